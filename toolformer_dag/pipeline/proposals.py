"""scored_candidates of a lane whose calls come from other sources than the model's samples, or from several.

An inner table per kind of source finds the place of each call in the lane's texts: file_proposals over all shards,
rule_proposals and served_proposals shard by shard. A part of scored_candidates takes their rows. From there on they are
calls like others; the column `source` tells them apart.
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
from toolformer_dag.pipeline.placing import placing
from toolformer_dag.settings.tool_settings import MODEL, RULE, source_name
from toolformer_dag.synthetic import WRITTEN


def rarely_written(plan: Plan, lanes: Sequence[Lane]) -> list[str]:
    """Return a warning for each tool that the packaged small model cannot call, although it is to sample its calls.

    It was trained to write calls of the tools WRITTEN only. The warning says what would propose calls in its place. No
    warning where another model proposes. lanes: tools with their thresholds.
    """
    if not is_packaged(plan.identity_of("proposer")):
        return []
    warnings = []
    for lane in lanes:
        if MODEL in lane.sources.names and lane.tool.name not in WRITTEN:
            warnings.append(
                f"{lane.key}: the embedded model writes calls of {', '.join(WRITTEN)}, and hardly any of "
                f'{lane.tool.name}, so that most samples are lost. Set proposals = ["rule"] under '
                f"[tools.{lane.tool.key}], with a pattern under [tools.{lane.tool.key}.rule] or `propose` in the "
                "tool's class, or name a file of calls there, or another model.name"
            )
    return warnings


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what a lane's calls depend on, apart from the texts: the settings of its sources.

    A lane is a tool with its thresholds; its sources are the model's samples, a server, a rule, files of calls.
    """
    sampled = scored_candidates.settings(plan, lane) if lane.sources.sampled else {}
    served = served_proposals.settings(plan, lane) if lane.sources.served else {}
    return {
        **placing(plan, lane),
        **sampled,
        **served,
        **file_proposals.identity(lane),
        **rule_proposals.identity(lane),
        "proposals": list(lane.sources.names),
    }


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its texts, and of what the lane's files have of it."""
    texts = output.lane_table("heuristic_subset")
    from_files = output.lane_table("file_proposals") if output.lane.sources.files else None
    return versions({"heuristic_subset": texts}, over_all=from_files)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a shard from all sources of a lane: the model's samples, files, a rule, a server.

    The calls of every source but sampling stand in a table of that source, an inner table of this stage
    (`output.inner`).

    Samples have the numbers (`sample`) 0, 1, 2, ... at a position. Calls of other sources get -1, -2, ..., in the order
    in which the settings name the sources, so that a number stays with its call however many samples there are.
    """
    lane = output.lane
    sampled = scored_candidates.rows(worker, output, shard) if lane.sources.sampled else PartRows([])
    proposed = [output.stage.schema.to_frame()]
    rejected: Rejected = Counter(sampled.rejected)
    for inner in output.inner:
        proposed.append(_calls_of(inner, shard).select(output.stage.schema.names()))
        rejected.update(_rejections_of(inner, shard))

    order = {source_name(source): number for number, source in enumerate(lane.sources.names)}
    source_order = pl.col("source").replace_strict(order, return_dtype=pl.Int32)
    ordered = pl.concat(proposed).sort(source_order, *CALL_KEY)
    # 0, 1, ... at each position of a text, so that these calls get the numbers -1, -2, ...
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    numbered = ordered.with_columns(sample=-1 - number_at_position)
    table = pl.concat([*sampled.frames, numbered]).sort(CALL_KEY)
    return replace(sampled, frames=[table], rejected=rejected)


def _part_of(inner: TableOutput, shard: str) -> str:
    """Return the part of an inner table that has the rows of a shard."""
    return shard if inner.stage.sharded else WHOLE


def _calls_of(inner: TableOutput, shard: str) -> pl.DataFrame:
    """Return the rows of an inner table that belong to a shard."""
    return inner.table.scan([_part_of(inner, shard)]).filter(pl.col("shard") == shard).collect()


def _rejections_of(inner: TableOutput, shard: str) -> Rejected:
    """Return what an inner table rejected of a shard."""
    rejected: Rejected = Counter()
    for rejection in inner.table.record(_part_of(inner, shard))[REJECTIONS]:
        if rejection["shard"] == shard:
            rejected[shard, rejection["reason"]] += rejection["count"]
    return rejected


def _warnings(output: TableOutput) -> list[str]:
    """Warn before a token is spent where the model hardly writes calls of the lane's tool."""
    return rarely_written(output.plan, [output.lane])


SAMPLED = replace(scored_candidates.STAGE, asset=StageAsset(warns=_warnings))
"""The stage scored_candidates of a lane whose calls the model alone proposes, by sampling."""


def stage(lane: Lane) -> Stage:
    """Return the definition of the stage scored_candidates for a lane: it makes the table of the lane's proposed calls.

    The definition differs with the sources of the lane's calls: the model's samples, files, a rule, a server. SAMPLED
    is the one for samples alone.
    """
    sources = lane.sources
    only_samples = sources.names == (MODEL,) and sources.sampled
    if only_samples:
        return SAMPLED
    return _stage(
        has_files=bool(sources.files),
        has_rule=RULE in sources.names,
        is_served=sources.served,
        is_sampled=sources.sampled,
    )


@cache
def _stage(*, has_files: bool, has_rule: bool, is_served: bool, is_sampled: bool) -> Stage:
    """Return the definition of the stage scored_candidates for a mix of sources.

    It has an inner table for each source but sampling: a table that is made just before, from which `rows` takes the
    calls of the source. Equal arguments give the same object (cached), since stages are compared by identity.
    """
    inner: list[Stage] = []
    if has_files:
        inner.append(file_proposals.STAGE)
    if has_rule:
        inner.append(rule_proposals.STAGE)
    if is_served:
        inner.append(served_proposals.STAGE)
    mixed = replace(SAMPLED, settings=settings, inputs=inputs, inner=tuple(inner))
    if is_sampled:
        return replace(mixed, make=ByChunk(scored_candidates.chunks, scored_candidates.compute, rows))
    # Nothing is computed by the model: the rows of a part are read from the inner tables, and no GPU is needed.
    return replace(mixed, pool="lake", kinds=frozenset({"polars", "parquet"}), make=ByPart(rows))
