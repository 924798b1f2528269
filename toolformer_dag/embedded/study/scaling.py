"""The gain against the size of the model (paper, section 4.4 and Figure 4), from studies that have run."""

from collections.abc import Sequence
from pathlib import Path

import altair as alt
import polars as pl
import vl_convert

from toolformer_dag.checkpoints import model_name
from toolformer_dag.embedded.study.tables import BENCHMARK
from toolformer_dag.errors import UserError
from toolformer_dag.evaluation.interval import wilson
from toolformer_dag.evaluation.results import OUTCOMES
from toolformer_dag.language_model.size import parameters
from toolformer_dag.settings.load import load_settings
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE

GROUPS = ("parameters", "tool", "condition")


def scaling_table(studies: Sequence[Path]) -> pl.DataFrame:
    """A row per size, tool and condition: parameters, tool, condition, n, and accuracy, low, high in per cent.

    `low` to `high` is the 95 % interval over all seeds of a study. Raises UserError for a folder without lines,
    MissingPartition for a line that has not run.
    """
    outcomes = pl.concat([_outcomes(line) for study in studies for line in _lines(study)])
    counts = outcomes.group_by(*GROUPS).agg(hits=pl.col("correct").sum(), n=pl.len()).sort(*GROUPS)
    intervals = [wilson(hits, n) for hits, n in counts.select("hits", "n").iter_rows()]
    spans = pl.DataFrame(intervals, schema=["low", "high"], orient="row")
    shares = counts.select(*GROUPS, "n", accuracy=pl.col("hits") / pl.col("n")).hstack(spans)
    return shares.with_columns(pl.col("accuracy", "low", "high") * 100)


def scaling_figure(table: pl.DataFrame) -> str:
    """SVG: what is answered right, by size, a panel per tool and a line per condition."""
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
        raise UserError(f"{study} holds no study; make one with `toolformer-dag embedded evaluate {study}`")
    return found


def _outcomes(line: Path) -> pl.DataFrame:
    settings = load_settings(line, environment={})
    outcomes = Lake(settings.paths.lake).table(OUTCOMES).read(WHOLE)
    tools = pl.col("benchmark").str.extract_groups(BENCHMARK).struct.field("tool")
    size = pl.lit(parameters(Path(model_name(settings.model))))
    return outcomes.select("condition", "correct", tool=tools, parameters=size)
