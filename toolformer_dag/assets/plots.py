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

BIN_COUNT = 80
"""Bars of a histogram: tenths of a nat between the ends of DELTA_LIMITS."""
DELTA_LIMITS = (-3, 5)
"""The deltas, in nats, at the ends of a histogram; those beyond count in its outermost bars."""
MAX_CURVE_POINTS = 20
"""Points of a curve: more would not fit."""
PLOT_WIDTH = 400
"""Width of the plot between its axes, in pixels."""
PLOT_HEIGHT = 99
"""Its height: two digits, since every character counts."""
SIDE_MARGIN = 45
"""Room for the numbers of the vertical axis, and the same on the right."""
TOP_MARGIN = 16
"""Room for the legend."""
BOTTOM_MARGIN = 17
"""Room for the numbers of the horizontal axis."""
TEXT_HEIGHT = 9
"""Pixels by which a text at the upper end of an axis is lowered, so that it is below that end."""
AXIS_TEXT_OFFSET = 13
"""Pixels from the horizontal axis down to the foot of its numbers."""
LAST_NUMBER_WIDTH = 30
"""Pixels by which the number at the right end of the horizontal axis begins before that end."""
LEGEND_LABEL_XS = (0, 140, 280)
"""Where the labels of a legend begin, in pixels."""
BAR_HEIGHT = 18
"""Height of a bar with the space around it."""
BLUE = "#48f"
ORANGE = "#e80"
RED = "#d44"
GREY = "#aaa"
ESCAPE_BY_CHARACTER = {"%": "%25", "#": "%23", "&": "%26", "<": r"\<", ">": r"\>"}
"""What an address in Markdown may not hold as it is; a third shorter than base64."""
FALSE_DISCOVERY_LEVEL = 0.05
"""The false discovery rate that a threshold by chance usually has."""


class AxisEnds(NamedTuple):
    """The values at the two ends of an axis."""

    low: float
    high: float

    @staticmethod
    def from_values(values: Iterable[float]) -> "AxisEnds":
        """Return the smallest and the largest of some values, of which there is at least one."""
        value_list = list(values)
        return AxisEnds(min(value_list), max(value_list))


def draw_plot(plot: Plot) -> str:
    """Draw the plot that a stage shows on its page, as a Markdown image."""
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
        deltas: A table with a column `delta`, which says by how many nats a call lowers the loss.
        tau_f: The threshold of the filter. None if no call is kept. Then there is no line.
    """
    counts = count_deltas_by_bin(deltas["delta"]).tolist()
    highest_count = max(*counts, 1)
    bar_path = _build_outline_path(counts, highest_count)

    parts = [f"<path d='{bar_path}' fill='{BLUE}'/>"]
    legend = {"calls, log scale": BLUE}
    if tau_f is not None:
        parts.append(_draw_threshold_line(tau_f))
        legend[f"tau_f {tau_f:.4g}"] = RED

    axes = _draw_axes("delta, nats", AxisEnds(*DELTA_LIMITS), AxisEnds(0, highest_count))
    return _build_markdown_image("calls by delta", legend, axes, *parts)


def _draw_threshold_line(tau_f: float) -> str:
    """Return the SVG of a vertical line through a histogram of deltas, at a threshold."""
    x = _compute_histogram_x(tau_f)
    return _draw_red_line(f"M{x} 0V{PLOT_HEIGHT}")


def _compute_histogram_x(delta: float) -> int:
    """Return how many pixels a delta lies right of the left end of a histogram. Beyond an end, it counts as the end."""
    low, high = DELTA_LIMITS
    clipped = min(max(delta, low), high)
    return round((clipped - low) / (high - low) * PLOT_WIDTH)


def _build_outline_path(counts: Sequence[int], highest_count: int) -> str:
    """Build the SVG path around the bars of a histogram, on a log scale on which the highest count fills the plot.

    In the path, `V` draws to a height and `h` to the right. Neighbors with equal counts are drawn as one wide bar,
    which keeps the path short.

    Args:
        counts: The count of each bar, from left to right.
        highest_count: The highest of them, at least 1.
    """
    bar_width = PLOT_WIDTH // BIN_COUNT
    path = f"M0 {PLOT_HEIGHT}"

    for count, equal_counts in groupby(counts):
        bar_top = PLOT_HEIGHT - _compute_log_height(count, highest_count)
        bar_count = len(list(equal_counts))
        path += f"V{bar_top}h{bar_width * bar_count}"
    return f"{path}V{PLOT_HEIGHT}"


def _compute_log_height(count: int, highest_count: int) -> int:
    """Return the height of a bar in pixels, on a log scale on which `highest_count` has PLOT_HEIGHT."""
    return round(math.log1p(count) / math.log1p(highest_count) * PLOT_HEIGHT)


def count_deltas_by_bin(deltas: pl.Series) -> np.ndarray:
    """Count how many deltas (in nats) fall into each bar of a histogram.

    Args:
        deltas: The deltas. Nulls are left out. Deltas outside DELTA_LIMITS count in the outermost bars.

    Returns:
        BIN_COUNT counts, from the lowest deltas to the highest.
    """
    bin_edges = np.linspace(*DELTA_LIMITS, BIN_COUNT + 1)
    clipped_deltas = deltas.drop_nulls().clip(*DELTA_LIMITS)
    return np.histogram(clipped_deltas, bin_edges)[0]


def draw_chance_curves(rates: pl.DataFrame) -> str:
    """Draw the false discovery rate over the threshold tau_f, as a Markdown image.

    The rate is the share of the kept calls that are kept by chance. Its one-sided 95 % bound and a line at 5 % are
    drawn too.

    Args:
        rates: A table with the columns tau_f, fdr (the rate) and fdr_high (the bound).
    """
    sampled_rates = _sample_evenly_spaced_rows(rates.sort("tau_f"))
    thresholds = sampled_rates["tau_f"]

    area = _PlotArea(AxisEnds(thresholds[0], thresholds[-1]), AxisEnds(0, 1))
    rate_curve = area.draw_curve(thresholds, sampled_rates["fdr"], BLUE)
    bound_curve = area.draw_curve(thresholds, sampled_rates["fdr_high"], ORANGE)

    legend = {"share by chance": BLUE, "95 % bound": ORANGE, f"{FALSE_DISCOVERY_LEVEL:.0%}": RED}
    axes = area.draw_axes("tau_f")
    return _build_markdown_image("share by chance", legend, axes, rate_curve, bound_curve, _draw_level_line())


def _draw_level_line() -> str:
    """Return the SVG of a horizontal line at FALSE_DISCOVERY_LEVEL, on a vertical axis from 0 to 1."""
    level_y = round(PLOT_HEIGHT * (1 - FALSE_DISCOVERY_LEVEL))
    return _draw_red_line(f"M0 {level_y}H{PLOT_WIDTH}")


def draw_frontier_curve(frontier: pl.DataFrame) -> str:
    """Draw the nats that calls gain over their cost, as a Markdown image.

    The curve has a point for each threshold tau_f, and a ring around the threshold that applies today.

    Args:
        frontier: A table with the columns tau_f, today (whether this tau_f applies now), nats and cost.
    """
    points = _select_frontier_points(frontier)
    area = _PlotArea(AxisEnds.from_values(points["cost"]), AxisEnds.from_values(points["nats"]))
    curve = area.draw_curve(points["cost"], points["nats"], BLUE)
    rings = _draw_rings(points.filter("today"), area)

    legend = {"nats that calls gain": BLUE}
    if rings:
        legend["at today's tau_f"] = RED
    return _build_markdown_image("nats over cost", legend, area.draw_axes("cost"), curve, *rings)


def _select_frontier_points(frontier: pl.DataFrame) -> pl.DataFrame:
    """Return the points of a frontier that are drawn, by falling tau_f.

    These are at most MAX_CURVE_POINTS points that differ in cost or nats, and those of today's tau_f, so that a point
    may occur twice.

    Args:
        frontier: A table with a row per tau_f (the threshold of the filter), and the columns tau_f, cost, nats and
            today, which is true if this tau_f applies now.
    """
    by_falling_tau_f = frontier.sort("tau_f", descending=True)
    distinct_points = by_falling_tau_f.unique(("cost", "nats"), keep="first", maintain_order=True)
    todays_points = by_falling_tau_f.filter("today")

    chosen_points = pl.concat([_sample_evenly_spaced_rows(distinct_points), todays_points])
    return chosen_points.sort("tau_f", descending=True)


def _draw_rings(points: pl.DataFrame, area: "_PlotArea") -> list[str]:
    """Return the SVG of a red ring around each point.

    Args:
        points: A table with the columns cost and nats. Equal points get a single ring.
        area: The area of the plot, with cost on the horizontal axis and nats on the vertical one.
    """
    distinct_points = points.unique(("cost", "nats"))
    x_pixels = area.compute_x_pixels(distinct_points["cost"])
    y_pixels = area.compute_y_pixels(distinct_points["nats"])
    rings = []
    for x, y in zip(x_pixels, y_pixels, strict=True):
        rings.append(f"<circle cx='{x}' cy='{y}' r='5' fill='none' stroke='{RED}'/>")
    return rings


def draw_loss_curve(curve: pl.DataFrame) -> str:
    """Draw training loss (blue) and held-out perplexity (orange) over the steps of a training, as a Markdown image.

    Each curve has its own scale.

    Args:
        curve: A table with the columns step, measure and value. Only its first two measures and finite values are
            drawn.
    """
    finite_points = curve.filter(pl.col("value").is_finite())
    step_ends = AxisEnds(0, max(finite_points["step"], default=0))

    parts: list[str] = []
    legend: dict[str, str] = {}
    for measure_points, style in zip(_split_by_measure(finite_points), LOSS_CURVES, strict=False):
        parts += _draw_curve_with_scale(measure_points, step_ends, style)
        legend[_shorten_measure(measure_points)] = style.color

    return _build_markdown_image("curves", legend, _draw_axes("steps", step_ends), *parts)


def _split_by_measure(curve: pl.DataFrame) -> list[pl.DataFrame]:
    """Split the rows of a loss curve by their measure, in the order in which the measures occur."""
    return [points for _, points in curve.group_by("measure", maintain_order=True)]


def _shorten_measure(measure_points: pl.DataFrame) -> str:
    """Return the measure that all these points have, without "training " before it: "loss" for "training loss"."""
    return str(measure_points["measure"][0]).removeprefix("training ")


class _CurveStyle(NamedTuple):
    """How a curve with a scale of its own is drawn.

    Attributes:
        color: The color of the curve and of the numbers of its scale.
        scale_text_x: Where these numbers begin, in pixels from the left end of the plot.
    """

    color: str
    scale_text_x: int


LOSS_CURVES = (_CurveStyle(BLUE, -SIDE_MARGIN), _CurveStyle(ORANGE, PLOT_WIDTH + 3))
"""The style of the training loss, with its scale left of the plot, and of the held-out perplexity, right of it."""


def _draw_curve_with_scale(curve_points: pl.DataFrame, step_ends: AxisEnds, style: _CurveStyle) -> list[str]:
    """Return the SVG of a curve, and of the numbers at the two ends of its vertical scale.

    Args:
        curve_points: A table with the columns step and value.
        step_ends: The ends of the horizontal axis.
        style: The color of the curve, and the place of the numbers.
    """
    sampled = _sample_evenly_spaced_rows(curve_points.sort("step"))
    scale = AxisEnds.from_values(sampled["value"])
    curve_svg = _PlotArea(step_ends, scale).draw_curve(sampled["step"], sampled["value"], style.color)
    highest_label_svg = _draw_text(style.scale_text_x, _format_number(scale.high), TEXT_HEIGHT, style.color)
    lowest_label_svg = _draw_text(style.scale_text_x, _format_number(scale.low), PLOT_HEIGHT, style.color)
    return [curve_svg, highest_label_svg, lowest_label_svg]


def draw_start_curves(rows: pl.DataFrame) -> str:
    """Draw right answers (blue) and questions with a call (orange) over `decoding.min_probability`, in per cent.

    Args:
        rows: A table with the columns min_probability (the least probability at which a call starts), accuracy and
            calls.

    Returns:
        A Markdown image.
    """
    probabilities = rows["min_probability"]
    area = _PlotArea(AxisEnds.from_values(probabilities), AxisEnds(0, 100))
    accuracy_curve = area.draw_curve(probabilities, rows["accuracy"], BLUE)
    call_curve = area.draw_curve(probabilities, rows["calls"], ORANGE)

    legend = {"right, %": BLUE, "calls, %": ORANGE}
    axes = area.draw_axes("min_probability")
    return _build_markdown_image(
        "right answers and calls over min_probability", legend, axes, accuracy_curve, call_curve
    )


class BarColumns(NamedTuple):
    """How a view of the warehouse is drawn as a bar chart.

    Attributes:
        label_columns: The columns that name a bar.
        length_column: The column that determines its length.
    """

    label_columns: Sequence[str]
    length_column: str


BAR_COLUMNS_BY_VIEW: Mapping[str, BarColumns] = {
    "table_2": BarColumns(("tool", "tau_f"), "examples"),
    **{f"table_{number}": BarColumns(("benchmark", "model", "figures_of"), "accuracy") for number in range(3, 8)},
    "table_8": BarColumns(("source", "model", "figures_of"), "perplexity"),
    "table_9": BarColumns(("benchmark", "model", "k", "figures_of"), "accuracy"),
    "table_10": BarColumns(("tool", "kept", "figures_of"), "delta"),
    "figure_4": BarColumns(("benchmarks", "condition", "parameters", "figures_of"), "accuracy"),
}
"""How each view of the paper's tables is drawn."""


def draw_bar_chart(rows: pl.DataFrame, label_columns: Sequence[str], length_column: str) -> str:
    """Draw a bar per row, with its number and, if the row has low and high, its 95 % interval, as a Markdown image.

    Args:
        rows: The rows.
        label_columns: The columns that name a bar.
        length_column: The column that determines its length. Rows without a value there are left out.
    """
    bar_rows = rows.drop_nulls(length_column).to_dicts()
    chart = _BarChart(label_columns, length_column, _find_max_value(bar_rows, length_column))

    bars: list[str] = []
    for bar_index, row in enumerate(bar_rows):
        bars += chart.draw_bar(row, top_y=bar_index * BAR_HEIGHT)

    height = len(bar_rows) * BAR_HEIGHT
    width = 2 * PLOT_WIDTH  # the labels take the right half
    legend = _build_bar_legend(bar_rows, length_column)
    axes = chart.draw_axes(height)
    return _build_markdown_image("plot", legend, axes, *bars, width=width, height=height)


@dataclass(frozen=True, slots=True)
class _BarChart:
    """A chart with a horizontal bar per row.

    Attributes:
        label_columns: The columns that name a bar.
        length_column: The column that determines its length.
        max_value: The value whose bar has the full width.
    """

    label_columns: Sequence[str]
    length_column: str
    max_value: float

    def draw_bar(self, row: Mapping[str, Any], top_y: int) -> list[str]:
        """Return the SVG of a bar, of its interval, and of its number and name.

        Args:
            row: The row that the bar shows.
            top_y: How many pixels below the top of the chart the space of the bar begins.
        """
        # A negative value has no bar, but its number and name are shown.
        length = max(self._compute_pixel_width(row[self.length_column]), 0)
        middle_y = top_y + BAR_HEIGHT // 2
        bar = f"<path d='M0 {middle_y}h{length}' stroke='{_choose_bar_color(row)}' stroke-width='12'/>"

        label_y = top_y + AXIS_TEXT_OFFSET
        return [bar, self._draw_interval(row, middle_y), self._draw_label(row, label_y)]

    def draw_axes(self, height: int) -> str:
        """Return the SVG of the axes of a chart of this height."""
        unit = f"{self.length_column}, %" if self.length_column == "accuracy" else ""
        return _draw_axes(unit, AxisEnds(0, self.max_value), height=height)

    def _draw_interval(self, row: Mapping[str, Any], y: int) -> str:
        """Return the SVG of a line from the lower to the upper end of a row's interval. A missing end counts as 0."""
        low = self._compute_pixel_width(row.get("low"))
        high = self._compute_pixel_width(row.get("high"))
        return _draw_red_line(f"M{low} {y}H{high}")

    def _draw_label(self, row: Mapping[str, Any], y: int) -> str:
        """Return the SVG of a bar's number and name, to the right of the plot."""
        label_values = [row[column] for column in self.label_columns if row[column] is not None]
        name = ", ".join(escape(str(value)) for value in label_values)
        return _draw_text(PLOT_WIDTH + 5, f"{row[self.length_column]:,.4g}  {name}", y)

    def _compute_pixel_width(self, value: float | None) -> int:
        """Return the width of a value in pixels. None counts as 0."""
        return round((value or 0) / self.max_value * PLOT_WIDTH)


def _find_max_value(rows: Sequence[Mapping[str, Any]], length_column: str) -> float:
    """Return the highest value that a bar chart has to show: of a bar, or of the upper end of its interval.

    Returns 1 if there are no rows or all values are 0, so that one can divide by it.
    """
    upper_ends = [row.get("high") or row[length_column] for row in rows]
    return max(upper_ends, default=0) or 1


def _build_bar_legend(rows: Sequence[Mapping[str, Any]], length_column: str) -> dict[str, str]:
    """Return the legend of a bar chart, a color by label. The paper's figures are named if there are some."""
    color_by_label = {length_column: BLUE}
    if any(row.get("figures_of") == FIGURES_OF_PAPER for row in rows):
        color_by_label["the paper's"] = GREY
    color_by_label["95 % interval"] = RED
    return color_by_label


def _choose_bar_color(row: Mapping[str, Any]) -> str:
    """Return the color of a bar: grey for a figure of the paper, blue for ours."""
    return GREY if row.get("figures_of") == FIGURES_OF_PAPER else BLUE


def _sample_evenly_spaced_rows(rows: pl.DataFrame) -> pl.DataFrame:
    """Return at most MAX_CURVE_POINTS rows, evenly spread over the table, with the first and the last among them."""
    last_index = rows.height - 1
    row_indexes = {round(index) for index in np.linspace(0, last_index, MAX_CURVE_POINTS)}
    return rows[sorted(row_indexes)]


class _PlotArea(NamedTuple):
    """The area of a plot, which places values between its axes.

    Attributes:
        x_ends: The values at the ends of the horizontal axis.
        y_ends: The values at the ends of the vertical axis.
    """

    x_ends: AxisEnds
    y_ends: AxisEnds

    def draw_axes(self, x_axis_title: str) -> str:
        """Return the SVG of the axes, with the numbers at their ends and a title below the horizontal one."""
        return _draw_axes(x_axis_title, self.x_ends, self.y_ends)

    def draw_curve(self, x_values: Iterable[float], y_values: Iterable[float], color: str) -> str:
        """Return the SVG of a line through points, which come in the order in which they are joined.

        Args:
            x_values: The value of each point on the horizontal axis.
            y_values: Its value on the vertical axis.
            color: The color of the line.
        """
        x_pixels = self.compute_x_pixels(x_values)
        y_pixels = self.compute_y_pixels(y_values)

        # In an SVG path, `M` sets the first point, and `l` draws a line by so many pixels to the right and down.
        path = f"M{x_pixels[0]} {y_pixels[0]}"
        for (x, next_x), (y, next_y) in zip(pairwise(x_pixels), pairwise(y_pixels), strict=True):
            path += f"l{next_x - x} {next_y - y}"
        return f"<path d='{path}' fill='none' stroke='{color}'/>"

    def compute_x_pixels(self, x_values: Iterable[float]) -> list[int]:
        """Return how many pixels each value lies right of the left end of the plot."""
        return _compute_pixels(x_values, self.x_ends, PLOT_WIDTH)

    def compute_y_pixels(self, y_values: Iterable[float]) -> list[int]:
        """Return how many pixels each value lies below the top of the plot, because SVG counts from above."""
        return [PLOT_HEIGHT - pixels for pixels in _compute_pixels(y_values, self.y_ends, PLOT_HEIGHT)]


def _compute_pixels(values: Iterable[float], axis_ends: AxisEnds, axis_pixels: int) -> list[int]:
    """Return how many pixels each value lies from the lower end of an axis.

    Args:
        values: The values.
        axis_ends: The values at the ends of the axis. If they are equal, all values lie at the lower end.
        axis_pixels: The length of the axis in pixels.
    """
    extent = axis_ends.high - axis_ends.low or 1
    return [round((value - axis_ends.low) / extent * axis_pixels) for value in values]


def _draw_axes(x_axis_title: str, x_ends: AxisEnds, y_ends: AxisEnds | None = None, height: int = PLOT_HEIGHT) -> str:
    """Return the SVG of both axes, with the numbers at their ends.

    Args:
        x_axis_title: What the horizontal axis measures.
        x_ends: The values at the ends of the horizontal axis.
        y_ends: The values at the ends of the vertical axis. None to draw no numbers there.
        height: The height of the plot in pixels.
    """
    parts = [f"<path d='M0 0V{height}H{PLOT_WIDTH}' fill='none' stroke='#888'/>"]
    parts += _draw_x_numbers(x_ends, height)
    if y_ends is not None:
        parts += _draw_y_numbers(y_ends, height)
    parts.append(_draw_text(PLOT_WIDTH // 3, x_axis_title, height + AXIS_TEXT_OFFSET))
    return "".join(parts)


def _draw_x_numbers(axis_ends: AxisEnds, height: int) -> list[str]:
    """Return the SVG of the numbers below the horizontal axis."""
    below = height + AXIS_TEXT_OFFSET
    return [
        _draw_text(0, _format_number(axis_ends.low), below),
        _draw_text(PLOT_WIDTH - LAST_NUMBER_WIDTH, _format_number(axis_ends.high), below),
    ]


def _draw_y_numbers(axis_ends: AxisEnds, height: int) -> list[str]:
    """Return the SVG of the numbers left of the vertical axis."""
    return [
        _draw_text(-SIDE_MARGIN, _format_number(axis_ends.high), TEXT_HEIGHT),
        _draw_text(-SIDE_MARGIN, _format_number(axis_ends.low), height),
    ]


def _format_number(value: float) -> str:
    """Return a whole number below a million with its digits, any other number with three significant digits."""
    is_short_whole = value == round(value) and abs(value) < 1e6
    return f"{value:,.0f}" if is_short_whole else f"{value:.3g}"


def _draw_text(x: int, text: object, y: int, color: str = "") -> str:
    """Return the SVG of a text whose lower left corner is at (x, y). Without a color it has that of the picture."""
    fill = f" fill='{color}'" if color else ""
    return f"<text x='{x}' y='{y}'{fill}>{text}</text>"


def _draw_red_line(path_data: str) -> str:
    """Return the SVG of a red line (a threshold, a level or an interval) along an SVG path such as "M0 9H99"."""
    return f"<path d='{path_data}' stroke='{RED}'/>"


def _build_markdown_image(
    alt_text: str,
    color_by_label: Mapping[str, str],
    *svg_parts: str,
    width: int = PLOT_WIDTH,
    height: int = PLOT_HEIGHT,
) -> str:
    """Put a drawing together as a Markdown image whose address holds the SVG itself: `![TEXT](<data:...>)`.

    Args:
        alt_text: What is shown if the image cannot be.
        color_by_label: The labels of the legend with their colors. Only the first three are shown.
        svg_parts: The SVG of the axes, the curves and so on.
        width: The width of the plot in pixels, without the margins.
        height: The height of the plot in pixels, without the margins.
    """
    opening_tag = _build_svg_opening_tag(width + 2 * SIDE_MARGIN, height + TOP_MARGIN + BOTTOM_MARGIN)
    svg = "".join((opening_tag, *_draw_legend(color_by_label), *svg_parts, "</svg>"))

    ascii_svg = svg.encode("ascii", "xmlcharrefreplace").decode()
    address = "".join(ESCAPE_BY_CHARACTER.get(char, char) for char in ascii_svg)
    return f"![{alt_text}](<data:image/svg+xml,{address}>)"


def _build_svg_opening_tag(width: int, height: int) -> str:
    """Return the opening tag of an SVG of this size in pixels. (0, 0) is the upper end of the vertical axis."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='{-SIDE_MARGIN} {-TOP_MARGIN} {width} {height}' "
        "style='font:12px sans-serif' fill='#888'>"
    )


def _draw_legend(color_by_label: Mapping[str, str]) -> list[str]:
    """Return the SVG of the first three labels of a legend, side by side above the plot, each in its color."""
    above_plot = -4  # pixels
    texts = []
    for x, (label, color) in zip(LEGEND_LABEL_XS, color_by_label.items(), strict=False):
        texts.append(_draw_text(x, label, above_plot, color))
    return texts
