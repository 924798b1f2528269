"""Losses that were paid for: one row per distinct (text, position, input, result) of a lane under one model."""

from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.model.requests import CallLosses, LossRequest
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.rows import RowStore

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

METHOD = 3
"""Raised by hand when the same model would give other losses."""
KEY = ("text_digest", "position", "input", "result")
LOSSES = pl.Schema(
    {
        "text_digest": pl.String,
        "position": pl.Int32,
        "input": pl.String,
        "result": pl.String,
        "loss_empty": pl.Float64,
        "loss_call": pl.Float64,
        "loss_result": pl.Float64,
        "reason": pl.String,
    }
)


def losses_identity(lane: Lane, model: Mapping[str, object]) -> dict[str, Any]:
    """What determines a loss beside text, position, input and result."""
    return {"method": METHOD, "model": dict(model), "tool": lane.tool.name}


def loss_store(lake: Lake, lane: Lane, model: Mapping[str, object]) -> RowStore:
    """The losses of a lane under a model."""
    return lake.rows(f"{lane.key}/losses", losses_identity(lane, model), KEY, LOSSES)


def computed_losses(engine: "Engine", lane: Lane, keys: pl.DataFrame, texts: Mapping[str, str]) -> pl.DataFrame:
    """Rows of LOSSES for `keys`; `texts`: text by digest.

    Losses are null, with a reason, where call and text do not fit the context together, and where the model's numbers
    are not finite (not_finite: a dtype that overflows).
    """
    wanted = list(keys.select(KEY).iter_rows())
    requests = [LossRequest(texts[digest], i, lane.tool.name, call, result) for digest, i, call, result in wanted]
    answers = zip(wanted, engine.losses(requests), strict=True)
    return pl.DataFrame([(*key, *_values(losses)) for key, losses in answers], schema=LOSSES, orient="row")


def _values(losses: CallLosses) -> tuple[float | None, float | None, float | None, str | None]:
    values = (losses.loss_empty, losses.loss_call, losses.loss_result)
    if losses.reason is None and all(map(isfinite, values)):
        return (*values, None)
    return None, None, None, losses.reason or "not_finite"
