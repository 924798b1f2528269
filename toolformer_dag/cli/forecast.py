"""`run --estimate`: what annotating will cost, by lane, with 95 % intervals."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

from rich.filesize import decimal

from toolformer_dag.computing.forecast_range import Range
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_configured_executor, choose_worker_count
from toolformer_dag.pipeline.estimate import LaneForecast, forecast_annotation
from toolformer_dag.pipeline.stages import list_table_outputs

NOT_COVERED_NOTE = "Not covered: finetuning and evaluation, the documents and texts themselves, C* and the warehouse."
TABLE_HEADER = f"{'lane':<22}{'texts':>12}{'sampled':>9}  {'tokens still to compute':<36}storage still to take"


def forecast_cost_as_table(plan: Plan) -> str:
    """Forecast what annotating the remaining texts will cost, and return it as a table with a line per lane.

    For every lane (a tool with its settings), a sample of the texts is annotated. The run reuses what it computed.
    """
    lane_forecasts = _forecast_lanes(plan)
    total = _sum_lane_forecasts(lane_forecasts)
    if not total.text_count:
        return "Nothing is left to annotate."

    lane_lines = [_format_table_line(lane_forecast) for lane_forecast in lane_forecasts]
    time_line = format_time_line(total.seconds, choose_worker_count(plan.settings))
    sample_note = f"The sample took {total.sample_tokens:,} tokens; the run reuses its samples, results and losses."

    lines = [TABLE_HEADER, *lane_lines, _format_table_line(total), time_line, sample_note, NOT_COVERED_NOTE]
    return "\n".join(lines)


def _forecast_lanes(plan: Plan) -> Sequence[LaneForecast]:
    """Forecast for every lane (a tool with its settings) the cost to propose, run and score calls in its texts.

    For that a sample of the texts of each lane is annotated, that is, goes through all these steps.
    """
    outputs = list_table_outputs(plan)
    output_by_name = {output.name: output for output in outputs}
    build_executor = partial(build_configured_executor, list_table_outputs)

    worker = Worker(plan)
    workers = Workers(worker, output_by_name, build_executor)
    try:
        return forecast_annotation(worker, workers, outputs, lambda done, total: None)
    finally:
        workers.close()


def _format_table_line(lane_forecast: LaneForecast) -> str:
    """Format the forecast of a lane as a line of the table, with the columns of TABLE_HEADER."""
    tokens = _format_token_range(lane_forecast)
    storage = format_range(lane_forecast.bytes, _format_size)
    return (
        f"{lane_forecast.lane_key:<22}{lane_forecast.text_count:>12,}{lane_forecast.sampled_text_count:>9,}"
        f"  {tokens:<36}{storage}"
    )


def format_time_line(single_worker_seconds: Range, num_workers: int) -> str:
    """Format how long the workers take together, such as `Time on 2 workers: 0:10:00 (0:08:00 - 0:12:00)`.

    Args:
        single_worker_seconds: The time that a single worker would take.
        num_workers: How many workers share the work.
    """
    seconds = Range(
        single_worker_seconds.value / num_workers,
        low=single_worker_seconds.low / num_workers,
        high=single_worker_seconds.high / num_workers,
    )
    plural = "s" if num_workers > 1 else ""
    return f"Time on {num_workers} worker{plural}: {format_range(seconds, _format_duration)}"


def _format_duration(seconds: float) -> str:
    """Return a time in hours, minutes and seconds: `0:10:00` for 600."""
    return str(timedelta(seconds=round(seconds)))


def _sum_lane_forecasts(lane_forecasts: Sequence[LaneForecast]) -> LaneForecast:
    """Return a forecast for all lanes together, under the name "all"."""
    return LaneForecast(
        lane_key="all",
        text_count=sum(lane.text_count for lane in lane_forecasts),
        sampled_text_count=sum(lane.sampled_text_count for lane in lane_forecasts),
        tokens=_sum_ranges(lane.tokens for lane in lane_forecasts),
        bytes=_sum_ranges(lane.bytes for lane in lane_forecasts),
        seconds=_sum_ranges(lane.seconds for lane in lane_forecasts),
        sample_tokens=sum(lane.sample_tokens for lane in lane_forecasts),
        stale_shard_count=sum(lane.stale_shard_count for lane in lane_forecasts),
    )


def _sum_ranges(ranges: Iterable[Range]) -> Range:
    """Add the values, the lower ends and the upper ends of ranges, as if all forecasts erred in the same direction."""
    return Range(*map(sum, zip(*ranges, strict=True)))


def _format_size(byte_count: float) -> str:
    """Return bytes as people write them, such as 1.5 MB."""
    return decimal(int(byte_count))


def _format_token_range(lane_forecast: LaneForecast) -> str:
    """Format the tokens that a lane will take, with their 95 % interval."""
    if lane_forecast.text_count and not lane_forecast.sampled_text_count:
        return "too few texts to tell"
    return format_range(lane_forecast.tokens, "{:,.0f}".format)


def format_range(forecast_range: Range, format_number: Callable[[float], str]) -> str:
    """Return `VALUE (LOW - HIGH)`, each number as `format_number` writes it."""
    value = format_number(forecast_range.value)
    return f"{value} ({format_number(forecast_range.low)} - {format_number(forecast_range.high)})"
