"""tool_results: run the tool once for every distinct call (paper, section 2, "Executing API Calls")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
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
    count_by_reason,
)
from toolformer_dag.computing.stored_rows import claim, require_whole
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.pipeline import file_proposals
from toolformer_dag.pipeline.work_counts import count_planned_work
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.tool import ToolCall, ToolResult

RESULT_KEY = ("input", "context")
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
MEASURED_COLUMNS = ("seconds", "cost")
"""Columns that differ from run to run and do not count in the version of the data."""


class _ResultRow(NamedTuple):
    """What a tool answered to a call; see `ToolResult`."""

    input: str
    context: str
    result: str | None
    reason: str | None  # why there is no result
    seconds: float
    cost: float | None

    @classmethod
    def of(cls, call: ToolCall, answer: ToolResult) -> "_ResultRow":
        """Build the row of a call and its answer."""
        return cls(
            input=call.input,
            context=call.context,
            result=answer.result,
            reason=answer.reason,
            seconds=answer.seconds,
            cost=answer.cost,
        )


def result_settings(lane: Lane) -> dict[str, Any]:
    """Collect what the result of a call depends on, apart from the call: the tool, its version, options and limits.

    Text generation and evaluation call tools with the same settings.
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
    """Calls (RESULT_KEY) to the tool of a lane: the output's, or in a chain one whose tool may be called after it."""

    lane: str
    calls: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the distinct calls of a shard whose results are not stored yet."""
    return plan_calls(worker, output, _read_candidate_calls(output, shard), claimed)


def plan_calls(worker: Worker, output: TableOutput, candidates: pl.DataFrame, claimed: Claimed) -> Planned:
    """Plan which calls of a tool still have to be run.

    Args:
        output: The table to build. Its lane names the tool and the tool's settings.
        candidates: The wanted calls, possibly repeated, in the columns RESULT_KEY. Other columns are ignored.
        claimed: The calls that earlier shards of this run plan already, which are left out here. The newly planned ones
            are added to it.

    Returns:
        The calls to run, in chunks, and how many calls are run and reused.
    """
    distinct_calls = candidates.select(RESULT_KEY).unique().sort(RESULT_KEY)
    done_calls = _collect_done_calls(worker, output, distinct_calls)
    open_calls = distinct_calls.join(done_calls, on=RESULT_KEY, how="anti", maintain_order="left")

    # Leaves out what earlier shards plan, and adds the rest to `claimed`.
    store_name = _open_store(worker, output.lane).name
    calls_to_run = claim(claimed, store_name, open_calls)

    chunks = _split_into_chunks(worker.plan, output.lane, calls_to_run)
    work = count_planned_work("calls", total=distinct_calls.height, missing=calls_to_run.height)
    return Planned(chunks, work)


def _split_into_chunks(plan: Plan, lane: Lane, calls: pl.DataFrame) -> list[Chunk]:
    """Cut calls (RESULT_KEY) to the tool of a lane into chunks."""
    chunks = []
    for batch in calls.iter_slices(plan.settings.execution.chunk_calls):
        payload = CallChunk(lane=lane.key, calls=batch)
        chunks.append(Chunk(units=batch.height, payload=payload))
    return chunks


def _collect_done_calls(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> pl.DataFrame:
    """Collect the calls that the tool need not run now.

    These are calls with a stored answer, calls whose result is given in a file, and calls that were lost in this run,
    for example by a time limit or a broken connection. Only the next run tries lost calls again.

    Args:
        calls: The wanted calls, in the columns RESULT_KEY.

    Returns:
        Calls in the same columns. Lost calls and calls of files may be others than the wanted ones.
    """
    # Whole rows are read, not only their keys, so that damage in any column shows before the tool runs.
    stored_answers = _open_store(worker, output.lane).stored(calls)
    results_in_files = file_proposals.read_results_in_files(output)
    lost_calls = worker.lost_calls[output.lane.key]

    frames = [stored_answers, *lost_calls, results_in_files]
    return pl.concat([frame.select(RESULT_KEY) for frame in frames])


def compute(worker: Worker, output: TableOutput, chunk: CallChunk) -> Work:
    """Run the tool on the calls of a chunk, and store its answers.

    Calls that are lost, for example by a time limit or a broken connection, get no stored answer. The next run tries
    them again.

    Returns:
        An empty count of work, because no model ran.

    Raises:
        ToolDown: The tool stopped working. The answers that it gave before are stored.
    """
    lane = _get_called_lane(output, chunk)
    calls = [ToolCall(input, context) for input, context in chunk.calls.select(RESULT_KEY).iter_rows()]

    answers: dict[ToolCall, ToolResult] = {}  # the runner adds each answer as it comes
    try:
        worker.runner(lane).run(calls, answers)
    finally:
        # Answers may have cost money, so those that came are stored even if an error follows.
        _store_answers(worker, lane, answers)
    return Work()


def _get_called_lane(output: TableOutput, chunk: CallChunk) -> Lane:
    """Return the lane whose tool the calls of a chunk are for."""
    lane_of = {lane.key: lane for lane in output.lane.chainable.values()}
    return lane_of[chunk.lane]


def _store_answers(worker: Worker, lane: Lane, answers: Mapping[ToolCall, ToolResult]) -> None:
    """Store the answers of a tool. Answers of lost calls are only remembered, in `worker.lost_calls`.

    Args:
        answers: The answer to each call. It is `lost` if another try may succeed, for example after a time limit.
    """
    final_answers = [_ResultRow.of(call, answer) for call, answer in answers.items() if not answer.lost]
    lost_answers = [_ResultRow.of(call, answer) for call, answer in answers.items() if answer.lost]

    _open_store(worker, lane).append(pl.DataFrame(final_answers, schema=RESULTS, orient="row"))
    worker.lost_calls[lane.key].append(pl.DataFrame(lost_answers, schema=RESULTS, orient="row"))


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per distinct call of a shard: its result, or the reason why there is none."""
    return answered(worker, output, _read_candidate_calls(output, shard))


def answered(worker: Worker, output: TableOutput, candidates: pl.DataFrame) -> PartRows:
    """Look up the results of calls that the tool has run.

    Args:
        output: The table to build. Its lane names the tool and the tool's settings.
        candidates: The calls, possibly repeated, in the columns shard, input and context. If a call has no result, it
            is counted in `rejected`, unless its `shard` is null.

    Returns:
        A row per distinct call: its result, or the reason why there is none.

    Raises:
        StorageError: Results are missing, because they were damaged after they had been computed.
    """
    distinct_calls = candidates.select(RESULT_KEY).unique()
    answers = _read_answers(worker, output, distinct_calls)
    results = answers.all()  # lost calls (time limit, broken connection) have a row too

    missing_count = distinct_calls.height - results.height
    require_whole(output, "results", missing_count)  # raises StorageError unless it is 0

    counted_calls = candidates.drop_nulls("shard").join(results, on=RESULT_KEY)
    return PartRows(
        frames=[_build_table(output, results)],
        rejected=count_by_reason(counted_calls),
        stores=[_open_store(worker, output.lane).name],
        facts=_build_retry_note(answers.lost),  # makes the next run try lost calls again
    )


def _build_table(output: TableOutput, results: pl.DataFrame) -> pl.DataFrame:
    """Return results (RESULTS) as rows of the table."""
    lane = output.lane
    table = results.with_columns(tool=pl.lit(lane.key), tool_version=pl.lit(lane.tool.version))
    return output.stage.shaped(table).sort(RESULT_KEY)


def _build_retry_note(lost: pl.DataFrame) -> dict[str, str]:
    """Return the note by which the next run tries lost calls (RESULTS) again; empty without any."""
    if lost.is_empty():
        return {}
    reasons = ", ".join(sorted(set(lost["reason"])))
    return {RETRY: f"calls were lost ({reasons}) and are tried again"}


class _Answers(NamedTuple):
    """Answers to calls (RESULTS): the final ones, and the answers of calls that the tool lost in this update."""

    final: pl.DataFrame
    lost: pl.DataFrame

    def all(self) -> pl.DataFrame:
        """Return both."""
        return pl.concat([self.final, self.lost])


def _read_answers(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> _Answers:
    """Look up the answers to calls, at most one answer per call.

    If a call was lost in this run, but has been answered in another way, it does not count as lost.

    Args:
        calls: The distinct calls, in the columns RESULT_KEY.
    """
    lost = _collect_lost_answers(worker, output.lane)
    if not lost.is_empty():
        # Another process may have stored an answer to a call that was lost here.
        _open_store(worker, output.lane).refresh()

    final = _read_final_answers(worker, output, calls)
    still_lost = lost.join(calls, on=RESULT_KEY, how="semi").join(final, on=RESULT_KEY, how="anti")
    return _Answers(final=final, lost=still_lost)


def _read_final_answers(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the answers (RESULTS) to calls: the result in a file of calls, else the tool's stored answer."""
    from_files = file_proposals.read_results_in_files(output).join(calls, on=RESULT_KEY, how="semi")
    stored = _open_store(worker, output.lane).stored(calls)
    from_tool = stored.join(from_files, on=RESULT_KEY, how="anti")
    answers = [RESULTS.to_frame(), from_tool, from_files.with_columns(seconds=pl.lit(0.0))]
    return pl.concat(answers, how="diagonal")


def _collect_lost_answers(worker: Worker, lane: Lane) -> pl.DataFrame:
    """Return the distinct calls that a lane's tool lost in this update (RESULTS)."""
    return pl.concat([RESULTS.to_frame(), *worker.lost_calls[lane.key]]).unique(RESULT_KEY)


def _open_store(worker: Worker, lane: Lane) -> RowStore:
    """Open the row store of the results of a lane's tool."""
    return worker.lane_rows(lane, "results", result_settings(lane), RESULT_KEY, RESULTS)


def _read_candidate_calls(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return (shard, input, context) of every call that the tool has to answer for a shard: candidates and echoes."""
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    samples = output.lane_table("scored_candidates").read(shard)
    candidates = samples.filter(pl.col("input").is_not_null())
    calls = candidates.join(texts, on=TEXT_KEY, how="left").select("shard", *RESULT_KEY, "words")
    return pl.concat([calls, _build_echoes(calls)]).drop("words")


def _build_echoes(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the echo of each call that a rule proposed for words of the text; its shard is null.

    A rule that saw "Paris" in the text may have proposed Search("capital of France"): then the echo is Search("Paris").
    """
    return calls.drop_nulls("words").with_columns(shard=pl.lit(None, pl.String), input="words")


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
    key=("tool", *RESULT_KEY),
    settings=lambda plan, lane: {**result_settings(lane), **file_proposals.identity(lane)},
    reads=("scored_candidates", "heuristic_subset"),
    pool="tools",
    volatile=MEASURED_COLUMNS,
    make=ByChunk(chunks, compute, rows),
    in_warehouse=InWarehouse(
        select="SELECT DISTINCT ON (tool, input, context) * FROM rows ORDER BY tool, input, context, reason NULLS FIRST"
    ),
    asset=StageAsset(calls=lambda output: (output.lane,)),
)
