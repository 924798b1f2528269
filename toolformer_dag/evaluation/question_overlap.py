"""Find the questions of benchmarks that occur in the texts that were trained on. Imports no torch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.evaluation.benchmark import Benchmark
from toolformer_dag.evaluation.benchmark_files import (
    format_completion_prompt,
    format_mathematics_prompt,
    format_multilingual_prompt,
    format_question_answering_prompt,
)
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.texts.shared_passages import MIN_PASSAGE_WORDS, SharedPassages

TEXTS_PER_BATCH = 2_000
"""Texts of C* that are searched together."""


class CorpusTextId(NamedTuple):
    """The id of a text of C*. Sorted ids are in the order of C*.

    Attributes:
        document_hash, digest: Two hashes of its document.
        segment: The number of the text within the document.
        shard: The shard (a file of the corpus) that has the document.
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
QUESTION_PLACEHOLDER = "\0"
"""Stands for the question in a prompt."""


class PromptFrame(NamedTuple):
    """The fixed text of a prompt's template, before and after the question."""

    before: str
    after: str


def _build_prompt_frames() -> tuple[PromptFrame, ...]:
    """Return the fixed text around the question, for each template of prompts (appendix C).

    With it, the question can be taken out of a prompt.

    Example:
        For prompts such as "2 + 3 = ? The answer is", nothing stands before the question and " The answer is" after it.
    """
    # The placeholder stands for the paragraph here, so that paragraph and question remain together.
    multilingual_frame = _split_at_placeholder(format_multilingual_prompt(QUESTION_PLACEHOLDER, ""))
    return (
        _split_at_placeholder(format_completion_prompt(QUESTION_PLACEHOLDER)),
        _split_at_placeholder(format_question_answering_prompt(QUESTION_PLACEHOLDER)),
        PromptFrame(before=multilingual_frame.before, after=""),  # the question ends the prompt
        _split_at_placeholder(format_mathematics_prompt("", QUESTION_PLACEHOLDER)),
    )


def _split_at_placeholder(prompt: str) -> PromptFrame:
    """Return the text before and after QUESTION_PLACEHOLDER in a prompt."""
    before, _, after = prompt.partition(QUESTION_PLACEHOLDER)
    return PromptFrame(before, after)


PROMPT_FRAMES = _build_prompt_frames()
"""The frames of all templates of appendix C."""


class _NumberedQuestion(NamedTuple):
    """A question: the name of its benchmark, its number there from 1, and its prompt."""

    benchmark_name: str
    number: int
    prompt: str


def find_question_overlap(benchmarks: Sequence[Benchmark], corpus_batches: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """Find out which questions of benchmarks occur in the training texts of C*, the corpus with the kept calls.

    A question occurs in a text that has 13 of its words in a row. A question of 8 to 12 words has to occur as a whole.
    A shorter one gets a row with null in `in_corpus`. The words of a prompt's template (appendix C) do not count.

    Args:
        benchmarks: The benchmarks with their questions.
        corpus_batches: Batches of rows of C*, with the columns split, text, document_hash, digest, segment and shard.
            They are read only once.

    Returns:
        A row per question, in the columns OVERLAP_COLUMNS.
    """
    questions = _number_questions(benchmarks)
    passages = SharedPassages([drop_template_words(question.prompt) for question in questions])
    first_text_ids = _find_first_text_ids(passages, corpus_batches)

    rows = []
    for question_index, question in enumerate(questions):
        first_text_id = first_text_ids.get(question_index)
        is_long_enough = passages.word_counts[question_index] >= MIN_PASSAGE_WORDS
        rows.append(_build_overlap_row(question, first_text_id, is_long_enough=is_long_enough))
    return pl.DataFrame(rows, schema=OVERLAP_COLUMNS)


def _number_questions(benchmarks: Sequence[Benchmark]) -> list[_NumberedQuestion]:
    """Return the questions of all benchmarks in order, each with its number within its benchmark, from 1."""
    numbered_questions = []
    for benchmark in benchmarks:
        for number, question in enumerate(benchmark.questions, 1):
            numbered_questions.append(_NumberedQuestion(benchmark.name, number, question.prompt))
    return numbered_questions


def _build_overlap_row(
    question: _NumberedQuestion, text_id: CorpusTextId | None, *, is_long_enough: bool
) -> dict[str, Any]:
    """Build the row of a question (OVERLAP_COLUMNS), which says whether it occurs in C*, and in which text.

    Args:
        text_id: The first text of C* that holds the question, or None.
        is_long_enough: Whether the question has enough words to tell. Otherwise `in_corpus` is None.
    """
    occurs_in_corpus = None
    if is_long_enough:
        occurs_in_corpus = text_id is not None

    return {
        "benchmark": question.benchmark_name,
        "question": question.number,
        "in_corpus": occurs_in_corpus,
        "shard": text_id.shard if text_id else None,
        "digest": text_id.digest if text_id else None,
        "segment": text_id.segment if text_id else None,
    }


def _find_first_text_ids(passages: SharedPassages, corpus_batches: Iterable[pl.DataFrame]) -> dict[int, CorpusTextId]:
    """Find the first training text of C* (the corpus with the kept calls) that holds each question of a benchmark.

    The first is the one with the smallest id.

    Args:
        passages: The questions, indexed by their words.
        corpus_batches: Batches of rows of C*, as for `find_question_overlap`.

    Returns:
        The ids of the texts, by the index of the question. Questions that occur in no text are missing.
    """
    first_text_ids: dict[int, CorpusTextId] = {}
    for batch in _iter_training_batches(corpus_batches):
        text_ids = batch.select(CorpusTextId._fields)
        # A row for each text of the batch and each question that it holds.
        matches = passages.find_shared_pairs(batch["text"].to_list())

        for text_index, question_index in matches.iter_rows():
            text_id = CorpusTextId(*text_ids.row(text_index))
            first_so_far = first_text_ids.get(question_index, text_id)
            first_text_ids[question_index] = min(first_so_far, text_id)
    return first_text_ids


def _iter_training_batches(corpus_batches: Iterable[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    """Yield the training rows of C*, at most TEXTS_PER_BATCH at a time."""
    for corpus_rows in corpus_batches:
        training_rows = corpus_rows.filter(pl.col("split") == TRAIN)
        yield from training_rows.iter_slices(TEXTS_PER_BATCH)


def drop_template_words(prompt: str) -> str:
    """Return the question of a prompt, without the words of its template (appendix C).

    "Answer the following question: Who wrote Emma?" becomes "Who wrote Emma".
    """
    for frame in PROMPT_FRAMES:
        if prompt.startswith(frame.before) and prompt.endswith(frame.after):
            return prompt.removeprefix(frame.before).removesuffix(frame.after)
    return prompt


def count_overlap(overlap_rows: pl.DataFrame) -> pl.DataFrame:
    """Count the questions of each benchmark that occur in the corpus.

    Args:
        overlap_rows: The table that `find_question_overlap` returns.

    Returns:
        A row per benchmark, with the number of its questions in `n`, of those that occur in the corpus in `in_corpus`,
        and of those with too few words to tell in `too_short`.
    """
    return overlap_rows.group_by("benchmark", maintain_order=True).agg(
        pl.len().alias("n"),
        pl.col("in_corpus").sum(),
        pl.col("in_corpus").is_null().sum().alias("too_short"),
    )
