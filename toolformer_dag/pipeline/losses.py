"""Losses that are computed once: one row per distinct (text, position, input, result) of a lane under one model."""

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import Check, Chunk, Claimed, Planned, TableOutput, Work
from toolformer_dag.computing.stored_rows import TOKEN_BYTES, chunk_limits, claim, require_whole, text_chunks
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.settings.setting_types import determining

METHOD = 3
"""Raised when the same model would give other losses; a golden test notices where it was not."""
KEY = ("text_digest", "position", "input", "result")
AROUND = 12
"""Tokens beside the text and what a call holds, for estimates: its name and marks, and those of the window."""
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


def losses_identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what determines a loss beside text, position, input and result."""
    weights, model = list(WINDOW_WEIGHTS), plan.identity_of("judge")
    return {"method": METHOD, "window_weights": weights, "model": model, "tool": lane.tool.name}


def losses_settings(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what determines the losses of a stage's rows: a floor leaves L(c) out of some, a score changes none."""
    return {**losses_identity(plan, lane), **determining(plan.settings.filtering, but=("score", "cost_weight"))}


def loss_stores(worker: Worker, lane: Lane) -> tuple[RowStore, RowStore]:
    """Open the losses of a lane under the plan's model, and those of calls without L(c).

    Under a lower floor, or none, the second ones are computed again with it.
    """
    identity = losses_identity(worker.plan, lane)
    whole = worker.lane_rows(lane, "losses", identity, KEY, LOSSES)
    bounds = worker.lane_rows(lane, "loss_bounds", identity, KEY, LOSSES)
    return whole, bounds


def stored_losses(worker: Worker, lane: Lane, keys: pl.DataFrame) -> pl.DataFrame:
    """Return the losses stored under `keys`; under a floor, loss_call is null wherever it cannot matter.

    They are the same whatever was stored before the floor was set.
    """
    losses, bounds = loss_stores(worker, lane)
    whole = losses.stored(keys)
    floor = worker.plan.settings.filtering.loss_floor
    if floor is None:
        return whole
    bounded = bounds.stored(keys.join(whole, on=KEY, how="anti"))
    matters = ~(pl.col("loss_empty") - pl.col("loss_result") < floor)
    hidden = whole.with_columns(loss_call=pl.when(matters).then("loss_call"))
    return pl.concat([hidden, bounded.filter(~matters)])


@dataclass(frozen=True, slots=True)
class LossChunk:
    """Calls (KEY) without losses, and the texts (text_digest, text) they stand in."""

    keys: pl.DataFrame
    texts: pl.DataFrame


def planned_losses(
    worker: Worker, output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame, claimed: Claimed
) -> Planned:
    """Plan the losses of `calls` (KEY and other columns) that are not stored. Counts distinct losses.

    Candidates of a text that share position, input and result share one computation.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    store, _ = loss_stores(worker, output.lane)
    lacking = store.missing(keys)
    if worker.plan.settings.filtering.loss_floor is not None:
        lacking = lacking.join(stored_losses(worker, output.lane, lacking), on=KEY, how="anti", maintain_order="left")
    missing = claim(claimed, store.name, lacking)
    tokens = loss_tokens(pl.col("input").str.len_bytes() + pl.col("result").str.len_bytes())
    distinct = keys.group_by("text_digest", maintain_order=True).agg(tokens=tokens)
    stored = keys.join(missing, on=KEY, how="anti")["text_digest"].unique()
    whole = ~pl.col("text_digest").is_in(stored.implode())
    lacking = missing.select("text_digest").unique().with_columns(whole=whole)
    by_digest = texts.select("text_digest", "text").unique("text_digest")
    chunks = [
        Chunk(
            batch.height,
            LossChunk(
                missing.join(batch, on="text_digest", how="semi", maintain_order="left"),
                by_digest.join(batch, on="text_digest", how="semi"),
            ),
            float(batch["tokens"].sum()),
        )
        for batch in text_chunks(distinct, lacking, *chunk_limits(worker.plan, "judge"))
    ]
    work = Work(computed=Counter(losses=missing.height), reused=Counter(losses=keys.height - missing.height))
    return Planned(chunks, work)


def loss_tokens(call: pl.Expr) -> pl.Expr:
    """Estimate what the losses of a text's calls run, of `position` and the bytes of each `call`.

    That is the text up to the place, once alone, and for each call twice behind it.
    """
    after = pl.col("position") + call / TOKEN_BYTES + AROUND
    return 2 * after.sum() + pl.col("position").max()


def compute_losses(worker: Worker, output: TableOutput, chunk: LossChunk) -> Work:
    """Compute and commit the losses of every call of a chunk; L(c) only where it reaches `filtering.loss_floor`.

    Losses are null, with a reason, where call and text do not fit the context together (does_not_fit), and where the
    model's numbers are not finite (not_finite: a dtype that overflows).
    """
    engine, name = worker.engine("judge"), output.lane.tool.name
    before, texts = Counter(engine.counts.as_dict()), dict(chunk.texts.iter_rows())
    wanted = list(chunk.keys.select(KEY).iter_rows())
    requests = [LossRequest(texts[digest], i, name, call, result) for digest, i, call, result in wanted]
    answers = zip(wanted, engine.losses(requests, worker.plan.settings.filtering.loss_floor), strict=True)
    rows = pl.DataFrame([(*key, *_values(losses)) for key, losses in answers], schema=LOSSES, orient="row")
    bound = pl.col("loss_call").is_null() & pl.col("reason").is_null()
    losses, bounds = loss_stores(worker, output.lane)
    bounds.append(rows.filter(bound))
    losses.append(rows.filter(~bound))
    tokens = Counter(engine.counts.as_dict()) - before
    return Work(tokens, backends=frozenset({engine.backend.identity}))


def with_losses(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return `calls` with loss_empty, loss_call, loss_result and reason, and the names of the row stores.

    Raises StorageError where losses were damaged meanwhile.
    """
    keys = calls.select(KEY).unique(maintain_order=True)
    losses = stored_losses(worker, output.lane, keys)
    require_whole(output, "losses", keys.height - losses.height)
    return calls.join(losses, on=KEY), [store.name for store in loss_stores(worker, output.lane)]


def losses_finite(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count rows whose losses or delta are no finite numbers; null stands for losses that a reason explains."""
    columns = [name for name, kind in rows.schema.items() if kind == pl.Float64]
    return rows.filter(~pl.all_horizontal(pl.col(name).is_finite() for name in columns)).height


LOSSES_FINITE = Check("Every loss is a finite number, or missing with a reason.", losses_finite)


def _values(losses: CallLosses) -> tuple[float | None, float | None, float | None, str | None]:
    values = (losses.loss_empty, losses.loss_call, losses.loss_result)
    if losses.reason is None and all(value is None or isfinite(value) for value in values):
        return (*values, None)
    return None, None, None, losses.reason or "not_finite"
