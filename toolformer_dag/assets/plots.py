"""Plots for the UI, on dark and light, as SVG. Dagster hides Markdown of 1,000 characters behind a click.

Above each stands its legend, in the colors of what it names, and at the ends of both axes stand their numbers.
"""

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import polars as pl

from toolformer_dag.computing.shown import ChanceCurves, CostFrontier, DeltaHistogram, Plot
from toolformer_dag.evaluation.paper_tables import FIGURES_OF_PAPER

BINS = 80  # tenths of a nat
CLIPPED = (-3, 5)
POINTS = 20
"""Of a curve: more would not fit."""
WIDTH, HEIGHT = 400, 99  # two digits: every character counts
LEFT, ABOVE, BELOW = 45, 16, 17
"""Room for the numbers of the axes and for the legend."""
BAR = 18
"""Height of a bar with the space around it."""
BLUE, ORANGE, RED, GREY = "#48f", "#e80", "#d44", "#aaa"
ESCAPED = {"%": "%25", "#": "%23", "&": "%26", "<": r"\<", ">": r"\>"}
"""What an address in Markdown may not hold as it is; a third shorter than base64."""
LEVEL = 0.05
"""The false discovery rate that a threshold by chance usually has."""


def drawn(plot: Plot) -> str:
    """Draw what a stage shows; returns Markdown."""
    match plot:
        case DeltaHistogram():
            return delta_histogram(plot.deltas, plot.tau_f)
        case ChanceCurves():
            return chance_curves(plot.rates)
        case CostFrontier():
            return frontier_curve(plot.points)


def delta_histogram(deltas: pl.DataFrame, tau_f: float | None) -> str:
    """Draw how L- - L+ is distributed over a lane's scored calls, counts by their logarithm, and where tau_f cuts.

    Needs a column `delta`; returns Markdown. No call is kept where tau_f is None.
    """
    low, high = CLIPPED
    bars = histogram(deltas["delta"]).tolist()
    most, wide = max(*bars, 1), WIDTH // BINS
    heights = [HEIGHT - round(math.log1p(count) / math.log1p(most) * HEIGHT) for count in bars]
    shape = "".join(f"V{height}h{wide * len(list(same))}" for height, same in groupby(heights))
    parts = [f"<path d='M0 {HEIGHT}{shape}V{HEIGHT}' fill='{BLUE}'/>"]
    legend = {"calls, log scale": BLUE}
    if tau_f is not None:
        at = round((min(max(tau_f, low), high) - low) / (high - low) * WIDTH)
        parts.append(_line(f"M{at} 0V{HEIGHT}"))
        legend[f"tau_f {tau_f:.4g}"] = RED
    return _picture("calls by delta", legend, _axes("delta, nats", CLIPPED, (0, most)), *parts)


def histogram(deltas: pl.Series) -> np.ndarray:
    """Count the calls of each of BINS, whose upper end is not in it; outside of CLIPPED they count in the outermost."""
    return np.histogram(deltas.drop_nulls().clip(*CLIPPED), np.linspace(*CLIPPED, BINS + 1))[0]


def chance_curves(rates: pl.DataFrame) -> str:
    """Draw the false discovery rate (blue) and its one-sided 95 % bound (orange) over tau_f, and the level of 5 %.

    Needs tau_f, fdr, fdr_high; returns Markdown.
    """
    sampled = _sampled(rates.sort("tau_f"))
    legend = {"share by chance": BLUE, "95 % bound": ORANGE, f"{LEVEL:.0%}": RED}
    curves = [
        _curve(sampled["tau_f"].to_list(), sampled[name].to_list(), color, y_from=0, y_to=1)
        for name, color in (("fdr", BLUE), ("fdr_high", ORANGE))
    ]
    level = _line(f"M0 {round(HEIGHT * (1 - LEVEL))}H{WIDTH}")
    axes = _axes("tau_f", (sampled["tau_f"][0], sampled["tau_f"][-1]), (0, 1))
    return _picture("share by chance", legend, axes, *curves, level)


def frontier_curve(frontier: pl.DataFrame) -> str:
    """Draw the nats that calls gain over what they cost, a point per tau_f, and a ring at today's.

    Needs tau_f, today, nats, cost. Returns Markdown.
    """
    falling = frontier.sort("tau_f", descending=True)
    distinct = falling.unique(("cost", "nats"), keep="first", maintain_order=True)
    few = pl.concat([_sampled(distinct), falling.filter("today")]).sort("tau_f", descending=True)
    x, y = few["cost"].to_list(), few["nats"].to_list()
    places = zip(_placed(x, min(x), max(x), WIDTH), _placed(y, min(y), max(y), HEIGHT), few["today"], strict=True)
    ring = {
        f"<circle cx='{at}' cy='{HEIGHT - up}' r='5' fill='none' stroke='{RED}'/>" for at, up, today in places if today
    }
    legend = {"nats that calls gain": BLUE, **({"at today's tau_f": RED} if ring else {})}
    axes = _axes("cost", (min(x), max(x)), (min(y), max(y)))
    return _picture("nats over cost", legend, axes, _curve(x, y, BLUE), *ring)


def loss_curve(curve: pl.DataFrame) -> str:
    """Draw the training loss (blue) and the held-out perplexity (orange) over steps, each on a scale of its own.

    Needs step, measure, value; what is no number is left out. The numbers of the left scale are those of the first.
    Returns Markdown.
    """
    finite = curve.filter(pl.col("value").is_finite())
    last, parts, legend = max(finite["step"].to_list(), default=0), list[str](), dict[str, str]()
    by_measure = finite.group_by("measure", maintain_order=True)
    for ((measure,), points), color, at in zip(by_measure, (BLUE, ORANGE), (-LEFT, WIDTH + 3), strict=False):
        few = _sampled(points.sort("step"))
        values = few["value"].to_list()
        parts.append(_curve(few["step"].to_list(), values, color, x_from=0, x_to=last))
        parts += [_text(at, _number(max(values)), 9, color), _text(at, _number(min(values)), HEIGHT, color)]
        legend[str(measure).removeprefix("training ")] = color
    return _picture("curves", legend, _axes("steps", (0, last)), *parts)


def start_curves(rows: pl.DataFrame) -> str:
    """Draw questions answered right (blue) and questions with a call (orange) over min_probability, in per cent.

    Needs min_probability, accuracy, calls. Returns Markdown.
    """
    x, legend = rows["min_probability"].to_list(), {"right, %": BLUE, "calls, %": ORANGE}
    curves = [
        _curve(x, rows[column].to_list(), color, y_from=0, y_to=100)
        for column, color in (("accuracy", BLUE), ("calls", ORANGE))
    ]
    axes = _axes("min_probability", (min(x), max(x)), (0, 100))
    return _picture("right answers and calls over min_probability", legend, axes, *curves)


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
        parts += [*_bar(row, y + 9, figure, longest), _text(WIDTH + 5, f"{row[figure]:,.4g}  {name}", y + 13)]
    height = len(drawn) * BAR
    papers = any(row.get("figures_of") == FIGURES_OF_PAPER for row in drawn)
    legend = {figure: BLUE, **({"the paper's": GREY} if papers else {}), "95 % interval": RED}
    axes = _axes(f"{figure}, %" * (figure == "accuracy"), (0, longest), height=height)
    return _picture("plot", legend, axes, *parts, width=2 * WIDTH, height=height)


def _bar(row: Mapping[str, Any], y: int, figure: str, longest: float) -> tuple[str, str]:
    low, wide, high = (round((row.get(end) or 0) / longest * WIDTH) for end in ("low", figure, "high"))
    color = GREY if row.get("figures_of") == FIGURES_OF_PAPER else BLUE
    return f"<path d='M0 {y}h{max(wide, 0)}' stroke='{color}' stroke-width='12'/>", _line(f"M{low} {y}H{high}")


def _sampled(rows: pl.DataFrame) -> pl.DataFrame:
    """At most POINTS rows, the first and the last among them."""
    return rows[sorted({round(at) for at in np.linspace(0, rows.height - 1, POINTS)})]


def _curve(
    x: Sequence[float], y: Sequence[float], color: str,
    y_from: float | None = None, y_to: float | None = None, x_from: float | None = None, x_to: float | None = None,
) -> str:  # fmt: skip
    across = _placed(x, min(x) if x_from is None else x_from, max(x) if x_to is None else x_to, WIDTH)
    down = _placed(y, min(y) if y_from is None else y_from, max(y) if y_to is None else y_to, HEIGHT)
    points = [(here, HEIGHT - there) for here, there in zip(across, down, strict=True)]
    steps = "".join(f"l{bx - ax} {by - ay}" for (ax, ay), (bx, by) in pairwise(points))
    return f"<path d='M{points[0][0]} {points[0][1]}{steps}' fill='none' stroke='{color}'/>"


def _placed(values: Sequence[float], low: float, high: float, size: int) -> list[int]:
    return [round((value - low) / (high - low or 1) * size) for value in values]


def _axes(across: str, x: tuple[float, float], y: tuple[float, float] | None = None, height: int = HEIGHT) -> str:
    """Both axes with the numbers at their ends, and what the horizontal one measures."""
    numbers = [_text(0, _number(x[0]), height + 13), _text(WIDTH - 30, _number(x[1]), height + 13)]
    if y:
        numbers += [_text(-LEFT, _number(y[1]), 9), _text(-LEFT, _number(y[0]), height)]
    line = f"<path d='M0 0V{height}H{WIDTH}' fill='none' stroke='#888'/>"
    return "".join((line, *numbers, _text(WIDTH // 3, across, height + 13)))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def _text(x: int, text: object, y: int, color: str = "") -> str:
    fill = f" fill='{color}'" if color else ""
    return f"<text x='{x}' y='{y}'{fill}>{text}</text>"


def _line(path: str) -> str:
    return f"<path d='{path}' stroke='{RED}'/>"


def _picture(name: str, legend: Mapping[str, str], *parts: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Markdown of an image that brings its data along; `legend`: what is drawn in which color."""
    size = f"{width + 2 * LEFT} {height + ABOVE + BELOW}"
    wide, high = size.split()
    frame = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{wide}' height='{high}' viewBox='{-LEFT} {-ABOVE} {size}' "
        "style='font:12px sans-serif' fill='#888'>"
    )
    named = (_text(at, label, -4, color) for at, (label, color) in zip((0, 140, 280), legend.items(), strict=False))
    svg = "".join((frame, *named, *parts, "</svg>")).encode("ascii", "xmlcharrefreplace").decode()
    return f"![{name}](<data:image/svg+xml,{''.join(ESCAPED.get(char, char) for char in svg)}>)"
