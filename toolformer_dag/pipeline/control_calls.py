"""The calls of a control before they are scored: a sample of a shard's scored calls with other results.

The sample is of texts. It does not depend on the sampling settings k (positions per text), m (samples per position) and
tau_s (the least probability of a call, p_api): more calls add rows, and leave the other rows as they are.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.stage import CALL_KEY, TEXT_KEY, Rejected, TableOutput, count_by_reason
from toolformer_dag.pipeline import chained_candidates
from toolformer_dag.pipeline.controls import Control
from toolformer_dag.settings.sections import ControlSettings
from toolformer_dag.tools.tool import NO_OPERATION

PLACE = (*TEXT_KEY, "position")
"""Key of a place: a position of a text."""
DISTINCT_CALL = (*PLACE, "input")
"""Key of the calls that get results: samples that wrote the same call at the same place get the same ones."""
SWAPPED = pl.List(pl.String())
"""The type of a column with the other results of a call, one per swap."""
SWAPPED_COLUMNS = (*CALL_KEY, "source", "char_offset", "input", "result", "p_api", "reason", "chain")
"""Columns of a scored call that its swaps have too."""
FIRST_SAMPLES = (0, -1, chained_candidates.FIRST_SAMPLE, 2 * chained_candidates.FIRST_SAMPLE)
"""The numbers (`sample`) of the first calls at a position: sampled, of another source, after one and two calls."""


class SwappedCalls(NamedTuple):
    """The calls of a control in a shard, before they are scored.

    - texts: all texts of the shard
    - calls: the calls that got another result, a row per swap
    - left_out: how many calls got none, by shard and reason; also those that had a reason before
    """

    texts: pl.DataFrame
    calls: pl.DataFrame
    left_out: Rejected

    @staticmethod
    def of(texts: pl.DataFrame, calls: pl.DataFrame, exchanged: pl.DataFrame) -> "SwappedCalls":
        """Sort out which calls got another result. calls: all scored calls. exchanged: rows of `exchange`."""
        without_reason = exchanged.filter(pl.col("reason").is_null())
        swapped = without_reason.filter(pl.col("result").is_not_null())
        return SwappedCalls(
            texts=texts,
            calls=swapped.drop("reason", "swap_reason"),
            left_out=count_by_reason(calls) + count_by_reason(without_reason, "swap_reason"),
        )


def swap_call_results(control: Control, output: TableOutput, shard: str, scored_table: LaneTable) -> SwappedCalls:
    """Give scored calls of a shard other results, which cannot help, so that they can be scored again for comparison.

    A call with a reason not to stay gets no other result and is counted by that reason.

    control: chooses the other results, such as results of other documents.
    scored_table: the table with the calls: loss_deltas (single calls) or chained_deltas (chains).

    Raises MissingPart, DamagedPart.
    """
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = _read_scored_calls(output, shard, scored_table)
    exchangeable = calls.filter(_has_usable_result())
    # Only calls at the most probable position of a text give their results to others. Of single calls, those that were
    # sampled and not scored count too, so that the position is the same for all sampling settings.
    candidates = _read_candidate_places(output, shard) if scored_table == "loss_deltas" else exchangeable
    exchanged = exchange(
        exchangeable,
        control=control,
        settings=output.plan.settings.control,
        texts=texts,
        likeliest=select_likeliest_places(candidates),
        limit=output.plan.settings.evaluation.swapped_texts,
    )
    return SwappedCalls.of(texts, calls, exchanged)


def _has_usable_result() -> pl.Expr:
    """Return whether other calls may get the result of a call.

    Calls without an operation are among them, although they are not swapped themselves.
    """
    return pl.col("reason").is_null() | (pl.col("reason") == NO_OPERATION)


def _read_scored_calls(output: TableOutput, shard: str, scored_table: LaneTable) -> pl.DataFrame:
    """Return the calls of a shard in a table of scores (SWAPPED_COLUMNS)."""
    return output.lane_table(scored_table).read(shard).select(SWAPPED_COLUMNS).with_columns(_fill_likelihood())


def _read_candidate_places(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return all sampled calls of a shard, among which the likeliest place of a text is found.

    The version of their table is no input of the stage: that place is the same for every k, m and tau_s.
    """
    return output.lane_table("scored_candidates").read(shard).with_columns(_fill_likelihood())


def _fill_likelihood() -> pl.Expr:
    """Return the column p_api with 0 instead of null: calls of a file may have none, and are then equally likely."""
    return pl.col("p_api").fill_null(0.0)


def exchange(
    calls: pl.DataFrame,
    *,
    control: Control,
    settings: ControlSettings,
    texts: pl.DataFrame,
    likeliest: pl.DataFrame,
    limit: int,
) -> pl.DataFrame:
    """Replace the results of a shard's calls by other results; return a row per call and swap.

    The columns are those of `calls`, with the other result, and `swap`, its number from 0. A call without another
    result has one row with a null result and a `swap_reason`: not_sampled or no_other_result.

    calls: (tool, shard, digest, segment, position, input, sample, p_api, result, ...), of one shard. `sample` is
        negative for a call that a rule or a file proposes.
    control: chooses the other results, up to a few for each call.
    texts: (shard, digest, segment, text_digest), all texts of the shard.
    likeliest: (shard, digest, segment, position), the most probable position of each text.
    limit: how many distinct texts are sampled, and how many of the texts with calls of a rule or a file: 200 takes at
        most 400.
    """
    # Choose the texts whose calls are swapped; adds the columns text_digest and sampled.
    proposed_texts = calls.filter(pl.col("sample") < 0).select(TEXT_KEY).unique()
    calls = calls.join(_sample_texts(texts, limit, proposed_texts), on=TEXT_KEY, maintain_order="left")
    # Mark the calls whose results others may get (`gives`); equal calls become one.
    distinct_calls = _select_distinct_calls(calls.with_columns(gives=_may_give_result(calls, likeliest)))
    other_results = control.other_results(distinct_calls, settings)  # a list for each sampled call
    swaps = _number_swaps(distinct_calls, other_results, most=settings.swaps)
    return _with_swaps(calls, swaps)


def _number_swaps(distinct: pl.DataFrame, other_results: Sequence[Sequence[str]], *, most: int) -> pl.DataFrame:
    """Return a row per swap, numbered from 0 for each call: (DISTINCT_CALL, swapped, swap).

    A result that equals the call's own would count as one that is kept by chance, and is left out.

    distinct: see `_select_distinct_calls`. other_results: of each `sampled` call among them, in their order. most: how
        many swaps a call has at most.
    """
    sampled = distinct.filter("sampled").select(*DISTINCT_CALL, "result")
    with_results = sampled.with_columns(swapped=pl.Series(other_results, dtype=SWAPPED))
    swaps = with_results.explode("swapped").filter(pl.col("swapped") != pl.col("result")).drop("result")
    numbers = pl.int_range(pl.len(), dtype=pl.Int32).over(DISTINCT_CALL)
    return swaps.with_columns(swap=numbers).filter(pl.col("swap") < most)


def _with_swaps(calls: pl.DataFrame, swaps: pl.DataFrame) -> pl.DataFrame:
    """Return a row per call and swap; a call without another result stays as one row, with its `swap_reason`.

    calls: with the column `sampled`, which is dropped. swaps: (DISTINCT_CALL, swapped, swap).
    """
    joined = calls.join(swaps, on=DISTINCT_CALL, how="left", maintain_order="left")
    joined = joined.with_columns(pl.col("swap").fill_null(0), swap_reason=_explain_no_swap(), result="swapped")
    return joined.drop("sampled", "swapped")


def _explain_no_swap() -> pl.Expr:
    """Return why a call has no other result: not_sampled or no_other_result; null where it has one."""
    has_no_result = pl.when(pl.col("swapped").is_null()).then(pl.lit("no_other_result"))
    return pl.when("sampled").then(has_no_result).otherwise(pl.lit("not_sampled"))


def _may_give_result(calls: pl.DataFrame, likeliest: pl.DataFrame) -> pl.Series:
    """Return for each call whether others may get its result: it is a first sample at the likeliest place of its text.

    Such calls exist for every k and m, so that neither changes which results the other calls get.
    """
    marked = calls.join(likeliest.select(PLACE, likeliest=True), on=PLACE, how="left", maintain_order="left")
    return marked["likeliest"].fill_null(False) & marked["sample"].is_in(FIRST_SAMPLES)


def select_likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """Return the most probable position of each text, of equals the earliest: (shard, digest, segment, position).

    candidates: (shard, digest, segment, position, p_api).
    """
    ordered = candidates.sort("p_api", "position", descending=[True, False])
    return ordered.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE)


def _sample_texts(texts: pl.DataFrame, limit: int, proposed_texts: pl.DataFrame) -> pl.DataFrame:
    """Sample texts by their hashes; return all texts as (shard, digest, segment, text_digest, sampled).

    `sampled` are those with the `limit` smallest distinct hashes among all texts of their shard, and those with the
    `limit` smallest among its texts with proposed calls.

    proposed_texts: (shard, digest, segment) of the texts with calls of a rule or a file.
    """
    hashed = texts.with_columns(hash=_hash_rows("text", texts.select("text_digest")))
    marked_proposed = proposed_texts.with_columns(proposed=True)
    marked = hashed.join(marked_proposed, on=TEXT_KEY, how="left", maintain_order="left")
    hash_if_proposed = pl.when("proposed").then("hash")  # null for other texts, which then have no rank
    is_among_all = _is_among_smallest(pl.col("hash"), limit)
    is_among_proposed = _is_among_smallest(hash_if_proposed, limit).fill_null(False)
    return marked.select(*TEXT_KEY, "text_digest", sampled=is_among_all | is_among_proposed)


def _is_among_smallest(hashes: pl.Expr, limit: int) -> pl.Expr:
    """Return whether a hash is among the `limit` smallest distinct ones of its shard; equal texts count once."""
    return hashes.rank("dense").over("shard") <= limit


def _select_distinct_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the distinct calls in the order of a hash: (DISTINCT_CALL, text_digest, result, p_api, sampled, gives).

    Equal samples are one row, which is `sampled` or `gives` its result if one of them is or does.
    """
    shared = pl.col("text_digest", "result", "p_api").first()
    distinct = calls.group_by(DISTINCT_CALL).agg(shared, pl.col("sampled", "gives").any())
    hashes = _hash_rows("call", distinct.select("text_digest", "position", "input"))
    return distinct.with_columns(hash=hashes).sort("hash", *DISTINCT_CALL)


def _hash_rows(salt: str, rows: pl.DataFrame) -> pl.Series:
    """Return a hash of each row, the same on every machine. Another `salt` gives other hashes of the same rows."""
    digests = [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows.iter_rows()]
    return pl.Series(digests, dtype=pl.String)
