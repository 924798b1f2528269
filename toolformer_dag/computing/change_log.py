"""What runs changed: settings before and after, and kept calls before and after. A log in the lake: `changes` in SQL.

A step that finds its table made with other settings, or whose lane keeps other calls than before, adds rows under its
asset's name. A first run changes nothing. Nothing is computed from this log, so that lakes may differ in it alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import polars as pl

from toolformer_dag.computing.spending import find_lane_key
from toolformer_dag.lake.record import FieldChange, build_record, shorten_pair
from toolformer_dag.lake.table import Lake

CHANGES_TABLE = "warehouse/changes"
"""The lake's table of changes. It has a part per asset, so that a new row of an asset rewrites no others."""
CHANGE_COLUMNS = {
    "run": (pl.String(), "id of the run, as Dagster shows it"),
    "ended": (pl.Datetime("us", "UTC"), "when the step ended"),
    "stage": (pl.String(), "the stage whose table was made with other settings, or other calls"),
    "tool": (pl.String(), "key of the lane; null for what belongs to no lane"),
    "setting": (pl.String(), "the setting, with the names of its tables before it; null where only kept calls changed"),
    "value_before": (pl.String(), "its value before, in at most 60 characters; null where only kept calls changed"),
    "value_after": (pl.String(), "its value after, in at most 60 characters; null where only kept calls changed"),
    "kept_before": (pl.Int64(), "calls that the lane kept before the run; null outside of filtered_calls"),
    "kept_after": (pl.Int64(), "calls that the lane kept after it; null outside of filtered_calls"),
}
"""Name -> (type, meaning)."""
_CHANGE_SCHEMA = {name: dtype for name, (dtype, _) in CHANGE_COLUMNS.items()}
_EMPTY_SETTING_COLUMNS: dict[str, str | None] = {"setting": None, "value_before": None, "value_after": None}
"""The columns of a setting in a row that says only how many calls were kept."""


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """How many calls the filter kept in a lane (a tool with its settings), before and after a step.

    Attributes:
        before: The number before the step.
        after: The number after the step.
    """

    before: int
    after: int


def add_changes(
    lake: Lake,
    run_id: str,
    asset_name: str,
    setting_changes: Sequence[FieldChange],
    kept_counts: KeptCounts | None = None,
) -> None:
    """Add to the log what a step of a run has changed: a row per changed setting, or a single row without a setting.

    Args:
        lake: The lake, which contains the log.
        run_id: The id of the Dagster run.
        asset_name: The asset that the step has materialized, such as "calculator/filtered_calls".
        setting_changes: The changes of fields in the record of the asset, such as "settings.tau_f".
        kept_counts: How many calls the filter kept before and after the step. None for other steps.

    Raises:
        WriteError: The log cannot be written.
    """
    step_columns = {
        "run": run_id,
        "ended": datetime.now(UTC),
        "stage": asset_name.rpartition("/")[2],
        "tool": find_lane_key(lake, asset_name),
        **_build_kept_columns(kept_counts),
    }
    columns_by_setting = [_build_setting_columns(change) for change in setting_changes]
    if not columns_by_setting:
        columns_by_setting = [_EMPTY_SETTING_COLUMNS]

    rows = [{**step_columns, **setting_columns} for setting_columns in columns_by_setting]
    new_rows = pl.DataFrame(rows, schema=_CHANGE_SCHEMA)

    # `append_rows` gets the rows of the asset so far, and is called again if another run has added some meanwhile.
    append_rows = partial(_append_distinct_rows, new_rows)
    lake.get_table(CHANGES_TABLE).revise_part(asset_name, revise_rows=append_rows, make_record=_build_record)


def _build_kept_columns(kept_counts: KeptCounts | None) -> dict[str, int | None]:
    """Build the columns of the log that say how many calls were kept. They are null if `kept_counts` is None."""
    if kept_counts is None:
        return {"kept_before": None, "kept_after": None}
    return {"kept_before": kept_counts.before, "kept_after": kept_counts.after}


def _build_setting_columns(change: FieldChange) -> dict[str, str | None]:
    """Build the columns of the log that say how a setting changed, with shortened values."""
    value_before, value_after = shorten_pair(change.old_value, change.new_value)
    setting_name = change.field_path.removeprefix("settings.")
    return {"setting": setting_name, "value_before": value_before, "value_after": value_after}


def _append_distinct_rows(new_rows: pl.DataFrame, rows_so_far: pl.DataFrame | None) -> pl.DataFrame:
    """Append rows to the log of an asset.

    Rows that are there already are not repeated. This happens if the object store has written the rows but its answer
    was lost, so that they are written again.

    Args:
        new_rows: The rows to append.
        rows_so_far: The log of the asset so far, or None.
    """
    all_rows = new_rows if rows_so_far is None else pl.concat([rows_so_far, new_rows], how="diagonal")
    return all_rows.unique(maintain_order=True)


def _build_record() -> dict[str, Any]:
    """Build the record of a part of the log, which depends on no settings and no inputs."""
    return build_record(settings={}, inputs={}, stage="changes", tool=None)
