"""Plots for the UI, on dark and light, as SVG. Dagster hides Markdown of 1,000 characters behind a click.

Above each stands its legend, in the colors of what it names, and at the ends of both axes stand their numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from toolformer_dag.computing.shown import ChanceCurves, CostFrontier, DeltaHistogram, Plot
from toolformer_dag.evaluation.paper_tables import FIGURES_OF_PAPER

BINS = 80
"""Bars of a histogram: tenths of a nat between the ends of CLIPPED."""
CLIPPED = (-3, 5)
"""The deltas, in nats, at the ends of a histogram; those beyond count in its outermost bars."""
POINTS = 20
"""Points of a curve: more would not fit."""
WIDTH = 400
"""Width of the plot between its axes, in pixels."""
HEIGHT = 99
"""Its height: two digits, since every character counts."""
LEFT = 45
"""Room for the numbers of the vertical axis, and the same on the right."""
ABOVE = 16
"""Room for the legend."""
BELOW = 17
"""Room for the numbers of the horizontal axis."""
TEXT_HEIGHT = 9
"""Pixels by which a text at the upper end of an axis is lowered, so that it stands below that end."""
TEXT_BELOW = 13
"""Pixels from the horizontal axis down to the foot of its numbers."""
LAST_NUMBER_WIDTH = 30
"""Pixels by which the number at the right end of the horizontal axis begins before that end."""
BAR = 18
"""Height of a bar with the space around it."""
BLUE = "#48f"
ORANGE = "#e80"
RED = "#d44"
GREY = "#aaa"
ESCAPED = {"%": "%25", "#": "%23", "&": "%26", "<": r"\<", ">": r"\>"}
"""What an address in Markdown may not hold as it is; a third shorter than base64."""
LEVEL = 0.05
"""The false discovery rate that a threshold by chance usually has."""


class Ends(NamedTuple):
    """The values at the two ends of an axis."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "Ends":
        """Return the smallest and the largest of some values."""
        kept = list(values)
        return Ends(min(kept), max(kept))


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
    counts = histogram(deltas["delta"]).tolist()
    most = max(*counts, 1)
    parts = [f"<path d='{_outline(counts, most)}' fill='{BLUE}'/>"]
    legend = {"calls, log scale": BLUE}
    if tau_f is not None:
        low, high = CLIPPED
        tau_f_in_picture = min(max(tau_f, low), high)
        x = round((tau_f_in_picture - low) / (high - low) * WIDTH)
        parts.append(_line(f"M{x} 0V{HEIGHT}"))
        legend[f"tau_f {tau_f:.4g}"] = RED
    return _picture("calls by delta", legend, _axes("delta, nats", Ends(*CLIPPED), Ends(0, most)), *parts)


def _outline(counts: Sequence[int], most: int) -> str:
    """Return the SVG path around the bars of a histogram, `V` to a height and `h` by a width; `most` fills HEIGHT.

    Neighbours of one count are drawn as one wide bar, which keeps the path short.
    """
    bar_width = WIDTH // BINS
    path = f"M0 {HEIGHT}"
    for count, equal_counts in groupby(counts):
        top = HEIGHT - round(math.log1p(count) / math.log1p(most) * HEIGHT)
        bars = len(list(equal_counts))
        path += f"V{top}h{bar_width * bars}"
    return f"{path}V{HEIGHT}"


def histogram(deltas: pl.Series) -> np.ndarray:
    """Count the calls of each of BINS, whose upper end is not in it; outside of CLIPPED they count in the outermost."""
    return np.histogram(deltas.drop_nulls().clip(*CLIPPED), np.linspace(*CLIPPED, BINS + 1))[0]


def chance_curves(rates: pl.DataFrame) -> str:
    """Draw the false discovery rate (blue) and its one-sided 95 % bound (orange) over tau_f, and the level of 5 %.

    Needs tau_f, fdr, fdr_high; returns Markdown.
    """
    sampled = _sampled(rates.sort("tau_f"))
    tau_f = sampled["tau_f"].to_list()
    x_ends = Ends(tau_f[0], tau_f[-1])
    y_ends = Ends(0, 1)
    level_y = round(HEIGHT * (1 - LEVEL))
    legend = {"share by chance": BLUE, "95 % bound": ORANGE, f"{LEVEL:.0%}": RED}
    parts = [
        _curve(tau_f, sampled["fdr"].to_list(), BLUE, x_ends, y_ends),
        _curve(tau_f, sampled["fdr_high"].to_list(), ORANGE, x_ends, y_ends),
        _line(f"M0 {level_y}H{WIDTH}"),
    ]
    return _picture("share by chance", legend, _axes("tau_f", x_ends, y_ends), *parts)


def frontier_curve(frontier: pl.DataFrame) -> str:
    """Draw the nats that calls gain over what they cost, a point per tau_f, and a ring at the tau_f that applies.

    Needs tau_f, today (whether it is the tau_f that applies), nats, cost. Returns Markdown.
    """
    falling = frontier.sort("tau_f", descending=True)
    # Thresholds that keep the same calls are one point. Of many points some are left out, but today's stays.
    distinct = falling.unique(("cost", "nats"), keep="first", maintain_order=True)
    points = pl.concat([_sampled(distinct), falling.filter("today")]).sort("tau_f", descending=True)
    costs = points["cost"].to_list()
    nats = points["nats"].to_list()
    x_ends = Ends.of(costs)
    y_ends = Ends.of(nats)
    legend = {"nats that calls gain": BLUE}
    parts = [_curve(costs, nats, BLUE, x_ends, y_ends)]
    # Today's point is there twice where it was sampled: it gets one ring.
    for point in points.filter("today").unique(("cost", "nats")).iter_rows(named=True):
        [x] = _placed([point["cost"]], x_ends, WIDTH)
        [from_below] = _placed([point["nats"]], y_ends, HEIGHT)
        y = HEIGHT - from_below
        parts.append(f"<circle cx='{x}' cy='{y}' r='5' fill='none' stroke='{RED}'/>")
        legend["at today's tau_f"] = RED
    return _picture("nats over cost", legend, _axes("cost", x_ends, y_ends), *parts)


def loss_curve(curve: pl.DataFrame) -> str:
    """Draw the training loss (blue) and the held-out perplexity (orange) over steps, each on a scale of its own.

    Needs step, measure, value; values that are NaN or infinite are left out. The left scale belongs to the first
    measure, the right one to the second; further measures are not drawn. Returns Markdown.
    """
    finite = curve.filter(pl.col("value").is_finite())
    steps = Ends(0, max(finite["step"].to_list(), default=0))
    colors = (BLUE, ORANGE)
    scales_x = (-LEFT, WIDTH + 3)  # where the numbers of each scale begin: left and right of the plot
    parts: list[str] = []
    legend: dict[str, str] = {}
    by_measure = finite.group_by("measure", maintain_order=True)
    for ((measure,), points), color, scale_x in zip(by_measure, colors, scales_x, strict=False):
        sampled = _sampled(points.sort("step"))
        values = sampled["value"].to_list()
        scale = Ends.of(values)
        parts.append(_curve(sampled["step"].to_list(), values, color, steps, scale))
        parts.append(_text(scale_x, _number(scale.high), TEXT_HEIGHT, color))
        parts.append(_text(scale_x, _number(scale.low), HEIGHT, color))
        legend[str(measure).removeprefix("training ")] = color
    return _picture("curves", legend, _axes("steps", steps), *parts)


def start_curves(rows: pl.DataFrame) -> str:
    """Draw questions answered right (blue) and questions with a call (orange) over min_probability, in per cent.

    Needs min_probability, accuracy, calls. Returns Markdown.
    """
    probabilities = rows["min_probability"].to_list()
    x_ends = Ends.of(probabilities)
    y_ends = Ends(0, 100)
    legend = {"right, %": BLUE, "calls, %": ORANGE}
    curves = [
        _curve(probabilities, rows["accuracy"].to_list(), BLUE, x_ends, y_ends),
        _curve(probabilities, rows["calls"].to_list(), ORANGE, x_ends, y_ends),
    ]
    axes = _axes("min_probability", x_ends, y_ends)
    return _picture("right answers and calls over min_probability", legend, axes, *curves)


class Bars(NamedTuple):
    """How a view is drawn: the columns that name a bar, and the one whose figure it is."""

    named: Sequence[str]
    figure: str


PLOTTED: Mapping[str, Bars] = {
    "table_2": Bars(("tool", "tau_f"), "examples"),
    **{f"table_{number}": Bars(("benchmark", "model", "figures_of"), "accuracy") for number in range(3, 8)},
    "table_8": Bars(("source", "model", "figures_of"), "perplexity"),
    "table_9": Bars(("benchmark", "model", "k", "figures_of"), "accuracy"),
    "table_10": Bars(("tool", "kept", "figures_of"), "delta"),
    "figure_4": Bars(("benchmarks", "condition", "parameters", "figures_of"), "accuracy"),
}
"""How each view of the paper's tables is drawn."""


def bars(rows: pl.DataFrame, named: Sequence[str], figure: str) -> str:
    """Draw a bar per row with its figure and, where it has low and high, its 95 % interval; the paper's are grey.

    - `named`: the columns that name a bar
    - `figure`: the column of its length; a row without it has no bar

    Returns Markdown.
    """
    drawn_rows = rows.drop_nulls(figure).to_dicts()
    longest = max((row.get("high") or row[figure] for row in drawn_rows), default=0) or 1
    parts = []
    for number, row in enumerate(drawn_rows):
        top = number * BAR
        name = ", ".join(escape(str(row[column])) for column in named if row[column] is not None)
        parts += _bar(row, top + 9, figure, longest)
        parts.append(_text(WIDTH + 5, f"{row[figure]:,.4g}  {name}", top + TEXT_BELOW))
    height = len(drawn_rows) * BAR
    legend = {figure: BLUE}
    if any(row.get("figures_of") == FIGURES_OF_PAPER for row in drawn_rows):
        legend["the paper's"] = GREY
    legend["95 % interval"] = RED
    unit = f"{figure}, %" if figure == "accuracy" else ""
    return _picture(
        "plot", legend, _axes(unit, Ends(0, longest), height=height), *parts, width=2 * WIDTH, height=height
    )


def _bar(row: Mapping[str, Any], y: int, figure: str, longest: float) -> list[str]:
    """Draw a bar around `y`, and its interval in it: from 0 where it has none. `longest`: the value at full width."""
    length = _width(row[figure], longest)
    low = _width(row.get("low"), longest)
    high = _width(row.get("high"), longest)
    color = GREY if row.get("figures_of") == FIGURES_OF_PAPER else BLUE
    bar = f"<path d='M0 {y}h{max(length, 0)}' stroke='{color}' stroke-width='12'/>"
    return [bar, _line(f"M{low} {y}H{high}")]


def _width(value: float | None, longest: float) -> int:
    """Return the pixels of a value, of which `longest` has WIDTH; 0 where there is none."""
    return round((value or 0) / longest * WIDTH)


def _sampled(rows: pl.DataFrame) -> pl.DataFrame:
    """Return at most POINTS rows, evenly spread, the first and the last among them."""
    chosen = {round(number) for number in np.linspace(0, rows.height - 1, POINTS)}
    return rows[sorted(chosen)]


def _curve(x: Sequence[float], y: Sequence[float], color: str, x_ends: Ends, y_ends: Ends) -> str:
    """Draw a line through points. `x_ends`, `y_ends`: the values at the ends of the axes."""
    columns = _placed(x, x_ends, WIDTH)
    rows = [HEIGHT - pixels for pixels in _placed(y, y_ends, HEIGHT)]  # SVG counts from above
    path = f"M{columns[0]} {rows[0]}"
    for (column, next_column), (row, next_row) in zip(pairwise(columns), pairwise(rows), strict=True):
        path += f"l{next_column - column} {next_row - row}"
    return f"<path d='{path}' fill='none' stroke='{color}'/>"


def _placed(values: Sequence[float], ends: Ends, size: int) -> list[int]:
    """Return how many pixels from the lower end of an axis of `size` pixels each value lies."""
    extent = ends.high - ends.low or 1
    return [round((value - ends.low) / extent * size) for value in values]


def _axes(title: str, x_ends: Ends, y_ends: Ends | None = None, height: int = HEIGHT) -> str:
    """Return the SVG of both axes, with the numbers at their ends; `title`: what the horizontal one measures.

    The vertical axis has no numbers where `y_ends` is None.
    """
    below = height + TEXT_BELOW
    texts = [
        _text(0, _number(x_ends.low), below),
        _text(WIDTH - LAST_NUMBER_WIDTH, _number(x_ends.high), below),
    ]
    if y_ends is not None:
        texts.append(_text(-LEFT, _number(y_ends.high), TEXT_HEIGHT))
        texts.append(_text(-LEFT, _number(y_ends.low), height))
    texts.append(_text(WIDTH // 3, title, below))
    lines = f"<path d='M0 0V{height}H{WIDTH}' fill='none' stroke='#888'/>"
    return "".join((lines, *texts))


def _number(value: float) -> str:
    """Write a whole number with its digits, any other and very large ones with three significant digits."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e6 else f"{value:.3g}"


def _text(x: int, text: object, y: int, color: str = "") -> str:
    """Write text whose lower left corner is at (x, y), in the color of the picture's texts if none is given."""
    fill = f" fill='{color}'" if color else ""
    return f"<text x='{x}' y='{y}'{fill}>{text}</text>"


def _line(path: str) -> str:
    """Draw a red line: a threshold, a level, an interval."""
    return f"<path d='{path}' stroke='{RED}'/>"


def _picture(name: str, legend: Mapping[str, str], *parts: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Return Markdown of an image that brings its data along.

    - `legend`: what is drawn, and in which color; the first three are shown
    - `width`, `height`: of the plot, without the room around it
    """
    whole_width = width + 2 * LEFT
    whole_height = height + ABOVE + BELOW
    frame = (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{whole_width}' height='{whole_height}' "
        f"viewBox='{-LEFT} {-ABOVE} {whole_width} {whole_height}' "
        "style='font:12px sans-serif' fill='#888'>"
    )
    labels = [_text(x, label, -4, color) for x, (label, color) in zip((0, 140, 280), legend.items(), strict=False)]
    svg = "".join((frame, *labels, *parts, "</svg>")).encode("ascii", "xmlcharrefreplace").decode()
    address = "".join(ESCAPED.get(char, char) for char in svg)
    return f"![{name}](<data:image/svg+xml,{address}>)"
