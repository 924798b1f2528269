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


def build_run_metadata(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Return what this run computed of a table and what that cost, under the names that the page shows."""
    tokens = token_count(report.work.tokens)
    calls = report.work.computed["calls"]
    return {
        "seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "computed": dg.MetadataValue.int(report.computed),
        "reused (cache hits)": dg.MetadataValue.int(report.reused),
        TOKENS: dg.MetadataValue.int(tokens),
        CALLS: dg.MetadataValue.int(calls),
        UNCHANGED: dg.MetadataValue.bool(report.unchanged),
    }


def read_last_metadata(context: dg.AssetExecutionContext, key: dg.AssetKey | None = None) -> Mapping[str, Any]:
    """Return the metadata of an asset's last materialization, which a step shows again if it has nothing to do.

    key: the asset, for a step that makes several.
    """
    last = find_last_materialization(context.instance, key or context.asset_key)
    return dict(last.metadata) if last else {}


def find_last_materialization(instance: dg.DagsterInstance, key: dg.AssetKey) -> dg.AssetMaterialization | None:
    """Return the last materialization of an asset that Dagster knows of."""
    event = instance.get_latest_materialization_event(key)
    return event.asset_materialization if event else None


def numbers(rows: pl.DataFrame, measure: str, of: str, unit: str = "") -> dict[str, dg.MetadataValue]:
    """Build a number per row for Dagster's UI, which draws trends of them.

    The names are such as `accuracy, %: calendar, toolformer`.

    Args:
        measure: The column with the number. Rows without a number are left out.
        of: The column of the subject. In the name, the column `condition` follows it.
        unit: The unit with a comma before it, such as ", %".
    """
    measured = rows.select(of, "condition", measure).drop_nulls()
    shown: dict[str, dg.MetadataValue] = {}
    for subject, condition, value in measured.iter_rows():
        shown[f"{measure}{unit}: {subject}, {condition}"] = dg.MetadataValue.float(value)
    return shown


def format_counts_table(heading: str, counts: Mapping[str, int], figure: str = "count") -> str:
    """Return a Markdown table of counts, the largest first; equal counts stay in order."""
    if not counts:
        return "none"
    rows = pl.DataFrame(Counter(counts).most_common(), [heading, figure], orient="row")
    return format_frame_table(rows, COUNTS_SHOWN)


def format_frame_table(frame: pl.DataFrame, rows: int = PREVIEW_ROWS, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return the first rows of a frame as a Markdown table, each cell cut to `characters`."""
    return table(frame.columns, frame.head(rows).iter_rows(), partial(_format_cell, characters=characters))


def _format_cell(value: object, characters: int) -> str:
    """Return a cell's text; anything but numbers, dates and None is cut to `characters`."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if value is None or isinstance(value, int | date):
        return str(value)
    return format_code_cell(str(value), characters)


def format_code_cell(text: str, characters: int = PREVIEW_CHARACTERS) -> str:
    """Format text of the web or of a tool as one line of code for a Markdown cell, cut to a number of characters.

    As code, the text cannot be HTML or a link. Unprintable characters become spaces.
    """
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())

    if not line:
        return ""
    if len(line) > characters:
        line = line[: characters - 1] + "…"
    return _format_code_span(line)


def _format_code_span(line: str) -> str:
    """Return a line as a Markdown span of code that a cell of a table can hold."""
    # A span of code ends at a run of backticks as long as the one that began it: this one is longer than any inside.
    longest_run = max(map(len, re.findall("`+", line)), default=0)
    fence = "`" * (longest_run + 1)
    # A table reads a backslash before a bar as part of the bar: \| becomes \ |, and the bar is written as BAR.
    separated = re.sub(r"\\(?=\|)", r"\\ ", line)
    content = separated.replace("|", BAR)
    return f"{fence} {content} {fence}"
