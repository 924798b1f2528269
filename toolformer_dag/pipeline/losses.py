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
    """Return what a loss depends on, apart from text, position, input and result: model, tool, window and method."""
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
    """Return the stored losses of the calls `keys` (KEY), as rows of LOSSES; calls without stored losses are left out.

    With the setting `filtering.loss_floor`, loss_call is null for calls whose score, delta, cannot reach this floor.
    """
    stores = loss_stores(worker, lane)
    floor = worker.plan.settings.filtering.loss_floor
    if floor is None:
        return stores.whole.stored(keys)  # the row store of calls with all three losses
    return _read_losses_under_floor(stores, keys, floor)


def _read_losses_under_floor(stores: LossStores, keys: pl.DataFrame, floor: float) -> pl.DataFrame:
    """Return the stored losses of calls; loss_call is null where delta is below the floor whatever loss_call is.

    delta = min(loss_empty, loss_call) - loss_result: the losses without the call, without its result, and with it.

    stores: `whole` has calls with all three losses, `bounds` calls without loss_call. keys: KEY of the calls.
    """
    largest_delta = pl.col("loss_empty") - pl.col("loss_result")
    reaches_floor = largest_delta >= floor
    # Null also where loss_call is stored, so that rows do not depend on earlier runs.
    whole = stores.whole.stored(keys).with_columns(loss_call=pl.when(reaches_floor).then("loss_call"))

    # Rows without loss_call may come from a higher floor; they only serve calls below the present one.
    other_keys = keys.join(whole, on=KEY, how="anti")
    bounds = stores.bounds.stored(other_keys).filter(~reaches_floor)
    return pl.concat([whole, bounds])


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Calls (KEY) without losses, and the texts (text_digest, text) they stand in."""

    keys: pl.DataFrame
    texts: pl.DataFrame


def plan_losses(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan the computation of a shard's losses that are not stored yet, in chunks; calls with equal KEY share one.

    calls: KEY (text_digest, position, input, result) and other columns.
    texts: text_digest and text of at least the texts of the calls.
    claimed: losses that earlier shards of this run compute already. They are left out; the planned ones are added.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    store = loss_stores(worker, output.lane).whole  # the row store of calls with all three losses
    # `claim` leaves out what earlier shards compute, and adds the rest to `claimed`.
    missing = claim(claimed, store.name, _select_missing_losses(worker, output.lane, keys))
    work = count_planned_work("losses", total=keys.height, missing=missing.height)
    return Planned(_split_into_chunks(worker.plan, keys, missing, texts), work)


def _select_missing_losses(worker: Worker, lane: Lane, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the `keys` (KEY) whose losses have to be computed. Below a floor, a row without loss_call is enough."""
    missing = loss_stores(worker, lane).whole.missing(keys)
    if worker.plan.settings.filtering.loss_floor is None:
        return missing
    bounds = read_stored_losses(worker, lane, missing)
    return missing.join(bounds, on=KEY, how="anti", maintain_order="left")


def _split_into_chunks(plan: Plan, keys: pl.DataFrame, missing: pl.DataFrame, texts: pl.DataFrame) -> list[Chunk]:
    """Cut the missing losses into chunks of about equal work; all losses of a text are in one chunk.

    keys: all calls of the shard (KEY), so that chunks of which nothing is stored are the same in every run.
    missing: the keys among them whose losses have to be computed.
    texts: text_digest and text of at least the texts of the calls.
    """
    limits = choose_chunk_limits(plan, "judge")  # the judge is the model that computes losses
    call_bytes = pl.col("input").str.len_bytes() + pl.col("result").str.len_bytes()
    texts_with_tokens = keys.group_by("text_digest", maintain_order=True).agg(tokens=estimate_loss_tokens(call_bytes))
    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    to_compute = _select_texts_to_compute(keys, missing)
    batches = split_texts_into_chunks(texts_with_tokens, to_compute, size=limits.texts, tokens=limits.tokens)
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
    """Return an aggregation: about how many tokens the model runs for the losses of all calls of a text.

    It runs the text up to the last call once without calls, and twice with each call. Use it on calls grouped by text;
    it reads the column `position`: the index of the token before which a call stands.

    call_bytes: the bytes of each call's input and result.
    """
    # AROUND: a call's name and brackets, and the tokens after it whose loss is computed.
    tokens_with_call = pl.col("position") + call_bytes / TOKEN_BYTES + AROUND
    return 2 * tokens_with_call.sum() + pl.col("position").max()


def compute_losses(worker: Worker, output: TableOutput, chunk: LossChunk) -> Work:
    """Compute the losses of every call of a chunk with the model, and append them to their row stores.

    They are the losses of the text without the call (loss_empty), after the call without its result (loss_call), and
    after its result (loss_result). loss_call is left out where delta = min(loss_empty, loss_call) - loss_result stays
    below `filtering.loss_floor` whatever it is. All are null, with a reason, if call and text do not fit the context
    together (does_not_fit), or if a loss is not finite (not_finite).

    Returns the tokens that went through the model, and the backend that it ran on.
    """
    engine = worker.engine("judge")
    meter = EngineMeter(engine)
    requests = _build_requests(output.lane, chunk)
    losses = engine.losses(requests, worker.plan.settings.filtering.loss_floor)
    _append_losses(loss_stores(worker, output.lane), chunk.keys, losses)
    return meter.work()


def _build_requests(lane: Lane, chunk: LossChunk) -> list[LossRequest]:
    """Return a request to the engine for each call of a chunk, in the order of `chunk.keys`."""
    text_of = dict(chunk.texts.select("text_digest", "text").iter_rows())
    requests = []
    for key in chunk.keys.iter_rows(named=True):
        requests.append(
            LossRequest(
                text=text_of[key["text_digest"]],
                position=key["position"],
                tool=lane.tool.name,
                input=key["input"],
                result=key["result"],
            )
        )
    return requests


def _append_losses(stores: LossStores, keys: pl.DataFrame, losses: Iterable[CallLosses]) -> None:
    """Append the losses of the calls `keys` (KEY), in their order; rows without loss_call go to `stores.bounds`."""
    schema = {name: LOSSES[name] for name in _Losses._fields}
    values = pl.DataFrame([_to_stored_losses(call_losses) for call_losses in losses], schema=schema, orient="row")
    rows = keys.select(KEY).hstack(values)
    lacks_loss_call = pl.col("loss_call").is_null() & pl.col("reason").is_null()
    stores.bounds.append(rows.filter(lacks_loss_call))
    stores.whole.append(rows.filter(~lacks_loss_call))


def with_losses(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> CallsWithLosses:
    """Add the stored losses to calls; return them with the names of the row stores that the losses come from.

    Columns that are added, in nats: loss_empty, loss_call (null where `filtering.loss_floor` saves it), loss_result,
    and reason, why the losses are null (does_not_fit, not_finite), else null.

    calls: KEY (text_digest, position, input, result) and other columns.

    Raises StorageError if losses were damaged since they were computed.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    losses = read_stored_losses(worker, output.lane, keys)
    missing_count = keys.height - losses.height
    require_whole(output, "losses", missing_count)  # raises StorageError if any are missing
    stores = loss_stores(worker, output.lane)
    return CallsWithLosses(calls.join(losses, on=KEY), [stores.whole.name, stores.bounds.name])


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
