"""What runs changed: settings before and after, and kept calls before and after. A log in the lake: `changes` in SQL.

A step that finds its table made with other settings, or whose lane keeps other calls than before, adds rows under its
asset's name. A first run changes nothing. Nothing is computed from this log, so that lakes may differ in it alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl

from toolformer_dag.computing.spending import lane_of
from toolformer_dag.lake.record import FieldChange, record, shortened_pair
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
    schema = {name: kind for name, (kind, _) in CHANGE_COLUMNS.items()}
    shared = {
        "run": run,
        "ended": datetime.now(UTC),
        "stage": asset.rpartition("/")[2],
        "tool": lane_of(lake, asset),
        "kept_before": kept.before if kept else None,
        "kept_after": kept.after if kept else None,
    }
    values: list[dict[str, str | None]] = []
    for change in settings:
        before, after = shortened_pair(change.old, change.new)
        setting = change.field.removeprefix("settings.")
        values.append({"setting": setting, "value_before": before, "value_after": after})
    if not values:
        values.append({"setting": None, "value_before": None, "value_after": None})
    added = pl.DataFrame([{**shared, **value} for value in values], schema=schema)

    def with_added_rows(before: pl.DataFrame | None) -> pl.DataFrame:
        # the rows are there already where the answer to their put was lost
        rows = added if before is None else pl.concat([before, added], how="diagonal")
        return rows.unique(maintain_order=True)

    # `revise` calls it again with other rows where another process has written meanwhile.
    lake.table(CHANGES).revise(
        asset, revised=with_added_rows, record=lambda: record(settings={}, inputs={}, stage="changes", tool=None)
    )
