"""Find texts again in others by passages of 13 words, as corpora are compared with benchmarks (Brown et al. 2020)."""

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
from numpy.typing import NDArray

PASSAGE_WORDS, FEWEST_WORDS = 13, 8
"""Words of a passage, and of the shortest text that is looked for as a whole (appendix C of the GPT-3 paper)."""
MATCHING = 1
"""Raised when other texts would be found in the same ones."""
WORD = r"[\p{L}\p{M}\p{N}]+"
FACTOR = np.uint64(0x9E3779B97F4A7C15)
BITS = np.uint64(2**22 - 1)
PAIRS = pl.Schema({"place": pl.Int64(), "text": pl.Int64()})
Numbers = NDArray[np.uint64]
Places = NDArray[np.int64]


def _words(texts: Sequence[str]) -> tuple[Numbers, Places]:
    """Return the words of texts, one after another, as hashes, and the place of each word's text.

    Words are runs of letters, marks and digits, without case (NFKC).
    """
    plain = pl.Series("word", texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
    extracted = pl.DataFrame({"word": plain.str.extract_all(WORD)}).with_row_index("place").explode("word")
    words = extracted.filter(pl.col("word").is_not_null())
    return words["word"].hash().to_numpy(), words["place"].cast(pl.Int64).to_numpy()


def _passages(words: Numbers, places: Places) -> Iterator[tuple[int, Numbers, Places]]:
    """Yield (n, hashes, places) of all runs of n words within a text, for n from FEWEST_WORDS to PASSAGE_WORDS."""
    rolled = words
    for n in range(2, min(PASSAGE_WORDS, len(words)) + 1):
        rolled = rolled[:-1] * FACTOR + words[n - 1 :]
        begins = places[: len(rolled)]
        inside = begins == places[n - 1 :]
        if n >= FEWEST_WORDS:
            yield n, rolled[inside], begins[inside]


class SharedPassages:
    """The passages of some texts, by hashes of 64 bits; memory grows with these texts, not with what is searched.

    Every run of PASSAGE_WORDS words is a passage; a text of FEWEST_WORDS words or more that has fewer is one as a
    whole. Words are runs of letters and digits: languages without spaces are not covered. Hashes hold in one process.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words, places_of_words = _words(texts)
        self.words = np.bincount(places_of_words, minlength=len(texts)).tolist()
        """Words of each text; those with fewer than FEWEST_WORDS are never found."""
        counts = np.array(self.words, np.int64)
        self._texts: dict[int, tuple[Numbers, Places]] = {}
        for n, hashes, places in _passages(words, places_of_words):
            own = counts[places] == n if n < PASSAGE_WORDS else np.ones(len(places), np.bool_)
            order = np.argsort(hashes[own], kind="stable")
            if len(order):
                self._texts[n] = hashes[own][order], places[own][order]
        self._maybe = {n: _bits(hashes) for n, (hashes, _) in self._texts.items()}

    def found_in(self, others: Sequence[str]) -> pl.DataFrame:
        """Return which texts share a passage with which of `others`: their numbers, as `text` and `place`, sorted."""
        pairs = [PAIRS.to_frame()]
        for n, hashes, places in _passages(*_words(others)) if self._texts else ():
            if n not in self._texts:
                continue
            known, texts = self._texts[n]
            likely = self._maybe[n][hashes & BITS]
            left = pl.DataFrame({"hash": hashes[likely], "place": places[likely]})
            right = pl.DataFrame({"hash": known, "text": texts})
            pairs.append(left.join(right, on="hash").select(PAIRS.names()))
        return pl.concat(pairs).unique().sort(PAIRS.names())


def _bits(hashes: Numbers) -> NDArray[np.bool_]:
    """Return a table of the low bits of hashes, which rules most others out at once."""
    table = np.zeros(int(BITS) + 1, np.bool_)
    table[hashes & BITS] = True
    return table
