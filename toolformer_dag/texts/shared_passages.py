"""Find texts again in others by passages of 13 words, as corpora are compared with benchmarks (Brown et al. 2020)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Words:
    """The words of texts, one after another: hashes, and the place of each word's text."""

    hashes: Numbers
    places: NDArray[np.int64]

    @staticmethod
    def of(texts: Sequence[str]) -> "_Words":
        """Split texts into runs of letters, marks and digits, without case (NFKC)."""
        plain = pl.Series("word", texts, dtype=pl.String).str.normalize("NFKC").str.to_lowercase()
        found = pl.DataFrame({"word": plain.str.extract_all(WORD)}).with_row_index("place").explode("word")
        words = found.filter(pl.col("word").is_not_null())
        return _Words(words["word"].hash().to_numpy(), words["place"].cast(pl.Int64).to_numpy())

    def passages(self) -> Iterator[tuple[int, Numbers, NDArray[np.int64]]]:
        """Yield (n, hashes, places) of all runs of n words within a text, for n up to PASSAGE_WORDS."""
        rolled = self.hashes
        for n in range(1, PASSAGE_WORDS + 1):
            if n > 1:
                rolled = rolled[:-1] * FACTOR + self.hashes[n - 1 :]
            if len(rolled) == 0:
                return
            places = self.places[: len(rolled)]
            inside = places == self.places[n - 1 :]
            if n >= FEWEST_WORDS:
                yield n, rolled[inside], places[inside]


class SharedPassages:
    """The passages of some texts, by hashes of 64 bits; memory grows with these texts, not with what is searched.

    Every run of PASSAGE_WORDS words is a passage; a text of FEWEST_WORDS words or more that has fewer is one as a
    whole. Words are runs of letters and digits: languages without spaces are not covered. Hashes hold in one process.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        words = _Words.of(texts)
        self.words = np.bincount(words.places, minlength=len(texts)).tolist()
        """Words of each text; those with fewer than FEWEST_WORDS are never found."""
        counts = np.array(self.words, np.int64)
        self._texts: dict[int, tuple[Numbers, NDArray[np.int64]]] = {}
        for n, hashes, places in words.passages():
            own = counts[places] == n if n < PASSAGE_WORDS else np.ones(len(places), np.bool_)
            order = np.argsort(hashes[own], kind="stable")
            if len(order):
                self._texts[n] = hashes[own][order], places[own][order]
        self._maybe = {n: _bits(hashes) for n, (hashes, _) in self._texts.items()}

    def found_in(self, others: Sequence[str]) -> pl.DataFrame:
        """Return which texts share a passage with which of `others`: their numbers, as `text` and `place`, sorted."""
        found = [PAIRS.to_frame()]
        for n, hashes, places in _Words.of(others).passages() if self._texts else ():
            if n not in self._texts:
                continue
            known, texts = self._texts[n]
            likely = self._maybe[n][hashes & BITS]
            left = pl.DataFrame({"hash": hashes[likely], "place": places[likely]})
            right = pl.DataFrame({"hash": known, "text": texts})
            found.append(left.join(right, on="hash").select(PAIRS.names()))
        return pl.concat(found).unique().sort(PAIRS.names())


def _bits(hashes: Numbers) -> NDArray[np.bool_]:
    """Return a table of the low bits of hashes, which rules most others out at once."""
    table = np.zeros(int(BITS) + 1, np.bool_)
    table[hashes & BITS] = True
    return table
