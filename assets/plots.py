"""The plots that are too large to be shown in place: accuracy, and the paper's tables. See small_plots for others."""

from collections.abc import Callable, Mapping

import altair as alt
import polars as pl
import vl_convert

from toolformer_dag.evaluation.paper_tables import PAPER

WHOSE = alt.Color(
    "figures_of:N", title="figures of", scale=alt.Scale(domain=["ours", PAPER], range=["#2c7fb8", "#bbbbbb"])
)


def png(chart: alt.TopLevelMixin) -> bytes:
    """Draw a chart as PNG."""
    return bytes(vl_convert.vegalite_to_png(chart.to_json(validate=False), scale=1.5))


def bars(rows: pl.DataFrame, item: str, figure: str, title: str) -> bytes:
    """Draw a bar per model with its 95 % interval (low, high), a panel per item. Needs figures_of and model."""
    named = rows.with_columns(
        name=pl.when(pl.col("figures_of") == PAPER).then(pl.format("{} (paper)", "model")).otherwise("model")
    )
    y = alt.Y("name:N", title=None, sort=named["name"].unique(maintain_order=True).to_list())
    base = alt.Chart(named).encode(y=y, x=alt.X(f"{figure}:Q", title=title), color=WHOSE)
    spans = base.mark_rule().encode(x=alt.X("low:Q", title=""), x2="high:Q", color=alt.value("black"))
    panels = (base.mark_bar() + spans).properties(width=150)
    return png(panels.facet(alt.Facet(f"{item}:N", title=None, sort=None), columns=4))


def _examples(rows: pl.DataFrame) -> bytes:
    figures = rows.select("tool", "tau_f", pl.col("examples").alias("ours"), pl.col("paper").alias(PAPER))
    long = figures.unpivot(index=["tool", "tau_f"], variable_name="figures_of", value_name="examples")
    chart = (
        alt.Chart(long.filter(pl.col("examples").is_not_null()))
        .mark_bar()
        .encode(
            y=alt.Y("tau_f:N"),
            x=alt.X("examples:Q", scale=alt.Scale(type="symlog")),
            yOffset="figures_of:N",
            color=WHOSE,
        )
    )
    return png(chart.properties(width=220).facet(alt.Facet("tool:N", title=None), columns=3))


def _over_k(rows: pl.DataFrame) -> bytes:
    base = alt.Chart(rows).encode(x=alt.X("k:Q", title="k of decoding"), color=WHOSE, strokeDash="model:N")
    lines = base.mark_line(point=True).encode(y=alt.Y("accuracy:Q", title="right (%)"))
    panels = (lines + base.mark_rule().encode(y="low:Q", y2="high:Q")).properties(width=150, height=130)
    return png(panels.facet(alt.Facet("benchmark:N", title=None), columns=4))


def _calls(rows: pl.DataFrame) -> bytes:
    points = rows.with_columns(
        kept=pl.col("kept").replace_strict({True: "kept", False: "rejected"}, default="the paper's")
    )
    chart = (
        alt.Chart(points)
        .mark_tick(thickness=2)
        .encode(
            x=alt.X("delta:Q", title="L- - L+ (nats)"),
            y=alt.Y("tool:N", title=None),
            color=alt.Color("kept:N", title=None),
        )
    )
    return png(chart.properties(width=420))


def _over_size(rows: pl.DataFrame) -> bytes:
    """Draw lines over the sizes of models with tools and disabled; other models are points."""
    named = rows.filter("published").with_columns(line=pl.format("{}, {}", "curve", "figures_of"))
    size = alt.X("parameters:Q", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=4))
    base = alt.Chart(named).encode(
        x=size, y=alt.Y("accuracy:Q", title="right (%)"), color=alt.Color("line:N", title=None)
    )
    lines = base.transform_filter("datum.curve != 'other'").mark_line()
    panels = lines + base.mark_point(filled=True) + base.mark_rule().encode(y="low:Q", y2="high:Q")
    return png(panels.properties(width=190, height=190).facet(alt.Facet("benchmarks:N", title=None), columns=3))


PLOTS: Mapping[str, Callable[[pl.DataFrame], bytes]] = {
    "table_2": _examples,
    **{f"table_{number}": lambda rows: bars(rows, "benchmark", "accuracy", "right (%)") for number in range(3, 8)},
    "table_8": lambda rows: bars(rows, "source", "perplexity", "perplexity"),
    "table_9": _over_k,
    "table_10": _calls,
    "figure_4": _over_size,
}
"""View -> PNG of its rows."""
