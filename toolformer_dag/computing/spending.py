"""What steps spend on the model and the tools. Each step, also one that failed, is a row of the lake's table COSTS."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import polars as pl

from toolformer_dag.lake.record import record
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.setting_types import ASSET_GROUPS

NO_TOKENS = ("passes", "decoding_steps")
"""What the engine counts that is no number of tokens."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that went through the model, and tool calls that were made; counted as in COST_COLUMNS.

    Two can be added, and the earlier of two counts subtracted from the later.
    """

    tokens: int = 0
    calls: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens - other.tokens, self.calls - other.calls)

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens went through the model, {self.calls:,} tool calls were made"


def token_count(counts: Mapping[str, int]) -> int:
    """Return the sum of an engine's counts (kind -> number) without those of NO_TOKENS."""
    return sum(count for kind, count in counts.items() if kind not in NO_TOKENS)


COSTS = "warehouse/costs"
"""The lake's table of costs; a part per asset, so that an asset's next row rewrites no other's."""
COST_COLUMNS = {
    "run": (pl.String(), "id of the run, as Dagster shows it"),
    "ended": (pl.Datetime("us", "UTC"), "when the step ended"),
    "stage": (pl.String(), "name of the stage, checkpoint or measurement"),
    "tool": (pl.String(), "key of the lane; null for what belongs to no lane"),
    "seconds": (pl.Float64(), "wall time of the step"),
    "tokens": (
        pl.Int64(),
        "tokens that went through the model; of a checkpoint those of its training examples, times the epochs; of "
        "accuracy those that were written",
    ),
    "calls": (pl.Int64(), "tool calls that were made"),
    "computed": (pl.Int64(), "rows of all kinds that were computed; null outside of the stages"),
    "reused": (pl.Int64(), "rows of all kinds that an earlier run had computed; null outside of the stages"),
    "failed": (
        pl.Boolean(),
        "whether the step failed or was interrupted, whose tokens are counted in the stages alone; null in rows of "
        "earlier releases",
    ),
}
"""Name -> (type, meaning)."""
_COST_SCHEMA = {name: dtype for name, (dtype, _) in COST_COLUMNS.items()}


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of a run cost; see COST_COLUMNS."""

    seconds: float
    tokens: int = 0
    calls: int = 0
    computed: int | None = None
    reused: int | None = None
    failed: bool = False


def lane_of(lake: Lake, asset: str) -> str | None:
    """Return the key of the lane of an asset such as "calculator/loss_deltas"; None where it belongs to no lane."""
    group, _, _ = asset.rpartition("/")
    is_lane = group.removesuffix(lake.suffix) not in ASSET_GROUPS
    return group if is_lane else None


def add_cost(lake: Lake, run: str, asset: str, cost: StepCost) -> None:
    """Add a row with the cost of a step that ends now to the costs of an asset, such as "calculator/loss_deltas".

    run: the id of the Dagster run. Raises WriteError. A step that is killed adds no row.
    """
    row = {
        "run": run,
        "ended": datetime.now(UTC),
        "stage": asset.rpartition("/")[2],
        "tool": lane_of(lake, asset),
        **asdict(cost),
    }
    new_row = pl.DataFrame([row], schema=_COST_SCHEMA)
    # `revise` calls `revised` with the asset's rows so far, and again where another run has added some meanwhile.
    lake.table(COSTS).revise(asset, revised=partial(_with_row, new_row), record=_build_record)


def _build_record() -> dict[str, Any]:
    """Return the record of a part of the costs: they depend on no settings and no inputs."""
    return record(settings={}, inputs={}, stage="costs", tool=None)


def _with_row(new_row: pl.DataFrame, rows: pl.DataFrame | None) -> pl.DataFrame:
    """Add a row to the costs of an asset, if it has some; equal rows, as after a lost answer of the store, count once.

    Rows of earlier releases may lack columns, which become null.
    """
    no_rows = pl.DataFrame(schema=_COST_SCHEMA)  # gives the order of the columns
    frames = [no_rows, new_row] if rows is None else [no_rows, rows, new_row]
    return pl.concat(frames, how="diagonal").unique(maintain_order=True)
