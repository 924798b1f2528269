"""Losses that are computed once: one row per distinct (text, position, input, result) of a lane under one model."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import polars as pl

from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.requests import WINDOW_WEIGHTS, CallLosses, LossRequest
from toolformer_dag.pipeline.chunks import claim, text_chunks
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import Claimed, Planned, TableOutput, Work
from toolformer_dag.pipeline.worker import Worker

METHOD = 3
"""Raised when the same model would give other losses; a golden test notices where it was not."""
KEY = ("text_digest", "position", "input", "result")
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
    weights = list(WINDOW_WEIGHTS)
    return {"method": METHOD, "window_weights": weights, "model": dict(plan.model), "tool": lane.tool.name}


def loss_store(worker: Worker, lane: Lane) -> RowStore:
    """Open the losses of a lane under the plan's model."""
    return worker.rows(f"{lane.key}/losses", losses_identity(worker.plan, lane), KEY, LOSSES)


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
    store = loss_store(worker, output.lane)
    keys = calls.select(KEY).unique(maintain_order=True)
    missing = claim(claimed, store.name, store.missing(keys))
    distinct = keys.select("text_digest").unique(maintain_order=True)
    stored = keys.join(missing, on=KEY, how="anti").select("text_digest")
    partial = missing.select("text_digest").unique().join(stored, on="text_digest", how="semi")
    untouched = distinct.join(stored, on="text_digest", how="anti")
    by_digest = texts.select("text_digest", "text").unique("text_digest")
    chunks = text_chunks(distinct, untouched, partial, worker.plan.settings.execution.chunk_texts)
    payloads = [
        LossChunk(
            missing.join(chunk, on="text_digest", how="semi", maintain_order="left"),
            by_digest.join(chunk, on="text_digest", how="semi"),
        )
        for chunk in chunks
    ]
    counts = {"losses": (missing.height, keys.height - missing.height)}
    units = [(payload.texts.height, payload) for payload in payloads]
    return Planned(units, distinct.height, counts)


def compute_losses(worker: Worker, output: TableOutput, chunk: LossChunk) -> Work:
    """Compute and commit the three losses of every call of a chunk.

    Losses are null, with a reason, where call and text do not fit the context together (does_not_fit), and where the
    model's numbers are not finite (not_finite: a dtype that overflows).
    """
    engine, name = worker.engine(), output.lane.tool.name
    before, texts = engine.counts.as_dict(), dict(chunk.texts.iter_rows())
    wanted = list(chunk.keys.select(KEY).iter_rows())
    requests = [LossRequest(texts[digest], i, name, call, result) for digest, i, call, result in wanted]
    answers = zip(wanted, engine.losses(requests), strict=True)
    rows = pl.DataFrame([(*key, *_values(losses)) for key, losses in answers], schema=LOSSES, orient="row")
    loss_store(worker, output.lane).append(rows)
    return Work({kind: count - before[kind] for kind, count in engine.counts.as_dict().items()})


def with_losses(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> tuple[pl.DataFrame, list[str]]:
    """Return `calls` with loss_empty, loss_call, loss_result and reason, and the names of the row stores.

    Raises StorageError where losses were damaged meanwhile.
    """
    store = loss_store(worker, output.lane)
    keys = calls.select(KEY).unique(maintain_order=True)
    losses = store.stored(keys)
    if losses.height < keys.height:
        lost = keys.height - losses.height
        raise StorageError(f"{lost} losses of {output.lane.key} were damaged while they were read; run again")
    return calls.join(losses, on=KEY), [store.name]


def losses_finite(rows: pl.DataFrame, output: TableOutput) -> int:
    """Count rows whose losses or delta are no finite numbers; null stands for losses that a reason explains."""
    columns = [name for name, kind in rows.schema.items() if kind == pl.Float64]
    return rows.filter(~pl.all_horizontal(pl.col(name).is_finite() for name in columns)).height


def _values(losses: CallLosses) -> tuple[float | None, float | None, float | None, str | None]:
    values = (losses.loss_empty, losses.loss_call, losses.loss_result)
    if losses.reason is None and all(map(isfinite, values)):
        return (*values, None)
    return None, None, None, losses.reason or "not_finite"
