"""Find the questions of benchmarks that occur in the texts that were trained on. Imports no torch."""

from collections.abc import Iterable, Sequence

import polars as pl

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import completion, mathematics, multilingual, question_answering
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.texts.shared_passages import FEWEST_WORDS, SharedPassages

BATCH = 2_000
"""Texts of C* that are searched together."""
Place = tuple[int, str, int, str]
"""Where a text stands in the order of C*: hash and digest of its document, its number there; and its shard."""
OVERLAP_COLUMNS = {
    "benchmark": pl.String,
    "question": pl.Int64,
    "in_corpus": pl.Boolean,
    "shard": pl.String,
    "digest": pl.String,
    "segment": pl.Int32,
}
"""`question`: its number, from 1. `in_corpus`: null where it has fewer words than any passage that is looked for. The
others: the first text of C* that holds a passage of the question."""
MARK = "\0"
FRAMES = tuple(
    (before, "" if template is multilingual else after)
    for template, filled in (
        (completion, completion(MARK)),
        (question_answering, question_answering(MARK)),
        (multilingual, multilingual(MARK, "")),
        (mathematics, mathematics("", MARK)),
    )
    for before, _, after in [filled.partition(MARK)]
)
"""What the prompts of appendix C put before and after a question; MLQA's question stands after its paragraph."""


def question_overlap(benchmarks: Sequence[Benchmark], corpus: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Return a row per question: whether 13 words of it in a row stand in a training text of `corpus` (rows of C*).

    A question of 8 to 12 words is looked for as a whole. The words of the prompt's template are not the question's;
    the paragraph of MLQA is.
    """
    asked = [(one.name, number, each.prompt) for one in benchmarks for number, each in enumerate(one.questions, 1)]
    passages = SharedPassages([own_words(prompt) for *_, prompt in asked])
    places: dict[int, Place] = {}
    for rows in corpus:
        texts = rows.filter(pl.col("split") == TRAIN)
        for at in range(0, texts.height, BATCH):
            batch = texts[at : at + BATCH]
            for row, question in passages.found_in(batch["text"].to_list()).iter_rows():
                place = batch.select("document_hash", "digest", "segment", "shard").row(row)
                places[question] = min(places.get(question, place), place)
    first = {question: (shard, digest, segment) for question, (_, digest, segment, shard) in places.items()}
    table = [
        (name, number, at in first if words >= FEWEST_WORDS else None, *first.get(at, (None, None, None)))
        for at, ((name, number, _), words) in enumerate(zip(asked, passages.words, strict=True))
    ]
    return pl.DataFrame(table, schema=OVERLAP_COLUMNS, orient="row")


def own_words(prompt: str) -> str:
    """Return a prompt without what its template puts before and after (appendix C)."""
    for before, after in FRAMES:
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt.removeprefix(before).removesuffix(after)
    return prompt


def overlap_counts(overlap: pl.DataFrame) -> pl.DataFrame:
    """Return questions, those in the corpus, and those too short to tell, by benchmark."""
    counts = (pl.len().alias("n"), pl.col("in_corpus").sum(), pl.col("in_corpus").is_null().sum().alias("too_short"))
    return overlap.group_by("benchmark", maintain_order=True).agg(*counts)
