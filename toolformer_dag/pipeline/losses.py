"""Losses of single calls, computed once: one row per distinct (text, position, input, result) of a lane and a model.

The losses are those of the paper, section 2, "Filtering API Calls", each over the tokens after the position:
- loss_empty, L_i(empty): without a call
- loss_call, L_i(e(c)): after the call without its result
- loss_result, L_i(e(c, r)): after the call with its result
A call helps by delta = min(loss_empty, loss_call) - loss_result. The losses of chains are in chained_losses.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import Check, Chunk, ClaimedKeys, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import (
    BYTES_PER_TOKEN,
    choose_chunk_limits,
    claim_keys,
    require_no_lost_rows,
    split_texts_into_chunks,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.pipeline.work_counts import EngineMeter, count_planned_work
from toolformer_dag.settings.setting_types import select_determining_settings

METHOD = 3
"""Raised when the same model would give other losses; a golden test notices where it was not."""
CALL_LOSS_KEY = ("text_digest", "position", "input", "result")
"""The key of stored losses: a call with its result at a position of a text."""
EXTRA_TOKENS_PER_CALL = 7 + len(WINDOW_WEIGHTS)
"""For estimates: tokens of a call apart from its input and result (name, brackets), and of the window behind it."""
LOSS_SCHEMA = pl.Schema(
    {
        "text_digest": pl.String(),
        "position": pl.Int32(),
        "input": pl.String(),
        "result": pl.String(),
        "loss_empty": pl.Float64(),
        "loss_call": pl.Float64(),
        "loss_result": pl.Float64(),
        "reason": pl.String(),
    }
)
"""Columns of the stored losses, in nats: L_i(empty), L_i(e(c)) and L_i(e(c, r)); `reason` says why they are null."""


class _Losses(NamedTuple):
    """The losses of a call as they are stored, in nats. All are None if there is a reason why they are missing."""

    loss_empty: float | None
    loss_call: float | None
    loss_result: float | None
    reason: str | None


def collect_losses_identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Collect what the losses of a call depend on, apart from its text, position, input and result."""
    return {
        "method": METHOD,
        "window_weights": list(WINDOW_WEIGHTS),
        "model": plan.get_model_identity("judge"),
        "tool": lane.tool.name,
    }


def collect_losses_settings(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what the losses in a stage's rows depend on, such as a floor below which loss_call is not computed.

    A score other than the paper's is computed from the losses and changes none of them.
    """
    return {
        **collect_losses_identity(plan, lane),
        **select_determining_settings(plan.settings.filtering, excluded_keys=("score", "cost_weight")),
    }


class CallsWithLosses(NamedTuple):
    """Calls with their losses, and the names of the row stores that the losses come from."""

    calls: pl.DataFrame
    store_names: list[str]


class LossStores(NamedTuple):
    """The row stores of a lane's losses under the plan's model.

    Under a lower floor, or none, a call in `losses_without_call` is computed again, and is then in `complete_losses`
    too.

    Attributes:
        complete_losses: Calls with all three losses.
        losses_without_call: Calls without loss_call. It need not be computed if delta stays below the setting
            `filtering.loss_floor` whatever loss_call is: delta is at most loss_empty - loss_result.
    """

    complete_losses: RowStore
    losses_without_call: RowStore


def open_loss_stores(worker: Worker, lane: Lane) -> LossStores:
    """Open the row stores of a lane's losses."""
    identity = collect_losses_identity(worker.plan, lane)
    return LossStores(
        complete_losses=worker.open_lane_row_store(lane, "losses", identity, CALL_LOSS_KEY, LOSS_SCHEMA),
        losses_without_call=worker.open_lane_row_store(lane, "loss_bounds", identity, CALL_LOSS_KEY, LOSS_SCHEMA),
    )


def read_stored_losses(worker: Worker, lane: Lane, call_keys: pl.DataFrame) -> pl.DataFrame:
    """Look up the losses of calls that were computed before.

    The score of a call is delta = min(loss_empty, loss_call) - loss_result. With the setting `filtering.loss_floor`,
    loss_call is null where loss_empty - loss_result is below this floor, because delta is then below it as well.

    Args:
        call_keys: The calls, in the columns CALL_LOSS_KEY.

    Returns:
        The losses, in the columns LOSS_SCHEMA. Calls whose losses are not stored have no row.
    """
    stores = open_loss_stores(worker, lane)
    floor = worker.plan.settings.filtering.loss_floor
    if floor is None:
        return stores.complete_losses.read_stored_rows(call_keys)  # these have all three losses
    return _read_losses_with_floor(stores, call_keys, floor)


def _read_losses_with_floor(stores: LossStores, call_keys: pl.DataFrame, loss_floor: float) -> pl.DataFrame:
    """Look up the losses of calls, without loss_call if it cannot lift the score of a call to a floor.

    The score is delta = min(loss_empty, loss_call) - loss_result: the losses without the call, with the call but
    without its result, and with both.

    Args:
        stores: `complete_losses` has calls with all three losses, `losses_without_call` those without loss_call.
        call_keys: The calls, in the columns CALL_LOSS_KEY.
        loss_floor: If delta is below it whatever loss_call is, loss_call is null.

    Returns:
        The losses, in the columns LOSS_SCHEMA. Calls whose losses are not stored have no row.
    """
    max_delta = pl.col("loss_empty") - pl.col("loss_result")
    can_reach_floor = max_delta >= loss_floor

    # loss_call is dropped here even if it is stored, so that the result does not depend on earlier runs.
    loss_call_or_null = pl.when(can_reach_floor).then("loss_call")
    whole_losses = stores.complete_losses.read_stored_rows(call_keys).with_columns(loss_call=loss_call_or_null)

    # The stored rows without loss_call may come from a higher floor. They are enough for calls below the present one.
    other_keys = call_keys.join(whole_losses, on=CALL_LOSS_KEY, how="anti")
    losses_without_call = stores.losses_without_call.read_stored_rows(other_keys).filter(~can_reach_floor)
    return pl.concat([whole_losses, losses_without_call])


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Calls without losses, and the texts in which they stand.

    Attributes:
        call_keys: The calls, in the columns CALL_LOSS_KEY.
        texts: The texts, in the columns text_digest and text.
    """

    call_keys: pl.DataFrame
    texts: pl.DataFrame


def plan_losses(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame, claimed_keys: ClaimedKeys
) -> Planned:
    """Plan which losses of a shard's calls have to be computed, because they are not stored yet.

    Args:
        calls: The calls, in the columns CALL_LOSS_KEY (text_digest, position, input, result). Other columns are
            ignored, and calls that are equal in CALL_LOSS_KEY are computed once.
        texts: The texts of the calls, in the columns text_digest and text.
        claimed_keys: The losses that earlier shards of this run compute already, which are left out here. The newly
            planned ones are added to it.

    Returns:
        The work in chunks, and how many losses are computed and reused.
    """
    keys = calls.select(CALL_LOSS_KEY).unique(maintain_order=True)
    missing_keys = _select_keys_without_losses(worker, output.lane, keys)

    # Leaves out what earlier shards compute, and adds the rest to `claimed_keys`.
    store_name = open_loss_stores(worker, output.lane).complete_losses.name
    keys_to_compute = claim_keys(claimed_keys, store_name, missing_keys)

    chunks = _split_into_chunks(worker.plan, keys, keys_to_compute, texts)
    work = count_planned_work("losses", total_count=keys.height, missing_count=keys_to_compute.height)
    return Planned(chunks, work)


def _select_keys_without_losses(worker: Worker, lane: Lane, call_keys: pl.DataFrame) -> pl.DataFrame:
    """Return the `call_keys` (CALL_LOSS_KEY) of the calls whose losses still have to be computed.

    With the setting `filtering.loss_floor`, loss_call need not be stored for calls whose score is below the floor
    whatever loss_call is.
    """
    complete_losses = open_loss_stores(worker, lane).complete_losses
    incomplete_keys = complete_losses.find_missing_keys(call_keys)
    if worker.plan.settings.filtering.loss_floor is None:
        return incomplete_keys

    # Of the calls with incomplete losses, it only returns those below the floor, for which nothing is missing.
    losses_below_floor = read_stored_losses(worker, lane, incomplete_keys)
    return incomplete_keys.join(losses_below_floor, on=CALL_LOSS_KEY, how="anti", maintain_order="left")


def _split_into_chunks(
    plan: Plan, call_keys: pl.DataFrame, missing_keys: pl.DataFrame, texts: pl.DataFrame
) -> list[Chunk]:
    """Split the losses that have to be computed into chunks of about equal work, with all losses of a text in one.

    Args:
        call_keys: All calls of the shard, in the columns CALL_LOSS_KEY. They are needed so that chunks of texts without
            any stored loss are the same in every run.
        missing_keys: The calls whose losses have to be computed, in the same columns.
        texts: The texts of the calls, in the columns text_digest and text.
    """
    call_bytes = pl.col("input").str.len_bytes() + pl.col("result").str.len_bytes()
    token_estimate = estimate_loss_tokens(call_bytes)
    texts_with_tokens = call_keys.group_by("text_digest", maintain_order=True).agg(tokens=token_estimate)

    limits = choose_chunk_limits(plan, "judge")  # the judge is the model that computes losses
    texts_to_compute = _select_texts_to_compute(call_keys, missing_keys)
    batches = split_texts_into_chunks(
        texts_with_tokens, texts_to_compute, max_texts=limits.max_texts, max_tokens=limits.max_tokens
    )

    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    return [_build_chunk(batch, missing_keys, distinct_texts) for batch in batches]


def _select_texts_to_compute(call_keys: pl.DataFrame, missing_keys: pl.DataFrame) -> pl.DataFrame:
    """Return the texts of the missing losses: text_digest, and `whole`, whether no loss of the text is stored."""
    texts_with_losses = call_keys.join(missing_keys, on=CALL_LOSS_KEY, how="anti")["text_digest"].unique()
    has_no_losses = ~pl.col("text_digest").is_in(texts_with_losses.implode())
    return missing_keys.select("text_digest").unique().with_columns(whole=has_no_losses)


def _build_chunk(chunk_texts: pl.DataFrame, missing_keys: pl.DataFrame, texts: pl.DataFrame) -> Chunk:
    """Return the chunk (what a worker computes and stores at once) that computes the missing losses of some texts.

    Args:
        chunk_texts: The texts, in the columns text_digest and tokens.
        missing_keys: All calls whose losses are missing, in the columns CALL_LOSS_KEY.
        texts: All texts, in the columns text_digest and text.
    """
    payload = LossChunk(
        call_keys=missing_keys.join(chunk_texts, on="text_digest", how="semi", maintain_order="left"),
        texts=texts.join(chunk_texts, on="text_digest", how="semi"),
    )
    return Chunk(unit_count=chunk_texts.height, payload=payload, estimated_tokens=float(chunk_texts["tokens"].sum()))


def estimate_loss_tokens(call_bytes: pl.Expr) -> pl.Expr:
    """Estimate how many tokens the model has to read to compute the losses of all calls of a text.

    The model reads the text up to its last call once without calls, and up to each call twice with that call.

    Args:
        call_bytes: The bytes of a call's input and result together.

    Returns:
        An aggregation for calls that are grouped by text. It reads their column `position`, which is the index of the
        token before which a call stands.
    """
    # EXTRA_TOKENS_PER_CALL: the tokens of a call's name and brackets, and the tokens after it whose loss is computed.
    tokens_with_call = pl.col("position") + call_bytes / BYTES_PER_TOKEN + EXTRA_TOKENS_PER_CALL
    tokens_without_calls = pl.col("position").max()
    return 2 * tokens_with_call.sum() + tokens_without_calls


def compute_losses(worker: Worker, output: TableOutput, chunk: LossChunk) -> Work:
    """Compute the losses of the calls of a chunk with the model, and store them.

    Each call gets three losses: loss_empty (without the call), loss_call (with the call but without its result) and
    loss_result (with both). Exceptions are:
    - loss_call is null if delta = min(loss_empty, loss_call) - loss_result is below the setting `filtering.loss_floor`
      whatever loss_call is.
    - All three are null, with a reason, if call and text do not fit into the model's context (does_not_fit), or if a
      loss is not finite (not_finite).

    Returns:
        The number of tokens that the model read, and the backend that it ran on.
    """
    engine = worker.get_engine("judge")
    meter = EngineMeter(engine)  # counts the tokens from now on

    requests = _build_loss_requests(output.lane, chunk)
    losses = engine.losses(requests, worker.plan.settings.filtering.loss_floor)
    _store_losses(open_loss_stores(worker, output.lane), chunk.call_keys, losses)
    return meter.measure_work()


def _build_loss_requests(lane: Lane, chunk: LossChunk) -> list[LossRequest]:
    """Build the requests to the model for the calls of a chunk, one per call and in the order of `chunk.call_keys`."""
    text_by_digest = dict(chunk.texts.select("text_digest", "text").iter_rows())

    requests = []
    for call in chunk.call_keys.iter_rows(named=True):
        request = LossRequest(
            text=text_by_digest[call["text_digest"]],
            position=call["position"],
            tool=lane.tool.name,
            input=call["input"],
            result=call["result"],
        )
        requests.append(request)
    return requests


def _store_losses(stores: LossStores, call_keys: pl.DataFrame, losses: Iterable[CallLosses]) -> None:
    """Store the losses of calls: those without loss_call in `stores.losses_without_call`, others in `complete_losses`.

    Args:
        call_keys: The calls, in the columns CALL_LOSS_KEY.
        losses: Their losses, in the same order.
    """
    schema_without_key = {name: LOSS_SCHEMA[name] for name in _Losses._fields}
    stored_losses = [_to_stored_losses(call_losses) for call_losses in losses]
    loss_columns = pl.DataFrame(stored_losses, schema=schema_without_key, orient="row")
    loss_rows = call_keys.select(CALL_LOSS_KEY).hstack(loss_columns)

    # With a reason all losses are null. Without one, loss_call is null if it was not computed.
    lacks_loss_call = pl.col("loss_call").is_null() & pl.col("reason").is_null()
    stores.losses_without_call.append_rows(loss_rows.filter(lacks_loss_call))
    stores.complete_losses.append_rows(loss_rows.filter(~lacks_loss_call))


def with_losses(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> CallsWithLosses:
    """Add the stored losses to calls.

    The new columns are:
    - loss_empty, loss_call and loss_result, in nats. loss_call is also null where `filtering.loss_floor` made it
      unnecessary.
    - reason: why all three losses are null (does_not_fit or not_finite). It is null otherwise.

    Args:
        calls: The calls, in the columns CALL_LOSS_KEY (text_digest, position, input, result) and others.

    Returns:
        The calls with their losses, and the names of the row stores that the losses come from.

    Raises:
        StorageError: Losses are missing, because they were damaged after they had been computed.
    """
    keys = calls.select(CALL_LOSS_KEY).unique(maintain_order=True)
    losses = read_stored_losses(worker, output.lane, keys)

    missing_count = keys.height - losses.height
    require_no_lost_rows(output, "losses", missing_count)  # raises StorageError unless it is 0

    stores = open_loss_stores(worker, output.lane)
    store_names = [stores.complete_losses.name, stores.losses_without_call.name]
    return CallsWithLosses(calls.join(losses, on=CALL_LOSS_KEY), store_names)


def count_rows_not_finite(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count rows with a loss or delta that is NaN or infinite. Nulls are not counted: a reason explains them."""
    columns = [name for name, kind in rows.schema.items() if kind == pl.Float64]
    return rows.filter(~pl.all_horizontal(pl.col(name).is_finite() for name in columns)).height


LOSSES_FINITE_CHECK = Check("Every loss is a finite number, or missing with a reason.", count_rows_not_finite)
"""The check of the stages that store losses."""


def _to_stored_losses(losses: CallLosses) -> _Losses:
    """Return the losses of a call as they are stored.

    If there is a reason, or a loss is not finite, all losses are None. Else only loss_call may be None, if it was not
    computed.
    """
    all_losses = (losses.loss_empty, losses.loss_call, losses.loss_result)
    is_finite = all(loss is None or isfinite(loss) for loss in all_losses)
    if losses.reason is None and is_finite:
        return _Losses(losses.loss_empty, losses.loss_call, losses.loss_result, reason=None)
    return _Losses(None, None, None, reason=losses.reason or "not_finite")
