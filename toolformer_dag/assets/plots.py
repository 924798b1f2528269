"""Plots for the UI, as SVG in Markdown, for dark and light pages; short, since Dagster folds long Markdown.

The legend is above each plot, in the colors of the curves; numbers are at the ends of both axes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Pixels by which a text at the upper end of an axis is lowered, so that it is below that end."""
TEXT_BELOW = 13
"""Pixels from the horizontal axis down to the foot of its numbers."""
LAST_NUMBER_WIDTH = 30
"""Pixels by which the number at the right end of the horizontal axis begins before that end."""
LEGEND_X = (0, 140, 280)
"""Where the labels of a legend begin, in pixels."""
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


class AxisEnds(NamedTuple):
    """The values at the two ends of an axis."""

    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "AxisEnds":
        """Return the smallest and the largest of some values."""
        kept = list(values)
        return AxisEnds(min(kept), max(kept))


def drawn(plot: Plot) -> str:
    """Return the picture of a stage's plot as Markdown."""
    match plot:
        case DeltaHistogram():
            return draw_delta_histogram(plot.deltas, plot.tau_f)
        case ChanceCurves():
            return draw_chance_curves(plot.rates)
        case CostFrontier():
            return draw_frontier_curve(plot.points)


def draw_delta_histogram(deltas: pl.DataFrame, tau_f: float | None) -> str:
    """Draw a histogram of the deltas of scored calls as Markdown, with counts on a log scale and a line at tau_f.

    Args:
        deltas: A table with a column `delta` (by how many nats a call lowers the loss).
        tau_f: The threshold of the filter. None if no call is kept. Then there is no line.
    """
    counts = histogram(deltas["delta"]).tolist()
    highest_count = max(*counts, 1)
    bar_path = _build_outline_path(counts, highest_count)

    parts = [f"<path d='{bar_path}' fill='{BLUE}'/>"]
    legend = {"calls, log scale": BLUE}
    if tau_f is not None:
        parts.append(_draw_threshold_line(tau_f))
        legend[f"tau_f {tau_f:.4g}"] = RED

    axes = _draw_axes("delta, nats", AxisEnds(*CLIPPED), AxisEnds(0, highest_count))
    return _draw_picture("calls by delta", legend, axes, *parts)


def _draw_threshold_line(tau_f: float) -> str:
    """Return the SVG of a vertical line at a threshold in a histogram."""
    x = _compute_histogram_x(tau_f)
    return _draw_line(f"M{x} 0V{HEIGHT}")


def _compute_histogram_x(delta: float) -> int:
    """Return the pixels from the left end of a histogram to a delta; beyond the ends, those of the end."""
    low, high = CLIPPED
    clipped = min(max(delta, low), high)
    return round((clipped - low) / (high - low) * WIDTH)


def _build_outline_path(counts: Sequence[int], highest_count: int) -> str:
    """Build the SVG path around the bars of a histogram. The highest count fills HEIGHT.

    In the path, `V` moves to a height and `h` to the right. Neighbours with equal counts are drawn as one wide bar.
    """
    bar_width = WIDTH // BINS
    path = f"M0 {HEIGHT}"

    for count, equal_counts in groupby(counts):
        top = HEIGHT - _compute_log_height(count, highest_count)
        bar_count = len(list(equal_counts))
        path += f"V{top}h{bar_width * bar_count}"
    return f"{path}V{HEIGHT}"


def _compute_log_height(count: int, highest_count: int) -> int:
    """Return the height of a bar in pixels, on a log scale on which `highest_count` has HEIGHT."""
    return round(math.log1p(count) / math.log1p(highest_count) * HEIGHT)


def histogram(deltas: pl.Series) -> np.ndarray:
    """Return how many deltas each of BINS holds; deltas outside CLIPPED count in the outermost bins."""
    edges = np.linspace(*CLIPPED, BINS + 1)
    return np.histogram(deltas.drop_nulls().clip(*CLIPPED), edges)[0]


def draw_chance_curves(rates: pl.DataFrame) -> str:
    """Draw the false discovery rate over tau_f as Markdown, with its one-sided 95 % bound and the level of 5 %.

    Args:
        rates: A table with the columns tau_f, fdr and fdr_high.
    """
    sampled = _sample_rows(rates.sort("tau_f"))
    area = _PlotArea(AxisEnds(sampled["tau_f"][0], sampled["tau_f"][-1]), AxisEnds(0, 1))
    rate = area.curve(sampled["tau_f"], sampled["fdr"], BLUE)
    upper_bound = area.curve(sampled["tau_f"], sampled["fdr_high"], ORANGE)

    legend = {"share by chance": BLUE, "95 % bound": ORANGE, f"{LEVEL:.0%}": RED}
    return _draw_picture("share by chance", legend, area.axes("tau_f"), rate, upper_bound, _draw_level_line())


def _draw_level_line() -> str:
    """Return the SVG of a horizontal line at LEVEL, on an axis from 0 to 1."""
    level_y = round(HEIGHT * (1 - LEVEL))
    return _draw_line(f"M0 {level_y}H{WIDTH}")


def draw_frontier_curve(frontier: pl.DataFrame) -> str:
    """Draw the nats that calls gain over their cost as Markdown, a point per tau_f and a ring at today's tau_f.

    Args:
        frontier: A table with the columns tau_f, today (whether this tau_f applies now), nats and cost.
    """
    points = _select_frontier_points(frontier)
    area = _PlotArea(AxisEnds.of(points["cost"]), AxisEnds.of(points["nats"]))
    curve = area.curve(points["cost"], points["nats"], BLUE)
    rings = _draw_rings(points.filter("today"), area)

    legend = {"nats that calls gain": BLUE}
    if rings:
        legend["at today's tau_f"] = RED
    return _draw_picture("nats over cost", legend, area.axes("cost"), curve, *rings)


def _select_frontier_points(frontier: pl.DataFrame) -> pl.DataFrame:
    """Return at most POINTS distinct points and today's, by falling tau_f."""
    falling = frontier.sort("tau_f", descending=True)
    distinct = falling.unique(("cost", "nats"), keep="first", maintain_order=True)
    with_today = pl.concat([_sample_rows(distinct), falling.filter("today")])
    return with_today.sort("tau_f", descending=True)


def _draw_rings(points: pl.DataFrame, area: "_PlotArea") -> list[str]:
    """Return the SVG of a red ring around each distinct point of cost and nats."""
    distinct = points.unique(("cost", "nats"))
    x = area.columns(distinct["cost"])
    y = area.rows(distinct["nats"])
    rings = []
    for column, row in zip(x, y, strict=True):
        rings.append(f"<circle cx='{column}' cy='{row}' r='5' fill='none' stroke='{RED}'/>")
    return rings


def draw_loss_curve(curve: pl.DataFrame) -> str:
    """Draw training loss (blue) and held-out perplexity (orange) over steps as Markdown, each on its own scale.

    Args:
        curve: A table with the columns step, measure and value. Only its first two measures and finite values are
            drawn.
    """
    finite = curve.filter(pl.col("value").is_finite())
    steps = AxisEnds(0, max(finite["step"], default=0))

    parts: list[str] = []
    legend: dict[str, str] = {}
    for points, style in zip(_split_by_measure(finite), LOSS_CURVES, strict=False):
        parts += _draw_curve_with_scale(points, steps, style)
        legend[_shorten_measure(points)] = style.color

    return _draw_picture("curves", legend, _draw_axes("steps", steps), *parts)


def _split_by_measure(curve: pl.DataFrame) -> list[pl.DataFrame]:
    """Return the points of each measure, in the order in which the measures occur."""
    return [points for _, points in curve.group_by("measure", maintain_order=True)]


def _shorten_measure(points: pl.DataFrame) -> str:
    """Return the measure of points, `loss` for "training loss"."""
    return str(points["measure"][0]).removeprefix("training ")


class _CurveStyle(NamedTuple):
    """How a curve with a scale of its own is drawn. `scale_x`: where the numbers of its scale begin, in pixels."""

    color: str
    scale_x: int


LOSS_CURVES = (_CurveStyle(BLUE, -LEFT), _CurveStyle(ORANGE, WIDTH + 3))
"""The style of the training loss, with its scale left of the plot, and of the held-out perplexity, right of it."""


def _draw_curve_with_scale(points: pl.DataFrame, steps: AxisEnds, style: _CurveStyle) -> list[str]:
    """Return the SVG of a curve and of the numbers at the ends of its scale."""
    sampled = _sample_rows(points.sort("step"))
    scale = AxisEnds.of(sampled["value"])
    curve = _PlotArea(steps, scale).curve(sampled["step"], sampled["value"], style.color)
    highest = _draw_text(style.scale_x, _format_number(scale.high), TEXT_HEIGHT, style.color)
    lowest = _draw_text(style.scale_x, _format_number(scale.low), HEIGHT, style.color)
    return [curve, highest, lowest]


def draw_start_curves(rows: pl.DataFrame) -> str:
    """Draw right answers (blue) and questions with a call (orange) over min_probability as Markdown, in per cent.

    Args:
        rows: A table with the columns min_probability, accuracy and calls.
    """
    probabilities = rows["min_probability"]
    area = _PlotArea(AxisEnds.of(probabilities), AxisEnds(0, 100))
    right = area.curve(probabilities, rows["accuracy"], BLUE)
    calls = area.curve(probabilities, rows["calls"], ORANGE)

    legend = {"right, %": BLUE, "calls, %": ORANGE}
    axes = area.axes("min_probability")
    return _draw_picture("right answers and calls over min_probability", legend, axes, right, calls)


class Bars(NamedTuple):
    """How a view is drawn: the columns that name a bar, and the column of its length."""

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
    """Draw a bar per row as Markdown, with its number and, if the row has low and high, its 95 % interval.

    Args:
        named: The columns that name a bar.
        figure: The column of its length. Rows without a value there are left out.
    """
    bar_rows = rows.drop_nulls(figure).to_dicts()
    chart = _BarChart(named, figure, _longest(bar_rows, figure))
    parts: list[str] = []
    for index, row in enumerate(bar_rows):
        parts += chart.bar(row, top=index * BAR)

    height = len(bar_rows) * BAR
    legend = _build_bar_legend(bar_rows, figure)
    return _draw_picture("plot", legend, chart.axes(height), *parts, width=2 * WIDTH, height=height)


@dataclass(frozen=True, slots=True)
class _BarChart:
    """A chart with a horizontal bar per row.

    - `named`: the columns that name a bar
    - `figure`: the column of its length
    - `longest`: the value at full width
    """

    named: Sequence[str]
    figure: str
    longest: float

    def bar(self, row: Mapping[str, Any], top: int) -> list[str]:
        """Return the SVG of a bar, its interval, its number and its name. top: pixels above it."""
        length = max(self._compute_width(row[self.figure]), 0)
        y = top + BAR // 2
        bar = f"<path d='M0 {y}h{length}' stroke='{_choose_bar_color(row)}' stroke-width='12'/>"
        return [bar, self._draw_interval(row, y), self._draw_label(row, top + TEXT_BELOW)]

    def axes(self, height: int) -> str:
        """Return the SVG of the axes of a chart of this height."""
        unit = f"{self.figure}, %" if self.figure == "accuracy" else ""
        return _draw_axes(unit, AxisEnds(0, self.longest), height=height)

    def _draw_interval(self, row: Mapping[str, Any], y: int) -> str:
        """Return the SVG of a bar's interval, which begins at 0 if the row has no `low`."""
        low = self._compute_width(row.get("low"))
        high = self._compute_width(row.get("high"))
        return _draw_line(f"M{low} {y}H{high}")

    def _draw_label(self, row: Mapping[str, Any], y: int) -> str:
        """Return the SVG of a bar's number and name, to the right of the plot."""
        names = [escape(str(row[column])) for column in self.named if row[column] is not None]
        return _draw_text(WIDTH + 5, f"{row[self.figure]:,.4g}  {', '.join(names)}", y)

    def _compute_width(self, value: float | None) -> int:
        """Return the pixels of a value; 0 for None."""
        return round((value or 0) / self.longest * WIDTH)


def _longest(rows: Sequence[Mapping[str, Any]], figure: str) -> float:
    """Return the highest value of the bars and of the upper ends of their intervals; 1 if all are 0."""
    return max((row.get("high") or row[figure] for row in rows), default=0) or 1


def _build_bar_legend(rows: Sequence[Mapping[str, Any]], figure: str) -> dict[str, str]:
    """Return the legend of a bar chart, label -> color."""
    legend = {figure: BLUE}
    if any(row.get("figures_of") == FIGURES_OF_PAPER for row in rows):
        legend["the paper's"] = GREY
    legend["95 % interval"] = RED
    return legend


def _choose_bar_color(row: Mapping[str, Any]) -> str:
    """Return the color of a bar: grey for a figure of the paper, blue for ours."""
    return GREY if row.get("figures_of") == FIGURES_OF_PAPER else BLUE


def _sample_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return at most POINTS rows, evenly spread, the first and the last among them."""
    chosen = {round(number) for number in np.linspace(0, rows.height - 1, POINTS)}
    return rows[sorted(chosen)]


class _PlotArea(NamedTuple):
    """The area of a plot: which values are at the ends of its axes."""

    x_ends: AxisEnds
    y_ends: AxisEnds

    def axes(self, title: str) -> str:
        """Return the SVG of the axes. title: what the horizontal one measures."""
        return _draw_axes(title, self.x_ends, self.y_ends)

    def curve(self, x: Iterable[float], y: Iterable[float], color: str) -> str:
        """Return the SVG of a line through points."""
        columns = self.columns(x)
        rows = self.rows(y)
        path = f"M{columns[0]} {rows[0]}"
        for (column, next_column), (row, next_row) in zip(pairwise(columns), pairwise(rows), strict=True):
            path += f"l{next_column - column} {next_row - row}"
        return f"<path d='{path}' fill='none' stroke='{color}'/>"

    def columns(self, x: Iterable[float]) -> list[int]:
        """Return the pixels of values from the left."""
        return _compute_pixels(x, self.x_ends, WIDTH)

    def rows(self, y: Iterable[float]) -> list[int]:
        """Return the pixels of values from above, as SVG counts."""
        return [HEIGHT - pixels for pixels in _compute_pixels(y, self.y_ends, HEIGHT)]


def _compute_pixels(values: Iterable[float], ends: AxisEnds, size: int) -> list[int]:
    """Return the distance of each value from the lower end of an axis of `size` pixels."""
    extent = ends.high - ends.low or 1
    return [round((value - ends.low) / extent * size) for value in values]


def _draw_axes(title: str, x_ends: AxisEnds, y_ends: AxisEnds | None = None, height: int = HEIGHT) -> str:
    """Draw both axes as SVG, with the numbers at their ends.

    Args:
        title: What the horizontal axis measures.
        y_ends: The ends of the vertical axis. None to draw no numbers there.
    """
    parts = [f"<path d='M0 0V{height}H{WIDTH}' fill='none' stroke='#888'/>"]
    parts += _draw_x_numbers(x_ends, height)
    if y_ends is not None:
        parts += _draw_y_numbers(y_ends, height)
    parts.append(_draw_text(WIDTH // 3, title, height + TEXT_BELOW))
    return "".join(parts)


def _draw_x_numbers(ends: AxisEnds, height: int) -> list[str]:
    """Return the SVG of the numbers below the horizontal axis."""
    below = height + TEXT_BELOW
    return [
        _draw_text(0, _format_number(ends.low), below),
        _draw_text(WIDTH - LAST_NUMBER_WIDTH, _format_number(ends.high), below),
    ]


def _draw_y_numbers(ends: AxisEnds, height: int) -> list[str]:
    """Return the SVG of the numbers left of the vertical axis."""
    return [
        _draw_text(-LEFT, _format_number(ends.high), TEXT_HEIGHT),
        _draw_text(-LEFT, _format_number(ends.low), height),
    ]


def _format_number(value: float) -> str:
    """Return a whole number below a million with its digits, any other number with three significant digits."""
    is_short_whole = value == round(value) and abs(value) < 1e6
    return f"{value:,.0f}" if is_short_whole else f"{value:.3g}"


def _draw_text(x: int, text: object, y: int, color: str = "") -> str:
    """Return the SVG of a text whose lower left corner is at (x, y); without a color it has the picture's."""
    fill = f" fill='{color}'" if color else ""
    return f"<text x='{x}' y='{y}'{fill}>{text}</text>"


def _draw_line(path: str) -> str:
    """Return the SVG of a red line: a threshold, a level, an interval."""
    return f"<path d='{path}' stroke='{RED}'/>"


def _draw_picture(name: str, legend: Mapping[str, str], *parts: str, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Put a drawing together as a Markdown image whose address holds the SVG itself.

    Args:
        legend: The colors by label. Only the first three are shown.
        width: The width of the plot without the margins.
        height: The height of the plot without the margins.
    """
    begin = _open_svg(width + 2 * LEFT, height + ABOVE + BELOW)
    svg = "".join((begin, *_draw_legend(legend), *parts, "</svg>"))

    ascii_svg = svg.encode("ascii", "xmlcharrefreplace").decode()
    address = "".join(ESCAPED.get(char, char) for char in ascii_svg)
    return f"![{name}](<data:image/svg+xml,{address}>)"


def _open_svg(width: int, height: int) -> str:
    """Return the opening tag of an SVG of this size; (0, 0) is the upper end of the vertical axis."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='{-LEFT} {-ABOVE} {width} {height}' "
        "style='font:12px sans-serif' fill='#888'>"
    )


def _draw_legend(legend: Mapping[str, str]) -> list[str]:
    """Return the SVG of the first labels of a legend, side by side above the plot."""
    texts = []
    for x, (label, color) in zip(LEGEND_X, legend.items(), strict=False):
        texts.append(_draw_text(x, label, -4, color))
    return texts
