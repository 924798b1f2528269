"""Results exchanged between documents: what a call would have been told had it stood elsewhere. No die is thrown."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import polars as pl
from numpy.typing import NDArray

METHOD = 1
"""Raised by hand when the same calls would be chosen otherwise or get other results."""
PLACE = ("shard", "digest", "segment", "position")
CALL = (*PLACE, "input")
NOT_SAMPLED, NO_OTHER_RESULT = "not_sampled", "no_other_result"


def exchange(calls: pl.DataFrame, limit: int) -> pl.DataFrame:
    """`calls` (CALL, sample, result, ...) with results of other documents; null, with a `swap_reason`, without one.

    Of more than `limit` calls of a shard, those at the positions with the smallest hashes are taken (not_sampled), all
    samples of a position together, so that the best of them can be found as in filtering. All `calls` stand in a circle
    in the order of another hash, and a call gets the next result that differs from its own and comes from a document
    with another digest (no_other_result); equal calls at a position get the same one. A result that is right all the
    same, or of a near-duplicate, is not noticed.
    """
    sampled = _sampled(calls, limit)
    found = sampled.join(_told(sampled), on=CALL, how="left", maintain_order="left")
    absent = pl.when(pl.col("told").is_null()).then(pl.lit(NO_OTHER_RESULT))
    reason = pl.when("sampled").then(absent).otherwise(pl.lit(NOT_SAMPLED))
    return found.with_columns(swap_reason=reason, result="told").drop("sampled", "told")


def _sampled(calls: pl.DataFrame, limit: int) -> pl.DataFrame:
    """`calls` with `sampled`: whether a call is one of its shard's first `limit`."""
    places = calls.select(PLACE).unique(maintain_order=True)
    hashed = calls.join(places.with_columns(hash=_hashes("place", places)), on=PLACE)
    ordered = hashed.sort("hash", *PLACE, "sample").with_columns(number=pl.int_range(pl.len()).over("shard"))
    return ordered.with_columns(sampled=pl.col("number") < limit).drop("hash", "number")


def _told(calls: pl.DataFrame) -> pl.DataFrame:
    """(CALL, told): the exchanged result of every distinct call that is sampled."""
    distinct = calls.group_by(CALL).agg(pl.col("result").first(), pl.col("sampled").any())
    circle = distinct.with_columns(hash=_hashes("call", distinct.select(CALL))).sort("hash", *CALL)
    results = circle["result"].to_list()
    donors = _donors(_codes(circle["digest"]), _codes(circle["result"]), circle["sampled"].arg_true().to_list())
    told = pl.Series("told", [None if donor is None else results[donor] for donor in donors], pl.String)
    return circle.filter("sampled").select(CALL).with_columns(told)


def _donors(documents: NDArray[np.uint32], results: NDArray[np.uint32], seats: Sequence[int]) -> Iterator[int | None]:
    """For each of `seats` the next seat of the circle with another document and another result."""
    for seat in seats:
        others = np.flatnonzero((documents != documents[seat]) & (results != results[seat]))
        yield int(others[np.searchsorted(others, seat) % len(others)]) if len(others) else None


def _codes(values: pl.Series) -> NDArray[np.uint32]:
    """Equal values, equal numbers."""
    return values.rank("dense").to_numpy()


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """The same on every machine and in every version."""
    return pl.Series(_digests(salt, rows.iter_rows()), dtype=pl.String)


def _digests(salt: str, rows: Iterable[tuple[object, ...]]) -> list[str]:
    return [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows]
