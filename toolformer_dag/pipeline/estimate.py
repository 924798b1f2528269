"""What a run will cost, forecast from a sample of its texts that is annotated for real.

The rows of the sample are stored, so the run that follows does not compute them again. Covered: tokens, storage and
time of annotating. Not covered: finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.reasons import difference
from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import Progress, update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers
from toolformer_dag.lake import parquet
from toolformer_dag.pipeline import heuristic_subset, swapped_results
from toolformer_dag.pipeline.stages import lane_stages
from toolformer_dag.pipeline.trial import ALL, trial

GROUPS, STUDENT = 4, 3.18
"""Parts of the sample, whose differences tell the range, and the 97.5 % point of Student's distribution for them."""
TEXTS, SHARE = 256, 5
"""Texts of a lane that are annotated, at most, and at most one in so many."""


class Range(NamedTuple):
    """A forecast with its 95 % interval."""

    value: float = 0
    low: float = 0
    high: float = 0


class LaneForecast(NamedTuple):
    """What annotating a lane will cost. `texts`: distinct texts of its stale `shards`; `sampled` of them are annotated.

    `tokens` will go through the model, `bytes` be added to the lane's tables and row stores, and `seconds` pass on one
    worker, for the texts that are not sampled. `spent`: tokens of the sample. Of four texts or fewer, and of a lane
    with calls of a file, there is no sample, and everything but `texts` and `shards` is 0.
    """

    lane: str
    texts: int
    sampled: int = 0
    tokens: Range = Range()
    bytes: Range = Range()
    seconds: Range = Range()
    spent: int = 0
    shards: int = 0


def estimate(
    worker: Worker, workers: Workers, outputs: Sequence[TableOutput], progress: Progress, seed: int | None = None
) -> list[LaneForecast]:
    """Read the shards, choose the texts and annotate a sample of those whose shards are stale; forecast the rest.

    The texts are drawn anew each time, so that those whose rows are stored already are in the sample as often as in the
    rest; `seed` draws the same ones. Raises what the stages raise.
    """
    lanes: dict[str, dict[str, TableOutput]] = {}
    for output in outputs:
        if output.lane_or_none is not None:
            lanes.setdefault(output.lane.key, {})[output.stage.name] = output
        if output.stage is heuristic_subset.STAGE or (output.group == "ccnet" and output.stage.name != "heldout_texts"):
            update(worker, workers, output, progress)
    return [_forecast(worker, tables, progress, seed) for tables in lanes.values()]


def _forecast(worker: Worker, tables: Mapping[str, TableOutput], progress: Progress, seed: int | None) -> LaneForecast:
    subset = tables[heuristic_subset.STAGE.name]
    stages = annotating(subset.plan, subset.lane)
    stale = [part for part in subset.parts if any(difference(tables[stage.name], part) for stage in stages)]
    placed = pl.concat([subset.stage.schema.to_frame(), *map(subset.table.read, stale)])
    texts = placed.unique("text_digest", keep="first", maintain_order=True).sort("text_digest")
    texts = texts.sample(fraction=1, shuffle=True, seed=seed)
    if texts.height <= GROUPS or subset.lane.sources.files:
        return LaneForecast(subset.lane.key, texts.height, shards=len(stale))
    size = max(1, min(TEXTS, texts.height // SHARE) // GROUPS)
    sampled = texts[: size * GROUPS]
    samples = subset.lane.sources.sampled
    worker.engine("proposer" if samples else "judge")  # loaded before anything is timed
    groups = [_annotated(worker, subset.lane, group, stages[:-1], progress) for group in sampled.iter_slices(size)]
    control = _annotated(worker, subset.lane, sampled, stages, progress)
    lane = LaneForecast(subset.lane.key, texts.height, sampled.height, shards=len(stale))
    return _scaled(lane, worker.plan, placed, groups, control)


def annotating(plan: Plan, lane: Lane) -> tuple[Stage, ...]:
    """Return the stages from the candidates on; the last is the control, which swaps results among texts of a shard."""
    stages = lane_stages(plan, lane)
    return stages[1 : stages.index(swapped_results.STAGE) + 1]


def _scaled(
    lane: LaneForecast, plan: Plan, placed: pl.DataFrame, groups: "Sequence[_Cost]", control: "_Cost"
) -> LaneForecast:
    """Scale what the sample cost to the stale shards, whose texts `placed` holds."""
    limit = plan.settings.evaluation.swapped_texts
    by_shard = placed.select("shard", "text_digest").n_unique()
    distinct = sum(min(limit, count) for count in placed.unique("text_digest").group_by("shard").len()["len"])
    per_text, controlled = (lane.texts - lane.sampled) / lane.sampled, distinct / min(limit, lane.sampled)
    tokens = [cost.tokens for cost in groups]
    spread = STUDENT * stdev(tokens) / (mean(tokens) or 1.0) / GROUPS**0.5

    def scaled(of_sample: float, of_control: float, more: float = 0) -> Range:
        value = of_sample * per_text + of_control * controlled + more
        return Range(value, value * max(0.0, 1 - spread), value * (1 + spread))

    *parts, last = control.rows
    published = control.fixed * lane.shards + sum(parts) / lane.sampled * by_shard + last * controlled
    return lane._replace(
        tokens=scaled(sum(tokens), control.tokens),
        bytes=scaled(_bytes(groups), _bytes([control]), published),
        seconds=scaled(sum(cost.seconds for cost in groups), control.seconds),
        spent=sum(tokens) + control.tokens,
    )


class _Cost(NamedTuple):
    """What annotating texts cost.

    stored: rows that were appended, by row store; fixed: bytes of the parts of all stages, without rows, and of their
    pointers; rows: bytes of each stage's rows.
    """

    tokens: int
    seconds: float
    stored: Mapping[str, list[pl.DataFrame]]
    fixed: int
    rows: Sequence[int]


def _bytes(costs: Sequence[_Cost]) -> int:
    """The bytes of what was stored, a file per row store, as after merging."""
    names = dict.fromkeys(name for cost in costs for name in cost.stored)
    frames = [[frame for cost in costs for frame in cost.stored.get(name, ())] for name in names]
    return sum(len(parquet.encode(pl.concat(of_store))) for of_store in frames)


def _annotated(worker: Worker, lane: Lane, texts: pl.DataFrame, stages: Sequence[Stage], progress: Progress) -> _Cost:
    """Annotate texts up to the last of the stages, as the only shard of a lake of its own."""
    with trial(worker, lane, texts, stages, progress, worker.plan.lake) as made:
        pointers = [one.table.pointer(ALL) for one in made.outputs]
        lines = [pointer.encode(one.name, ALL) for pointer, one in zip(pointers, made.outputs, strict=True)]
    empty = [len(parquet.encode(stage.schema.to_frame())) for stage in stages]
    return _Cost(
        sum(token_count(report.work.tokens) for report in made.reports),
        sum(report.seconds for report in made.reports),
        made.appended,
        sum(empty) + sum(map(len, lines)),
        [sum(file.bytes - none for file in one.files) for one, none in zip(pointers, empty, strict=True)],
    )
