"""Plots for the UI, on dark and light, as SVG. Dagster hides Markdown of 1,000 characters behind a click."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, pairwise

import numpy as np
import polars as pl

from toolformer_dag.evaluation.paper_tables import PAPER

BINS = 80  # tenths of a nat
CLIPPED = (-3, 5)
POINTS = 24
"""Of a curve: more would not fit."""
WIDTH, HEIGHT = 400, 99  # two digits: every character counts
BAR = 18
"""Height of a bar with the space around it."""
BLUE, ORANGE, RED, GREY = "#48f", "#e80", "#d44", "#aaa"
LEVEL = 0.05
"""The false discovery rate that a threshold by chance usually has."""


def delta_histogram(deltas: pl.DataFrame, tau_f: float | None) -> str:
    """Draw how L- - L+ is distributed over a lane's scored calls, counts by their logarithm, and where tau_f cuts.

    Needs a column `delta`; returns Markdown. No call is kept where tau_f is None.
    """
    low, high = CLIPPED
    bars = histogram(deltas["delta"]).tolist()
    top, wide = math.log1p(max(*bars, 1)), WIDTH // BINS
    heights = [HEIGHT - round(math.log1p(count) / top * HEIGHT) for count in bars]
    shape = "".join(f"V{height}h{wide * len(list(same))}" for height, same in groupby(heights))
    marks = "".join(_text(round((nats - low) / (high - low) * WIDTH), nats) for nats in (0, 2, 4))
    parts = [f"<path d='M0 {HEIGHT}{shape}V{HEIGHT}' fill='{BLUE}'/>", marks]
    if tau_f is not None:
        at = round((min(max(tau_f, low), high) - low) / (high - low) * WIDTH)
        parts.append(_dashed(f"M{at} 0V{HEIGHT}"))
    return _picture("calls by delta", *parts)


def histogram(deltas: pl.Series) -> np.ndarray:
    """Count the calls of each of BINS, whose upper end is not in it; outside of CLIPPED they count in the outermost."""
    return np.histogram(deltas.drop_nulls().clip(*CLIPPED), np.linspace(*CLIPPED, BINS + 1))[0]


def chance_curves(rates: pl.DataFrame) -> str:
    """Draw the false discovery rate (blue) and its one-sided 95 % bound (orange) over tau_f, and the level of 5 %.

    Needs tau_f, fdr, fdr_high; returns Markdown.
    """
    sampled = _sampled(rates.sort("tau_f"))
    curves = [
        _curve(sampled["tau_f"].to_list(), sampled[name].to_list(), color, y_from=0, y_to=1)
        for name, color in (("fdr", BLUE), ("fdr_high", ORANGE))
    ]
    ends = (_text(0, f"{sampled['tau_f'][0]:.2f}"), _text(WIDTH - 30, f"{sampled['tau_f'][-1]:.2f}"))
    return _picture("share by chance", *curves, _dashed(f"M0 {round(HEIGHT * (1 - LEVEL))}H{WIDTH}"), *ends)


def frontier_curve(frontier: pl.DataFrame) -> str:
    """Draw the nats that calls gain over what they cost, a point per tau_f, and a ring at today's.

    Needs tau_f, today, nats, cost; the smallest and the largest of both stand below. Returns Markdown.
    """
    falling = frontier.sort("tau_f", descending=True)
    distinct = falling.unique(("cost", "nats"), keep="first", maintain_order=True)
    few = pl.concat([_sampled(distinct), falling.filter("today")]).sort("tau_f", descending=True)
    x, y = few["cost"].to_list(), few["nats"].to_list()
    places = zip(_placed(x, min(x), max(x), WIDTH), _placed(y, min(y), max(y), HEIGHT), few["today"], strict=True)
    ring = {
        f"<circle cx='{at}' cy='{HEIGHT - up}' r='5' fill='none' stroke='{RED}'/>" for at, up, today in places if today
    }
    ends = (f"{min(y):.3g} to {max(y):.3g} nats", f"cost {min(x):.3g} to {max(x):.3g}")
    return _picture("nats over cost", _curve(x, y, BLUE), *ring, _text(0, ends[0]), _text(WIDTH // 2, ends[1]))


def loss_curve(curve: pl.DataFrame) -> str:
    """Draw the training loss (blue) and the held-out perplexity (orange) over steps, each on a scale of its own.

    Needs step, measure, value; what is no number is left out. The first and the last value of each stand below.
    Returns Markdown.
    """
    parts = []
    finite = curve.filter(pl.col("value").is_finite())
    found = finite.group_by("measure", maintain_order=True)
    for ((measure,), points), color, at in zip(found, (BLUE, ORANGE), (0, WIDTH // 2), strict=False):
        few = _sampled(points.sort("step"))
        parts.append(_curve(few["step"].to_list(), few["value"].to_list(), color))
        name = str(measure).rpartition(" ")[2]
        parts.append(_text(at, f"{name} {few['value'][0]:.3g} to {few['value'][-1]:.3g}", color))
    return _picture("curves", *parts)


def start_curves(rows: pl.DataFrame) -> str:
    """Draw questions answered right (blue) and questions with a call (orange) over min_probability, in per cent.

    Needs min_probability, accuracy, calls; the first and the last value of each stand below. Returns Markdown.
    """
    x, parts = rows["min_probability"].to_list(), []
    for name, column, color, at in (("right", "accuracy", BLUE, 0), ("calls", "calls", ORANGE, WIDTH // 2)):
        y = rows[column].to_list()
        parts.append(_curve(x, y, color, y_from=0, y_to=100))
        parts.append(_text(at, f"{name} {y[0]:.3g} to {y[-1]:.3g} %", color))
    return _picture("right answers and calls over min_probability", *parts)


PLOTTED: Mapping[str, tuple[Sequence[str], str]] = {
    "table_2": (("tool", "tau_f"), "examples"),
    **{f"table_{number}": (("benchmark", "model", "figures_of"), "accuracy") for number in range(3, 8)},
    "table_8": (("source", "model", "figures_of"), "perplexity"),
    "table_9": (("benchmark", "model", "k", "figures_of"), "accuracy"),
    "table_10": (("tool", "kept", "figures_of"), "delta"),
    "figure_4": (("benchmarks", "condition", "parameters", "figures_of"), "accuracy"),
}
"""View -> the columns that name a bar, and the one whose figure it is."""


def bars(rows: pl.DataFrame, named: Sequence[str], figure: str) -> str:
    """Draw a bar per row with its figure and, where it has low and high, its 95 % interval; the paper's are grey.

    `named`: the columns that name a bar. Returns Markdown.
    """
    drawn = rows.drop_nulls(figure).to_dicts()
    longest = max((row.get("high") or row[figure] for row in drawn), default=0) or 1
    parts = []
    for y, row in zip(range(0, len(drawn) * BAR, BAR), drawn, strict=True):
        name = ", ".join(escape(str(row[column])) for column in named if row[column] is not None)
        low, wide, high = (round((row.get(end) or 0) / longest * WIDTH) for end in ("low", figure, "high"))
        color = GREY if row.get("figures_of") == PAPER else BLUE
        parts.append(f"<path d='M0 {y + 9}h{max(wide, 0)}' stroke='{color}' stroke-width='12'/>")
        parts.append(f"<path d='M{low} {y + 9}H{high}' stroke='{RED}'/>")
        parts.append(f"<text x='{WIDTH + 5}' y='{y + 13}'>{row[figure]:,.4g}  {name}</text>")
    return _picture("plot", *parts, width=2 * WIDTH, height=len(drawn) * BAR)


def _sampled(rows: pl.DataFrame) -> pl.DataFrame:
    """At most POINTS rows, the first and the last among them."""
    return rows[sorted({round(at) for at in np.linspace(0, rows.height - 1, POINTS)})]


def _curve(
    x: Sequence[float], y: Sequence[float], color: str, y_from: float | None = None, y_to: float | None = None
) -> str:
    across = _placed(x, min(x), max(x), WIDTH)
    down = _placed(y, min(y) if y_from is None else y_from, max(y) if y_to is None else y_to, HEIGHT)
    points = [(here, HEIGHT - there) for here, there in zip(across, down, strict=True)]
    steps = "".join(f"l{bx - ax} {by - ay}" for (ax, ay), (bx, by) in pairwise(points))
    return f"<path d='M{points[0][0]} {points[0][1]}{steps}' fill='none' stroke='{color}'/>"


def _placed(values: Sequence[float], low: float, high: float, size: int) -> list[int]:
    return [round((value - low) / (high - low or 1) * size) for value in values]


def _text(x: int, told: object, color: str = "") -> str:
    fill = f" fill='{color}'" if color else ""
    return f"<text x='{x}' y='112'{fill}>{told}</text>"


def _dashed(line: str) -> str:
    return f"<path d='{line}' stroke='{RED}' stroke-dasharray='4'/>"


def _picture(name: str, *parts: str, width: int = WIDTH, height: int = 116) -> str:
    """Markdown of an image that brings its data along."""
    frame = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' font-size='12' fill='#888'>"
    svg = "".join((frame, *parts, "</svg>"))
    return f"![{name}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
