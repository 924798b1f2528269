"""tool_results: every distinct input in its context, answered once (paper, section 2, "Executing API Calls")."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from toolformer_dag.pipeline import file_proposals
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.tool import ToolCall, ToolResult

KEY = ("input", "context")
"""A call to a lane's tool; `context` is what the result depends on beside the input (`Tool.context`)."""
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
"""Columns of the stored results; `_ResultRow` describes them."""
MEASURED = ("seconds", "cost")
"""Columns that differ from run to run and make no other version of the data."""


class _ResultRow(NamedTuple):
    """What a tool answered to a call; see `ToolResult`."""

    input: str
    context: str
    result: str | None
    reason: str | None  # why there is no result
    seconds: float
    cost: float | None


def result_settings(lane: Lane) -> dict[str, Any]:
    """Return what a result depends on, apart from the call: tool, version, options and limits.

    It is the same where tools are called while decoding and in evaluation.
    """
    tool = lane.tool
    return {
        "tool": tool.name,
        "version": tool.version,
        "identity": lane.identity(),
        **determining(lane.limits),
    }


@dataclass(frozen=True, slots=True)
class CallChunk:
    """Calls (KEY) to the tool of a lane.

    The lane is the output's, or in a chain one whose tool may be called after the output's own.
    """

    lane: str
    calls: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the calls of a shard whose results no run has stored. Counts distinct calls."""
    return planned_calls(worker, output, _candidate_calls(output, shard), claimed)


def planned_calls(worker: Worker, output: TableOutput, candidates: pl.DataFrame, claimed: Claimed) -> Planned:
    """Plan which distinct calls of `candidates` the tool has to be run on, in chunks of `execution.chunk_calls`.

    candidates: a row per candidate call; the columns of KEY (input, context) are read.
    claimed: calls that earlier shards of this run make already; the planned ones are added to it.

    The tool is that of the output's lane. A call is not planned where an earlier shard makes it, or where it is done
    (`_done_calls`).
    """
    lane = output.lane
    calls = candidates.select(KEY).unique().sort(KEY)
    not_done = calls.join(_done_calls(worker, output, calls), on=KEY, how="anti", maintain_order="left")
    # `claim` leaves out the calls in `claimed`, and adds the others to it.
    missing = claim(claimed, _store(worker, lane).name, not_done)

    chunk_calls = worker.plan.settings.execution.chunk_calls
    call_chunks = []
    for calls_of_chunk in missing.iter_slices(chunk_calls):
        payload = CallChunk(lane=lane.key, calls=calls_of_chunk)
        call_chunks.append(Chunk(units=calls_of_chunk.height, payload=payload))
    work = Work(
        computed=Counter(calls=missing.height),
        reused=Counter(calls=calls.height - missing.height),
    )
    return Planned(call_chunks, work)


def _done_calls(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls (KEY) that the tool need not answer now.

    Their result is stored or came with a file of calls; or the tool lost them in this update (time limit, broken
    connection), and the next run tries them again.

    calls: (input, context), of which the stored ones are looked up.
    """
    # Whole rows are read, not keys alone: damage in any column has to show before the tool runs.
    stored = _store(worker, output.lane).stored(calls)
    from_files = file_proposals.given_results(output)
    lost = worker.lost_calls[output.lane.key]
    return pl.concat([frame.select(KEY) for frame in (stored, *lost, from_files)])


def compute(worker: Worker, output: TableOutput, chunk: CallChunk) -> Work:
    """Run the tool on a chunk of calls (input, context), and append its answers to the row store of results.

    The chunk names the lane whose tool it is: the output's, or in a chain one that may be called after it. The returned
    Work is empty: no token goes through the model.

    A lost call (time limit, broken connection) is not stored, so that the next run tries it again; its reason is kept
    in `worker.lost_calls` until the end of the update. Raises ToolDown where the tool stops working; the answers before
    that are stored.
    """
    lane_of = {lane.key: lane for lane in output.lane.chainable.values()}
    lane = lane_of[chunk.lane]
    calls = [ToolCall(input, context) for input, context in chunk.calls.select(KEY).iter_rows()]
    answers: dict[ToolCall, ToolResult] = {}  # `run` adds each answer as it comes
    try:
        worker.runner(lane).run(calls, answers)
    finally:  # what was answered may have cost money, and is kept whatever happened then
        _commit(worker, lane, answers)
    return Work()


def _commit(worker: Worker, lane: Lane, answers: Mapping[ToolCall, ToolResult]) -> None:
    """Append answers to the row store of results; those of lost calls go to `worker.lost_calls` instead.

    answers: call -> the tool's answer. `lost` is true of one that another try may answer (time limit, connection).
    """
    stored: list[_ResultRow] = []
    lost: list[_ResultRow] = []
    for call, answer in answers.items():
        row = _ResultRow(
            input=call.input,
            context=call.context,
            result=answer.result,
            reason=answer.reason,
            seconds=answer.seconds,
            cost=answer.cost,
        )
        if answer.lost:
            lost.append(row)
        else:
            stored.append(row)
    _store(worker, lane).append(pl.DataFrame(stored, schema=RESULTS, orient="row"))
    worker.lost_calls[lane.key].append(pl.DataFrame(lost, schema=RESULTS, orient="row"))


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per distinct call of a shard; `rejected` counts the candidate calls without a result by reason.

    Where the tool lost calls the next run computes the part again.
    """
    return answered(worker, output, _candidate_calls(output, shard))


def answered(worker: Worker, output: TableOutput, candidates: pl.DataFrame) -> PartRows:
    """Return the answer to each distinct call of `candidates`: a row with its result, or the reason why there is none.

    An answer is stored, comes from a file of calls, or was lost in this update; then a note in `facts` makes the next
    run compute the part again. `rejected` counts candidate calls without a result, by shard and reason.

    candidates: (shard, input, context), calls to the tool of the output's lane. Where `shard` is null the row is no
    candidate call (see `_candidate_calls`) and is not counted.

    Raises StorageError where results were damaged since they were computed.
    """
    lane = output.lane
    calls = candidates.select(KEY).unique()
    answers = _answers(worker, output, calls)
    results = pl.concat([answers.final, answers.lost])
    require_whole(output, "results", calls.height - results.height)

    facts = {}
    if not answers.lost.is_empty():
        reasons = sorted(set(answers.lost["reason"]))
        facts = {RETRY: f"calls were lost ({', '.join(reasons)}) and are tried again"}
    rejected = counted(candidates.drop_nulls("shard").join(results, on=KEY))
    table = results.with_columns(tool=pl.lit(lane.key), tool_version=pl.lit(lane.tool.version))
    table = table.select(output.stage.schema.names()).sort(KEY)
    return PartRows([table], rejected=rejected, stores=[_store(worker, lane).name], facts=facts)


class _Answers(NamedTuple):
    """Answers to calls (RESULTS): those that stay, and those of calls that the tool lost in this update."""

    final: pl.DataFrame
    lost: pl.DataFrame


def _answers(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> _Answers:
    """Look up the answers to distinct calls (input, context), each at most once.

    What a file brings wins over what the tool answered, and any answer over a lost call.
    """
    store = _store(worker, output.lane)
    lost = pl.concat([RESULTS.to_frame(), *worker.lost_calls[output.lane.key]]).unique(KEY)
    if not lost.is_empty():
        store.refresh()  # another process may have stored an answer to a call that was lost here
    from_files = file_proposals.given_results(output).join(calls, on=KEY, how="semi")
    from_files = from_files.with_columns(seconds=pl.lit(0.0))
    from_tool = store.stored(calls).join(from_files, on=KEY, how="anti")
    final = pl.concat([RESULTS.to_frame(), from_tool, from_files], how="diagonal")
    still_lost = lost.join(calls, on=KEY, how="semi").join(final, on=KEY, how="anti")
    return _Answers(final=final, lost=still_lost)


def _store(worker: Worker, lane: Lane) -> RowStore:
    return worker.lane_rows(lane, "results", result_settings(lane), KEY, RESULTS)


def _candidate_calls(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return (shard, input, context) of every call that the tool has to answer for a shard.

    These are the candidate calls, and an echo for each call that a rule proposed because it saw `words` in the text
    after it: the call with these words as its input. For Search("capital of France") and the words "Paris", it is
    Search("Paris"). Whether the call helps more than its echo is judged later (see `loss_deltas`). An echo is no
    candidate: its shard is null.
    """
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    candidates = output.lane_table("scored_candidates").read(shard).filter(pl.col("input").is_not_null())
    calls = candidates.join(texts, on=TEXT_KEY, how="left").select("shard", *KEY, "words")
    echoes = calls.drop_nulls("words").with_columns(shard=pl.lit(None, pl.String), input="words")
    return pl.concat([calls, echoes]).drop("words")


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
    settings=lambda plan, lane: {**result_settings(lane), **file_proposals.identity(lane)},
    reads=("scored_candidates", "heuristic_subset"),
    pool="tools",
    volatile=MEASURED,
    make=ByChunk(chunks, compute, rows),
    in_warehouse=InWarehouse(
        select="SELECT DISTINCT ON (tool, input, context) * FROM rows ORDER BY tool, input, context, reason NULLS FIRST"
    ),
    asset=StageAsset(calls=lambda output: (output.lane,)),
)
