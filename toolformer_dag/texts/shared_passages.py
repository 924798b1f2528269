"""Find which texts share a passage of 13 words with others, as corpora are checked for benchmarks (Brown et al. 2020).

A run is any sequence of consecutive words of a text. A passage is a run by which a text is recognized: one of
PASSAGE_WORDS words, or a whole shorter text.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

PASSAGE_WORDS = 13
"""Words of a passage (appendix C of the GPT-3 paper)."""
MIN_PASSAGE_WORDS = 8
"""Words of the shortest text that is looked for as a whole (as there)."""
MATCHING_VERSION = 1
"""Version of the matching: raised when the same texts would match differently."""
WORD_PATTERN = r"[\p{L}\p{M}\p{N}]+"
"""A run of letters, marks and digits, as Rust's pattern."""
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with its bits spread, by which hashes of words are mixed to hashes of passages."""
LOW_BITS_MASK = np.uint64(2**22 - 1)
"""The low bits of a hash, by which most passages are ruled out at once."""
PAIR_COLUMNS = pl.Schema({"place": pl.Int64(), "text": pl.Int64()})
"""Two texts that share a passage, by number: the searched text (`place`) and the text of the passage (`text`)."""
Hashes64 = NDArray[np.uint64]
TextNumbers = NDArray[np.int64]


class _Words(NamedTuple):
    """The words of some texts, one after another. Both arrays have an entry per word."""

    hashes: Hashes64
    text_numbers: TextNumbers  # the number of the text that the word is from, ascending: [0, 0, 1] for ["a b", "c"]


class _Runs(NamedTuple):
    """Runs (consecutive words) of one length, from all texts. Both arrays have an entry per run."""

    word_count: int  # words of each run
    hashes: Hashes64
    text_numbers: TextNumbers  # the number of the text that the run is from

    def select_runs(self, is_chosen: NDArray[np.bool_]) -> "_Runs":
        """Return the runs whose entry in `is_chosen` is True."""
        return _Runs(self.word_count, self.hashes[is_chosen], self.text_numbers[is_chosen])

    def sort_by_hash(self) -> "_Runs":
        """Return the same runs in ascending order of their hashes."""
        order = np.argsort(self.hashes, kind="stable")
        return _Runs(self.word_count, self.hashes[order], self.text_numbers[order])


def _hash_words(texts: Sequence[str]) -> _Words:
    """Split texts into words (letters, marks and digits), and hash each word in Unicode's form NFKC, in lower case."""
    normalized_texts = pl.Series("word", texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    words_by_text = pl.DataFrame({"word": normalized_texts.str.extract_all(WORD_PATTERN)}).with_row_index("text")

    # A row per word. A text without words has a row with null.
    words = words_by_text.explode("word").filter(pl.col("word").is_not_null())
    return _Words(
        hashes=words["word"].hash().to_numpy(),
        text_numbers=words["text"].cast(pl.Int64).to_numpy(),
    )


def _iter_runs_by_length(words: _Words) -> Iterator[_Runs]:
    """Hash all runs of 8 words (MIN_PASSAGE_WORDS) that follow each other in a text, then all of 9, and so on up to 13.

    Args:
        words: The words of all texts, one after the other.

    Yields:
        For each length the runs of all texts. A run that begins in one text and ends in the next is left out.
    """
    max_length = min(PASSAGE_WORDS, len(words.hashes))
    run_hashes = words.hashes  # at each word, the hash of the run that begins there

    for length in range(2, max_length + 1):
        # A run of `length` words is a run of one word less and the word after it, and so is its hash. Shorter runs than
        # those that are yielded are hashed on the way.
        run_hashes = run_hashes[:-1] * HASH_FACTOR + words.hashes[length - 1 :]
        if length >= MIN_PASSAGE_WORDS:
            yield _select_runs_within_texts(length, run_hashes, words.text_numbers)


def _select_runs_within_texts(word_count: int, run_hashes: Hashes64, text_numbers_of_words: TextNumbers) -> _Runs:
    """Select the runs whose words are all from the same text.

    Example:
        If the texts of four words are [0, 0, 1, 1], of their three runs of 2 words the first and the last stay.

    Args:
        word_count: The number of words of each run.
        run_hashes: At each word, the hash of the run that begins there. Shape: (words - word_count + 1,).
        text_numbers_of_words: The number of the text from which each word is, ascending. Shape: (words,).
    """
    text_of_first_word = text_numbers_of_words[: len(run_hashes)]
    text_of_last_word = text_numbers_of_words[word_count - 1 :]
    is_within_text = text_of_first_word == text_of_last_word
    return _Runs(word_count, run_hashes, text_of_first_word).select_runs(is_within_text)


class SharedPassages:
    """The passages of some texts, as hashes of 64 bits, to be looked for in other texts.

    Every run of 13 words (PASSAGE_WORDS) is a passage. A text of 8 to 12 words (from MIN_PASSAGE_WORDS on) is
    one passage as a whole. Shorter texts have none. Languages without spaces are not covered.

    Memory grows with these texts, not with the texts that are searched. Hashes differ from process to process.

    Attributes:
        word_counts: The number of words of each text.
    """

    word_counts: list[int]

    def __init__(self, texts: Sequence[str]) -> None:
        """Index the passages of some texts, so that they can be found in other texts.

        A passage is a run of PASSAGE_WORDS (13) consecutive words, or a whole text of 8 to 12 words.
        """
        words = _hash_words(texts)
        words_per_text = np.bincount(words.text_numbers, minlength=len(texts))
        self.word_counts = words_per_text.tolist()
        self._tables_by_word_count: dict[int, _PassageTable] = {}  # number of words -> the passages with so many

        for runs in _iter_runs_by_length(words):  # all sequences of 8 consecutive words, then all of 9, up to 13
            if runs.word_count == PASSAGE_WORDS:
                passages = runs
            else:
                # A shorter run is a passage only if it is its whole text.
                is_whole_text = words_per_text[runs.text_numbers] == runs.word_count
                passages = runs.select_runs(is_whole_text)
            if len(passages.hashes):
                self._tables_by_word_count[runs.word_count] = _PassageTable(passages)

    def find_shared_pairs(self, other_texts: Sequence[str]) -> pl.DataFrame:
        """Find out which other texts share a passage with which texts of this object.

        Returns:
            A table with a row for each pair, sorted by both columns: `place`, the index of the text in `other_texts`,
            and `text`, the index of the text of this object.
        """
        no_pairs = PAIR_COLUMNS.to_frame()  # no rows, only the columns
        if not self._tables_by_word_count:  # these texts have no passages
            return no_pairs

        pairs = [no_pairs]
        # All sequences of 8 consecutive words, then all of 9, up to 13.
        for runs in _iter_runs_by_length(_hash_words(other_texts)):
            passage_table = self._tables_by_word_count.get(runs.word_count)
            if passage_table is not None:
                pairs.append(passage_table.find_pairs(runs))

        return pl.concat(pairs).unique().sort(PAIR_COLUMNS.names())


class _PassageTable:
    """Passages with the same number of words, in which runs of other texts are looked up."""

    def __init__(self, passages: _Runs) -> None:
        self._passages = passages.sort_by_hash()
        self._has_low_bits = _mark_low_bits(passages.hashes)

    def find_pairs(self, runs: _Runs) -> pl.DataFrame:
        """Find the runs of other texts that are equal to passages of this table.

        Returns:
            A table with the columns PAIR_COLUMNS: `place`, the number of the other text, and `text`, the number of
            the text with the passage. A pair may occur several times.
        """
        # Most runs are not passages, and are ruled out by the low bits of their hashes.
        may_be_passage = self._has_low_bits[runs.hashes & LOW_BITS_MASK]
        candidates = runs.select_runs(may_be_passage)
        searched = pl.DataFrame({"hash": candidates.hashes, "place": candidates.text_numbers})
        stored = pl.DataFrame({"hash": self._passages.hashes, "text": self._passages.text_numbers})
        return searched.join(stored, on="hash").select(PAIR_COLUMNS.names())


def _mark_low_bits(hashes: Hashes64) -> NDArray[np.bool_]:
    """Mark the values of the low 22 bits that occur among hashes.

    Returns:
        True or False for each possible value. Shape: (2**22,).
    """
    is_used = np.zeros(int(LOW_BITS_MASK) + 1, np.bool_)
    is_used[hashes & LOW_BITS_MASK] = True
    return is_used
