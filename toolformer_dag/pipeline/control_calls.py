"""The calls of a control before they are scored: a sample of a shard's scored calls with other results.

The sample is of texts. It does not depend on the sampling settings k (positions per text), m (samples per position) and
tau_s (the least probability of a call, p_api): more calls add rows, and leave the other rows as they are.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.stage import CALL_KEY, TEXT_KEY, RejectionCounts, TableOutput, count_rejected_rows
from toolformer_dag.pipeline import chained_candidates
from toolformer_dag.pipeline.controls import Control
from toolformer_dag.settings.sections import ControlSettings
from toolformer_dag.tools.tool import NO_OPERATION_REASON

PLACE_KEY_COLUMNS = (*TEXT_KEY, "position")
"""Key of a place: a position of a text."""
DISTINCT_CALL_KEY = (*PLACE_KEY_COLUMNS, "input")
"""Key of the calls that get results: samples that wrote the same call at the same place get the same ones."""
SWAPPED_RESULTS_TYPE = pl.List(pl.String())
"""The type of a column with the other results of a call, one per swap."""
SWAPPED_COLUMNS = (*CALL_KEY, "source", "char_offset", "input", "result", "p_api", "reason", "chain")
"""Columns of a scored call that its swaps have too."""
FIRST_SAMPLE_NUMBERS = (
    0,
    -1,
    chained_candidates.FIRST_CHAINED_SAMPLE_NUMBER,
    2 * chained_candidates.FIRST_CHAINED_SAMPLE_NUMBER,
)
"""The numbers (`sample`) of the first calls at a position: sampled, of another source, after one and two calls."""


class SwappedCalls(NamedTuple):
    """The calls of a control in a shard, before they are scored.

    Attributes:
        texts: All texts of the shard.
        calls: The calls that got another result, with a row per swap.
        left_out_counts: How many calls got none, by (shard, reason). Calls that had been rejected before count too.
    """

    texts: pl.DataFrame
    calls: pl.DataFrame
    left_out_counts: RejectionCounts

    @staticmethod
    def from_exchanged_calls(texts: pl.DataFrame, calls: pl.DataFrame, exchanged_calls: pl.DataFrame) -> "SwappedCalls":
        """Return the calls that got another result, which cannot help, and count the rest by reason.

        They are a control: the filter keeps such a call only by chance.

        Args:
            texts: All texts of the shard, a file of the corpus.
            calls: All scored calls of the shard.
            exchanged_calls: The rows that `exchange_results` returned.
        """
        # `reason` says why a call was rejected before, `swap_reason` why it got no other result here.
        without_reason = exchanged_calls.filter(pl.col("reason").is_null())
        swapped = without_reason.filter(pl.col("result").is_not_null())

        left_out_before = count_rejected_rows(calls)
        left_out_here = count_rejected_rows(without_reason, "swap_reason")
        return SwappedCalls(
            texts=texts,
            calls=swapped.drop("reason", "swap_reason"),
            left_out_counts=left_out_before + left_out_here,
        )


def swap_call_results(control: Control, output: TableOutput, shard: str, scored_table: LaneTable) -> SwappedCalls:
    """Replace the results of scored calls by results that cannot help, so that the calls can be scored again.

    This is a control: a call with such a result is kept only by chance. Calls that were rejected before are not swapped
    but counted by their reason.

    Args:
        control: Chooses the other results, such as results of calls in other documents.
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard, a file of the corpus.
        scored_table: The table with the calls: loss_deltas (single calls) or chained_deltas (chains).

    Raises:
        MissingPart: A table has no rows for the shard yet.
        DamagedPart: A file of a table is damaged.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard)
    calls = _read_scored_calls(output, shard, scored_table)
    exchangeable_calls = calls.filter(_has_usable_result())

    # Only calls at the most probable position of a text give their results to others. That position must be the
    # same for all sampling settings, so single calls count for it even if they were sampled and never scored.
    if scored_table == "loss_deltas":
        candidates = _read_candidate_places(output, shard)
    else:
        candidates = exchangeable_calls

    exchanged = exchange_results(
        exchangeable_calls,
        control=control,
        settings=output.plan.settings.control,
        texts=texts,
        likeliest_places=select_likeliest_places(candidates),
        max_texts=output.plan.settings.evaluation.swapped_texts,
    )
    return SwappedCalls.from_exchanged_calls(texts, calls, exchanged)


def _has_usable_result() -> pl.Expr:
    """Build the condition that a call may be used to exchange results.

    That is a call that was not rejected. Calls without an operation may be used too, so that others can get their
    results, although they are not swapped themselves.
    """
    return pl.col("reason").is_null() | (pl.col("reason") == NO_OPERATION_REASON)


def _read_scored_calls(output: TableOutput, shard: str, scored_table: LaneTable) -> pl.DataFrame:
    """Read the calls of a shard from a table of scores, with the columns SWAPPED_COLUMNS."""
    scored_calls = output.get_lane_table(scored_table).read_part(shard)
    return scored_calls.select(SWAPPED_COLUMNS).with_columns(_build_p_api_without_nulls())


def _read_candidate_places(output: TableOutput, shard: str) -> pl.DataFrame:
    """Read all sampled calls of a shard, to find the most probable position of each text.

    The version of their table is no input of the stage, because that position is the same for every k, m and tau_s.
    """
    return output.get_lane_table("scored_candidates").read_part(shard).with_columns(_build_p_api_without_nulls())


def _build_p_api_without_nulls() -> pl.Expr:
    """Return the column p_api with 0 instead of null: calls of a file may have none, and are then equally likely."""
    return pl.col("p_api").fill_null(0.0)


def exchange_results(
    calls: pl.DataFrame,
    *,
    control: Control,
    settings: ControlSettings,
    texts: pl.DataFrame,
    likeliest_places: pl.DataFrame,
    max_texts: int,
) -> pl.DataFrame:
    """Replace the results of a shard's calls by other results.

    Only calls in a sample of the texts are swapped.

    Args:
        calls: The calls of one shard: tool, shard, digest, segment, position, input, sample, p_api, result and
            more columns. `sample` is negative if a rule or a file proposed the call.
        control: Chooses the other results, up to a few for each call.
        settings: The settings of the controls.
        texts: All texts of the shard: shard, digest, segment, text_digest.
        likeliest_places: The most probable position of each text: shard, digest, segment, position.
        max_texts: How many distinct texts are sampled. As many again are sampled among the texts in which a rule or
            a file proposed a call, so a limit of 200 gives at most 400 texts.

    Returns:
        One row per call and swap. The columns are those of `calls` and these:

        - result: the other result, in place of the call's own
        - swap: the number of the swap, from 0
        - swap_reason: why a call has no other result (not_sampled or no_other_result). Such a call has one row
          with a null result.
        - text_digest: the hash of its text
    """
    # Choose the texts whose calls are swapped. The join adds the columns text_digest and sampled.
    proposed_texts = calls.filter(pl.col("sample") < 0).select(TEXT_KEY).unique()
    sampled_texts = _sample_texts(texts, max_texts, proposed_texts)
    calls = calls.join(sampled_texts, on=TEXT_KEY, maintain_order="left")

    # Mark the calls whose results others may get (`gives`). Equal calls become one.
    marked_calls = calls.with_columns(gives=_may_give_result(calls, likeliest_places))
    distinct_calls = _select_distinct_calls(marked_calls)

    other_results = control.choose_other_results(distinct_calls, settings)  # a list for each sampled call
    swaps = _number_swaps(distinct_calls, other_results, max_swaps=settings.swaps)
    return _with_swaps(calls, swaps)


def _number_swaps(
    distinct_calls: pl.DataFrame, other_results: Sequence[Sequence[str]], *, max_swaps: int
) -> pl.DataFrame:
    """Build a table with a row for each swap (another result, which cannot help, that a call gets as a control).

    The swaps of each call are numbered from 0. A result that equals the call's own is left out, because it would count
    as one that is kept by chance.

    Args:
        distinct_calls: The calls, as `_select_distinct_calls` returns them.
        other_results: A list of results for each call that is `sampled`, in the same order.
        max_swaps: How many swaps a call may have.

    Returns:
        The columns DISTINCT_CALL_KEY, `swapped` (the other result) and `swap` (its number).
    """
    sampled_calls = distinct_calls.filter("sampled").select(*DISTINCT_CALL_KEY, "result")
    with_lists = sampled_calls.with_columns(swapped=pl.Series(other_results, dtype=SWAPPED_RESULTS_TYPE))

    one_per_row = with_lists.explode("swapped")
    swaps = one_per_row.filter(pl.col("swapped") != pl.col("result")).drop("result")

    number_in_call = pl.int_range(pl.len(), dtype=pl.Int32).over(DISTINCT_CALL_KEY)
    return swaps.with_columns(swap=number_in_call).filter(pl.col("swap") < max_swaps)


def _with_swaps(calls: pl.DataFrame, swaps: pl.DataFrame) -> pl.DataFrame:
    """Replace the results of calls by other ones that cannot help (swaps), as a control for the filter.

    Args:
        calls: The calls, with a column `sampled` (whether the text of the call is among the sampled ones), which is
            dropped.
        swaps: The columns DISTINCT_CALL_KEY, `swapped` (the other result) and `swap` (its number).

    Returns:
        One row per call and swap. A call without another result stays as one row with a null result, the
        swap 0 and a `swap_reason`.
    """
    calls_and_swaps = calls.join(swaps, on=DISTINCT_CALL_KEY, how="left", maintain_order="left")
    swap_reason = _build_no_swap_reason()  # from `sampled` and `swapped`
    swapped_calls = calls_and_swaps.with_columns(pl.col("swap").fill_null(0), swap_reason=swap_reason, result="swapped")
    return swapped_calls.drop("sampled", "swapped")


def _build_no_swap_reason() -> pl.Expr:
    """Build the column that says why a call has no other result: not_sampled or no_other_result.

    It is null for a call that has one.
    """
    has_no_result = pl.when(pl.col("swapped").is_null()).then(pl.lit("no_other_result"))
    return pl.when("sampled").then(has_no_result).otherwise(pl.lit("not_sampled"))


def _may_give_result(calls: pl.DataFrame, likeliest_places: pl.DataFrame) -> pl.Series:
    """Return for each call whether its result may be given to other calls as a control.

    It may if the call is one of the first samples at the most probable position of its text. These calls exist
    whatever the number of positions per text (k) and of samples per position (m), so neither setting changes which
    results the other calls get.

    Args:
        calls: The calls of a shard, a file of the corpus.
        likeliest_places: The most probable position of each text, with the columns PLACE_KEY_COLUMNS.
    """
    marked_places = likeliest_places.select(PLACE_KEY_COLUMNS, likeliest=True)
    # Adds the column `likeliest`, which is null for calls at other positions.
    marked_calls = calls.join(marked_places, on=PLACE_KEY_COLUMNS, how="left", maintain_order="left")
    is_at_likeliest_place = marked_calls["likeliest"].fill_null(False)
    return is_at_likeliest_place & marked_calls["sample"].is_in(FIRST_SAMPLE_NUMBERS)


def select_likeliest_places(candidates: pl.DataFrame) -> pl.DataFrame:
    """Select the position of each text at which a call most probably begins, the earliest of several equal ones.

    Later only calls at these positions give their results to other calls.

    Args:
        candidates: The columns shard, digest, segment, position and p_api (the probability that a call begins there).

    Returns:
        The columns shard, digest, segment and position.
    """
    most_probable_first = candidates.sort("p_api", "position", descending=[True, False])
    return most_probable_first.unique(TEXT_KEY, keep="first", maintain_order=True).select(PLACE_KEY_COLUMNS)


def _sample_texts(texts: pl.DataFrame, max_texts: int, proposed_texts: pl.DataFrame) -> pl.DataFrame:
    """Mark the texts whose calls get other results: a sample by hashes, so that the same texts are chosen every time.

    Per shard (a file of the corpus), these are the `max_texts` distinct texts with the smallest hashes. As many again
    are chosen in this way among the texts with proposed calls.

    Args:
        texts: The texts, with the columns shard, digest, segment and text_digest.
        max_texts: How many distinct texts each of the two groups has at most.
        proposed_texts: The texts in which a rule or a file proposed a call: shard, digest, segment.

    Returns:
        All texts with the columns shard, digest, segment, text_digest and `sampled`, which is true or false.
    """
    hashed_texts = texts.with_columns(hash=_hash_rows("text", texts.select("text_digest")))

    # Adds the column `proposed`, which is null for texts without a proposed call.
    marked_as_proposed = proposed_texts.with_columns(proposed=True)
    marked_texts = hashed_texts.join(marked_as_proposed, on=TEXT_KEY, how="left", maintain_order="left")

    is_among_all = _is_among_smallest_hashes(pl.col("hash"), max_texts)
    hash_if_proposed = pl.when("proposed").then("hash")  # null for other texts, which then have no rank
    is_among_proposed = _is_among_smallest_hashes(hash_if_proposed, max_texts).fill_null(False)
    return marked_texts.select(*TEXT_KEY, "text_digest", sampled=is_among_all | is_among_proposed)


def _is_among_smallest_hashes(hashes: pl.Expr, max_hashes: int) -> pl.Expr:
    """Return an expression: whether a hash is among the `max_hashes` smallest distinct ones of its shard."""
    return hashes.rank("dense").over("shard") <= max_hashes


def _select_distinct_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Merge the samples that wrote the same call at the same place, and put the calls in a random but repeatable order.

    In this order they later get other results, as a control.

    Returns:
        One row per distinct call: DISTINCT_CALL_KEY, text_digest, result, p_api (the probability that a call begins
        there), hash (the order), and two of true and false: `sampled` if one of the equal calls was sampled, `gives` if
        other calls may get the result.
    """
    shared_values = pl.col("text_digest", "result", "p_api").first()
    any_of_equal = pl.col("sampled", "gives").any()
    distinct_calls = calls.group_by(DISTINCT_CALL_KEY).agg(shared_values, any_of_equal)

    hashes = _hash_rows("call", distinct_calls.select("text_digest", "position", "input"))
    return distinct_calls.with_columns(hash=hashes).sort("hash", *DISTINCT_CALL_KEY)


def _hash_rows(salt: str, rows: pl.DataFrame) -> pl.Series:
    """Return a hash of each row, the same on every machine. Another `salt` gives other hashes of the same rows."""
    digests = [blake2b(repr((salt, *row)).encode(), digest_size=8).hexdigest() for row in rows.iter_rows()]
    return pl.Series(digests, dtype=pl.String)
