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
TOKENS, CALLS = "tokens through the model", "tool calls"
"""Names of what a run cost, in an asset's metadata."""
PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 60
COUNTS_SHOWN = 200
BAR = "\\|"
"""A bar that does not end a cell, in code too (GitHub Flavored Markdown, section 4.10)."""
UNCHANGED = "unchanged"
"""Whether a step found nothing to do."""


def this_run(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Return what a run cost."""
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
    made = last_materialization(context.instance, key or context.asset_key)
    return dict(made.metadata) if made else {}


def last_materialization(instance: dg.DagsterInstance, key: dg.AssetKey) -> dg.AssetMaterialization | None:
    """Return what Dagster learned last of an asset."""
    event = instance.get_latest_materialization_event(key)
    return event.asset_materialization if event else None


def numbers(rows: pl.DataFrame, measure: str, of: str, unit: str = "") -> dict[str, dg.MetadataValue]:
    """Return a measure per row as numbers, of which the UI draws trends: `accuracy, %: calendar, toolformer`.

    `of`: the column that names what was measured, beside the column `condition`.
    """
    entries, measured = rows.select(of, "condition", measure).drop_nulls().rows(), f"{measure}{unit}"
    return {f"{measured}: {name}, {condition}": dg.MetadataValue.float(value) for name, condition, value in entries}


def counts_table(heading: str, counts: Mapping[str, int], figure: str = "count") -> str:
    """Return a markdown table of counts, the largest first; of equal ones the first stays first."""
    rows = pl.DataFrame(Counter(counts).most_common(), [heading, figure], orient="row")
    return frame_table(rows, COUNTS_SHOWN) if counts else "none"


def frame_table(frame: pl.DataFrame, rows: int = PREVIEW_ROWS, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return the first rows as a markdown table; longer cells are cut."""
    return table(frame.columns, frame.head(rows).iter_rows(), partial(_cell, characters=characters))


def _cell(value: object, characters: int) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value) if value is None or isinstance(value, int | date) else as_text(str(value), characters)


def as_text(text: str, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return text of the web or of a tool for a cell of a markdown table, shown as it is and on one line.

    A span of code is the only markdown in which nothing has a meaning: no HTML, no image, no link, no address. Control
    characters and marks that reverse the direction become spaces; a long text is cut.
    """
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    short = line if len(line) <= characters else line[: characters - 1] + "…"
    if not short:
        return ""
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", short)), default=0))
    apart = re.sub(r"\\(?=\|)", r"\\ ", short)  # a table reads a backslash before its bar as part of the bar
    return f"{fence} {apart.replace('|', BAR)} {fence}"
