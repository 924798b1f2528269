"""What people see of an asset in the UI: rows, columns, time, tokens, reuse, small tables, plots."""

import base64
import re
from collections import Counter
from collections.abc import Mapping
from datetime import date
from typing import Any

import dagster as dg
import polars as pl

from toolformer_dag.pipeline.spending import NO_TOKENS, token_count
from toolformer_dag.pipeline.stage import Stage
from toolformer_dag.pipeline.update import TableReport

ROWS = "dagster/row_count"
TOKENS, CALLS = "tokens through the model", "tool calls"
"""Names of what a run cost, in an asset's metadata."""
PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 60
COUNTS_SHOWN = 200
BAR = "\\|"
"""A bar that does not end a cell, in code too (GitHub Flavored Markdown, section 4.10)."""
PLAIN = re.compile(r"[A-Za-z0-9]+(?:[ _][A-Za-z0-9]+)*")
"""A name that Markdown shows as it is."""
UNCHANGED = "unchanged"
"""Whether a step found nothing to do."""


def figures(report: TableReport) -> dict[str, dg.MetadataValue]:
    """Return rows, time, reuse, tokens and rejections of a table."""
    tokens = {kind: n for kind, n in report.work.tokens.items() if kind not in NO_TOKENS}
    return {
        ROWS: dg.MetadataValue.int(sum(report.rows.values())),
        **this_run(report),
        "tokens": dg.MetadataValue.md(counts_table("kind", largest_first(tokens))),
        "rejections": dg.MetadataValue.md(counts_table("reason", largest_first(report.rejections))),
        "rows per shard": dg.MetadataValue.md(counts_table("shard", report.rows, "rows")),
    }


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


def shape(stage: Stage, rows: pl.LazyFrame) -> dict[str, dg.MetadataValue]:
    """Return the columns with what each holds, and the first rows."""
    columns = [dg.TableColumn(name, str(column.dtype), column.description) for name, column in stage.columns.items()]
    return {
        "dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns)),
        "first rows": dg.MetadataValue.md(frame_table(rows.head(PREVIEW_ROWS).collect())),
    }


def last_metadata(context: dg.AssetExecutionContext, key: dg.AssetKey | None = None) -> Mapping[str, Any]:
    """Return the metadata of the asset's last materialization: a step that skips itself shows it again.

    `key`: the asset, where the step makes several.
    """
    made = last_materialization(context.instance, key or context.asset_key)
    return dict(made.metadata) if made else {}


def last_materialization(instance: dg.DagsterInstance, key: dg.AssetKey) -> dg.AssetMaterialization | None:
    """Return what Dagster was told last of an asset."""
    event = instance.get_latest_materialization_event(key)
    return event.asset_materialization if event else None


def numbers(rows: pl.DataFrame, measure: str, of: str) -> dict[str, dg.MetadataValue]:
    """Return a measure per row as numbers, of which the UI draws trends: `accuracy: calendar, toolformer`.

    `of`: the column that names what was measured, beside the column `condition`.
    """
    told = rows.select(of, "condition", measure).drop_nulls().rows()
    return {f"{measure}: {name}, {condition}": dg.MetadataValue.float(value) for name, condition, value in told}


def counts_table(heading: str, counts: Mapping[str, int], figure: str = "count") -> str:
    """Return a markdown table of counts, in their order."""
    lines = [f"| {_cell(name)} | {count:,} |" for name, count in list(counts.items())[:COUNTS_SHOWN]]
    if len(counts) > COUNTS_SHOWN:
        lines.append(f"| {len(counts) - COUNTS_SHOWN:,} more | |")
    return "\n".join((f"| {heading} | {figure} |", "|---|---:|", *lines)) if counts else "none"


def largest_first(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Return the counts in another order; of equal ones the first stays first."""
    return dict(Counter(counts).most_common())


def frame_table(frame: pl.DataFrame, rows: int = PREVIEW_ROWS, characters: int = PREVIEW_CHARACTERS) -> str:
    """Return the first rows as a markdown table; longer cells are cut."""
    head = frame.head(rows)
    lines = [f"| {' | '.join(_heading(name) for name in head.columns)} |", f"|{'---|' * head.width}"]
    lines += [f"| {' | '.join(_cell(value, characters) for value in row)} |" for row in head.iter_rows()]
    return "\n".join(lines)


def image(png: bytes) -> dg.MetadataValue:
    """Return a plot that the UI shows in place."""
    return dg.MetadataValue.md(f"![plot](data:image/png;base64,{base64.b64encode(png).decode()})")


def _cell(value: object, characters: int = PREVIEW_CHARACTERS) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value) if value is None or isinstance(value, int | date) else as_text(str(value), characters)


def _heading(name: str) -> str:
    """A column's name; only words and numbers mean the same in Markdown."""
    return name if PLAIN.fullmatch(name) else as_text(name)


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
