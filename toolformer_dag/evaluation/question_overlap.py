"""Find the questions of benchmarks that occur in the texts that were trained on. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import completion, mathematics, multilingual, question_answering
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.texts.shared_passages import FEWEST_WORDS, SharedPassages

BATCH = 2_000
"""Texts of C* that are searched together."""


class CorpusTextId(NamedTuple):
    """What tells a text of C* from others; sorted, these are in the order of C*.

    - `document_hash`, `digest`: two hashes of its document
    - `segment`: its number within the document
    - `shard`: the shard of the document
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
"""Columns of the overlap. `question`: its number, from 1. `in_corpus`: null if it has too few words to tell. `shard`,
`digest` and `segment`: of the first text of C* that holds a passage of the question; null without one."""
MARK = "\0"
"""Stands for the question in a prompt."""


class Frame(NamedTuple):
    """The fixed text of a prompt's template, before and after the question."""

    before: str
    after: str


def _build_frames() -> tuple[Frame, ...]:
    """Return the text around the question of each template of prompts (appendix C)."""
    before_paragraph, _, _ = multilingual(MARK, "").partition(MARK)
    return (
        _split_at_mark(completion(MARK)),
        _split_at_mark(question_answering(MARK)),
        Frame(before_paragraph, ""),
        _split_at_mark(mathematics("", MARK)),
    )


def _split_at_mark(prompt: str) -> Frame:
    """Return the text before and after MARK in a prompt."""
    before, _, after = prompt.partition(MARK)
    return Frame(before, after)


FRAMES = _build_frames()
"""The frames of all templates of appendix C."""


class _NumberedQuestion(NamedTuple):
    """A question: its benchmark, its number there from 1, and its prompt."""

    benchmark: str
    number: int
    prompt: str


def question_overlap(benchmarks: Sequence[Benchmark], corpus: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Find out which questions of benchmarks occur in the training texts of C*.

    A question occurs in a text that has 13 of its words in a row. A question of 8 to 12 words has to occur as a whole.

    Args:
        corpus: Batches of rows of C*, with the columns split, text, document_hash, digest, segment and shard.
            They are read only once.

    Returns:
        A row per question, in the columns OVERLAP_COLUMNS.
    """
    questions = _number_questions(benchmarks)
    passages = SharedPassages([drop_template_words(question.prompt) for question in questions])
    first_texts = _find_first_texts(passages, corpus)

    rows = []
    for index, question in enumerate(questions):
        is_long_enough = passages.words[index] >= FEWEST_WORDS
        rows.append(_build_overlap_row(question, first_texts.get(index), is_long_enough=is_long_enough))
    return pl.DataFrame(rows, schema=OVERLAP_COLUMNS)


def _number_questions(benchmarks: Sequence[Benchmark]) -> list[_NumberedQuestion]:
    """Return the questions of all benchmarks, in order."""
    questions = []
    for benchmark in benchmarks:
        for number, question in enumerate(benchmark.questions, 1):
            questions.append(_NumberedQuestion(benchmark.name, number, question.prompt))
    return questions


def _build_overlap_row(
    question: _NumberedQuestion, text: CorpusTextId | None, *, is_long_enough: bool
) -> dict[str, Any]:
    """Build the row of a question (OVERLAP_COLUMNS), which says whether it occurs in C*, and in which text.

    Args:
        text: The first text of C* that holds the question, or None.
        is_long_enough: Whether the question has enough words to tell. Otherwise `in_corpus` is None.
    """
    occurs = text is not None
    return {
        "benchmark": question.benchmark,
        "question": question.number,
        "in_corpus": occurs if is_long_enough else None,
        "shard": text.shard if text else None,
        "digest": text.digest if text else None,
        "segment": text.segment if text else None,
    }


def _find_first_texts(passages: SharedPassages, corpus: Iterable[pl.DataFrame]) -> dict[int, CorpusTextId]:
    """Find the first training text of C* that holds each question: the text with the smallest id.

    Args:
        passages: The questions, indexed by their words.

    Returns:
        The ids of the texts, by the index of the question. Questions that occur in no text are missing.
    """
    first_texts: dict[int, CorpusTextId] = {}
    for batch in _iter_training_batches(corpus):
        ids = batch.select(CorpusTextId._fields)
        # a row per text of the batch and question that it holds
        matches = passages.find_pairs_in(batch["text"].to_list())

        for text_index, question_index in matches.iter_rows():
            text_id = CorpusTextId(*ids.row(text_index))
            first_so_far = first_texts.get(question_index, text_id)
            first_texts[question_index] = min(first_so_far, text_id)
    return first_texts


def _iter_training_batches(corpus: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the training rows of C*, BATCH at a time."""
    for rows in corpus:
        training_rows = rows.filter(pl.col("split") == TRAIN)
        yield from training_rows.iter_slices(BATCH)


def drop_template_words(prompt: str) -> str:
    """Return the question of a prompt, without the words of its template (appendix C)."""
    for frame in FRAMES:
        if prompt.startswith(frame.before) and prompt.endswith(frame.after):
            return prompt.removeprefix(frame.before).removesuffix(frame.after)
    return prompt


def count_overlap(overlap: pl.DataFrame) -> pl.DataFrame:
    """Count the questions of each benchmark, as columns `n`, `in_corpus` and `too_short` (to tell).

    Args:
        overlap: The table that `question_overlap` returns.
    """
    return overlap.group_by("benchmark", maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("in_corpus").sum(),
        pl.col("in_corpus").is_null().sum().alias("too_short"),
    )
