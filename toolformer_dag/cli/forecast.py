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
from toolformer_dag.pipeline.stages import table_outputs

NOT_COVERED = "Not covered: finetuning and evaluation, the documents and texts themselves, C* and the warehouse."


def forecast(plan: Plan) -> str:
    """Annotate a sample of every lane and return the forecast for people. Raises what the stages raise."""
    outputs = table_outputs(plan)
    worker = Worker(plan)
    workers = Workers(worker, {output.name: output for output in outputs}, partial(executor_of, table_outputs))
    try:
        lanes = estimate(worker, workers, outputs, lambda done, total: None)
    finally:
        workers.close()
    total = _all(lanes)
    if not total.texts:
        return "Nothing is left to annotate."
    head = f"{'lane':<22}{'texts':>12}{'sampled':>9}  {'tokens still to compute':<36}storage still to take"
    rows = [
        f"{lane.lane:<22}{lane.texts:>12,}{lane.sampled:>9,}  {_tokens(lane):<36}{written(lane.bytes, _size)}"
        for lane in (*lanes, total)
    ]
    spent = f"The sample took {total.spent:,} tokens; the run reuses its samples, results and losses."
    return "\n".join((head, *rows, time_line(total.seconds, worker_count(plan.settings)), spent, NOT_COVERED))


def time_line(seconds: Range, workers: int) -> str:
    """Return how long so many workers take, such as `Time on 2 workers: 0:10:00 (0:08:00 - 0:12:00)`.

    seconds: of one worker.
    """
    of_all = Range(*(bound / workers for bound in seconds))
    time = written(of_all, lambda number: str(timedelta(seconds=round(number))))
    return f"Time on {workers} worker{'s' * (workers > 1)}: {time}"


def _all(lanes: Sequence[LaneForecast]) -> LaneForecast:
    """Return the forecast of all lanes together."""
    return LaneForecast(
        lane="all",
        texts=sum(lane.texts for lane in lanes),
        sampled=sum(lane.sampled for lane in lanes),
        tokens=_sum(lane.tokens for lane in lanes),
        bytes=_sum(lane.bytes for lane in lanes),
        seconds=_sum(lane.seconds for lane in lanes),
        spent=sum(lane.spent for lane in lanes),
        shards=sum(lane.shards for lane in lanes),
    )


def _sum(ranges: Iterable[Range]) -> Range:
    """Add values, and their intervals as if all erred to the same side."""
    return Range(*map(sum, zip(*ranges, strict=True)))


def _size(count: float) -> str:
    return decimal(int(count))


def _tokens(lane: LaneForecast) -> str:
    """Return the tokens that a lane will take, for people."""
    if lane.texts and not lane.sampled:
        return "too few texts to tell"
    return written(lane.tokens, "{:,.0f}".format)


def written(value: Range, write: Callable[[float], str]) -> str:
    """Return `VALUE (LOW - HIGH)`. `write`: writes each of the three."""
    return f"{write(value.value)} ({write(value.low)} - {write(value.high)})"
