"""Tabulate a study, and draw accuracy with and without tools against model size."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import polars as pl
import vl_convert

from toolformer_dag.evaluation.measurements import OUTCOMES
from toolformer_dag.evaluation.scores import wilson
from toolformer_dag.files import UserError
from toolformer_dag.lake.table import WHOLE, Lake
from toolformer_dag.model.weights import model_name, parameters
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic.phenomena import TOOLS

BENCHMARK = r"^(?<tool>\w+) \((?<wordings>\w+)\)$"
DISABLED, BASE_C = (
    "Toolformer (disabled)",
    "base + C",
)  # names of conditions in `evaluation.compared`, which loads torch


def accuracy_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return a row per wordings and condition, a column per tool: `96.2 (94.3-97.5)`, percent with 95 % interval."""
    return _shares(outcomes, pl.col("correct"))


def right_tool_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return the same table for the share of questions that triggered the intended tool."""
    with_tools = pl.col("condition").str.starts_with("Toolformer") & (pl.col("condition") != DISABLED)
    return _shares(outcomes.filter(with_tools), pl.col("right_tool"))


def calls_table(outcomes: pl.DataFrame) -> pl.DataFrame:
    """Return the same table for the share of questions that triggered any call."""
    return _shares(outcomes, pl.col("called").is_not_null())


def perplexity_table(plain: pl.DataFrame) -> pl.DataFrame:
    """Average over the seeds; `against base + C, %` is the relative increase of the perplexity."""
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


GROUPS = ("parameters", "tool", "condition")


def scaling_table(studies: Sequence[Path]) -> pl.DataFrame:
    """Return parameters, tool, condition, n, and accuracy, low, high in percent, a row per size, tool and condition.

    `low` to `high` is the 95 % interval over all seeds of a study. Raises UserError for a folder without runs,
    MissingPart for a run that has not finished.
    """
    outcomes = pl.concat([_outcomes(line) for study in studies for line in _lines(study)])
    counts = outcomes.group_by(*GROUPS).agg(hits=pl.col("correct").sum(), n=pl.len()).sort(*GROUPS)
    intervals = [wilson(hits, n) for hits, n in counts.select("hits", "n").iter_rows()]
    spans = pl.DataFrame(intervals, schema=["low", "high"], orient="row")
    shares = counts.select(*GROUPS, "n", accuracy=pl.col("hits") / pl.col("n")).hstack(spans)
    return shares.with_columns(pl.col("accuracy", "low", "high") * 100)


def scaling_figure(table: pl.DataFrame) -> str:
    """Draw accuracy against size as SVG, a panel per tool and a line per condition."""
    marks = alt.Axis(values=table["parameters"].unique().sort().to_list(), format=".1s")
    size = alt.X("parameters:Q", title="parameters", scale=alt.Scale(type="log", nice=False, padding=8), axis=marks)
    base = alt.Chart(table).encode(x=size, color=alt.Color("condition:N", title=None))
    lines = base.mark_line(point=True).encode(
        y=alt.Y("accuracy:Q", title="right (%)", scale=alt.Scale(domain=[0, 100]))
    )
    spans = base.mark_rule(opacity=0.5).encode(y="low:Q", y2="high:Q")
    panels = (lines + spans).properties(width=130, height=150).facet(column=alt.Column("tool:N", title=None))
    return str(vl_convert.vegalite_to_svg(panels.to_json()))


def _lines(study: Path) -> list[Path]:
    found = sorted(study.glob("seed*/toolformer.toml"))
    if not found:
        raise UserError(f"{study} holds no study; create it with `toolformer-dag embedded evaluate {study}`")
    return found


def _outcomes(line: Path) -> pl.DataFrame:
    settings = load_settings(line, environment={})
    outcomes = Lake.of(settings.paths).table(OUTCOMES).read(WHOLE)
    tools = pl.col("benchmark").str.extract_groups(BENCHMARK).struct.field("tool")
    size = pl.lit(parameters(Path(model_name(settings.model))))
    return outcomes.select("condition", "correct", tool=tools, parameters=size)
