"""How many bytes rows will take in the lake's files, told from the rows of a sample.

A Parquet file has a beginning and an end of its own, and longer ones compress better. So the sample's rows are encoded
a few, a quarter, a half and all at a time. Files between these are interpolated; larger ones grow with the power of
their texts with which the whole sample grew from its half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log2

import numpy as np
import polars as pl

from toolformer_dag.lake import parquet
from toolformer_dag.lake.row_files import HASH, encode_run, hashed
from toolformer_dag.lake.row_store import MERGE_AT

SHARES = (1 / 16, 1 / 4)
"""Parts of a group's rows, for files of few texts."""


@dataclass(frozen=True, slots=True)
class FileSizes:
    """The bytes of files by their texts: `bytes[i]` of one with `texts[i]`, ascending from 0."""

    texts: tuple[float, ...]
    bytes: tuple[float, ...]

    @staticmethod
    def of(groups: Sequence[pl.DataFrame], texts: int) -> "FileSizes":
        """Measure the rows of 2^n equal groups of texts, together `texts`; at least one text."""
        sizes, found = [0.0], [_encoded([groups[0].clear()])]
        for share in SHARES:
            some = [rows.head(round(rows.height * share)) for rows in groups]
            sizes.append(texts / len(groups) * share)
            found.append(_encoded(some))
        together = 1
        while together <= len(groups):
            some = [pl.concat(groups[at : at + together]) for at in range(0, len(groups), together)]
            sizes.append(texts * together / len(groups))
            found.append(_encoded(some))
            together *= 2
        return FileSizes(tuple(sizes), tuple(found))

    def total(self, files: "Files") -> float:
        """Return the bytes of `files`."""
        return sum(count * self._bytes(texts) for count, texts in files)

    def _bytes(self, texts: float) -> float:
        if texts <= self.texts[-1]:
            return float(np.interp(texts, self.texts, self.bytes))
        half, whole = self.bytes[-2] - self.bytes[0], self.bytes[-1] - self.bytes[0]
        power = min(1.0, log2(whole / half)) if half > 0 else 1.0
        return float(self.bytes[0] + whole * (texts / self.texts[-1]) ** power)


Files = Sequence[tuple[float, float]]
"""(how many, texts of each)."""


def chunk_files(texts: float, size: int) -> Files:
    """Cut so many texts, by expectation, into chunks of `size`; of less than one text there may be no chunk."""
    if texts < 1:
        some = 1 - exp(-texts)
        return [(some, texts / some)] if texts else []
    whole, rest = divmod(texts, size)
    return [(whole, size), (1 if rest else 0, rest)]


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """Rows of a sample and the chunk files to come of their kind. `groups`: rows of 2^n equal groups of texts.

    `key`: the first column of the store's key; `texts`: those of all groups that have rows; `files`: by such texts.
    """

    groups: Sequence[pl.DataFrame]
    key: str
    texts: int
    files: Files

    @property
    def count(self) -> float:
        return sum(count for count, _ in self.files)

    def bytes(self, merged: float) -> float:
        """Return the bytes of the files where this share of them is merged into runs."""
        chunks = FileSizes.of(self.groups, self.texts).total(self.files)
        if not merged:
            return chunks
        half = len(self.groups) // 2
        one, other, whole = (
            len(encode_run(_sorted(pl.concat(some), self.key)))
            for some in (self.groups[:half], self.groups[half:], self.groups)
        )
        per_text = (whole - (one + other) / 2) / (self.texts / 2)
        return (1 - merged) * chunks + merged * per_text * sum(count * texts for count, texts in self.files)


def stored_bytes(kinds: Sequence[Appended], waiting: Sequence[int]) -> float:
    """Return what a row store grows by. `waiting`: bytes of the chunks there that are not merged yet."""
    count = sum(kind.count for kind in kinds)
    merged = (len(waiting) + count) // MERGE_AT * MERGE_AT
    if not count or not merged:
        return sum(kind.bytes(0) for kind in kinds)
    share = max(0.0, merged - len(waiting)) / count
    left = sum(kind.bytes(1) for kind in kinds) / sum(kind.bytes(0) for kind in kinds)
    return sum(kind.bytes(share) for kind in kinds) - sum(waiting) * (1 - left)


def _encoded(frames: Sequence[pl.DataFrame]) -> float:
    return float(np.mean([len(parquet.encode(rows)) for rows in frames]))


def _sorted(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    found = hashed(rows, key)
    return found.select(HASH, *rows.columns).sort(HASH)
