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

from toolformer_dag.computing.spending import lane_of
from toolformer_dag.lake.record import FieldChange, record, shorten_pair
from toolformer_dag.lake.table import Lake

CHANGES = "warehouse/changes"
"""The lake's table of changes; a part per asset, so that an asset's next row rewrites no other's."""
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
_NO_SETTING: dict[str, str | None] = {"setting": None, "value_before": None, "value_after": None}
"""The columns of a setting in a row that says only how many calls were kept."""


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """How many calls a lane kept before and after a step."""

    before: int
    after: int


def add_changes(
    lake: Lake, run: str, asset: str, settings: Sequence[FieldChange], kept: KeptCounts | None = None
) -> None:
    """Add to the log what a step of a run changed: a row per setting, or one for the kept calls alone.

    run: the id of the Dagster run. asset: such as "calculator/filtered_calls".
    settings: changes of the fields `settings.NAME` in the asset's record.
    kept: how many calls the filter kept before and after the step; None for other steps.

    Raises WriteError. Not covered: a step that was killed before it ended.
    """
    step = {
        "run": run,
        "ended": datetime.now(UTC),
        "stage": asset.rpartition("/")[2],
        "tool": lane_of(lake, asset),
        **_build_kept_columns(kept),
    }
    rows_of_settings = [_build_setting_columns(change) for change in settings] or [_NO_SETTING]
    new_rows = pl.DataFrame([{**step, **row} for row in rows_of_settings], schema=_CHANGE_SCHEMA)
    # `revise` calls `revised` with the asset's rows so far, and again where another run has added some meanwhile.
    lake.table(CHANGES).revise(asset, revised=partial(_with_rows, new_rows), record=_build_record)


def _build_kept_columns(kept: KeptCounts | None) -> dict[str, int | None]:
    """Return the columns of the log that say how many calls a lane keeps; null for other steps."""
    if kept is None:
        return {"kept_before": None, "kept_after": None}
    return {"kept_before": kept.before, "kept_after": kept.after}


def _build_setting_columns(change: FieldChange) -> dict[str, str | None]:
    """Return the columns of the log that say how a setting changed."""
    before, after = shorten_pair(change.old, change.new)
    setting = change.field.removeprefix("settings.")
    return {"setting": setting, "value_before": before, "value_after": after}


def _with_rows(new_rows: pl.DataFrame, rows: pl.DataFrame | None) -> pl.DataFrame:
    """Add rows to the log of an asset, if it has one; equal rows, as after a lost answer of the store, count once."""
    all_rows = new_rows if rows is None else pl.concat([rows, new_rows], how="diagonal")
    return all_rows.unique(maintain_order=True)


def _build_record() -> dict[str, Any]:
    """Return the record of a part of the log: it depends on no settings and no inputs."""
    return record(settings={}, inputs={}, stage="changes", tool=None)
