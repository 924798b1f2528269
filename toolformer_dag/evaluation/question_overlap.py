"""Find the questions of benchmarks that occur in the texts that were trained on. Imports no torch."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import completion, mathematics, multilingual, question_answering
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.texts.shared_passages import FEWEST_WORDS, SharedPassages

BATCH = 2_000
"""Texts of C* that are searched together."""


class Place(NamedTuple):
    """Where a text stands in C*. Places compare in the order of C*.

    - `document_hash`, `digest`: two hashes of its document. `segment`: its number within the document.
    - `shard`: the shard of the document.
    """

    document_hash: int
    digest: str
    segment: int
    shard: str


OVERLAP_COLUMNS = {
    "benchmark": pl.String,
    "question": pl.Int64,
    "in_corpus": pl.Boolean,
    "shard": pl.String,
    "digest": pl.String,
    "segment": pl.Int32,
}
"""Columns of the overlap. `question`: its number, from 1. `in_corpus`: null where it has fewer words than any passage
that is looked for. The others: the first text of C* that holds a passage of the question; null without one."""
MARK = "\0"
"""Stands for the question in a prompt."""


class Frame(NamedTuple):
    """What a template of prompts puts before and after a question."""

    before: str
    after: str


def _frames() -> tuple[Frame, ...]:
    """Return what each template of prompts (appendix C) puts before and after a question.

    `own_words` takes it off, so that only the question is looked for in C*. Each template is filled with MARK in place
    of the question, and cut there. MLQA's is cut at the paragraph, which is looked for too, as is all that follows it.
    """
    before_paragraph, _, _ = multilingual(MARK, "").partition(MARK)
    return (
        _frame(completion(MARK)),
        _frame(question_answering(MARK)),
        Frame(before_paragraph, ""),
        _frame(mathematics("", MARK)),
    )


def _frame(prompt: str) -> Frame:
    """Return what stands before and after MARK in a prompt."""
    before, _, after = prompt.partition(MARK)
    return Frame(before, after)


FRAMES = _frames()
"""The frames of all templates of appendix C."""


class _Numbered(NamedTuple):
    """A question: its benchmark, its number there from 1, and its prompt."""

    benchmark: str
    number: int
    prompt: str


def question_overlap(benchmarks: Sequence[Benchmark], corpus: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Return a row per question (OVERLAP_COLUMNS): whether it occurs in C*, the texts that the model is finetuned on.

    It does if 13 words of it in a row stand in a training text; a question of 8 to 12 words is looked for as a whole.
    `in_corpus` is null for a question of fewer words. The words of the prompt's template do not belong to the question;
    the paragraph of MLQA does.

    corpus: batches of rows of C*, read once; with columns split, text, document_hash, digest, segment and shard.
    """
    numbered: list[_Numbered] = []
    for benchmark in benchmarks:
        for number, question in enumerate(benchmark.questions, 1):
            numbered.append(_Numbered(benchmark.name, number, question.prompt))
    passages = SharedPassages([own_words(row.prompt) for row in numbered])
    first_places = _first_places(passages, corpus)

    rows = []
    for index, row in enumerate(numbered):
        place = first_places.get(index)
        is_long_enough = passages.words[index] >= FEWEST_WORDS
        in_corpus = place is not None
        rows.append(
            {
                "benchmark": row.benchmark,
                "question": row.number,
                "in_corpus": in_corpus if is_long_enough else None,
                "shard": place.shard if place else None,
                "digest": place.digest if place else None,
                "segment": place.segment if place else None,
            }
        )
    return pl.DataFrame(rows, schema=OVERLAP_COLUMNS)


def _first_places(passages: SharedPassages, corpus: Iterable[pl.DataFrame]) -> dict[int, Place]:
    """Find the questions that occur in a training text of C*: index of the question -> its first place in C*.

    passages: the questions, indexed by their runs of words. corpus: the rows of C* (text, split, ...).
    """
    first_places: dict[int, Place] = {}
    for rows in corpus:
        texts = rows.filter(pl.col("split") == TRAIN)
        for start in range(0, texts.height, BATCH):
            batch = texts[start : start + BATCH]
            places = batch.select(Place._fields)
            # found_in: a row per match, with the index of the text in the batch and the index of the question.
            for row, question in passages.found_in(batch["text"].to_list()).iter_rows():
                place = Place(*places.row(row))
                first_places[question] = min(first_places.get(question, place), place)
    return first_places


def own_words(prompt: str) -> str:
    """Return a prompt without what its template (appendix C) puts before and after the question."""
    for frame in FRAMES:
        if prompt.startswith(frame.before) and prompt.endswith(frame.after):
            return prompt.removeprefix(frame.before).removesuffix(frame.after)
    return prompt


def overlap_counts(overlap: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark of a table of `question_overlap`.

    Columns: benchmark, n (questions), in_corpus (those that occur in C*), too_short (those with too few words to tell).
    """
    return overlap.group_by("benchmark", maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("in_corpus").sum(),
        pl.col("in_corpus").is_null().sum().alias("too_short"),
    )
