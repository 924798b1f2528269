"""`run --estimate`: what annotating will cost, by lane, with 95 % intervals."""

from functools import reduce
from operator import add

from rich.filesize import decimal

from toolformer_dag.pipeline.estimate import LaneForecast, Range, estimate
from toolformer_dag.pipeline.execution import OnDemand, worker_count
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.pipeline.worker import Worker

NOTHING = Range(0, 0, 0)
NOT_COVERED = "Not covered: finetuning and evaluation, the documents and texts themselves, C* and the warehouse."


def forecast(plan: Plan) -> str:
    """Annotate a sample of every lane and return the forecast for people. Raises what the stages raise."""
    outputs = table_outputs(plan)
    worker = Worker(plan)
    workers = OnDemand(worker, {output.name: output for output in outputs})
    try:
        lanes = estimate(worker, workers, outputs, lambda done, total: None)
    finally:
        workers.close()
    return "\n".join(_lines(lanes, worker_count(plan.settings)))


def _lines(lanes: list[LaneForecast], workers: int) -> list[str]:
    seconds = reduce(add, (lane.seconds for lane in lanes), NOTHING)
    total = LaneForecast(
        lane="all",
        texts=sum(lane.texts for lane in lanes),
        sampled=sum(lane.sampled for lane in lanes),
        tokens=reduce(add, (lane.tokens for lane in lanes), NOTHING),
        bytes=reduce(add, (lane.bytes for lane in lanes), NOTHING),
        seconds=seconds,
        spent=sum(lane.spent for lane in lanes),
    )
    if not total.texts:
        return ["Nothing is left to annotate."]
    head = f"{'lane':<22}{'texts':>12}{'sampled':>9}  {'tokens still to compute':<36}{'storage still to take':<30}"
    rows = [
        f"{one.lane:<22}{one.texts:>12,}{one.sampled:>9,}  {_tokens(one):<36}{_size(one.bytes):<30}".rstrip()
        for one in (*lanes, total)
    ]
    divided = Range(seconds.value / workers, seconds.low / workers, seconds.high / workers)
    return [
        head.rstrip(),
        *rows,
        f"Time on {workers} {'worker' if workers == 1 else 'workers'}: {_time(divided)}",
        f"The sample took {total.spent:,} tokens; the run reuses its samples, results and losses.",
        NOT_COVERED,
    ]


def _tokens(lane: LaneForecast) -> str:
    if lane.texts and not lane.sampled:
        return "too few texts to tell"
    return f"{lane.tokens.value:,.0f} ({lane.tokens.low:,.0f} - {lane.tokens.high:,.0f})"


def _size(one: Range) -> str:
    return f"{decimal(int(one.value))} ({decimal(int(one.low))} - {decimal(int(one.high))})"


def _time(one: Range) -> str:
    return f"{_span(one.value)} ({_span(one.low)} - {_span(one.high)})"


def _span(seconds: float) -> str:
    for unit, length in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
