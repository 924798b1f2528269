"""Forecast what a run will cost, from a sample of its texts that is annotated for real.

The rows of the sample are stored, so that the run does not compute them again. The forecast covers the tokens, storage
and time of annotating, but not finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import polars as pl

from toolformer_dag.computing.forecast_range import GROUP_COUNT, Range, build_range, compute_relative_half_interval
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.reasons import find_part_differences
from toolformer_dag.computing.spending import sum_token_counts
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import ProgressCallback, update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers
from toolformer_dag.lake import parquet
from toolformer_dag.pipeline import controls, heuristic_subset
from toolformer_dag.pipeline.stages import list_lane_stages
from toolformer_dag.pipeline.trial import TRIAL_SHARD, run_trial

MAX_SAMPLED_TEXTS = 256
"""Texts of a lane that are annotated, at most."""
TEXTS_PER_SAMPLED_TEXT = 5
"""At most one text in so many is annotated."""


class LaneForecast(NamedTuple):
    """What annotating a lane (a tool with its settings) will cost, beyond what the sample has cost already.

    For four texts or fewer, and for a lane with calls of a file, there is no sample: everything but `text_count` and
    `stale_shard_count` is 0 then.
    """

    lane_key: str
    text_count: int  # distinct texts of the stale shards
    sampled_text_count: int = 0  # how many of them were annotated
    tokens: Range = Range()  # that will go through the model
    bytes: Range = Range()  # that will be added to the lane's tables and row stores
    seconds: Range = Range()  # that will pass on one worker
    sample_tokens: int = 0  # tokens that the sample took
    stale_shard_count: int = 0  # that are stale


def forecast_annotation(
    worker: Worker,
    workers: Workers,
    outputs: Sequence[TableOutput],
    progress: ProgressCallback,
    seed: int | None = None,
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
            update_table(worker, workers, output, progress)

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

    annotation: Sequence[Stage]  # from proposing calls to scoring them
    controls: Sequence[Stage]  # score calls again with other results

    @property
    def all_stages(self) -> list[Stage]:
        """All stages, the controls last."""
        return [*self.annotation, *self.controls]


def _select_measured_stages(plan: Plan, lane: Lane) -> _MeasuredStages:
    """Select the stages of a lane (a tool with its settings) whose cost is forecast.

    These are all but the first stage, which selects texts, and the last, which filters calls. A control is a stage that
    scores calls again with results that cannot help, to see how many pass by chance.
    """
    _, *stages, _ = list_lane_stages(plan, lane)
    control_names = {name for control in controls.CONTROLS for name in control.list_table_names(lane)}
    return _MeasuredStages(
        annotation=[stage for stage in stages if stage.name not in control_names],
        controls=[stage for stage in stages if stage.name in control_names],
    )


def _forecast_lane(
    worker: Worker, output_by_stage: Mapping[str, TableOutput], progress: ProgressCallback, seed: int | None
) -> LaneForecast:
    """Forecast what it will cost to annotate all texts of a lane (a tool with its settings).

    A sample of the texts is annotated, and its cost is scaled up.

    Args:
        output_by_stage: The tables of the lane, by the names of their stages.
        seed: Determines which texts are sampled.
    """
    texts_table = output_by_stage[heuristic_subset.STAGE.name]
    lane = texts_table.lane
    stages = _select_measured_stages(texts_table.plan, lane)

    # A stale shard is one that a run would make again.
    stale_shards = _list_stale_shards(output_by_stage, stages.all_stages)
    text_rows = _read_rows_of_shards(texts_table, stale_shards)

    sample = _draw_sample(lane, text_rows, seed)
    if sample.is_empty():
        text_count = text_rows["text_digest"].n_unique()
        return LaneForecast(lane.key, text_count=text_count, stale_shard_count=len(stale_shards))

    sample_cost = _annotate_sample(worker, lane, sample, stages, progress)
    text_counts = _count_sampled_and_all_texts(
        worker.plan, text_rows, sample=sample, stale_shard_count=len(stale_shards)
    )
    return _forecast_from_sample(lane, text_counts, sample_cost)


def _draw_sample(lane: Lane, text_rows: pl.DataFrame, seed: int | None) -> pl.DataFrame:
    """Draw the texts that are annotated to forecast the cost of all texts: GROUP_COUNT groups of equal size.

    Returns:
        Rows of `text_rows` in random order. There are none, and so no forecast, if there are too few texts, or if the
        lane (a tool with its settings) gets calls from files.
    """
    shuffled_texts = _shuffle_texts(text_rows, seed)
    has_calls_of_files = bool(lane.call_sources.file_paths_by_name)
    if shuffled_texts.height <= GROUP_COUNT or has_calls_of_files:
        return shuffled_texts.clear()

    sample_size = _compute_group_size(shuffled_texts.height) * GROUP_COUNT
    return shuffled_texts[:sample_size]


def _read_rows_of_shards(output: TableOutput, shards: Sequence[str]) -> pl.DataFrame:
    """Return the rows of some shards of a table."""
    no_rows = output.stage.schema.to_frame()
    return pl.concat([no_rows, *(output.table.read_part(shard) for shard in shards)])


def _annotate_sample(
    worker: Worker, lane: Lane, sample: pl.DataFrame, stages: _MeasuredStages, progress: ProgressCallback
) -> "_SampleCost":
    """Annotate a sample of texts, and measure what it costs.

    This is done three times. What one time has computed is stored, and costs nothing the next time.
    1. In GROUP_COUNT groups of equal size. Their different costs show how much the cost varies.
    2. The whole sample at once, to compute what depends on all of its texts together.
    3. The whole sample with the controls, which score calls again with other results. They need the calls of many
       texts, so they are not run on single groups.
    """
    # Loads the model before anything is timed.
    worker.get_engine("proposer" if lane.call_sources.is_sampled else "judge")

    group_costs = []
    group_size = sample.height // GROUP_COUNT  # there is no remainder, see `_draw_sample`
    for group_texts in sample.iter_slices(group_size):
        group_cost = _measure_annotation(worker, lane, group_texts, stages.annotation, progress)
        group_costs.append(group_cost)

    whole_sample_cost = _measure_annotation(worker, lane, sample, stages.annotation, progress)
    control_cost = _measure_annotation(worker, lane, sample, stages.all_stages, progress)
    return _SampleCost(
        group_costs, whole_sample_cost, control_cost=control_cost, control_table_count=len(stages.controls)
    )


def _shuffle_texts(text_rows: pl.DataFrame, seed: int | None) -> pl.DataFrame:
    """Return the distinct texts among rows of heuristic_subset in a random order, the same for the same seed."""
    texts = text_rows.unique("text_digest", keep="first", maintain_order=True).sort("text_digest")
    return texts.sample(fraction=1, shuffle=True, seed=seed)


def _compute_group_size(text_count: int) -> int:
    """Return how many texts each group of the sample has, such as 51 for a lane with 1,024 texts.

    One in TEXTS_PER_SAMPLED_TEXT is annotated.
    """
    max_sample_size = min(MAX_SAMPLED_TEXTS, text_count // TEXTS_PER_SAMPLED_TEXT)
    return max(1, max_sample_size // GROUP_COUNT)


def _list_stale_shards(output_by_stage: Mapping[str, TableOutput], stages: Sequence[Stage]) -> list[str]:
    """Return the shards that a run would make again for one of the stages."""
    outputs = [output_by_stage[stage.name] for stage in stages]

    stale_shards = []
    for shard in outputs[0].parts:  # all stages of a lane have the same shards
        is_stale = any(find_part_differences(output, shard) for output in outputs)
        if is_stale:
            stale_shards.append(shard)
    return stale_shards


class _TextCounts(NamedTuple):
    """How many texts were annotated, and how many there are.

    A control scores calls again with other results: those of up to `evaluation.swapped_texts` texts in each shard.

    Attributes:
        sampled_texts: The annotated texts.
        distinct_texts: The distinct texts of the stale shards, which a run would make again.
        texts_in_shards: The sum over the stale shards of their distinct texts.
        sampled_control_texts: The texts of each control in the sample.
        control_texts: The texts of each control in all stale shards.
        stale_shards: The number of stale shards.
    """

    sampled_texts: int
    distinct_texts: int
    texts_in_shards: int
    sampled_control_texts: int
    control_texts: int
    stale_shards: int


def _count_sampled_and_all_texts(
    plan: Plan, text_rows: pl.DataFrame, *, sample: pl.DataFrame, stale_shard_count: int
) -> _TextCounts:
    """Count the texts of the sample and those that a run will annotate, to scale the cost of the sample up.

    The texts of a control are counted apart. It scores calls again with other results, and takes those of at most
    `evaluation.swapped_texts` texts of a shard.

    Args:
        text_rows: The texts of all stale shards (shard, text_digest, ...), with a row for each time that a text occurs.
        sample: The annotated texts.
        stale_shard_count: The number of shards (files of the corpus) that a run would make again.
    """
    distinct_texts = text_rows.unique("text_digest")
    texts_per_shard = distinct_texts.group_by("shard").len()["len"]  # each text only in one of its shards
    max_control_texts = plan.settings.evaluation.swapped_texts  # in a shard

    return _TextCounts(
        sampled_texts=sample.height,
        distinct_texts=distinct_texts.height,
        texts_in_shards=text_rows.select("shard", "text_digest").n_unique(),  # a text in two shards counts twice
        sampled_control_texts=min(max_control_texts, sample.height),  # the sample is annotated as one shard
        control_texts=sum(min(max_control_texts, text_count) for text_count in texts_per_shard),
        stale_shards=stale_shard_count,
    )


def _forecast_from_sample(lane: Lane, text_counts: _TextCounts, sample_cost: "_SampleCost") -> LaneForecast:
    """Forecast what all texts of a lane (a tool with its settings) will cost, from the cost of a sample.

    The tokens, the seconds and the bytes of stored rows are each the sum of three parts:
    - The cost of the sample's groups, times (distinct texts that were not sampled) / (sampled texts). A group is a part
      of the sample that was annotated by itself.
    - The cost of the controls, times (their texts in all shards) / (their texts in the sample). Controls score calls
      again with other results.
    - The cost of joining the groups to the whole sample, once. The run has to join the sample to all other texts too.

    The bytes of the tables themselves are estimated apart, and added.
    """
    scale_factors = _compute_scale_factors(text_counts, sample_cost)

    table_bytes = _estimate_table_bytes(sample_cost, text_counts, scale_factors)
    stored_bytes = scale_factors.scale_cost(
        group_cost=_measure_stored_bytes(sample_cost.group_costs),
        control_cost=_measure_stored_bytes([sample_cost.control_cost]),
        fixed_cost=_measure_stored_bytes([sample_cost.whole_sample_cost]) + table_bytes,
    )

    tokens = scale_factors.scale_cost(
        group_cost=sample_cost.group_tokens,
        control_cost=sample_cost.control_cost.tokens,
        fixed_cost=sample_cost.whole_sample_cost.tokens,
    )
    seconds = scale_factors.scale_cost(
        group_cost=sample_cost.group_seconds,
        control_cost=sample_cost.control_cost.seconds,
        fixed_cost=sample_cost.whole_sample_cost.seconds,
    )
    return LaneForecast(
        lane_key=lane.key,
        text_count=text_counts.distinct_texts,
        sampled_text_count=text_counts.sampled_texts,
        tokens=tokens,
        bytes=stored_bytes,
        seconds=seconds,
        sample_tokens=sample_cost.group_tokens + sample_cost.whole_sample_cost.tokens + sample_cost.control_cost.tokens,
        stale_shard_count=text_counts.stale_shards,
    )


def _compute_scale_factors(text_counts: _TextCounts, sample_cost: "_SampleCost") -> "_ScaleFactors":
    """Return by how much the sample's cost is multiplied. The groups' different costs give the spread."""
    unsampled_texts = text_counts.distinct_texts - text_counts.sampled_texts
    tokens_of_groups = [group_cost.tokens for group_cost in sample_cost.group_costs]
    return _ScaleFactors(
        text_factor=unsampled_texts / text_counts.sampled_texts,
        control_factor=text_counts.control_texts / text_counts.sampled_control_texts,
        relative_spread=compute_relative_half_interval(tokens_of_groups),
    )


def _estimate_table_bytes(
    sample_cost: "_SampleCost", text_counts: _TextCounts, scale_factors: "_ScaleFactors"
) -> float:
    """Return the bytes that the tables of all shards will take, forecast from those of the sample.

    They are the sum of three parts: what each shard takes whatever its rows, the rows of the annotated texts, and the
    rows of the controls (stages that score calls again with other results).
    """
    # A text in two shards is annotated once, but has rows in the tables of both. `texts_in_shards` counts it twice.
    bytes_per_text = sample_cost.annotation_row_bytes / text_counts.sampled_texts
    fixed_bytes = sample_cost.control_cost.fixed_bytes_per_shard * text_counts.stale_shards
    return (
        fixed_bytes
        + bytes_per_text * text_counts.texts_in_shards
        + sample_cost.control_row_bytes * scale_factors.control_factor
    )


class _ScaleFactors(NamedTuple):
    """By how much the sample's cost is multiplied.

    Attributes:
        text_factor: The factor for the texts that are not sampled.
        control_factor: The factor for the controls.
        relative_spread: Half of the 95 % interval, as a share of the value.
    """

    text_factor: float
    control_factor: float
    relative_spread: float

    def scale_cost(self, group_cost: float, control_cost: float, fixed_cost: float = 0) -> Range:
        """Forecast what a run will cost, from what the sample cost, with a 95 % interval.

        What the sample has computed is stored. So the groups' cost is scaled to the texts that are not sampled.

        Args:
            group_cost: What the groups of the sample cost, such as their tokens.
            control_cost: What the controls cost for the sample. It is scaled to their texts in all shards.
            fixed_cost: A cost that is added as it is.
        """
        value = group_cost * self.text_factor + control_cost * self.control_factor + fixed_cost
        return build_range(value, self.relative_spread)


class _AnnotationCost(NamedTuple):
    """What annotating some texts cost."""

    tokens: int  # that went through the model
    seconds: float
    frames_by_store: Mapping[str, list[pl.DataFrame]]  # rows that were appended, by row store
    # What each shard takes whatever its rows: an empty file and a manifest line for every table.
    fixed_bytes_per_shard: int
    # What the rows take beyond that: a number per table, in the order of the stages.
    row_bytes_per_table: Sequence[int]


class _SampleCost(NamedTuple):
    """What annotating the sample cost.

    Attributes:
        group_costs: The cost of each group of the sample, without the controls.
        whole_sample_cost: The cost of annotating the whole sample after that, without the controls. Most of it is
            stored by then; a score of chains is computed again, since it depends on the other chains of its shard.
        control_cost: The cost of annotating the whole sample again with the controls. Everything else was stored by
            then, so its tokens, seconds and stored rows are those of the controls; its bytes are those of all tables.
        control_table_count: How many of these tables, the last ones, are those of controls.
    """

    group_costs: Sequence[_AnnotationCost]
    whole_sample_cost: _AnnotationCost
    control_cost: _AnnotationCost
    control_table_count: int

    @property
    def group_tokens(self) -> int:
        """The tokens of all groups."""
        return sum(group.tokens for group in self.group_costs)

    @property
    def group_seconds(self) -> float:
        """The seconds of all groups."""
        return sum(group.seconds for group in self.group_costs)

    @property
    def annotation_row_bytes(self) -> int:
        """The bytes of the rows of the whole sample in all tables but those of controls."""
        return sum(self.control_cost.row_bytes_per_table[: -self.control_table_count])

    @property
    def control_row_bytes(self) -> int:
        """The bytes of the rows of the whole sample in the tables of controls."""
        return sum(self.control_cost.row_bytes_per_table[-self.control_table_count :])


def _measure_stored_bytes(costs: Sequence[_AnnotationCost]) -> int:
    """Return the bytes of the rows that were stored, as if each row store had a single file."""
    frames_by_store: dict[str, list[pl.DataFrame]] = {}
    for annotation_cost in costs:
        for store_name, frames in annotation_cost.frames_by_store.items():
            frames_by_store.setdefault(store_name, []).extend(frames)

    return sum(len(parquet.encode_rows(pl.concat(frames))) for frames in frames_by_store.values())


def _measure_annotation(
    worker: Worker, lane: Lane, texts: pl.DataFrame, stages: Sequence[Stage], progress: ProgressCallback
) -> _AnnotationCost:
    """Run some stages on texts, and measure what it costs.

    The tables of the stages are temporary. What the model and the tools compute is stored in the project's lake (its
    folder of tables), so that a later run can use it.
    """
    with run_trial(worker, lane, texts, stages, progress, worker.plan.lake) as annotated:
        table_sizes = [_measure_table_size(output) for output in annotated.outputs]  # before the tables are deleted

    return _AnnotationCost(
        tokens=sum(sum_token_counts(report.work.tokens_by_kind) for report in annotated.reports),
        seconds=sum(report.seconds for report in annotated.reports),
        frames_by_store=annotated.frames_by_store,
        fixed_bytes_per_shard=sum(size.fixed_bytes for size in table_sizes),
        row_bytes_per_table=[size.row_bytes for size in table_sizes],
    )


class _TableSize(NamedTuple):
    """The bytes of a table with one part."""

    fixed_bytes: int  # whatever its rows: a file without rows, and its line in the manifest
    row_bytes: int  # beyond the files without rows


def _measure_table_size(output: TableOutput) -> _TableSize:
    """Measure the bytes of a table that has a single part."""
    pointer = output.table.read_pointer(TRIAL_SHARD)
    manifest_line = pointer.encode_line(output.name, TRIAL_SHARD)
    empty_bytes = len(parquet.encode_rows(output.stage.schema.to_frame()))
    return _TableSize(
        fixed_bytes=empty_bytes + len(manifest_line),
        row_bytes=sum(file.bytes - empty_bytes for file in pointer.files),
    )
