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
    REJECTIONS,
    TEXT_KEY,
    ByChunk,
    ByPart,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.model.weights import is_packaged
from toolformer_dag.pipeline import file_proposals, rule_proposals, scored_candidates, served_proposals
from toolformer_dag.pipeline.placing import ProposedCalls, placing_settings
from toolformer_dag.settings.tool_settings import MODEL, RULE, get_source_name
from toolformer_dag.synthetic import WRITTEN


def list_rare_call_warnings(plan: Plan, lanes: Sequence[Lane]) -> list[str]:
    """Return a warning for each lane for which the packaged small model samples calls that it hardly ever writes.

    It was trained to write calls of the tools WRITTEN only. There is no warning if another model proposes.
    """
    if not is_packaged(plan.identity_of("proposer")):
        return []
    return [_describe_rare_calls(lane) for lane in lanes if _is_rarely_written(lane)]


def _is_rarely_written(lane: Lane) -> bool:
    """Return whether the model is to sample calls of a tool that is not among WRITTEN."""
    is_sampled = MODEL in lane.sources.names
    return is_sampled and lane.tool.name not in WRITTEN


def _describe_rare_calls(lane: Lane) -> str:
    """Return the warning for a lane whose calls the packaged model hardly ever writes."""
    return (
        f"{lane.key}: the embedded model writes calls of {', '.join(WRITTEN)}, and hardly any of "
        f'{lane.tool.name}, so that most samples are lost. Set proposals = ["rule"] under '
        f"[tools.{lane.tool.key}], with a pattern under [tools.{lane.tool.key}.rule] or `propose` in the "
        "tool's class, or name a file of calls there, or another model.name"
    )


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what a lane's calls depend on, apart from the texts: the settings of its sources.

    The sources of a lane (a tool with its settings) are the model's samples, a server, a rule, and files of calls.
    """
    sampled = scored_candidates.settings(plan, lane) if lane.sources.sampled else {}
    served = served_proposals.settings(plan, lane) if lane.sources.served else {}
    return {
        **placing_settings(plan, lane),
        **sampled,
        **served,
        **file_proposals.identity(lane),
        **rule_proposals.identity(lane),
        "proposals": list(lane.sources.names),
    }


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its texts and of its calls from the lane's files."""
    texts = output.lane_table("heuristic_subset")
    from_files = output.lane_table("file_proposals") if output.lane.sources.files else None
    return versions({"heuristic_subset": texts}, over_all=from_files)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a shard from all sources of a tool: the model's samples, files, a rule, a server.

    The samples of a position have the numbers 0, 1, ... in the column `sample`, its other calls -1, -2, ...: so these
    keep their numbers if more samples are added.
    """
    sampled = _read_sampled_calls(worker, output, shard)
    proposed = _read_proposed_calls(output, shard)  # from the other sources
    numbered = _number_calls(output.lane, proposed.rows)
    table = pl.concat([*sampled.frames, numbered]).sort(CALL_KEY)
    rejected: Rejected = Counter(sampled.rejected)
    rejected.update(proposed.rejected)
    return replace(sampled, frames=[table], rejected=rejected)  # keeps the names of the samples' row stores


def _read_sampled_calls(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a shard that the model sampled; without rows for a lane that does not sample."""
    if not output.lane.sources.sampled:
        return PartRows([])
    return scored_candidates.rows(worker, output, shard)


def _read_proposed_calls(output: TableOutput, shard: str) -> ProposedCalls:
    """Return the calls of a shard from the inner tables: from every source but sampling."""
    columns = output.stage.schema.names()
    frames = [output.stage.schema.to_frame()]
    rejected: Rejected = Counter()
    for inner in output.inner:
        frames.append(_read_calls_of_shard(inner, shard).select(columns))
        rejected.update(_count_rejections(inner, shard))
    return ProposedCalls(pl.concat(frames), rejected)


def _number_calls(lane: Lane, calls: pl.DataFrame) -> pl.DataFrame:
    """Number the calls at each position of a text -1, -2, ..., in the order of the lane's sources."""
    order = {get_source_name(source): number for number, source in enumerate(lane.sources.names)}
    source_order = pl.col("source").replace_strict(order, return_dtype=pl.Int32)
    index_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    return calls.sort(source_order, *CALL_KEY).with_columns(sample=-1 - index_at_position)


def _choose_part(inner: TableOutput, shard: str) -> str:
    """Return the name of the part of an inner table that has the rows of a shard."""
    return shard if inner.stage.sharded else WHOLE


def _read_calls_of_shard(inner: TableOutput, shard: str) -> pl.DataFrame:
    """Return the rows of an inner table that belong to a shard."""
    return inner.table.scan([_choose_part(inner, shard)]).filter(pl.col("shard") == shard).collect()


def _count_rejections(inner: TableOutput, shard: str) -> Rejected:
    """Count what an inner table rejected of a shard."""
    rejected: Rejected = Counter()
    for rejection in inner.table.record(_choose_part(inner, shard))[REJECTIONS]:
        if rejection["shard"] == shard:
            rejected[shard, rejection["reason"]] += rejection["count"]
    return rejected


def _list_warnings(output: TableOutput) -> list[str]:
    """Warn before a token is spent where the model hardly writes calls of the lane's tool."""
    return list_rare_call_warnings(output.plan, [output.lane])


SAMPLED = replace(scored_candidates.STAGE, asset=StageAsset(warns=_list_warnings))
"""The stage scored_candidates of a lane whose calls the model alone proposes, by sampling."""


def stage(lane: Lane) -> Stage:
    """Return the stage that collects the calls proposed for a lane (a tool with its settings): scored_candidates.

    Each source of calls has an inner table, which only this stage reads: file_proposals, rule_proposals, and
    served_proposals, where a server proposes in the model's place. Sampling with the model itself needs none.
    """
    sources = lane.sources
    only_samples = sources.names == (MODEL,) and sources.sampled
    if only_samples:
        return SAMPLED  # the stage without inner tables
    return _build_stage(
        has_files=bool(sources.files),
        has_rule=RULE in sources.names,
        is_served=sources.served,
        is_sampled=sources.sampled,
    )


@cache
def _build_stage(*, has_files: bool, has_rule: bool, is_served: bool, is_sampled: bool) -> Stage:
    """Return the stage scored_candidates for a mix of sources, with an inner table for each source but sampling.

    Equal arguments give the same object (cached), since stages are compared by identity.
    """
    inner = _list_inner_stages(has_files=has_files, has_rule=has_rule, is_served=is_served)
    # Columns and key are those of SAMPLED; `settings`, `inputs` and `rows` are the functions of this module.
    mixed = replace(SAMPLED, settings=settings, inputs=inputs, inner=inner)
    if is_sampled:  # the model computes samples in chunks, on a GPU
        return replace(mixed, make=ByChunk(scored_candidates.chunks, scored_candidates.compute, rows))
    # Nothing is computed by the model: the rows of a part are read from the inner tables, and no GPU is needed.
    return replace(mixed, pool="lake", kinds=frozenset({"polars", "parquet"}), make=ByPart(rows))


def _list_inner_stages(*, has_files: bool, has_rule: bool, is_served: bool) -> tuple[Stage, ...]:
    """Return the stages of the inner tables of a lane with some sources."""
    inner: list[Stage] = []
    if has_files:
        inner.append(file_proposals.STAGE)
    if has_rule:
        inner.append(rule_proposals.STAGE)
    if is_served:
        inner.append(served_proposals.STAGE)
    return tuple(inner)
