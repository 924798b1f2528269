"""What steps spend on the model and the tools: each step, also one that failed, is a row of the table COSTS_TABLE."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import polars as pl

from toolformer_dag.lake.record import build_record
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.setting_types import NON_LANE_GROUPS

NON_TOKEN_KINDS = ("passes", "decoding_steps")
"""What an engine counts apart from tokens."""


@dataclass(frozen=True, slots=True)
class Spent:
    """How much was spent so far. Two can be added, and an earlier count can be subtracted from a later one.

    Attributes:
        tokens: The number of tokens that went through the model.
        calls: The number of tool calls that were made.
    """

    tokens: int = 0
    calls: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)

    def __sub__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens - other.tokens, self.calls - other.calls)

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens went through the model, {self.calls:,} tool calls were made"


def sum_token_counts(counts_by_kind: Mapping[str, int]) -> int:
    """Return how many tokens an engine has processed.

    Args:
        counts_by_kind: All counts of the engine. Those of NON_TOKEN_KINDS are left out.
    """
    return sum(count for kind, count in counts_by_kind.items() if kind not in NON_TOKEN_KINDS)


COSTS_TABLE = "warehouse/costs"
"""The lake's table of costs. It has a part per asset, so that a new row of an asset rewrites no others."""
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
    """What a step of a run cost.

    Attributes:
        seconds: How long it took.
        tokens: The number of tokens that went through the model.
        calls: The number of tool calls that were made.
        computed: The number of rows that were computed. None outside of the stages.
        reused: The number of rows that an earlier run had computed. None outside of the stages.
        failed: Whether the step failed or was interrupted.
    """

    seconds: float
    tokens: int = 0
    calls: int = 0
    computed: int | None = None
    reused: int | None = None
    failed: bool = False


def find_lane_key(lake: Lake, asset_name: str) -> str | None:
    """Find the lane (a tool with its settings) to which an asset belongs.

    Returns:
        The key of the lane, such as "calculator" for "calculator/loss_deltas". None if the asset belongs to no lane.
    """
    group, _, _ = asset_name.rpartition("/")
    is_lane = group.removesuffix(lake.round_suffix) not in NON_LANE_GROUPS
    return group if is_lane else None


def add_cost(lake: Lake, run_id: str, asset_name: str, step_cost: StepCost) -> None:
    """Add a row with the cost of a step, which ends now, to the lake's table of costs.

    Args:
        lake: The lake.
        run_id: The id of the Dagster run.
        asset_name: The name of the asset that the step has materialized, such as "calculator/loss_deltas".
        step_cost: What the step cost.

    Raises:
        WriteError: The table cannot be written.
    """
    row = {
        "run": run_id,
        "ended": datetime.now(UTC),
        "stage": asset_name.rpartition("/")[2],
        "tool": find_lane_key(lake, asset_name),
        **asdict(step_cost),
    }
    new_row = pl.DataFrame([row], schema=_COST_SCHEMA)

    # `append_row` gets the rows of the asset so far, and is called again if another run has added some meanwhile.
    append_row = partial(_append_distinct_row, new_row)
    lake.get_table(COSTS_TABLE).revise_part(asset_name, revise_rows=append_row, make_record=_build_record)


def _build_record() -> dict[str, Any]:
    """Build the record of a part of the costs. They depend on no settings and no inputs."""
    return build_record(settings={}, inputs={}, stage="costs", tool=None)


def _append_distinct_row(new_row: pl.DataFrame, rows_so_far: pl.DataFrame | None) -> pl.DataFrame:
    """Append a row to the costs of an asset.

    A row that is there already is not repeated. This happens if the object store has written the row but its answer was
    lost, so that the row is written again.

    Args:
        new_row: A frame with the row.
        rows_so_far: The costs of the asset so far, or None. Columns that they lack, being from an earlier release, are
            filled with nulls.
    """
    no_rows = pl.DataFrame(schema=_COST_SCHEMA)  # determines the order of the columns
    frames = [no_rows, new_row] if rows_so_far is None else [no_rows, rows_so_far, new_row]
    all_rows = pl.concat(frames, how="diagonal")
    return all_rows.unique(maintain_order=True)
