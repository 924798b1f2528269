"""What a run will cost, forecast from a sample of its texts that is annotated for real.

The rows of the sample are stored, so the run that follows does not compute them again. Covered: tokens, storage and
time of annotating. Not covered: finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.forecast_range import GROUPS, Range, range_of, spread
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

TEXTS = 256
"""Texts of a lane that are annotated, at most."""
SHARE = 5
"""At most one text in so many is annotated."""


class LaneForecast(NamedTuple):
    """What annotating a lane will cost, beyond what the sample has cost already.

    Of four texts or fewer, and of a lane with calls of a file, there is no sample: everything but `texts` and `shards`
    is 0 then.
    """

    lane: str
    texts: int  # distinct texts of the stale shards
    sampled: int = 0  # how many of them were annotated
    tokens: Range = Range()  # that will go through the model
    bytes: Range = Range()  # that will be added to the lane's tables and row stores
    seconds: Range = Range()  # that will pass on one worker
    spent: int = 0  # tokens that the sample took
    shards: int = 0  # that are stale


def estimate(
    worker: Worker, workers: Workers, outputs: Sequence[TableOutput], progress: Progress, seed: int | None = None
) -> list[LaneForecast]:
    """Forecast what annotating will cost, for each lane (a tool with its thresholds), from a sample that is annotated.

    The tables before annotation (documents, the texts of each tool) are brought up to date first. The sample is drawn
    from the texts of shards that a run would make again.

    outputs: the tables of a plan, each after those that it reads.
    seed: draws the same texts each time. Without a seed each forecast draws other texts; else the texts of an earlier
        forecast, whose rows are stored and cost nothing more, would be drawn again.

    Raises what the stages raise.
    """
    tables_of_lanes: dict[str, dict[str, TableOutput]] = {}  # key of the lane -> name of the stage -> table
    for output in outputs:
        if output.lane_or_none is not None:
            tables_of_lanes.setdefault(output.lane.key, {})[output.stage.name] = output
    for output in outputs:
        makes_documents = output.group == "ccnet" and output.stage.name != "heldout_texts"
        makes_texts = output.stage is heuristic_subset.STAGE
        if makes_documents or makes_texts:
            update(worker, workers, output, progress)
    return [_forecast(worker, tables, progress, seed) for tables in tables_of_lanes.values()]


def _measured_stages(plan: Plan, lane: Lane) -> tuple[Stage, ...]:
    """Return the stages of a lane whose cost is forecast: from proposing calls to the control, which is the last.

    The control scores calls again with results of other texts of their shard.
    """
    stages = lane_stages(plan, lane)
    end = stages.index(swapped_results.STAGE) + 1
    return stages[1:end]  # without the first, which selects texts


def _forecast(worker: Worker, tables: Mapping[str, TableOutput], progress: Progress, seed: int | None) -> LaneForecast:
    """Annotate a sample of a lane's texts, and scale what that cost to all of them.

    tables: the lane's tables by the names of their stages.

    The sample is annotated in GROUPS groups of equal size, whose different costs give the range of the forecast. The
    control (calls scored again with results of other texts) needs the calls of many texts: it runs last, over the whole
    sample, whose other rows are stored by then. So the second run costs what the control costs.
    """
    subset = tables[heuristic_subset.STAGE.name]
    lane = subset.lane
    stages = _measured_stages(subset.plan, lane)
    *stages_before_control, _ = stages
    stale_shards = [shard for shard in subset.parts if _is_stale(tables, stages, shard)]
    rows = pl.concat([subset.stage.schema.to_frame(), *(subset.table.read(shard) for shard in stale_shards)])
    texts = _shuffled_texts(rows, seed)
    if texts.height <= GROUPS or lane.sources.files:  # no sample, see LaneForecast
        return LaneForecast(lane.key, texts=texts.height, shards=len(stale_shards))

    group_size = _group_size(texts.height)
    sample = texts[: group_size * GROUPS]
    worker.engine("proposer" if lane.sources.sampled else "judge")  # loaded before anything is timed
    groups = [
        _annotate(worker, lane, group, stages_before_control, progress) for group in sample.iter_slices(group_size)
    ]
    control = _annotate(worker, lane, sample, stages, progress)
    counts = _counts(worker.plan, rows, sample=sample, stale_shards=len(stale_shards))
    return _scaled(lane, counts, groups, control)


def _shuffled_texts(rows: pl.DataFrame, seed: int | None) -> pl.DataFrame:
    """Return the distinct texts among rows of heuristic_subset in a random order, the same for the same seed."""
    texts = rows.unique("text_digest", keep="first", maintain_order=True).sort("text_digest")
    return texts.sample(fraction=1, shuffle=True, seed=seed)


def _group_size(text_count: int) -> int:
    """Return how many texts a group of the sample has: 51 of 1,024 texts, of which 1 in SHARE is annotated."""
    most_sampled = min(TEXTS, text_count // SHARE)
    return max(1, most_sampled // GROUPS)


def _is_stale(tables: Mapping[str, TableOutput], stages: Sequence[Stage], shard: str) -> bool:
    """Return whether a run would make a shard of one of the stages again."""
    return any(difference(tables[stage.name], shard) for stage in stages)


class _Counts(NamedTuple):
    """How many texts were annotated, and how many there are.

    The control scores calls again with results of other texts. It takes the calls of up to `evaluation.swapped_texts`
    texts of each shard, which are its texts.
    """

    sampled: int  # annotated texts
    distinct: int  # distinct texts of the stale shards
    in_shards: int  # the sum over the shards of their distinct texts
    sampled_control: int  # texts of the control in the sample
    control: int  # texts of the control in all shards
    shards: int  # stale shards


def _counts(plan: Plan, rows: pl.DataFrame, *, sample: pl.DataFrame, stale_shards: int) -> _Counts:
    """Count the texts that were annotated and those that a run will annotate.

    rows: the texts of all stale shards (shard, text_digest, ...), a row per occurrence. sample: the annotated ones.
    """
    control_texts = plan.settings.evaluation.swapped_texts  # of each shard, at most
    distinct = rows.unique("text_digest")
    texts_of_shards = distinct.group_by("shard").len()["len"]
    return _Counts(
        sampled=sample.height,
        distinct=distinct.height,
        in_shards=rows.select("shard", "text_digest").n_unique(),
        sampled_control=min(control_texts, sample.height),
        control=sum(min(control_texts, count) for count in texts_of_shards),
        shards=stale_shards,
    )


def _scaled(lane: Lane, counts: _Counts, groups: "Sequence[_Cost]", control: "_Cost") -> LaneForecast:
    """Scale the cost of the sample to all texts that a run will annotate.

    Tokens, seconds and stored rows grow with the distinct texts that were not sampled. The control (calls scored again
    with results of other texts) has its own number of texts. The bytes of tables: see `_table_bytes`.

    groups: what annotating each of the GROUPS parts of the sample cost, without the control.
    control: what annotating the whole sample cost after that. Everything but the control was stored by then, so its
        tokens, seconds and stored rows are those of the control; its bytes are those of all tables.
    """
    factor = _Factor(
        texts=(counts.distinct - counts.sampled) / counts.sampled,
        control=counts.control / counts.sampled_control,
        spread=spread([cost.tokens for cost in groups]),
    )
    table_bytes = _table_bytes(control, counts, factor)
    group_tokens = sum(cost.tokens for cost in groups)
    group_seconds = sum(cost.seconds for cost in groups)
    return LaneForecast(
        lane=lane.key,
        texts=counts.distinct,
        sampled=counts.sampled,
        tokens=factor.scaled(group_tokens, control.tokens),
        bytes=factor.scaled(_stored_bytes(groups), _stored_bytes([control]), fixed=table_bytes),
        seconds=factor.scaled(group_seconds, control.seconds),
        spent=group_tokens + control.tokens,
        shards=counts.shards,
    )


def _table_bytes(control: "_Cost", counts: _Counts, factor: "_Factor") -> float:
    """Return the bytes of the tables of all shards: a text in two shards is computed once, but stands in two tables.

    control: the cost of annotating the whole sample; the control's table is the last in `row_bytes`.
    """
    *stage_bytes, control_bytes = control.row_bytes
    bytes_per_text = sum(stage_bytes) / counts.sampled
    return control.fixed_bytes * counts.shards + bytes_per_text * counts.in_shards + control_bytes * factor.control


class _Factor(NamedTuple):
    """By how much the sample's cost is multiplied."""

    texts: float  # for the texts that are not sampled
    control: float  # for the control
    spread: float  # half of the 95 % interval, as a share

    def scaled(self, of_groups: float, of_control: float, fixed: float = 0) -> Range:
        """Return the forecast, from what the groups and the control cost; `fixed` is added as it is."""
        value = of_groups * self.texts + of_control * self.control + fixed
        return range_of(value, self.spread)


class _Cost(NamedTuple):
    """What annotating texts cost."""

    tokens: int  # that went through the model
    seconds: float
    stored: Mapping[str, list[pl.DataFrame]]  # rows that were appended, by row store
    fixed_bytes: int  # what each shard takes whatever its rows: an empty file and a manifest line for every table
    row_bytes: Sequence[int]  # what the rows take beyond that, a number per table, in the order of the stages


def _stored_bytes(costs: Sequence[_Cost]) -> int:
    """Return the bytes of the rows that were stored, with a file per row store, as after merging."""
    frames_of: dict[str, list[pl.DataFrame]] = {}
    for cost in costs:
        for store, frames in cost.stored.items():
            frames_of.setdefault(store, []).extend(frames)
    return sum(len(parquet.encode(pl.concat(frames))) for frames in frames_of.values())


def _annotate(worker: Worker, lane: Lane, texts: pl.DataFrame, stages: Sequence[Stage], progress: Progress) -> _Cost:
    """Run stages over texts and measure what it costs.

    The tables are made in a temporary folder and are gone afterwards; what model and tools computed is stored in the
    project's lake, so that a run does not compute it again.
    """
    with trial(worker, lane, texts, stages, progress, worker.plan.lake) as annotated:
        pointers = [output.table.pointer(ALL) for output in annotated.outputs]
        pairs = zip(pointers, annotated.outputs, strict=True)
        manifest_lines = [pointer.encode(output.name, ALL) for pointer, output in pairs]
    # What a Parquet file of each table takes without rows.
    empty_bytes = [len(parquet.encode(stage.schema.to_frame())) for stage in stages]
    row_bytes = []
    for pointer, empty in zip(pointers, empty_bytes, strict=True):
        row_bytes.append(sum(file.bytes - empty for file in pointer.files))
    return _Cost(
        tokens=sum(token_count(report.work.tokens) for report in annotated.reports),
        seconds=sum(report.seconds for report in annotated.reports),
        stored=annotated.appended,
        fixed_bytes=sum(empty_bytes) + sum(len(line) for line in manifest_lines),
        row_bytes=row_bytes,
    )
