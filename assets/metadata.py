"""What a person sees of an asset in the UI: rows, columns, time, tokens, reuse, a small table, a plot."""

import base64
from collections.abc import Mapping, Sequence

import dagster as dg
import polars as pl

from resources.spent import CALLS, TOKENS
from toolformer_dag.stages.report import StageReport
from toolformer_dag.stages.schema import SCHEMAS

PREVIEW_ROWS = 5
PREVIEW_CHARACTERS = 60
NO_TOKENS = ("passes", "decoding_steps")
"""What the engine counts beside tokens."""


def result(
    report: StageReport,
    rows: pl.LazyFrame,
    checks: Sequence[dg.AssetCheckResult] = (),
    **extra: dg.MetadataValue,
) -> dg.MaterializeResult:
    """What an asset returns: the content's version, its figures, its columns, its first rows and its checks."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(report.data_version),
        metadata={**figures(report), **shape(report.stage, rows), **extra},
        check_results=list(checks),
    )


def figures(report: StageReport) -> dict[str, dg.MetadataValue]:
    """Rows, time, reuse, tokens and rejections of a stage."""
    return {
        "dagster/row_count": dg.MetadataValue.int(report.rows),
        "seconds": dg.MetadataValue.float(round(report.seconds, 3)),
        "computed": dg.MetadataValue.int(report.computed),
        "reused (cache hits)": dg.MetadataValue.int(report.reused),
        TOKENS: dg.MetadataValue.int(sum(n for kind, n in report.tokens.items() if kind not in NO_TOKENS)),
        CALLS: dg.MetadataValue.int(report.work.get("calls", (0, 0))[0]),
        "tokens": dg.MetadataValue.md(counts_table("kind", report.tokens)),
        "rejections": dg.MetadataValue.md(counts_table("reason", report.rejections)),
    }


def shape(stage: str, rows: pl.LazyFrame) -> dict[str, dg.MetadataValue]:
    """The columns with what each holds, and the first rows."""
    columns = [dg.TableColumn(name, str(column.dtype), column.description) for name, column in SCHEMAS[stage].items()]
    return {
        "dagster/column_schema": dg.MetadataValue.table_schema(dg.TableSchema(columns)),
        "first rows": dg.MetadataValue.md(frame_table(rows.head(PREVIEW_ROWS).collect())),
    }


def counts_table(heading: str, counts: Mapping[str, int]) -> str:
    """A markdown table of counts, largest first."""
    if not counts:
        return "none"
    rows = sorted(counts.items(), key=lambda item: -item[1])
    return "\n".join((f"| {heading} | count |", "|---|---:|", *(f"| {name} | {count:,} |" for name, count in rows)))


def frame_table(frame: pl.DataFrame, rows: int = PREVIEW_ROWS) -> str:
    """The first rows as a markdown table; long cells are cut."""
    head = frame.head(rows)
    lines = [f"| {' | '.join(head.columns)} |", f"|{'---|' * head.width}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in head.iter_rows()]
    return "\n".join(lines)


def image(png: bytes) -> dg.MetadataValue:
    """A plot that the UI shows in place."""
    return dg.MetadataValue.md(f"![plot](data:image/png;base64,{base64.b64encode(png).decode()})")


def _cell(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    short = text if len(text) <= PREVIEW_CHARACTERS else text[: PREVIEW_CHARACTERS - 1] + "…"
    return short.replace("|", "\\|").replace("\n", " ").replace("`", "'")
