"""tool_results: every distinct input in its context, answered once (paper, section 2, "Executing API Calls")."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane
from toolformer_dag.computing.stage import (
    INPUT,
    RETRY,
    TEXT_KEY,
    TOOL,
    ByChunk,
    Chunk,
    Claimed,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    Stage,
    StageAsset,
    TableOutput,
    Work,
    counted,
)
from toolformer_dag.computing.stored_rows import claim, require_whole
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.pipeline import proposals
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.tool import ToolCall, ToolResult

KEY = ("input", "context")
RESULTS = pl.Schema(
    {
        "input": pl.String(),
        "context": pl.String(),
        "result": pl.String(),
        "reason": pl.String(),
        "seconds": pl.Float64(),
        "cost": pl.Float64(),
    }
)
MEASURED = ("seconds", "cost")
"""Columns that differ from run to run and make no other version of the data."""


def result_settings(lane: Lane) -> dict[str, Any]:
    """Return what determines a result beside the call, also where decoding and evaluation make it."""
    tool = lane.tool
    return {
        "tool": tool.name,
        "version": tool.version,
        "identity": lane.identity(),
        **determining(lane.limits),
    }


@dataclass(frozen=True, slots=True)
class CallChunk:
    """Calls (KEY) to the tool of a lane, the output's own or one that it calls after its own."""

    lane: str
    calls: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the calls that no run and no shard has made under the same tool. Counts distinct calls."""
    return planned(worker, output, _calls(output, shard), claimed)


def planned(worker: Worker, output: TableOutput, candidates: pl.DataFrame, claimed: Claimed) -> Planned:
    """Plan the calls of `candidates` (KEY and other columns) to the tool of the output's lane."""
    calls, store = candidates.select(KEY).unique().sort(KEY), _store(worker, output.lane)
    # whole rows are read: damage beside the key columns has to show before the tool runs
    given = proposals.given_results(output).select(KEY)
    # lost calls wait for the next run
    known = pl.concat([one.select(KEY) for one in (store.stored(calls), *worker.lost_calls[output.lane.key], given)])
    missing = claim(claimed, store.name, calls.join(known, on=KEY, how="anti", maintain_order="left"))
    size = worker.plan.settings.execution.chunk_calls
    cut = [missing[at : at + size] for at in range(0, missing.height, size)]
    work = Work(computed=Counter(calls=missing.height), reused=Counter(calls=calls.height - missing.height))
    return Planned([Chunk(calls.height, CallChunk(output.lane.key, calls)) for calls in cut], work)


def compute(worker: Worker, output: TableOutput, chunk: CallChunk) -> Work:
    """Run the tool on a chunk of calls and commit the answers.

    A call that was lost (time limit, connection) is remembered until the end of the update and not stored, so the next
    run tries it again. Raises ToolDown when the tool stops working; the answers before it are stored.
    """
    lane = next(one for one in output.lane.chainable.values() if one.key == chunk.lane)
    answers: dict[ToolCall, ToolResult] = {}
    try:
        worker.runner(lane).run([ToolCall(*call) for call in chunk.calls.select(KEY).iter_rows()], answers)
    finally:  # what was answered was paid for
        rows = [(c.input, c.context, a.result, a.reason, a.seconds, a.cost, a.lost) for c, a in answers.items()]
        frame = pl.DataFrame(rows, schema={**RESULTS, "lost": pl.Boolean()}, orient="row")
        _store(worker, lane).append(frame.filter(~pl.col("lost")).drop("lost"))
        worker.lost_calls[lane.key].append(frame.filter("lost").drop("lost"))
    return Work()


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per distinct call of a shard; `rejected` counts candidates without a result."""
    return answered(worker, output, _calls(output, shard))


def answered(worker: Worker, output: TableOutput, candidates: pl.DataFrame) -> PartRows:
    """Return a row per distinct call of `candidates` (shard, KEY) to the tool of the output's lane; see `rows`.

    Those whose shard is null are no candidates and count nowhere.
    """
    calls, store = candidates.select(KEY).unique(), _store(worker, output.lane)
    lost = pl.concat([RESULTS.to_frame(), *worker.lost_calls[output.lane.key]]).unique(KEY)
    if not lost.is_empty():
        store.refresh()
    given = proposals.given_results(output).join(calls, on=KEY, how="semi").with_columns(seconds=pl.lit(0.0))
    others = store.stored(calls).join(given, on=KEY, how="anti")
    stored = pl.concat([RESULTS.to_frame(), others, given], how="diagonal")
    # what is stored wins: another process may have had an answer to a call that was lost here
    results = pl.concat([stored, lost.join(calls, on=KEY, how="semi").join(stored, on=KEY, how="anti")])
    require_whole(output, "results", calls.height - results.height)
    table = results.with_columns(tool=pl.lit(output.lane.key), tool_version=pl.lit(output.lane.tool.version))
    reasons = sorted(set(results.join(stored, on=KEY, how="anti")["reason"]))
    facts = {RETRY: f"calls were lost ({', '.join(reasons)}) and are tried again"} if reasons else {}
    rejected = counted(candidates.drop_nulls("shard").join(results, on=KEY))
    ordered = table.select(output.stage.schema.names()).sort(KEY)
    return PartRows([ordered], rejected, [store.name], facts)


def _store(worker: Worker, lane: Lane) -> RowStore:
    return worker.lane_rows(lane, "results", result_settings(lane), KEY, RESULTS)


def _calls(output: TableOutput, shard: str) -> pl.DataFrame:
    """(shard, input, context) of every candidate call, and of echoes, without their shard."""
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    calls = output.lane_table("scored_candidates").read(shard).filter(pl.col("input").is_not_null())
    placed = calls.join(texts, on=TEXT_KEY, how="left").select("shard", *KEY, "words")
    echoes = placed.drop_nulls("words").with_columns(shard=pl.lit(None, pl.String), input="words")
    return pl.concat([placed, echoes]).drop("words")


STAGE = Stage(
    name="tool_results",
    description="The tool's result per distinct input in its context, or the reason why there is none.",
    columns={
        "tool": TOOL,
        "input": INPUT,
        "context": Column(pl.String(), "what the result depends on beside the input"),
        "result": Column(pl.String(), "result of the call; null where reason says why there is none"),
        "reason": Column(pl.String(), "why there is no result; null where there is one"),
        "seconds": Column(pl.Float64(), "time the tool took"),
        "cost": Column(pl.Float64(), "what the backend says it cost; null where it says nothing"),
        "tool_version": Column(pl.String(), "version of the tool that answered"),
    },
    key=("tool", *KEY),
    settings=lambda plan, lane: {**result_settings(lane), **proposals.identity(lane)},
    reads=("scored_candidates", "heuristic_subset"),
    pool="tools",
    volatile=MEASURED,
    make=ByChunk(chunks, compute, rows),
    in_warehouse=InWarehouse(
        select="SELECT DISTINCT ON (tool, input, context) * FROM rows ORDER BY tool, input, context, reason NULLS FIRST"
    ),
    asset=StageAsset(calls=lambda output: (output.lane,)),
)
