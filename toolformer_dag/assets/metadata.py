"""What people see of an asset in the UI: rows, columns, time, tokens, reuse, small tables, plots."""

import re
from collections import Counter
from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.computing.spending import sum_token_counts
from toolformer_dag.computing.update import TableReport
from toolformer_dag.markdown import format_markdown_table

ROW_COUNT_LABEL = "dagster/row_count"
"""The name of the number of rows in an asset's metadata, which Dagster draws on its page."""
TOKENS_LABEL = "tokens through the model"
"""The name of the tokens that a run cost."""
CALLS_LABEL = "tool calls"
"""The name of the calls of tools that a run cost."""
MAX_PREVIEW_ROWS = 5
"""Rows of a table that are shown."""
MAX_CELL_CHARACTERS = 60
"""Characters of a cell that are shown."""
MAX_COUNT_ROWS = 200
"""Rows of a table of counts that are shown, such as shards."""
ESCAPED_BAR = "\\|"
"""A bar that does not end a cell, in code too (GitHub Flavored Markdown, section 4.10)."""
UNCHANGED_LABEL = "unchanged"
"""The name of whether a step found nothing to do."""


def build_run_metadata(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Build what the page of a table shows of a run: its time, what it computed or reused, and what that cost."""
    tokens = sum_token_counts(report.work.tokens_by_kind)
    calls = report.work.computed_rows_by_kind["calls"]
    return {
        "seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "computed": dg.MetadataValue.int(report.computed_row_count),
        "reused (cache hits)": dg.MetadataValue.int(report.reused_row_count),
        TOKENS_LABEL: dg.MetadataValue.int(tokens),
        CALLS_LABEL: dg.MetadataValue.int(calls),
        UNCHANGED_LABEL: dg.MetadataValue.bool(report.is_unchanged),
    }


def read_last_metadata(context: dg.AssetExecutionContext, asset_key: dg.AssetKey | None = None) -> Mapping[str, Any]:
    """Return the metadata of an asset's last materialization, which a step shows again if it has nothing to do.

    Args:
        context: The context of the step.
        asset_key: The asset. None for the only asset that the step makes.

    Returns:
        The metadata by label. Empty if the asset was never materialized.
    """
    last_materialization = find_last_materialization(context.instance, asset_key or context.asset_key)
    return dict(last_materialization.metadata) if last_materialization else {}


def find_last_materialization(instance: dg.DagsterInstance, asset_key: dg.AssetKey) -> dg.AssetMaterialization | None:
    """Return the last materialization of an asset that Dagster knows of, or None if it knows of none."""
    event = instance.get_latest_materialization_event(asset_key)
    return event.asset_materialization if event else None


def build_number_metadata(
    rows: pl.DataFrame, number_column: str, subject_column: str, unit_suffix: str = ""
) -> dict[str, dg.MetadataValue]:
    """Build a number for each row, for Dagster's UI, which draws how the numbers change from run to run.

    Each is labeled like `accuracy, %: calendar, toolformer`: the number, its unit, its subject, the condition.

    Args:
        rows: A table with these columns and the column `condition`, which names a model.
        number_column: The column with the number. Rows without a number are left out.
        subject_column: The column with the subject, such as "benchmark".
        unit_suffix: The unit with a comma before it, such as ", %".
    """
    numbered_rows = rows.select(subject_column, "condition", number_column).drop_nulls()
    metadata: dict[str, dg.MetadataValue] = {}
    for subject, condition, number in numbered_rows.iter_rows():
        label = f"{number_column}{unit_suffix}: {subject}, {condition}"
        metadata[label] = dg.MetadataValue.float(number)
    return metadata


def format_counts_table(name_heading: str, count_by_name: Mapping[str, int], count_heading: str = "count") -> str:
    """Format counts as a Markdown table, the largest first. Equal counts stay in order.

    Args:
        name_heading: The heading of the names.
        count_by_name: The counts. Without any, the text is "none".
        count_heading: The heading of the counts.
    """
    if not count_by_name:
        return "none"
    rows = pl.DataFrame(Counter(count_by_name).most_common(), [name_heading, count_heading], orient="row")
    return format_frame_table(rows, MAX_COUNT_ROWS)


def format_frame_table(
    frame: pl.DataFrame, max_rows: int = MAX_PREVIEW_ROWS, max_characters: int = MAX_CELL_CHARACTERS
) -> str:
    """Format the first `max_rows` rows of a frame as a Markdown table, with each cell cut to `max_characters`."""
    format_cell = partial(_format_cell, max_characters=max_characters)
    return format_markdown_table(frame.columns, frame.head(max_rows).iter_rows(), format_cell)


def _format_cell(value: object, max_characters: int) -> str:
    """Return the text of a cell. Numbers, dates and None stay whole; anything else is cut to `max_characters`."""
    if isinstance(value, float):
        return f"{value:.3f}"
    if value is None or isinstance(value, int | date):
        return str(value)
    return format_code_cell(str(value), max_characters)


def format_code_cell(text: str, max_characters: int = MAX_CELL_CHARACTERS) -> str:
    """Format a text as one line of code for a cell of a Markdown table.

    The text comes from the web or from a tool. As code it cannot act as HTML or as a link.

    Args:
        text: The text. Unprintable characters, such as line ends, become spaces.
        max_characters: How many characters are shown. A longer text ends with "…".

    Returns:
        The text between backticks, or an empty string if nothing is printable.
    """
    printable = "".join(char if char.isprintable() else " " for char in text)
    line = " ".join(printable.split())

    if not line:
        return ""
    if len(line) > max_characters:
        line = line[: max_characters - 1] + "…"
    return _format_code_span(line)


def _format_code_span(line: str) -> str:
    r"""Return a line as a Markdown code span that a cell of a table can hold: `` ` a\|b ` `` for `a|b`."""
    # A span ends at a run of backticks as long as the one that began it. So it begins with more than any run inside.
    backtick_runs = re.findall("`+", line)
    longest_run = max(map(len, backtick_runs), default=0)
    fence = "`" * (longest_run + 1)

    # In a table, a backslash and a bar are together a bar. A space separates them, and then each bar is escaped.
    separated = re.sub(r"\\(?=\|)", r"\\ ", line)
    content = separated.replace("|", ESCAPED_BAR)
    return f"{fence} {content} {fence}"
