"""What steps spend on the model and the tools. What each spent, also one that failed, is a row in the lake: `costs`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import polars as pl

from toolformer_dag.lake.record import record
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.setting_types import ASSET_GROUPS

NO_TOKENS = ("passes", "decoding_steps")
"""What the engine counts beside tokens."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that went through the model, and tool calls that were made; counted as in COST_COLUMNS."""

    tokens: int = 0
    calls: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens - other.tokens, self.calls - other.calls)

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens went through the model, {self.calls:,} tool calls were made"


def token_count(counts: Mapping[str, int]) -> int:
    """Sum the engine's counts that are tokens."""
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
    """Return the key of the lane that an asset such as "calculator/loss_deltas" belongs to; None for all lanes'."""
    group = asset.rpartition("/")[0]
    return None if group.removesuffix(lake.suffix) in ASSET_GROUPS else group


def add_cost(lake: Lake, run: str, asset: str, cost: StepCost) -> None:
    """Add a row to the costs of an asset, such as "calculator/loss_deltas". Raises WriteError.

    Not covered: what a killed step spent, and over an object store the one that ended before it, which the next report
    of `run` tells.
    """
    stage = asset.rpartition("/")[2]
    row = {"run": run, "ended": datetime.now(UTC), "stage": stage, "tool": lane_of(lake, asset), **asdict(cost)}
    schema = {name: kind for name, (kind, _) in COST_COLUMNS.items()}
    added = pl.DataFrame([row], schema=schema)

    def with_it(before: pl.DataFrame | None) -> pl.DataFrame:
        # the row is there where the answer to its put was lost
        rows = [pl.DataFrame(schema=schema), *([] if before is None else [before]), added]
        return pl.concat(rows, how="diagonal").unique(maintain_order=True)

    lake.table(COSTS).revise(asset, with_it, lambda: record({}, {}, stage="costs", tool=None))
