"""The plots beside an asset."""

from urllib.parse import unquote
from xml.etree import ElementTree

import polars as pl
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from toolformer_dag.assets.plots import (
    BLUE,
    GREY,
    PLOT_HEIGHT,
    PLOT_WIDTH,
    RED,
    count_deltas_by_bin,
    draw_bar_chart,
    draw_chance_curves,
    draw_delta_histogram,
    draw_frontier_curve,
    draw_loss_curve,
)

MARKDOWN = MarkdownIt("commonmark")
MARKDOWN.validateLink = lambda url: True  # as Dagster, which shows pictures that bring their data along
SHOWN_IN_PLACE = 1000
SHARE = st.floats(0, 1)
ANY = st.floats(width=32)
ANY_NATS = st.floats(-1e9, 1e9)


def drawn(markdown: str) -> ElementTree.Element:
    """Return the picture, which Dagster shows without a click."""
    assert len(markdown) < SHOWN_IN_PLACE
    [image] = [token for token in MARKDOWN.parse(markdown)[1].children or [] if token.type == "image"]
    return ElementTree.fromstring(unquote(str(image.attrs["src"]).partition(",")[2]))


def told(picture: ElementTree.Element) -> list[str]:
    """Return the legend, the names and the numbers of a picture."""
    return [text.text or "" for text in picture if text.tag.endswith("text")]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False)), st.none() | st.floats(-10, 10))
def test_any_deltas_are_drawn_in_place(deltas: list[float], tau_f: float | None) -> None:
    assert drawn(draw_delta_histogram(pl.DataFrame({"delta": deltas}, {"delta": pl.Float64}), tau_f)).tag.endswith(
        "svg"
    )


@given(st.lists(st.tuples(st.floats(0, 100), SHARE, SHARE), min_size=1, max_size=500))
def test_any_rates_are_drawn_in_place(rates: list[tuple[float, float, float]]) -> None:
    assert drawn(draw_chance_curves(pl.DataFrame(rates, ["tau_f", "fdr", "fdr_high"], orient="row"))).tag.endswith(
        "svg"
    )


AMOUNT = st.floats(0, 1e9)


@given(st.lists(st.tuples(st.floats(-100, 100), ANY_NATS, AMOUNT), min_size=1, max_size=500), st.booleans())
def test_any_frontier_is_drawn_in_place_with_a_ring_at_today_s_threshold(
    rows: list[tuple[float, float, float]], ruled: bool
) -> None:
    frontier = pl.DataFrame(rows, ["tau_f", "nats", "cost"], orient="row")
    marked = frontier.with_columns(today=pl.lit(ruled) & (pl.int_range(pl.len()) == len(rows) // 2))
    rings = [one for one in drawn(draw_frontier_curve(marked)) if one.get("stroke") == RED]
    assert len(rings) == ruled


@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(["loss", "perplexity"]), ANY), max_size=500))
def test_any_curve_is_drawn_in_place_where_it_is_a_number(curve: list[tuple[int, str, float]]) -> None:
    schema = {"step": pl.Int64, "measure": pl.String, "value": pl.Float64}
    assert drawn(draw_loss_curve(pl.DataFrame(curve, schema, orient="row"))).tag.endswith("svg")


def test_a_bar_stands_over_its_own_deltas_so_that_tau_f_parts_them() -> None:
    deltas = pl.Series("delta", [0.45, 0.45, 0.5, None, 99.0, -99.0])
    counts = {at: count for at, count in enumerate(count_deltas_by_bin(deltas)) if count}
    assert counts == {0: 1, 34: 2, 35: 1, 79: 1}  # tenths of a nat from -3 on; what lies outside is in the outermost
    picture = drawn(draw_delta_histogram(deltas.to_frame(), 1.0))
    assert [path.get("d") for path in picture if path.get("stroke") == RED] == [f"M{PLOT_WIDTH // 2} 0V{PLOT_HEIGHT}"]
    assert told(picture) == ["calls, log scale", "tau_f 1", "-3", "5", "2", "0", "delta, nats"]


def test_a_full_histogram_is_drawn_in_place() -> None:
    deltas = pl.DataFrame({"delta": [-3 + bin / 10 + 0.05 for bin in range(80) for _ in range((bin * 37) % 91 + 9)]})
    drawn(draw_delta_histogram(deltas, 0.5))


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
    picture = drawn(draw_bar_chart(pl.DataFrame([row, paper, unmeasured]), ("benchmark", "model"), "accuracy"))
    assert told(picture) == [
        *("accuracy", "the paper's", "95 % interval", "0", "99", "accuracy, %"),
        *("95  a < b, toolformer", "10  a < b, GPT-J"),
    ]
    bars_drawn = [path.get("stroke") for path in picture if path.get("stroke-width")]
    assert bars_drawn == [text.get("fill") for text in picture if text.text in ("accuracy", "the paper's")]
    assert bars_drawn == [BLUE, GREY]


def test_curves_have_the_numbers_at_the_ends_of_their_axes_and_a_legend() -> None:
    steps = [(0, "training loss", 3.0), (40, "training loss", 1.25), (0, "perplexity", 20.0), (40, "perplexity", 9.5)]
    curve = drawn(draw_loss_curve(pl.DataFrame(steps, ["step", "measure", "value"], orient="row")))
    assert told(curve) == ["loss", "perplexity", "0", "40", "steps", "3", "1.25", "20", "9.5"]
    rates = pl.DataFrame([(0.0, 0.5, 0.9), (2.5, 0.01, 0.04)], ["tau_f", "fdr", "fdr_high"], orient="row")
    assert told(drawn(draw_chance_curves(rates))) == [
        *("share by chance", "95 % bound", "5%", "0", "2.5", "1", "0", "tau_f"),
    ]
    frontier = pl.DataFrame(
        [(0.5, 40.0, 7.0, True), (1.0, 25.0, 3.0, False)], ["tau_f", "nats", "cost", "today"], orient="row"
    )
    assert told(drawn(draw_frontier_curve(frontier))) == [
        *("nats that calls gain", "at today's tau_f", "3", "7", "40", "25", "cost"),
    ]
