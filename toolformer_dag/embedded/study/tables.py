"""The tables of a study, over all its seeds. Imports no torch."""

import polars as pl

from toolformer_dag.embedded.phenomenon import TOOLS
from toolformer_dag.evaluation.interval import wilson

BENCHMARK = r"^(?<tool>\w+) \((?<wordings>\w+)\)$"
DISABLED, BASE_C = (
    "Toolformer (disabled)",
    "base + C",
)  # names of conditions in `evaluation.compared`, which loads torch


def accuracy_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """A row per wordings and condition, a column per tool: `96.2 (94.3-97.5)`, per cent with the 95 % interval."""
    return _shares(outcomes, pl.col("correct"))


def right_tool_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """The same for the share of questions in which the tool was called that they are made for."""
    with_tools = pl.col("condition").str.starts_with("Toolformer") & (pl.col("condition") != DISABLED)
    return _shares(outcomes.filter(with_tools), pl.col("right_tool"))


def calls_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """The same for the share of questions with any call."""
    return _shares(outcomes, pl.col("called").is_not_null())


def perplexity_table(plain: pl.DataFrame) -> pl.DataFrame:
    """Means over the seeds; `against base + C, %`: how much larger the perplexity is."""
    means = plain.group_by("text", "condition", maintain_order=True).agg(pl.col("perplexity", "bits_per_byte").mean())
    baseline = means.filter(condition=BASE_C).select("text", baseline="perplexity")
    larger = ((pl.col("perplexity") / pl.col("baseline") - 1) * 100).alias("against base + C, %")
    return means.join(baseline, on="text", how="left", maintain_order="left").with_columns(larger).drop("baseline")


def _shares(outcomes: pl.DataFrame, what: pl.Expr) -> pl.DataFrame:
    named = outcomes.with_columns(pl.col("benchmark").str.extract_groups(BENCHMARK).alias("parts")).unnest("parts")
    counts = named.group_by("wordings", "condition", "tool", maintain_order=True).agg(hits=what.sum(), n=pl.len())
    cells = counts.with_columns(cell=pl.struct("hits", "n").map_elements(_percent, return_dtype=pl.String))
    wide = cells.pivot("tool", index=["wordings", "condition"], values="cell", maintain_order=True)
    tools = [tool for tool in TOOLS if tool in wide.columns]
    return wide.select("wordings", "condition", *tools).sort("wordings", maintain_order=True)


def _percent(counts: dict[str, int]) -> str:
    low, high = wilson(counts["hits"], counts["n"])
    return f"{100 * counts['hits'] / counts['n']:.1f} ({100 * low:.1f}-{100 * high:.1f})"
