"""Find which texts share a passage of 13 words with others, as corpora are checked for benchmarks (Brown et al. 2020).

A run is any sequence of consecutive words of a text. A passage is a run by which a text is recognised: one of
PASSAGE_WORDS words, or a whole shorter text.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

PASSAGE_WORDS = 13
"""Words of a passage (appendix C of the GPT-3 paper)."""
FEWEST_WORDS = 8
"""Words of the shortest text that is looked for as a whole (as there)."""
MATCHING = 1
"""Version of the matching: raised when the same texts would match differently."""
WORD = r"[\p{L}\p{M}\p{N}]+"
"""A run of letters, marks and digits, as Rust's pattern."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with its bits spread, by which hashes of words are mixed to hashes of passages."""
BITS = np.uint64(2**22 - 1)
"""The low bits of a hash, by which most passages are ruled out at once."""
PAIR_COLUMNS = pl.Schema({"place": pl.Int64(), "text": pl.Int64()})
"""Two texts that share a passage, by number: the searched text (`place`) and the text of the passage (`text`)."""
Hashes64 = NDArray[np.uint64]
TextNumbers = NDArray[np.int64]


class _Words(NamedTuple):
    """The words of some texts, one after another; both arrays have an entry per word."""

    hashes: Hashes64
    text_of_word: TextNumbers  # the number of the text that the word is from, ascending: [0, 0, 1] for ["a b", "c"]


class _Runs(NamedTuple):
    """Runs of one length, from all texts; both arrays have an entry per run."""

    length: int  # words of each run
    hashes: Hashes64
    text_of_run: TextNumbers  # the number of the text that the run is from

    def chosen(self, is_chosen: NDArray[np.bool_]) -> "_Runs":
        """Return the runs whose entry in `is_chosen` is True."""
        return _Runs(self.length, self.hashes[is_chosen], self.text_of_run[is_chosen])

    def sort_by_hash(self) -> "_Runs":
        """Return the same runs in ascending order of their hashes."""
        order = np.argsort(self.hashes, kind="stable")
        return _Runs(self.length, self.hashes[order], self.text_of_run[order])


def _hash_words(texts: Sequence[str]) -> _Words:
    """Hash the words of texts: runs of letters, marks and digits, without case, in Unicode's form NFKC."""
    normalized = pl.Series("word", texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    lists = pl.DataFrame({"word": normalized.str.extract_all(WORD)}).with_row_index("text")
    words = lists.explode("word").filter(pl.col("word").is_not_null())  # null: a text without words
    return _Words(
        hashes=words["word"].hash().to_numpy(),
        text_of_word=words["text"].cast(pl.Int64).to_numpy(),
    )


def _iter_runs_by_length(words: _Words) -> Iterator[_Runs]:
    """Hash all sequences of 8 consecutive words within a text, then all of 9, and so on up to 13.

    Yields:
        The sequences of each length from all texts.
    """
    longest = min(PASSAGE_WORDS, len(words.hashes))
    run_hashes = words.hashes  # at each word, the hash of the run that begins there

    for length in range(2, longest + 1):
        # A run of `length` words is a run of one word less and the word after it.
        run_hashes = run_hashes[:-1] * FACTOR + words.hashes[length - 1 :]
        if length >= FEWEST_WORDS:
            yield _select_runs_within_texts(length, run_hashes, words.text_of_word)


def _select_runs_within_texts(length: int, run_hashes: Hashes64, text_of_word: TextNumbers) -> _Runs:
    """Return the runs whose words are all of one text. run_hashes: at each word, the run that begins there."""
    text_of_first_word = text_of_word[: len(run_hashes)]
    text_of_last_word = text_of_word[length - 1 :]
    is_within_text = text_of_first_word == text_of_last_word
    return _Runs(length, run_hashes, text_of_first_word).chosen(is_within_text)


class SharedPassages:
    """The passages of some texts, as hashes of 64 bits, to be looked for in other texts.

    Every run of 13 words (PASSAGE_WORDS) is a passage. A text of 8 to 12 words (from FEWEST_WORDS on) is one passage as
    a whole; shorter texts have none. Languages without spaces are not covered.

    Memory grows with these texts, not with the texts that are searched. Hashes differ from process to process.

    words: how many words each text has.
    """

    words: list[int]

    def __init__(self, texts: Sequence[str]) -> None:
        """Index the passages of some texts, so that they can be found in other texts."""
        words = _hash_words(texts)
        words_per_text = np.bincount(words.text_of_word, minlength=len(texts))
        self.words = words_per_text.tolist()
        self._tables: dict[int, _PassageTable] = {}  # number of words -> the passages with so many

        for runs in _iter_runs_by_length(words):  # all sequences of 8 consecutive words, then all of 9, up to 13
            if runs.length == PASSAGE_WORDS:
                passages = runs
            else:  # a shorter run is a passage only if it is its whole text
                is_whole_text = words_per_text[runs.text_of_run] == runs.length
                passages = runs.chosen(is_whole_text)
            if len(passages.hashes):
                self._tables[runs.length] = _PassageTable(passages)

    def find_pairs_in(self, others: Sequence[str]) -> pl.DataFrame:
        """Find out which other texts share a passage with which texts of this object.

        Returns:
            A table with a row for each pair, sorted by both columns: `place`, the index of the text in `others`,
            and `text`, the index of the text of this object.
        """
        pairs = [PAIR_COLUMNS.to_frame()]  # no rows, so that the columns are there without any pair
        if self._tables:  # number of words -> the passages of this object with so many
            for runs in _iter_runs_by_length(
                _hash_words(others)
            ):  # all sequences of 8 consecutive words, then of 9, up to 13
                if runs.length in self._tables:
                    passage_table = self._tables[runs.length]
                    pairs.append(passage_table.pairs(runs))

        return pl.concat(pairs).unique().sort(PAIR_COLUMNS.names())


class _PassageTable:
    """Passages with the same number of words, in which runs of other texts are looked up."""

    def __init__(self, passages: _Runs) -> None:
        self._passages = passages.sort_by_hash()
        self._occurring_low_bits = _occurring_low_bits(passages.hashes)

    def pairs(self, runs: _Runs) -> pl.DataFrame:
        """Return the pairs (PAIR_COLUMNS) of a run and a passage that are equal; pairs may repeat."""
        may_be_passage = self._occurring_low_bits[runs.hashes & BITS]  # rules out most runs at once
        candidates = runs.chosen(may_be_passage)
        searched = pl.DataFrame({"hash": candidates.hashes, "place": candidates.text_of_run})
        stored = pl.DataFrame({"hash": self._passages.hashes, "text": self._passages.text_of_run})
        return searched.join(stored, on="hash").select(PAIR_COLUMNS.names())


def _occurring_low_bits(hashes: Hashes64) -> NDArray[np.bool_]:
    """Return an array with an entry for each value of the low 22 bits: True if a hash has these low bits."""
    table = np.zeros(int(BITS) + 1, np.bool_)
    table[hashes & BITS] = True
    return table
