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
from toolformer_dag.computing.stage import Check, Chunk, Claimed, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import (
    TOKEN_BYTES,
    choose_chunk_limits,
    claim,
    require_whole,
    split_texts_into_chunks,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.pipeline.work_counts import EngineMeter, count_planned_work
from toolformer_dag.settings.setting_types import determining

METHOD = 3
"""Raised when the same model would give other losses; a golden test notices where it was not."""
KEY = ("text_digest", "position", "input", "result")
"""The key of stored losses: a call with its result at a position of a text."""
AROUND = 7 + len(WINDOW_WEIGHTS)
"""For estimates: tokens of a call apart from its input and result (name, brackets), and of the window behind it."""
LOSSES = pl.Schema(
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
    """The losses of a call as they are stored: all null where there is a reason."""

    loss_empty: float | None
    loss_call: float | None
    loss_result: float | None
    reason: str | None


def losses_identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Collect what the losses of a call depend on, apart from its text, position, input and result."""
    return {
        "method": METHOD,
        "window_weights": list(WINDOW_WEIGHTS),
        "model": plan.identity_of("judge"),
        "tool": lane.tool.name,
    }


def losses_settings(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what the losses in a stage's rows depend on, such as a floor below which loss_call is not computed.

    A score other than the paper's is computed from the losses and changes none of them.
    """
    return {**losses_identity(plan, lane), **determining(plan.settings.filtering, but=("score", "cost_weight"))}


class CallsWithLosses(NamedTuple):
    """Calls with their losses, and the names of the row stores that the losses come from."""

    calls: pl.DataFrame
    stores: list[str]


class LossStores(NamedTuple):
    """The row stores of a lane's losses under the plan's model.

    - `whole`: calls with all three losses
    - `bounds`: calls without loss_call. It need not be computed where delta stays below the setting
      `filtering.loss_floor` whatever loss_call is: delta is at most loss_empty - loss_result.

    Under a lower floor, or none, a call in `bounds` is computed again, and is then in `whole` too.
    """

    whole: RowStore
    bounds: RowStore


def loss_stores(worker: Worker, lane: Lane) -> LossStores:
    """Open the row stores of a lane's losses."""
    identity = losses_identity(worker.plan, lane)
    return LossStores(
        whole=worker.lane_rows(lane, "losses", identity, KEY, LOSSES),
        bounds=worker.lane_rows(lane, "loss_bounds", identity, KEY, LOSSES),
    )


def read_stored_losses(worker: Worker, lane: Lane, keys: pl.DataFrame) -> pl.DataFrame:
    """Look up the losses of calls that were computed before.

    The score of a call is delta = min(loss_empty, loss_call) - loss_result. With the setting `filtering.loss_floor`,
    loss_call is null if delta is below this floor whatever loss_call is.

    Args:
        keys: The calls, in the columns KEY.

    Returns:
        The losses, in the columns LOSSES. Calls whose losses are not stored have no row.
    """
    stores = loss_stores(worker, lane)
    floor = worker.plan.settings.filtering.loss_floor
    if floor is None:
        return stores.whole.stored(keys)  # `whole` holds the calls with all three losses
    return _read_losses_under_floor(stores, keys, floor)


def _read_losses_under_floor(stores: LossStores, keys: pl.DataFrame, floor: float) -> pl.DataFrame:
    """Look up the losses of calls, without loss_call if it cannot lift the score of a call to a floor.

    The score is delta = min(loss_empty, loss_call) - loss_result: the losses without the call, with the call but
    without its result, and with both.

    Args:
        stores: `whole` holds calls with all three losses, `bounds` holds calls without loss_call.
        keys: The calls, in the columns KEY.
        floor: If delta is below it whatever loss_call is, loss_call is null.

    Returns:
        The losses, in the columns LOSSES. Calls whose losses are not stored have no row.
    """
    max_delta = pl.col("loss_empty") - pl.col("loss_result")
    can_reach_floor = max_delta >= floor

    # loss_call is dropped here even if it is stored, so that the result does not depend on earlier runs.
    loss_call_or_null = pl.when(can_reach_floor).then("loss_call")
    whole_losses = stores.whole.stored(keys).with_columns(loss_call=loss_call_or_null)

    # The stored rows without loss_call may come from a higher floor. They are enough for calls below the present one.
    other_keys = keys.join(whole_losses, on=KEY, how="anti")
    losses_without_call = stores.bounds.stored(other_keys).filter(~can_reach_floor)
    return pl.concat([whole_losses, losses_without_call])


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Calls (KEY) without losses, and the texts (text_digest, text) they stand in."""

    keys: pl.DataFrame
    texts: pl.DataFrame


def plan_losses(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan which losses of a shard's calls have to be computed, because they are not stored yet.

    Args:
        calls: The calls, in the columns KEY (text_digest, position, input, result). Other columns are ignored, and
            calls that are equal in KEY are computed once.
        texts: The texts of the calls, in the columns text_digest and text.
        claimed: The losses that earlier shards of this run compute already, which are left out here. The newly planned
            ones are added to it.

    Returns:
        The work in chunks, and how many losses are computed and reused.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    missing_keys = _select_missing_losses(worker, output.lane, keys)

    # Leaves out what earlier shards compute, and adds the rest to `claimed`.
    store_name = loss_stores(worker, output.lane).whole.name
    keys_to_compute = claim(claimed, store_name, missing_keys)

    chunks = _split_into_chunks(worker.plan, keys, keys_to_compute, texts)
    work = count_planned_work("losses", total=keys.height, missing=keys_to_compute.height)
    return Planned(chunks, work)


def _select_missing_losses(worker: Worker, lane: Lane, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the `keys` (KEY) whose losses have to be computed. Below a floor, a row without loss_call is enough."""
    missing = loss_stores(worker, lane).whole.missing(keys)
    if worker.plan.settings.filtering.loss_floor is None:
        return missing
    bounds = read_stored_losses(worker, lane, missing)
    return missing.join(bounds, on=KEY, how="anti", maintain_order="left")


def _split_into_chunks(plan: Plan, keys: pl.DataFrame, missing: pl.DataFrame, texts: pl.DataFrame) -> list[Chunk]:
    """Split the losses that have to be computed into chunks of about equal work, with all losses of a text in one.

    Args:
        keys: All calls of the shard, in the columns KEY. They are needed so that chunks of texts without any stored
            loss are the same in every run.
        missing: The calls whose losses have to be computed, in the same columns.
        texts: The texts of the calls, in the columns text_digest and text.
    """
    call_bytes = pl.col("input").str.len_bytes() + pl.col("result").str.len_bytes()
    token_estimate = estimate_loss_tokens(call_bytes)
    texts_with_tokens = keys.group_by("text_digest", maintain_order=True).agg(tokens=token_estimate)

    limits = choose_chunk_limits(plan, "judge")  # the judge is the model that computes losses
    texts_to_compute = _select_texts_to_compute(keys, missing)
    batches = split_texts_into_chunks(texts_with_tokens, texts_to_compute, size=limits.texts, tokens=limits.tokens)

    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    return [_build_chunk(batch, missing, distinct_texts) for batch in batches]


def _select_texts_to_compute(keys: pl.DataFrame, missing: pl.DataFrame) -> pl.DataFrame:
    """Return the texts of the missing losses: text_digest, and `whole`, whether no loss of the text is stored."""
    texts_with_losses = keys.join(missing, on=KEY, how="anti")["text_digest"].unique()
    has_no_losses = ~pl.col("text_digest").is_in(texts_with_losses.implode())
    return missing.select("text_digest").unique().with_columns(whole=has_no_losses)


def _build_chunk(batch: pl.DataFrame, missing: pl.DataFrame, texts: pl.DataFrame) -> Chunk:
    """Return the chunk that computes the `missing` losses (KEY) of the texts in `batch` (text_digest, tokens)."""
    payload = LossChunk(
        keys=missing.join(batch, on="text_digest", how="semi", maintain_order="left"),
        texts=texts.join(batch, on="text_digest", how="semi"),
    )
    return Chunk(units=batch.height, payload=payload, tokens=float(batch["tokens"].sum()))


def estimate_loss_tokens(call_bytes: pl.Expr) -> pl.Expr:
    """Estimate how many tokens the model has to read to compute the losses of all calls of a text.

    The model reads the text up to its last call once without calls, and up to each call twice with that call.

    Args:
        call_bytes: The bytes of a call's input and result together.

    Returns:
        An aggregation for calls that are grouped by text. It reads their column `position`, which is the index of the
        token before which a call stands.
    """
    # AROUND: the tokens of a call's name and brackets, and the tokens after it whose loss is computed.
    tokens_with_call = pl.col("position") + call_bytes / TOKEN_BYTES + AROUND
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
    engine = worker.engine("judge")
    meter = EngineMeter(engine)  # counts the tokens from now on

    requests = _build_requests(output.lane, chunk)
    losses = engine.losses(requests, worker.plan.settings.filtering.loss_floor)
    _append_losses(loss_stores(worker, output.lane), chunk.keys, losses)
    return meter.work()


def _build_requests(lane: Lane, chunk: LossChunk) -> list[LossRequest]:
    """Build the requests to the model for the calls of a chunk, one per call and in the order of `chunk.keys`."""
    text_by_digest = dict(chunk.texts.select("text_digest", "text").iter_rows())

    requests = []
    for call in chunk.keys.iter_rows(named=True):
        request = LossRequest(
            text=text_by_digest[call["text_digest"]],
            position=call["position"],
            tool=lane.tool.name,
            input=call["input"],
            result=call["result"],
        )
        requests.append(request)
    return requests


def _append_losses(stores: LossStores, keys: pl.DataFrame, losses: Iterable[CallLosses]) -> None:
    """Store the losses of calls: losses without loss_call in `stores.bounds`, and others in `stores.whole`.

    Args:
        keys: The calls, in the columns KEY.
        losses: Their losses, in the same order.
    """
    schema = {name: LOSSES[name] for name in _Losses._fields}
    values = pl.DataFrame([_to_stored_losses(call_losses) for call_losses in losses], schema=schema, orient="row")
    rows = keys.select(KEY).hstack(values)

    # With a reason all losses are null. Without one, loss_call is null if it was not computed.
    lacks_loss_call = pl.col("loss_call").is_null() & pl.col("reason").is_null()
    stores.bounds.append(rows.filter(lacks_loss_call))
    stores.whole.append(rows.filter(~lacks_loss_call))


def with_losses(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> CallsWithLosses:
    """Add the stored losses to calls.

    The new columns are:
    - loss_empty, loss_call and loss_result, in nats. loss_call is also null where `filtering.loss_floor` made it
      unnecessary.
    - reason: why all three losses are null (does_not_fit or not_finite). It is null otherwise.

    Args:
        calls: The calls, in the columns KEY (text_digest, position, input, result) and others.

    Returns:
        The calls with their losses, and the names of the row stores that the losses come from.

    Raises:
        StorageError: Losses are missing, because they were damaged after they had been computed.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    losses = read_stored_losses(worker, output.lane, keys)

    missing_count = keys.height - losses.height
    require_whole(output, "losses", missing_count)  # raises StorageError unless it is 0

    stores = loss_stores(worker, output.lane)
    store_names = [stores.whole.name, stores.bounds.name]
    return CallsWithLosses(calls.join(losses, on=KEY), store_names)


def losses_finite(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count rows with a loss or delta that is NaN or infinite. Nulls are not counted: a reason explains them."""
    columns = [name for name, kind in rows.schema.items() if kind == pl.Float64]
    return rows.filter(~pl.all_horizontal(pl.col(name).is_finite() for name in columns)).height


LOSSES_FINITE = Check("Every loss is a finite number, or missing with a reason.", losses_finite)
"""The check of the stages that store losses."""


def _to_stored_losses(losses: CallLosses) -> _Losses:
    """Return the losses of a call as they are stored; without a reason, loss_call may be None: it was not computed."""
    values = (losses.loss_empty, losses.loss_call, losses.loss_result)
    is_finite = all(value is None or isfinite(value) for value in values)
    if losses.reason is None and is_finite:
        return _Losses(losses.loss_empty, losses.loss_call, losses.loss_result, reason=None)
    return _Losses(None, None, None, reason=losses.reason or "not_finite")
