"""Forecast what a run will cost, from a sample of its texts that is annotated for real.

The rows of the sample are stored, so that the run does not compute them again. The forecast covers the tokens, storage
and time of annotating, but not finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.forecast_range import GROUPS, Range, build_range, spread
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.reasons import difference
from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import Progress, update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers
from toolformer_dag.lake import parquet
from toolformer_dag.pipeline import controls, heuristic_subset
from toolformer_dag.pipeline.stages import list_lane_stages
from toolformer_dag.pipeline.trial import ALL, trial

TEXTS = 256
"""Texts of a lane that are annotated, at most."""
SHARE = 5
"""At most one text in so many is annotated."""


class LaneForecast(NamedTuple):
    """What annotating a lane (a tool with its settings) will cost, beyond what the sample has cost already.

    For four texts or fewer, and for a lane with calls of a file, there is no sample: everything but `texts` and
    `shards` is 0 then.
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
    """Forecast what it will cost to annotate the texts of each lane (a tool with its settings).

    To this end a sample of the texts is annotated. It is drawn from the shards that a run would make again. The tables
    before annotation are brought up to date first.

    Args:
        outputs: The tables of a plan. Each comes after the tables that it reads.
        seed: With the same seed, the same texts are sampled. Without a seed every forecast samples other texts. This is
            useful because texts that an earlier forecast has annotated cost nothing any more.

    Raises:
        Exception: Anything that the stages raise.
    """
    for output in outputs:
        if _is_made_before_annotation(output):
            update(worker, workers, output, progress)

    tables_by_lane = _group_tables_by_lane(outputs)
    return [_forecast_lane(worker, tables, progress, seed) for tables in tables_by_lane.values()]


def _is_made_before_annotation(output: TableOutput) -> bool:
    """Return whether a table is made before annotation: documents, or the texts of a tool."""
    holds_documents = output.group == "ccnet" and output.stage.name != "heldout_texts"
    return holds_documents or output.stage is heuristic_subset.STAGE


def _group_tables_by_lane(outputs: Sequence[TableOutput]) -> dict[str, dict[str, TableOutput]]:
    """Group the tables of lanes: key of the lane -> name of the stage -> table."""
    tables_of_lanes: dict[str, dict[str, TableOutput]] = {}
    for output in outputs:
        if output.lane_or_none is not None:
            tables_of_lanes.setdefault(output.lane.key, {})[output.stage.name] = output
    return tables_of_lanes


class _MeasuredStages(NamedTuple):
    """The stages of a lane (a tool with its settings) whose cost is forecast, in the order in which they run."""

    annotating: Sequence[Stage]  # from proposing calls to scoring them
    controls: Sequence[Stage]  # score calls again with other results

    @property
    def all(self) -> list[Stage]:
        """All stages, the controls last."""
        return [*self.annotating, *self.controls]


def _select_measured_stages(plan: Plan, lane: Lane) -> _MeasuredStages:
    """Select the stages of a lane (a tool with its settings) whose cost is forecast.

    These are all but the first stage, which selects texts, and the last, which filters calls.
    """
    _, *stages, _ = list_lane_stages(plan, lane)
    control_names = {name for control in controls.CONTROLS for name in control.table_names(lane)}
    return _MeasuredStages(
        annotating=[stage for stage in stages if stage.name not in control_names],
        controls=[stage for stage in stages if stage.name in control_names],
    )


def _forecast_lane(
    worker: Worker, tables: Mapping[str, TableOutput], progress: Progress, seed: int | None
) -> LaneForecast:
    """Forecast what it will cost to annotate all texts of a lane (a tool with its settings).

    A sample of the texts is annotated, and its cost is scaled up.

    Args:
        tables: The tables of the lane, by the names of their stages.
        seed: Determines which texts are sampled.
    """
    texts_table = tables[heuristic_subset.STAGE.name]
    lane = texts_table.lane
    stages = _select_measured_stages(texts_table.plan, lane)

    stale_shards = _list_stale_shards(tables, stages.all)  # the shards that a run would make again
    rows = _read_rows_of_shards(texts_table, stale_shards)

    sample = _draw_sample(lane, rows, seed)
    if sample.is_empty():
        text_count = rows["text_digest"].n_unique()
        return LaneForecast(lane.key, texts=text_count, shards=len(stale_shards))

    cost = _annotate_sample(worker, lane, sample, stages, progress)
    counts = _count_texts(worker.plan, rows, sample=sample, stale_shards=len(stale_shards))
    return _scale_cost(lane, counts, cost)


def _draw_sample(lane: Lane, rows: pl.DataFrame, seed: int | None) -> pl.DataFrame:
    """Return the texts to annotate, in GROUPS equal groups; none where the lane has no sample (see LaneForecast)."""
    texts = _shuffle_texts(rows, seed)
    has_calls_of_files = bool(lane.sources.files)
    if texts.height <= GROUPS or has_calls_of_files:
        return texts.clear()
    return texts[: _compute_group_size(texts.height) * GROUPS]


def _read_rows_of_shards(output: TableOutput, shards: Sequence[str]) -> pl.DataFrame:
    """Return the rows of some shards of a table."""
    no_rows = output.stage.schema.to_frame()
    return pl.concat([no_rows, *(output.table.read(shard) for shard in shards)])


def _annotate_sample(
    worker: Worker, lane: Lane, sample: pl.DataFrame, stages: _MeasuredStages, progress: Progress
) -> "_SampleCost":
    """Annotate a sample of texts, and measure what it costs.

    This is done three times. What one time has computed is stored, and costs nothing the next time.
    1. In GROUPS groups of equal size. Their different costs show how much the cost varies.
    2. The whole sample at once, to compute what depends on all of its texts together.
    3. The whole sample with the controls, which score calls again with other results. They need the calls of many
       texts, so they are not run on single groups.
    """
    # Loads the model before anything is timed.
    worker.engine("proposer" if lane.sources.sampled else "judge")

    groups = []
    group_size = sample.height // GROUPS  # there is no remainder, see `_draw_sample`
    for texts in sample.iter_slices(group_size):
        group_cost = _measure_annotation(worker, lane, texts, stages.annotating, progress)
        groups.append(group_cost)

    joined = _measure_annotation(worker, lane, sample, stages.annotating, progress)
    with_controls = _measure_annotation(worker, lane, sample, stages.all, progress)
    return _SampleCost(groups, joined, controls=with_controls, control_count=len(stages.controls))


def _shuffle_texts(rows: pl.DataFrame, seed: int | None) -> pl.DataFrame:
    """Return the distinct texts among rows of heuristic_subset in a random order, the same for the same seed."""
    texts = rows.unique("text_digest", keep="first", maintain_order=True).sort("text_digest")
    return texts.sample(fraction=1, shuffle=True, seed=seed)


def _compute_group_size(text_count: int) -> int:
    """Return how many texts a group of the sample has: 51 of 1,024 texts, where one in SHARE is annotated."""
    most_sampled = min(TEXTS, text_count // SHARE)
    return max(1, most_sampled // GROUPS)


def _list_stale_shards(tables: Mapping[str, TableOutput], stages: Sequence[Stage]) -> list[str]:
    """Return the shards that a run would make again for one of the stages."""
    outputs = [tables[stage.name] for stage in stages]
    shards = outputs[0].parts  # all stages of a lane have the same
    return [shard for shard in shards if any(difference(output, shard) for output in outputs)]


class _Counts(NamedTuple):
    """How many texts were annotated, and how many there are.

    A control scores calls again with other results: those of up to `evaluation.swapped_texts` texts a shard.
    """

    sampled: int  # annotated texts
    distinct: int  # distinct texts of the stale shards
    in_shards: int  # the sum over the shards of their distinct texts
    sampled_control: int  # texts of each control in the sample
    control: int  # texts of each control in all shards
    shards: int  # stale shards


def _count_texts(plan: Plan, rows: pl.DataFrame, *, sample: pl.DataFrame, stale_shards: int) -> _Counts:
    """Count the texts that were annotated as a sample, and the texts that a run will annotate.

    The texts of a control are counted apart. A control scores the calls of some texts again, with other results.

    Args:
        rows: The texts of all stale shards (shard, text_digest, ...), with a row for each time that a text occurs.
        sample: The annotated texts.
        stale_shards: The number of shards that a run would make again.
    """
    distinct_texts = rows.unique("text_digest")
    texts_per_shard = distinct_texts.group_by("shard").len()["len"]
    max_control_texts = plan.settings.evaluation.swapped_texts  # in a shard

    return _Counts(
        sampled=sample.height,
        distinct=distinct_texts.height,
        in_shards=rows.select("shard", "text_digest").n_unique(),  # a text in two shards counts twice
        sampled_control=min(max_control_texts, sample.height),  # the sample is annotated as one shard
        control=sum(min(max_control_texts, text_count) for text_count in texts_per_shard),
        shards=stale_shards,
    )


def _scale_cost(lane: Lane, counts: _Counts, cost: "_SampleCost") -> LaneForecast:
    """Forecast what all texts of a lane (a tool with its settings) will cost, from the cost of a sample.

    The tokens, the seconds and the bytes of stored rows are each the sum of three parts:
    - The cost of the sample's groups, times (distinct texts that were not sampled) / (sampled texts).
    - The cost of the controls, times (their texts in all shards) / (their texts in the sample). Controls score calls
      again with other results.
    - The cost of joining the groups to the whole sample, once. The run has to join the sample to all other texts too.

    The bytes of the tables themselves are estimated apart, and added.
    """
    factor = _compute_factor(counts, cost)

    table_bytes = _estimate_table_bytes(cost, counts, factor)
    stored_bytes = factor.scaled(
        of_groups=_measure_stored_bytes(cost.groups),
        of_controls=_measure_stored_bytes([cost.controls]),
        fixed=_measure_stored_bytes([cost.joined]) + table_bytes,
    )

    tokens = factor.scaled(cost.group_tokens, cost.controls.tokens, fixed=cost.joined.tokens)
    seconds = factor.scaled(cost.group_seconds, cost.controls.seconds, fixed=cost.joined.seconds)
    return LaneForecast(
        lane=lane.key,
        texts=counts.distinct,
        sampled=counts.sampled,
        tokens=tokens,
        bytes=stored_bytes,
        seconds=seconds,
        spent=cost.group_tokens + cost.joined.tokens + cost.controls.tokens,
        shards=counts.shards,
    )


def _compute_factor(counts: _Counts, cost: "_SampleCost") -> "_Factor":
    """Return by how much the sample's cost is multiplied; the groups' different costs give the spread."""
    return _Factor(
        texts=(counts.distinct - counts.sampled) / counts.sampled,
        control=counts.control / counts.sampled_control,
        spread=spread([group.tokens for group in cost.groups]),
    )


def _estimate_table_bytes(cost: "_SampleCost", counts: _Counts, factor: "_Factor") -> float:
    """Return the bytes of the tables of all shards. A text in two shards is computed once, but stored in two tables."""
    bytes_per_text = cost.annotated_bytes / counts.sampled
    fixed_bytes = cost.controls.fixed_bytes * counts.shards
    return fixed_bytes + bytes_per_text * counts.in_shards + cost.control_bytes * factor.control


class _Factor(NamedTuple):
    """By how much the sample's cost is multiplied."""

    texts: float  # for the texts that are not sampled
    control: float  # for the controls
    spread: float  # half of the 95 % interval, as a share

    def scaled(self, of_groups: float, of_controls: float, fixed: float = 0) -> Range:
        """Return of_groups * texts + of_controls * control + fixed, with its 95 % interval."""
        value = of_groups * self.texts + of_controls * self.control + fixed
        return build_range(value, self.spread)


class _Cost(NamedTuple):
    """What annotating texts cost."""

    tokens: int  # that went through the model
    seconds: float
    stored: Mapping[str, list[pl.DataFrame]]  # rows that were appended, by row store
    fixed_bytes: int  # what each shard takes whatever its rows: an empty file and a manifest line for every table
    row_bytes: Sequence[int]  # what the rows take beyond that, a number per table, in the order of the stages


class _SampleCost(NamedTuple):
    """What annotating the sample cost.

    - groups: the cost of each part of the sample, without the controls
    - joined: the cost of annotating the whole sample after that, without the controls. Most of it is stored by then; a
      score of chains is computed again, since it depends on the other chains of its shard
    - controls: the cost of annotating the whole sample again with the controls. Everything else was stored by then, so
      its tokens, seconds and stored rows are those of the controls; its bytes are those of all tables
    - control_count: how many of these tables, the last ones, are those of controls
    """

    groups: Sequence[_Cost]
    joined: _Cost
    controls: _Cost
    control_count: int

    @property
    def group_tokens(self) -> int:
        """The tokens of all groups."""
        return sum(group.tokens for group in self.groups)

    @property
    def group_seconds(self) -> float:
        """The seconds of all groups."""
        return sum(group.seconds for group in self.groups)

    @property
    def annotated_bytes(self) -> int:
        """The bytes of the rows of the whole sample in all tables but those of controls."""
        return sum(self.controls.row_bytes[: -self.control_count])

    @property
    def control_bytes(self) -> int:
        """The bytes of the rows of the whole sample in the tables of controls."""
        return sum(self.controls.row_bytes[-self.control_count :])


def _measure_stored_bytes(costs: Sequence[_Cost]) -> int:
    """Return the bytes of the rows that were stored, as if each row store had a single file."""
    frames_of: dict[str, list[pl.DataFrame]] = {}
    for cost in costs:
        for store, frames in cost.stored.items():
            frames_of.setdefault(store, []).extend(frames)
    return sum(len(parquet.encode(pl.concat(frames))) for frames in frames_of.values())


def _measure_annotation(
    worker: Worker, lane: Lane, texts: pl.DataFrame, stages: Sequence[Stage], progress: Progress
) -> _Cost:
    """Run some stages on texts, and measure what it costs.

    The tables of the stages are temporary. What the model and the tools compute is stored in the project's lake (its
    folder of tables), so that a later run can use it.
    """
    with trial(worker, lane, texts, stages, progress, worker.plan.lake) as annotated:
        table_sizes = [_measure_table_size(output) for output in annotated.outputs]  # before the tables are deleted

    return _Cost(
        tokens=sum(token_count(report.work.tokens) for report in annotated.reports),
        seconds=sum(report.seconds for report in annotated.reports),
        stored=annotated.appended,
        fixed_bytes=sum(size.fixed_bytes for size in table_sizes),
        row_bytes=[size.row_bytes for size in table_sizes],
    )


class _TableSize(NamedTuple):
    """The bytes of a table with one part."""

    fixed_bytes: int  # whatever its rows: a file without rows, and its line in the manifest
    row_bytes: int  # beyond the files without rows


def _measure_table_size(output: TableOutput) -> _TableSize:
    """Measure the bytes of a table that has a single part."""
    pointer = output.table.pointer(ALL)
    manifest_line = pointer.encode(output.name, ALL)
    empty_bytes = len(parquet.encode(output.stage.schema.to_frame()))
    return _TableSize(
        fixed_bytes=empty_bytes + len(manifest_line),
        row_bytes=sum(file.bytes - empty_bytes for file in pointer.files),
    )
