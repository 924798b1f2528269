"""The card of an exported data set: README.md with the hub's YAML header."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from toolformer_dag.lake.queries import sql_text

SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10**7, "1M<n<10M"))
LARGEST = "n>10M"
CITATION = sql_text(__package__, "citation.md")


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """A tool's line in the card: thresholds, `kept` by the filter, `by_chance` by the control; `calls`, `texts` of C*.

    `tau_f`: None where none was certified. `by_chance`: None where the control cannot tell.
    """

    tool: str
    name: str
    tau_s: float
    k: int
    m: int
    tau_f: float | None
    kept: int | None
    by_chance: int | None
    calls: int
    texts: int


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
        size_categories=[size_category(rows)],
        task_categories=[task] if task else None,
        tags=["toolformer", "tool-use"],
        configs=[dict(config) for config in configs] or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def size_category(rows: int) -> str:
    """Return the hub's name for a number of rows."""
    return next((name for limit, name in SIZES if rows < limit), LARGEST)


def split_config(splits: Sequence[str]) -> list[dict[str, Any]]:
    """Return the one config of a data set in splits, for `header`."""
    files = [{"split": split, "path": f"data/{split}-*.parquet"} for split in splits]
    return [{"config_name": "default", "data_files": files}] if files else []


def columns_table(schema: pa.Schema) -> str:
    """Return a Markdown table of the columns with their comments."""
    rows = [(f"`{one.name}`", _outside(one.type), one.metadata[b"comment"].decode()) for one in schema]
    return table(("column", "type", "meaning"), rows)


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (titles, ["---"] * len(titles), *lines))


def tools_table(tools: Sequence[ToolFigures]) -> str:
    """Return a line per tool: thresholds, and what they kept."""
    thresholds = ("tau_s", "k", "m", "tau_f")
    titles = ("tool", "in the text", *thresholds, "calls in C*", "texts", "kept by the filter", "by chance")
    return table(titles, [_line(one) for one in tools])


def _line(one: ToolFigures) -> tuple[object, ...]:
    counts = [f"{count:,}" for count in (one.calls, one.texts, one.kept or 0)]
    by_chance = "too few swaps to tell" if one.by_chance is None else f"{one.by_chance:,}"
    tau_f = "none certified" if one.tau_f is None else one.tau_f
    return (f"`{one.tool}`", one.name, one.tau_s, one.k, one.m, tau_f, *counts, by_chance)


def _outside(kind: pa.DataType) -> str:
    """Struct and list types without their fields, which stand in the comment."""
    return str(kind).partition("<")[0]
