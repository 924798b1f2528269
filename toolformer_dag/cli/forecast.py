"""`run --estimate`: what annotating will cost, by lane, with 95 % intervals."""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

from rich.filesize import decimal

from toolformer_dag.computing.forecast_range import Range
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, executor_of, worker_count
from toolformer_dag.pipeline.estimate import LaneForecast, estimate
from toolformer_dag.pipeline.stages import list_table_outputs

NOT_COVERED = "Not covered: finetuning and evaluation, the documents and texts themselves, C* and the warehouse."
HEAD = f"{'lane':<22}{'texts':>12}{'sampled':>9}  {'tokens still to compute':<36}storage still to take"


def forecast(plan: Plan) -> str:
    """Annotate a sample of texts for every lane, and return what the remaining texts will cost, as a table."""
    lanes = _estimate_lanes(plan)
    total = _sum_of_lanes(lanes)
    if not total.texts:
        return "Nothing is left to annotate."
    table_lines = [HEAD, *map(_format_table_line, lanes), _format_table_line(total)]
    time = format_time_line(total.seconds, worker_count(plan.settings))
    spent = f"The sample took {total.spent:,} tokens; the run reuses its samples, results and losses."
    return "\n".join((*table_lines, time, spent, NOT_COVERED))


def _estimate_lanes(plan: Plan) -> Sequence[LaneForecast]:
    """Annotate a sample of texts for every lane (a tool with its settings), and return the lanes' forecasts."""
    outputs = list_table_outputs(plan)
    worker = Worker(plan)
    workers = Workers(worker, {output.name: output for output in outputs}, partial(executor_of, list_table_outputs))
    try:
        return estimate(worker, workers, outputs, lambda done, total: None)
    finally:
        workers.close()


def _format_table_line(lane: LaneForecast) -> str:
    """Return a lane's line of the table, in the columns of HEAD."""
    size = format_range(lane.bytes, _format_size)
    return f"{lane.lane:<22}{lane.texts:>12,}{lane.sampled:>9,}  {_format_tokens(lane):<36}{size}"


def format_time_line(seconds: Range, workers: int) -> str:
    """Return how long the workers take together, such as `Time on 2 workers: 0:10:00 (0:08:00 - 0:12:00)`.

    `seconds`: the time that a single worker would take.
    """
    each = Range(seconds.value / workers, low=seconds.low / workers, high=seconds.high / workers)
    time = format_range(each, lambda number: str(timedelta(seconds=round(number))))
    return f"Time on {workers} worker{'s' * (workers > 1)}: {time}"


def _sum_of_lanes(lanes: Sequence[LaneForecast]) -> LaneForecast:
    """Return the forecast of all lanes together."""
    return LaneForecast(
        lane="all",
        texts=sum(lane.texts for lane in lanes),
        sampled=sum(lane.sampled for lane in lanes),
        tokens=_sum_ranges(lane.tokens for lane in lanes),
        bytes=_sum_ranges(lane.bytes for lane in lanes),
        seconds=_sum_ranges(lane.seconds for lane in lanes),
        spent=sum(lane.spent for lane in lanes),
        shards=sum(lane.shards for lane in lanes),
    )


def _sum_ranges(ranges: Iterable[Range]) -> Range:
    """Add the values, the lower ends and the upper ends, as if all forecasts erred in the same direction."""
    return Range(*map(sum, zip(*ranges, strict=True)))


def _format_size(count: float) -> str:
    """Return bytes as people write them, such as 1.5 MB."""
    return decimal(int(count))


def _format_tokens(lane: LaneForecast) -> str:
    """Return the tokens that a lane will take, with their interval."""
    if lane.texts and not lane.sampled:
        return "too few texts to tell"
    return format_range(lane.tokens, "{:,.0f}".format)


def format_range(forecast: Range, format_number: Callable[[float], str]) -> str:
    """Return `VALUE (LOW - HIGH)`, each number as `format_number` writes it."""
    value = format_number(forecast.value)
    return f"{value} ({format_number(forecast.low)} - {format_number(forecast.high)})"
