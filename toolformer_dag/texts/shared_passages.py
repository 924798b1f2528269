"""Find texts again in others by passages of 13 words, as corpora are compared with benchmarks (Brown et al. 2020)."""

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
"""Raised when other texts would be found in the same ones."""
WORD = r"[\p{L}\p{M}\p{N}]+"
"""A run of letters, marks and digits, as Rust's pattern."""
FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""An odd number with its bits spread, by which hashes of words are mixed to hashes of passages."""
BITS = np.uint64(2**22 - 1)
"""The low bits of a hash, by which most passages are ruled out at once."""
PAIRS = pl.Schema({"place": pl.Int64(), "text": pl.Int64()})
"""A text that was searched (`place`), and a text whose passage it has (`text`), each by its number."""
Hashes64 = NDArray[np.uint64]
TextNumbers = NDArray[np.int64]


class _Words(NamedTuple):
    """The words of some texts, one after another; both arrays have an entry per word."""

    hashes: Hashes64
    texts: TextNumbers  # the number of the text that has the word, ascending


class _Passages(NamedTuple):
    """Runs of as many words as `length` says; both arrays have an entry per run."""

    length: int
    hashes: Hashes64
    texts: TextNumbers


def _words(texts: Sequence[str]) -> _Words:
    """Hash the words of texts: runs of letters, marks and digits, without case, in Unicode's form NFKC."""
    normalized = pl.Series("word", texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    lists = pl.DataFrame({"word": normalized.str.extract_all(WORD)}).with_row_index("text")
    words = lists.explode("word").filter(pl.col("word").is_not_null())  # null: a text without words
    return _Words(
        hashes=words["word"].hash().to_numpy(),
        texts=words["text"].cast(pl.Int64).to_numpy(),
    )


def _passages(words: _Words) -> Iterator[_Passages]:
    """Hash all runs of consecutive words within a text; yield them length by length, from FEWEST_WORDS on.

    words: a hash per word of all texts, one after the other, and the number of the text of each. The hash of a run is
    computed from that of the run that is a word shorter (a rolling hash).
    """
    longest = min(PASSAGE_WORDS, len(words.hashes))
    run_hashes = words.hashes  # at each word, the hash of the run that begins there
    for length in range(2, longest + 1):
        # A run of `length` words is a run of one word less and the word after it.
        run_hashes = run_hashes[:-1] * FACTOR + words.hashes[length - 1 :]
        if length < FEWEST_WORDS:
            continue
        text_of_first_word = words.texts[: len(run_hashes)]
        text_of_last_word = words.texts[length - 1 :]
        within_a_text = text_of_first_word == text_of_last_word
        yield _Passages(length, run_hashes[within_a_text], text_of_first_word[within_a_text])


class SharedPassages:
    """The passages of some texts, by hashes of 64 bits; memory grows with these texts, not with what is searched.

    Every run of PASSAGE_WORDS words is a passage; a text of FEWEST_WORDS words or more that has fewer is one as a
    whole. Words are runs of letters and digits: languages without spaces are not covered. Hashes hold in one process.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Hash the passages of `texts`; memory holds their hashes and the numbers of their texts."""
        words = _words(texts)
        words_per_text = np.bincount(words.texts, minlength=len(texts))
        self.words: list[int] = words_per_text.tolist()
        """Words of each text; those with fewer than FEWEST_WORDS are never found."""
        self._by_length: dict[int, _Passages] = {}
        for runs in _passages(words):
            if runs.length < PASSAGE_WORDS:
                # A shorter run is a passage only where it is its whole text.
                is_passage = words_per_text[runs.texts] == runs.length
            else:
                is_passage = np.ones(len(runs.texts), np.bool_)
            hashes = runs.hashes[is_passage]
            text_numbers = runs.texts[is_passage]
            if len(hashes):
                order = np.argsort(hashes, kind="stable")
                self._by_length[runs.length] = _Passages(runs.length, hashes[order], text_numbers[order])
        self._low_bits = {length: _low_bits(passages.hashes) for length, passages in self._by_length.items()}

    def found_in(self, others: Sequence[str]) -> pl.DataFrame:
        """Search `others` for the passages.

        Returns a row for each of `others` (its number, as `place`) and text that it shares a passage with (its number,
        as `text`), sorted by both.
        """
        pairs = [PAIRS.to_frame()]
        if self._by_length:
            for runs in _passages(_words(others)):
                if runs.length in self._by_length:
                    pairs.append(self._pairs(runs))
        return pl.concat(pairs).unique().sort(PAIRS.names())

    def _pairs(self, runs: _Passages) -> pl.DataFrame:
        """Return which texts have which of these runs as a passage, in the columns of PAIRS; pairs may repeat."""
        passages = self._by_length[runs.length]
        may_be_passage = self._low_bits[runs.length][runs.hashes & BITS]
        candidates = pl.DataFrame({"hash": runs.hashes[may_be_passage], "place": runs.texts[may_be_passage]})
        own_passages = pl.DataFrame({"hash": passages.hashes, "text": passages.texts})
        return candidates.join(own_passages, on="hash").select(PAIRS.names())


def _low_bits(hashes: Hashes64) -> NDArray[np.bool_]:
    """Return a table of all values of BITS: True for those that one of the hashes has as its low bits."""
    table = np.zeros(int(BITS) + 1, np.bool_)
    table[hashes & BITS] = True
    return table
