"""tool_results: every distinct input in its context, answered once."""

from typing import Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.chunks import chunked
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.made_from import made_from
from toolformer_dag.stages.publish import Output, Work
from toolformer_dag.stages.rejections import counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.rows import RowStore
from toolformer_dag.tools.runner import Runner
from toolformer_dag.tools.tool import ToolCall

STAGE = "tool_results"
KEY = ("input", "context")
RESULTS = pl.Schema(
    {
        "input": pl.String,
        "context": pl.String,
        "result": pl.String,
        "reason": pl.String,
        "seconds": pl.Float64,
        "cost": pl.Float64,
    }
)
MEASURED = ("seconds", "cost")
"""Columns that differ from run to run and make no other version of the data."""


def settings(lane: Lane) -> dict[str, Any]:
    """What determines a result beside the call."""
    tool = lane.tool
    return {
        "tool": tool.name,
        "version": tool.version,
        "identity": dict(tool.identity()),
        "max_result_characters": lane.limits.max_result_characters,
    }


def tool_results(
    lake: Lake, lane: Lane, partition: str, *, chunk_calls: int, progress: Progress = silent
) -> StageReport:
    """Runs the calls that no run, shard or process has run under the same tool, `chunk_calls` at a time.

    `work` counts distinct calls, `rejections` candidates without a result. A call that was lost (time limit,
    connection) is published with its reason but not stored, so the next run tries it again. Raises ToolDown when the
    tool stops working; the chunks before stay paid for. Raises StorageError, WriteError.
    """
    clock = Clock()
    versions, candidates = _candidates(lake, lane, partition)
    calls = candidates.select(KEY).unique().sort(KEY)
    store = lake.rows(f"{lane.key}/results", settings(lane), KEY, RESULTS)
    # whole rows are read: damage beside the key columns has to show before the tool runs
    missing = calls.join(store.stored(calls), on=KEY, how="anti", maintain_order="left")
    lost = _run(lane, store, missing, chunk_calls, progress)
    found = _found(lane, store, calls, lost)
    table = found.with_columns(tool=pl.lit(lane.key), tool_version=pl.lit(lane.tool.version))
    work = Work(counts={"calls": (missing.height, calls.height - missing.height)}, stores=[store])
    rejected = counted(candidates.join(found, on=KEY))
    rows = table.select(columns(STAGE).names()).sort("input", "context")
    output = Output(lake, STAGE, lane.key, partition, lane.key)
    return output.publish([rows], settings(lane), versions, rejected, clock, work, MEASURED)


def _candidates(lake: Lake, lane: Lane, partition: str) -> tuple[dict[str, str], pl.DataFrame]:
    """Data versions of the inputs, and (shard, input, context) of every candidate call."""
    candidates, subset = lake.table(f"{lane.key}/scored_candidates"), lake.table(f"{lane.key}/heuristic_subset")
    versions = {table.name.split("/")[1]: table.pointer(partition).data_version for table in (candidates, subset)}
    if not made_from(candidates, subset, partition):
        raise StaleInput(STAGE, partition, "candidates of texts that are gone", f"{lane.key}/scored_candidates")
    texts = subset.read(partition).select("shard", "digest", "segment", "context")
    calls = candidates.read(partition).filter(pl.col("input").is_not_null())
    calls = calls.join(texts, on=("shard", "digest", "segment"), how="left")
    return versions, calls.select("shard", *KEY)


def _found(lane: Lane, store: RowStore, calls: pl.DataFrame, lost: pl.DataFrame) -> pl.DataFrame:
    """A row per call: what is stored, also where another process had an answer to a call that was lost here."""
    stored = store.stored(calls)
    found = pl.concat([stored, lost.join(stored, on=KEY, how="anti")])
    if found.height < calls.height:
        gone = calls.height - found.height
        raise StorageError(f"{gone} results of {lane.key} were damaged while they were read; run again")
    return found


def _run(lane: Lane, store: RowStore, missing: pl.DataFrame, size: int, progress: Progress) -> pl.DataFrame:
    """Runs and commits the missing calls; returns the rows of those that were lost."""
    runner = Runner(lane.tool, lane.limits)
    lost = [RESULTS.to_frame()]
    for chunk in chunked(missing, size, progress):
        calls = [ToolCall(*call) for call in chunk.select(KEY).iter_rows()]
        answers = zip(calls, runner.run(calls), strict=True)
        rows = [(c.input, c.context, a.result, a.reason, a.seconds, a.cost, a.lost) for c, a in answers]
        frame = pl.DataFrame(rows, schema={**RESULTS, "lost": pl.Boolean}, orient="row")
        store.append(frame.filter(~pl.col("lost")).drop("lost"))
        lost.append(frame.filter("lost").drop("lost"))
    return pl.concat(lost)
