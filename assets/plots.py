"""The plots that the UI shows beside an asset."""

import altair as alt
import numpy as np
import polars as pl
import vl_convert

BINS = 80  # tenths of a nat
CLIPPED = (-3, 5)


def delta_histogram(deltas: pl.DataFrame, tau_f: float | None) -> bytes:
    """PNG: how L- - L+ is distributed over a lane's scored calls, and where tau_f cuts. Needs a column `delta`.

    No call is kept where tau_f is None.
    """
    bars = (
        alt.Chart(histogram(deltas["delta"]))
        .mark_bar()
        .encode(
            x=alt.X("delta:Q", bin="binned", title="L- - L+ (nats, clipped to -3..5)"),
            x2="end:Q",
            y=alt.Y("calls:Q", scale=alt.Scale(type="symlog")),
        )
    )
    if tau_f is None:
        return _png(bars.properties(width=420, height=180, title="scored calls; no tau_f is certified, none is kept"))
    title = f"scored calls; kept right of tau_f = {tau_f:.6g}"
    return _png((bars + _dashed("x", tau_f)).properties(width=420, height=180, title=title))


LEVEL = 0.05
"""The false discovery rate that a threshold by chance usually has."""


def chance_curves(rates: pl.DataFrame) -> bytes:
    """PNG: the false discovery rate and its one-sided 95 % bound over tau_f. Needs tau_f, fdr, fdr_high."""
    lines = (
        alt.Chart(rates.select("tau_f", "fdr", "fdr_high"))
        .transform_fold(["fdr", "fdr_high"], as_=["measure", "rate"])
        .mark_line(interpolate="step-before")
        .encode(
            x=alt.X("tau_f:Q", title="tau_f (nats)"),
            y=alt.Y("rate:Q", title="kept by chance", scale=alt.Scale(domain=[0, 1])),
            color=alt.Color("measure:N", title=None),
        )
    )
    title = "share of the kept calls that are kept by chance"
    return _png((lines + _dashed("y", LEVEL)).properties(width=420, height=180, title=title))


def _dashed(axis: str, value: float) -> alt.Chart:
    """A line across the plot at a value of x or y."""
    line = alt.Chart(pl.DataFrame({"at": [value]})).mark_rule(color="#c0392b", strokeDash=[4, 3])
    placed: alt.Chart = line.encode(x="at:Q") if axis == "x" else line.encode(y="at:Q")
    return placed


def histogram(deltas: pl.Series) -> pl.DataFrame:
    """From `delta` to `end`, the end not counted: calls; what lies outside CLIPPED counts in the outermost bins."""
    edges = np.linspace(*CLIPPED, BINS + 1)
    calls, _ = np.histogram(deltas.drop_nulls().clip(*CLIPPED), edges)
    return pl.DataFrame({"delta": edges[:-1], "end": edges[1:], "calls": calls})


def accuracy_bars(results: pl.DataFrame) -> bytes:
    """PNG: accuracy per tool and condition with its 95 % interval. Needs benchmark, condition, accuracy, low, high."""
    base = alt.Chart(results).encode(x=alt.X("condition:N", title=None, sort=None), color="condition:N")
    bars = base.mark_bar().encode(y=alt.Y("accuracy:Q", title="right (%)", scale=alt.Scale(domain=[0, 100])))
    spans = base.mark_rule(color="black").encode(y="low:Q", y2="high:Q")
    return _png(
        (bars + spans)
        .properties(width=110, height=160)
        .facet(alt.Facet("benchmark:N", title=None, sort=None), columns=5)
    )


def loss_curve(curve: pl.DataFrame) -> bytes:
    """PNG: training loss and held-out perplexity over steps, where they are numbers. Needs step, measure, value."""
    chart = (
        alt.Chart(curve.filter(pl.col("value").is_finite()))
        .mark_line(point=True)
        .encode(x="step:Q", y="value:Q")
        .properties(width=260, height=160)
    )
    return _png(chart.facet(column=alt.Column("measure:N", title=None)).resolve_scale(y="independent"))


def _png(chart: alt.TopLevelMixin) -> bytes:
    return bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=1.5))
