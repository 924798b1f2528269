"""The plots that are too large to be shown in place; see small_plots."""

import altair as alt
import polars as pl
import vl_convert


def accuracy_bars(results: pl.DataFrame) -> bytes:
    """PNG: accuracy per tool and condition with its 95 % interval. Needs benchmark, condition, accuracy, low, high."""
    base = alt.Chart(results).encode(
        x=alt.X("condition:N", title=None, sort=None, axis=None),
        color=alt.Color("condition:N", title=None, sort=None, legend=alt.Legend(orient="bottom", columns=2)),
    )
    bars = base.mark_bar().encode(y=alt.Y("accuracy:Q", title="right (%)", scale=alt.Scale(domain=[0, 100])))
    spans = base.mark_rule(color="black").encode(y="low:Q", y2="high:Q")
    return png(
        (bars + spans)
        .properties(width=110, height=160)
        .facet(alt.Facet("benchmark:N", title=None, sort=None), columns=3)
    )


def png(chart: alt.TopLevelMixin) -> bytes:
    """Draw a chart."""
    return bytes(vl_convert.vegalite_to_png(chart.to_json(), scale=1.5))
