"""The plots beside an asset."""

import base64
from xml.etree import ElementTree

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.assets.plots import (
    BLUE,
    GREY,
    HEIGHT,
    RED,
    WIDTH,
    bars,
    chance_curves,
    delta_histogram,
    frontier_curve,
    histogram,
    loss_curve,
)

SHOWN_IN_PLACE = 1000
SHARE = st.floats(0, 1)
ANY = st.floats(width=32)
ANY_NATS = st.floats(-1e9, 1e9)


def drawn(markdown: str) -> ElementTree.Element:
    """Return the picture, which Dagster shows without a click."""
    assert len(markdown) < SHOWN_IN_PLACE
    encoded = markdown.partition("base64,")[2].removesuffix(")")
    return ElementTree.fromstring(base64.b64decode(encoded).decode())


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.none() | st.floats(-10, 10))
def test_any_deltas_are_drawn_in_place(deltas: list[float], tau_f: float | None) -> None:
    assert drawn(delta_histogram(pl.DataFrame({"delta": deltas}, {"delta": pl.Float64}), tau_f)).tag.endswith("svg")


@given(st.lists(st.tuples(st.floats(0, 100), SHARE, SHARE), min_size=1, max_size=500))
def test_any_rates_are_drawn_in_place(rates: list[tuple[float, float, float]]) -> None:
    assert drawn(chance_curves(pl.DataFrame(rates, ["tau_f", "fdr", "fdr_high"], orient="row"))).tag.endswith("svg")


AMOUNT = st.floats(0, 1e9)


@given(st.lists(st.tuples(st.floats(-100, 100), ANY_NATS, AMOUNT), min_size=1, max_size=500), st.booleans())
def test_any_frontier_is_drawn_in_place_with_a_ring_at_today_s_threshold(
    rows: list[tuple[float, float, float]], ruled: bool
) -> None:
    frontier = pl.DataFrame(rows, ["tau_f", "nats", "cost"], orient="row")
    marked = frontier.with_columns(today=pl.lit(ruled) & (pl.int_range(pl.len()) == len(rows) // 2))
    rings = [one for one in drawn(frontier_curve(marked)) if one.get("stroke") == RED]
    assert len(rings) == ruled


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["loss", "perplexity"]), ANY), max_size=500))
def test_any_curve_is_drawn_in_place_where_it_is_a_number(curve: list[tuple[int, str, float]]) -> None:
    schema = {"step": pl.Int64, "measure": pl.String, "value": pl.Float64}
    assert drawn(loss_curve(pl.DataFrame(curve, schema, orient="row"))).tag.endswith("svg")


def test_a_bar_stands_over_its_own_deltas_so_that_tau_f_parts_them() -> None:
    deltas = pl.Series("delta", [0.45, 0.45, 0.5, None, 99.0, -99.0])
    counts = {at: count for at, count in enumerate(histogram(deltas)) if count}
    assert counts == {0: 1, 34: 2, 35: 1, 79: 1}  # tenths of a nat from -3 on; what lies outside is in the outermost
    lines = [path.get("d") for path in drawn(delta_histogram(deltas.to_frame(), 1.0)) if path.get("stroke")]
    assert lines == [f"M{WIDTH // 2} 0V{HEIGHT}"]


def test_a_full_histogram_is_drawn_in_place() -> None:
    deltas = pl.DataFrame({"delta": [-3 + bin / 10 + 0.05 for bin in range(80) for _ in range((bin * 37) % 91 + 9)]})
    drawn(delta_histogram(deltas, 0.5))


def test_a_bar_per_figure_is_drawn_with_its_name_and_interval() -> None:
    row = {
        "benchmark": "a < b",
        "model": "toolformer",
        "figures_of": "ours",
        "accuracy": 95.0,
        "low": 90.0,
        "high": 99.0,
    }
    paper = row | {"model": "GPT-J", "figures_of": "the paper", "accuracy": 10.0, "low": None, "high": None}
    unmeasured = row | {"accuracy": None}
    picture = drawn(bars(pl.DataFrame([row, paper, unmeasured]), ("benchmark", "model"), "accuracy"))
    assert [text.text for text in picture if text.tag.endswith("text")] == ["95  a < b, toolformer", "10  a < b, GPT-J"]
    assert [path.get("stroke") for path in picture][::3] == [BLUE, GREY]
