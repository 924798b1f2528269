"""What people see of an asset in the UI: rows, columns, time, tokens, reuse, small tables, plots."""

import re
from collections import Counter
from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.update import TableReport
from toolformer_dag.markdown import table

ROWS = "dagster/row_count"
"""The name of the number of rows in an asset's metadata, which Dagster draws on its page."""
TOKENS = "tokens through the model"
"""The name of the tokens that a run cost."""
CALLS = "tool calls"
"""The name of the calls of tools that a run cost."""
PREVIEW_ROWS = 5
"""Rows of a table that are shown."""
PREVIEW_CHARACTERS = 60
"""Characters of a cell that are shown."""
COUNTS_SHOWN = 200
"""Rows of a table of counts that are shown, such as shards."""
BAR = "\\|"
"""A bar that does not end a cell, in code too (GitHub Flavored Markdown, section 4.10)."""
UNCHANGED = "unchanged"
"""The name of whether a step found nothing to do."""


def this_run(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Return what a run cost a table, under the names that the page shows."""
    return {
        "seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "computed": dg.MetadataValue.int(report.computed),
        "reused (cache hits)": dg.MetadataValue.int(report.reused),
        TOKENS: dg.MetadataValue.int(token_count(report.work.tokens)),
        CALLS: dg.MetadataValue.int(report.work.computed["calls"]),
        UNCHANGED: dg.MetadataValue.bool(report.unchanged),
    }


def last_metadata(context: dg.AssetExecutionContext, key: dg.AssetKey | None = None) -> Mapping[str, Any]:
    """Return the metadata of the asset's last materialization: a step that skips itself shows it again.

    `key`: the asset, where the step makes several.
    """
    last = last_materialization(context.instance, key or context.asset_key)
    return dict(last.metadata) if last else {}


def last_materialization(instance: dg.DagsterInstance, key: dg.AssetKey) -> dg.AssetMaterialization | None:
    """Return what Dagster learned last of an asset."""
    event = instance.get_latest_materialization_event(key)
    return event.asset_materialization if event else None


def numbers(rows: pl.DataFrame, measure: str, of: str, unit: str = "") -> dict[str, dg.MetadataValue]:
    """Return a measure per row as numbers, of which the UI draws trends: `accuracy, %: calendar, toolformer`.

    - `measure`: the column that holds it; rows without it are left out
    - `of`: the column that names what was measured, beside the column `condition`
    - `unit`: what follows the measure in the name, such as ", %"
    """
    measured = rows.select(of, "condition", measure).drop_nulls()
    shown: dict[str, dg.MetadataValue] = {}
    for subject, condition, value in measured.iter_rows():
        shown[f"{measure}{unit}: {subject}, {condition}"] = dg.MetadataValue.float(value)
    return shown


def counts_table(heading: str, counts: Mapping[str, int], figure: str = "count") -> str:
    """Return a markdown table of counts, the largest first; of equal ones the first stays first."""
    if not counts:
        return "none"
    rows = pl.DataFrame(Counter(counts).most_common(), [heading, figure], orient="row")
    return frame_table(rows, COUNTS_SHOWN)


def frame_table(frame: pl.DataFrame, rows: int = PREVIEW_ROWS, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return the first rows as a markdown table; longer cells are cut."""
    return table(frame.columns, frame.head(rows).iter_rows(), partial(_cell, characters=characters))


def _cell(value: object, characters: int) -> str:
    """Return a value for a cell: a number or a date as it is, anything else as text of at most so many characters."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if value is None or isinstance(value, int | date):
        return str(value)
    return as_text(str(value), characters)


def as_text(text: str, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return text of the web or of a tool for a cell of a markdown table, shown as it is and on one line.

    A span of code is the only markdown in which nothing has a meaning: no HTML, no image, no link, no address. Control
    characters and marks that reverse the direction become spaces; a long text is cut.
    """
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())
    if not line:
        return ""
    if len(line) > characters:
        line = line[: characters - 1] + "…"
    # A span of code ends at a run of backticks as long as the one that began it: this one is longer than any inside.
    longest_run = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest_run + 1)
    # A table reads a backslash before a bar as part of the bar: \| becomes \ |, and the bar is written as BAR.
    parted = re.sub(r"\\(?=\|)", r"\\ ", line)
    return f"{fence} {parted.replace('|', BAR)} {fence}"
