"""The plots that the UI shows beside an asset."""

import altair as alt
import numpy as np
import polars as pl
import vl_convert

BINS = 80  # tenths of a nat
CLIPPED = (-3, 5)


def delta_histogram(deltas: pl.DataFrame, tau_f: float) -> bytes:
    """PNG: how L- - L+ is distributed over a lane's scored calls, and where tau_f cuts. Needs a column `delta`."""
    bars = (
        alt.Chart(histogram(deltas["delta"]))
        .mark_bar()
        .encode(
            x=alt.X("delta:Q", bin="binned", title="L- - L+ (nats, clipped to -3..5)"),
            x2="end:Q",
            y=alt.Y("calls:Q", scale=alt.Scale(type="symlog")),
        )
    )
    rule = alt.Chart(pl.DataFrame({"tau_f": [tau_f]})).mark_rule(color="#c0392b", strokeDash=[4, 3]).encode(x="tau_f:Q")
    return _png((bars + rule).properties(width=420, height=180, title=f"scored calls; kept right of tau_f = {tau_f}"))


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
