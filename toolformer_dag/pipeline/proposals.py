"""Make scored_candidates for a lane whose calls come from other sources than the model's samples, or from several.

An inner table per kind of source places its calls in the lane's texts: file_proposals over all shards, rule_proposals
and served_proposals shard by shard. scored_candidates copies their rows; the column `source` tells them apart.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_KEY,
    REJECTIONS_FIELD,
    TEXT_KEY,
    ByChunk,
    ByPart,
    InputsFinder,
    PartRows,
    RejectionCounts,
    Stage,
    StageAsset,
    TableOutput,
    build_versions_finder,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE_TABLE_PART
from toolformer_dag.model.weights import is_packaged_model
from toolformer_dag.pipeline import file_proposals, rule_proposals, scored_candidates, served_proposals
from toolformer_dag.pipeline.placing import ProposedCalls, collect_placing_settings
from toolformer_dag.settings.tool_settings import MODEL_SOURCE, RULE_SOURCE, get_source_name
from toolformer_dag.synthetic import TRAINED_TOOL_NAMES


def list_rare_call_warnings(plan: Plan, lanes: Sequence[Lane]) -> list[str]:
    """Return a warning for each lane in which the packaged small model samples calls that it hardly ever writes.

    It was trained to write calls of the tools TRAINED_TOOL_NAMES only. If another model proposes calls, there is no
    warning.
    """
    if not is_packaged_model(plan.get_model_identity("proposer")):
        return []
    return [_describe_rare_calls(lane) for lane in lanes if _is_rarely_written(lane)]


def _is_rarely_written(lane: Lane) -> bool:
    """Return whether the model is to sample calls of a tool that is not among TRAINED_TOOL_NAMES."""
    is_sampled = MODEL_SOURCE in lane.call_sources.source_names
    return is_sampled and lane.tool.name not in TRAINED_TOOL_NAMES


def _describe_rare_calls(lane: Lane) -> str:
    """Return the warning for a lane whose calls the packaged model hardly ever writes."""
    return (
        f"{lane.key}: the embedded model writes calls of {', '.join(TRAINED_TOOL_NAMES)}, and hardly any of "
        f'{lane.tool.name}, so that most samples are lost. Set proposals = ["rule"] under '
        f"[tools.{lane.tool.key}], with a pattern under [tools.{lane.tool.key}.rule] or `propose` in the "
        "tool's class, or name a file of calls there, or another model.name"
    )


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings on which a lane's calls depend, apart from the texts: those of its sources.

    The sources of a lane (a tool with its settings) are the model's samples, a server, a rule, and files of calls.
    """
    sampling_settings = scored_candidates.settings(plan, lane) if lane.call_sources.is_sampled else {}
    server_settings = served_proposals.settings(plan, lane) if lane.call_sources.is_served else {}
    return {
        **collect_placing_settings(plan, lane),
        **sampling_settings,
        **server_settings,
        **file_proposals.compute_files_identity(lane),
        **rule_proposals.collect_rule_identity(lane),
        "proposals": list(lane.call_sources.source_names),
    }


def inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the versions of its texts and of its calls from the lane's files."""
    texts_table = output.get_lane_table("heuristic_subset")
    has_files = bool(output.lane.call_sources.file_paths_by_name)
    file_calls_table = output.get_lane_table("file_proposals") if has_files else None
    return build_versions_finder({"heuristic_subset": texts_table}, all_shards_table=file_calls_table)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a shard (a file of texts) from all sources: the model's samples, files, a rule, a server.

    The column `sample` numbers the calls at one position of a text: samples 0, 1, ..., and other calls -1, -2, ....
    So the other calls keep their numbers if more samples are added.
    """
    sampled_calls = _read_sampled_calls(worker, output, shard)
    proposed_calls = _read_proposed_calls(output, shard)

    numbered_calls = _number_calls(output.lane, proposed_calls.rows)
    all_calls = pl.concat([*sampled_calls.frames, numbered_calls]).sort(CALL_KEY)

    rejection_counts: RejectionCounts = Counter(sampled_calls.rejection_counts)
    rejection_counts.update(proposed_calls.rejected)

    # The other fields stay those of the samples, such as the names of the stores from which the samples were read.
    return replace(sampled_calls, frames=[all_calls], rejection_counts=rejection_counts)


def _read_sampled_calls(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a shard that the model sampled. A lane that does not sample has none."""
    if not output.lane.call_sources.is_sampled:
        return PartRows([])
    return scored_candidates.rows(worker, output, shard)


def _read_proposed_calls(output: TableOutput, shard: str) -> ProposedCalls:
    """Return the calls of a shard from every source but sampling. They are in the inner table of each source."""
    columns = output.stage.schema.names()
    frames = [output.stage.schema.to_frame()]  # without rows: gives the columns if there is no inner table
    rejection_counts: RejectionCounts = Counter()

    for inner_output in output.inner_outputs:
        frames.append(_read_calls_of_shard(inner_output, shard).select(columns))
        rejection_counts.update(_count_rejections(inner_output, shard))

    return ProposedCalls(pl.concat(frames), rejection_counts)


def _number_calls(lane: Lane, calls: pl.DataFrame) -> pl.DataFrame:
    """Number the calls at each position of a text -1, -2, ... in the column `sample`, in the order of the sources.

    Args:
        lane: The lane (a tool with its settings) whose sources give the order.
    """
    number_by_source = {get_source_name(source): number for number, source in enumerate(lane.call_sources.source_names)}
    source_order = pl.col("source").replace_strict(number_by_source, return_dtype=pl.Int32)
    index_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    return calls.sort(source_order, *CALL_KEY).with_columns(sample=-1 - index_at_position)


def _choose_part_name(inner_output: TableOutput, shard: str) -> str:
    """Return the name of the part that has the rows of a shard: an inner table has a part per shard, or one in all."""
    return shard if inner_output.stage.is_sharded else WHOLE_TABLE_PART


def _read_calls_of_shard(inner_output: TableOutput, shard: str) -> pl.DataFrame:
    """Return the rows of an inner table that belong to a shard."""
    part_name = _choose_part_name(inner_output, shard)
    rows_of_part = inner_output.table.scan_parts([part_name])
    return rows_of_part.filter(pl.col("shard") == shard).collect()


def _count_rejections(inner_output: TableOutput, shard: str) -> RejectionCounts:
    """Return how many calls of a shard an inner table rejected, by (shard, reason).

    An inner table has the calls from one source, such as a rule or files.
    """
    part_name = _choose_part_name(inner_output, shard)
    record = inner_output.table.read_record(part_name)

    # Some inner tables have one part for all shards, whose record counts the calls of other shards too.
    rejection_counts: RejectionCounts = Counter()
    for rejection in record[REJECTIONS_FIELD]:
        if rejection["shard"] == shard:
            rejection_counts[shard, rejection["reason"]] += rejection["count"]
    return rejection_counts


def _list_lane_warnings(output: TableOutput) -> list[str]:
    """Return the warning, before a token is spent, that the model hardly writes calls of the lane's tool, if so."""
    return list_rare_call_warnings(output.plan, [output.lane])


SAMPLED_STAGE = replace(scored_candidates.STAGE, asset=StageAsset(list_warnings=_list_lane_warnings))
"""The stage scored_candidates of a lane whose calls the model alone proposes, by sampling."""


def build_candidates_stage(lane: Lane) -> Stage:
    """Return the stage scored_candidates of a lane (a tool with its settings), which collects its proposed calls.

    Each source of calls has an inner table, which only this stage reads: file_proposals, rule_proposals, and
    served_proposals if a server proposes in the model's place. Sampling with the model itself needs none.
    """
    sources = lane.call_sources

    has_only_samples = sources.source_names == (MODEL_SOURCE,) and sources.is_sampled
    if has_only_samples:
        return SAMPLED_STAGE  # it has no inner tables

    return _build_mixed_stage(
        has_files=bool(sources.file_paths_by_name),
        has_rule=RULE_SOURCE in sources.source_names,
        is_served=sources.is_served,
        is_sampled=sources.is_sampled,
    )


@cache
def _build_mixed_stage(*, has_files: bool, has_rule: bool, is_served: bool, is_sampled: bool) -> Stage:
    """Return the stage scored_candidates, which collects the proposed calls of a tool, for a mix of sources.

    It has an inner table for each source but sampling. Equal arguments give the same object (cached), since stages are
    compared by identity.
    """
    inner_stages = _list_inner_stages(has_files=has_files, has_rule=has_rule, is_served=is_served)

    # Columns and key are those of SAMPLED_STAGE; `settings`, `inputs` and `rows` are the functions of this module.
    mixed_stage = replace(SAMPLED_STAGE, collect_settings=settings, inputs=inputs, inner_stages=inner_stages)

    if is_sampled:
        # The model computes the samples in chunks, on a GPU.
        row_maker = ByChunk(scored_candidates.chunks, scored_candidates.compute, rows)
        return replace(mixed_stage, row_maker=row_maker)

    # The model computes nothing: the rows of a part are read from the inner tables, and no GPU is needed.
    return replace(mixed_stage, pool="lake", kinds=frozenset({"polars", "parquet"}), row_maker=ByPart(rows))


def _list_inner_stages(*, has_files: bool, has_rule: bool, is_served: bool) -> tuple[Stage, ...]:
    """Return the stages of the inner tables: one for each source of calls that the lane has."""
    inner_stages: list[Stage] = []
    if has_files:
        inner_stages.append(file_proposals.STAGE)
    if has_rule:
        inner_stages.append(rule_proposals.STAGE)
    if is_served:
        inner_stages.append(served_proposals.STAGE)
    return tuple(inner_stages)
