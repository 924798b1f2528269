"""Results exchanged between documents: what a call would have been told had it stood elsewhere. No die is thrown.

Neither which calls are taken nor what they are told depends on k, m or tau_s: with more calls the rows are more, and
those that were there stay as they are.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b

import numpy as np
import polars as pl
from numpy.typing import NDArray

METHOD = 2
"""Raised by hand when the same calls would be chosen otherwise or get other results."""
TEXT = ("shard", "digest", "segment")
PLACE = (*TEXT, "position")
CALL = (*PLACE, "input")
NOT_SAMPLED, NO_OTHER_RESULT = "not_sampled", "no_other_result"


def exchange(calls: pl.DataFrame, texts: pl.DataFrame, likeliest: pl.DataFrame, limit: int) -> pl.DataFrame:
    """`calls` (CALL, sample, p_api, result, ...) with results of other documents; null, with a `swap_reason`, without.

    Of the `texts` (TEXT) of a shard, whether they have calls or not, the calls of the `limit` with the smallest hashes
    are taken (not_sampled). Results are given by the first samples at the `likeliest` place (PLACE) of each text: they
    are there for every k and m. A call is told one of a place at least as likely as its own, which is there for every
    tau_s under which the call is. All calls stand in a circle in the order of another hash, and a call gets the next
    such result that differs from its own and comes from a document with another digest (no_other_result); equal calls
    at a position get the same one. A result that is right all the same, or of a near-duplicate, is not noticed.
    """
    sampled = calls.join(_sampled(texts, limit), on=TEXT, maintain_order="left")
    giving = sampled.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    gives = pl.col("likeliest").fill_null(False) & (pl.col("sample") == 0)
    found = sampled.join(_told(giving.with_columns(gives=gives)), on=CALL, how="left", maintain_order="left")
    absent = pl.when(pl.col("told").is_null()).then(pl.lit(NO_OTHER_RESULT))
    reason = pl.when("sampled").then(absent).otherwise(pl.lit(NOT_SAMPLED))
    return found.with_columns(swap_reason=reason, result="told").drop("sampled", "told")


def likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """(PLACE): of each text the most probable position, of equals the earlier. `candidates`: (PLACE, p_api)."""
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT, keep="first", maintain_order=True).select(PLACE)


def _sampled(texts: pl.DataFrame, limit: int) -> pl.DataFrame:
    """(TEXT, sampled): whether a text is one of its shard's first `limit`."""
    hashed = texts.select(TEXT).with_columns(hash=_hashes("text", texts.select(TEXT)))
    number = pl.int_range(pl.len()).over("shard")
    return hashed.sort("hash", *TEXT).select(*TEXT, sampled=number < limit)


def _told(calls: pl.DataFrame) -> pl.DataFrame:
    """(CALL, told): the exchanged result of every distinct call that is sampled."""
    distinct = calls.group_by(CALL).agg(pl.col("result", "p_api").first(), pl.col("sampled", "gives").any())
    circle = distinct.with_columns(hash=_hashes("call", distinct.select(CALL))).sort("hash", *CALL)
    results = circle["result"].to_list()
    told = [None if donor is None else results[donor] for donor in _donors(circle)]
    return circle.filter("sampled").select(CALL).with_columns(told=pl.Series(told, dtype=pl.String))


def _donors(circle: pl.DataFrame) -> Iterator[int | None]:
    """For each sampled seat the next one that gives, at a place as likely, in another document, another result."""
    documents, results = _codes(circle["digest"]), _codes(circle["result"])
    likely, gives = circle["p_api"].to_numpy(), circle["gives"].to_numpy()
    for seat in circle["sampled"].arg_true().to_list():
        fitting = (likely >= likely[seat]) & (documents != documents[seat]) & (results != results[seat])
        others = np.flatnonzero(gives & fitting)
        yield int(others[np.searchsorted(others, seat) % len(others)]) if len(others) else None


def _codes(values: pl.Series) -> NDArray[np.uint32]:
    """Equal values, equal numbers."""
    return values.rank("dense").to_numpy()


def _hashes(salt: str, rows: pl.DataFrame) -> pl.Series:
    """The same on every machine and in every version."""
    return pl.Series(_digests(salt, rows.iter_rows()), dtype=pl.String)


def _digests(salt: str, rows: Iterable[tuple[object, ...]]) -> list[str]:
    return [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows]
