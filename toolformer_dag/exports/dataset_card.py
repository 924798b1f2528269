"""The card of an exported data set: README.md with the hub's YAML header."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from toolformer_dag.lake.queries import sql_text
from toolformer_dag.pipeline.plan import Lane

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10**7, "1M<n<10M"))
LARGEST = "n>10M"
CITATION = sql_text(__package__, "citation.md")
TOOL_TITLES = ("tool", "in the text", "tau_s", "k", "m", "tau_f")
"""Of `lane_cells`, and the threshold that was applied."""


def header(
    title: str,
    license: str,
    languages: Sequence[str],
    rows: int,
    configs: Sequence[Mapping[str, Any]],
    task: str | None,
) -> str:
    """Return the YAML header, which `load_dataset` and the hub read. `configs`: those without files are left out."""
    from huggingface_hub import DatasetCardData

    data = DatasetCardData(
        pretty_name=title,
        license=license,
        language=list(languages) or None,
        size_categories=[next((name for limit, name in SIZES if rows < limit), LARGEST)],
        task_categories=[task] if task else None,
        tags=["toolformer", "tool-use"],
        configs=[dict(config) for config in configs] or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def columns_table(schema: pa.Schema) -> str:
    """Return a Markdown table of the columns with their comments, which also tell the fields of structs and lists."""
    rows = [(f"`{one.name}`", str(one.type).partition("<")[0], one.metadata[b"comment"].decode()) for one in schema]
    return table(("column", "type", "meaning"), rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *lines))


def lane_cells(lane: Lane) -> tuple[object, ...]:
    """Return what every table of tools tells of a lane first."""
    return f"`{lane.key}`", lane.tool.name, lane.tau_s, lane.k, lane.m
