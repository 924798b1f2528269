"""tool_results: run the tool once for every distinct call (paper, section 2, "Executing API Calls")."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    INPUT,
    RETRY_FIELD,
    TEXT_KEY,
    TOOL,
    ByChunk,
    Chunk,
    ClaimedKeys,
    Column,
    InWarehouse,
    PartRows,
    Planned,
    Stage,
    StageAsset,
    TableOutput,
    Work,
    count_rejected_rows,
)
from toolformer_dag.computing.stored_rows import claim_keys, require_no_lost_rows
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.pipeline import file_proposals
from toolformer_dag.pipeline.work_counts import count_planned_work
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.tools.tool import ToolCall, ToolResult

RESULT_KEY_COLUMNS = ("input", "context")
"""A call to a lane's tool; `context` is what the result depends on beside the input (`Tool.context`)."""
RESULT_SCHEMA = pl.Schema(
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
    def from_answer(cls, call: ToolCall, answer: ToolResult) -> "_ResultRow":
        """Build the row of a call and its answer."""
        return cls(
            input=call.input,
            context=call.context,
            result=answer.result,
            reason=answer.reason,
            seconds=answer.seconds,
            cost=answer.cost,
        )


def collect_result_settings(lane: Lane) -> dict[str, Any]:
    """Collect what the result of a call depends on, apart from the call: the tool, its version, options and limits.

    Text generation and evaluation call tools with the same settings.
    """
    tool = lane.tool
    return {
        "tool": tool.name,
        "version": tool.version,
        "identity": lane.compute_tool_identity(),
        **select_determining_settings(lane.limits),
    }


@dataclass(frozen=True, slots=True)
class CallChunk:
    """Calls (RESULT_KEY_COLUMNS) to the tool of a lane.

    The lane is the output's own; in a chain it may be one whose tool can be called after it.
    """

    lane_key: str
    calls: pl.DataFrame


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
    """Plan the distinct calls of a shard whose results are not stored yet."""
    return plan_tool_calls(worker, output, _read_candidate_calls(output, shard), claimed_keys)


def plan_tool_calls(
    worker: Worker, output: TableOutput, candidate_calls: pl.DataFrame, claimed_keys: ClaimedKeys
) -> Planned:
    """Plan which calls of a tool still have to be run.

    Args:
        output: The table to build. Its lane names the tool and the tool's settings.
        candidate_calls: The wanted calls, possibly repeated, in the columns RESULT_KEY_COLUMNS. Other columns are
            ignored.
        claimed_keys: The calls that earlier shards of this run plan already, which are left out here. The newly planned
            ones are added to it.

    Returns:
        The calls to run, in chunks, and how many calls are run and reused.
    """
    distinct_calls = candidate_calls.select(RESULT_KEY_COLUMNS).unique().sort(RESULT_KEY_COLUMNS)
    done_calls = _collect_done_calls(worker, output, distinct_calls)
    open_calls = distinct_calls.join(done_calls, on=RESULT_KEY_COLUMNS, how="anti", maintain_order="left")

    # Leaves out what earlier shards plan, and adds the rest to `claimed_keys`.
    store_name = _open_result_store(worker, output.lane).name
    calls_to_run = claim_keys(claimed_keys, store_name, open_calls)

    chunks = _split_into_chunks(worker.plan, output.lane, calls_to_run)
    work = count_planned_work("calls", total_count=distinct_calls.height, missing_count=calls_to_run.height)
    return Planned(chunks, work)


def _split_into_chunks(plan: Plan, lane: Lane, calls: pl.DataFrame) -> list[Chunk]:
    """Cut calls (RESULT_KEY_COLUMNS) to the tool of a lane into chunks."""
    chunks = []
    for batch in calls.iter_slices(plan.settings.execution.chunk_calls):
        payload = CallChunk(lane_key=lane.key, calls=batch)
        chunks.append(Chunk(unit_count=batch.height, payload=payload))
    return chunks


def _collect_done_calls(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> pl.DataFrame:
    """Collect the calls that the tool need not run now.

    These are calls with a stored answer, calls whose result is given in a file, and calls that were lost in this run,
    for example by a time limit or a broken connection. Only the next run tries lost calls again.

    Args:
        calls: The wanted calls, in the columns RESULT_KEY_COLUMNS.

    Returns:
        Calls in the same columns. Lost calls and calls of files may be others than the wanted ones.
    """
    # Whole rows are read, not only their keys, so that damage in any column shows before the tool runs.
    stored_answers = _open_result_store(worker, output.lane).read_stored_rows(calls)
    results_in_files = file_proposals.read_results_in_files(output)
    lost_calls = worker.lost_calls_by_lane[output.lane.key]

    frames = [stored_answers, *lost_calls, results_in_files]
    return pl.concat([frame.select(RESULT_KEY_COLUMNS) for frame in frames])


def compute(worker: Worker, output: TableOutput, chunk: CallChunk) -> Work:
    """Run the tool on the calls of a chunk, and store its answers.

    Calls that are lost, for example by a time limit or a broken connection, get no stored answer. The next run tries
    them again.

    Returns:
        An empty count of work, because no model ran.

    Raises:
        ToolDown: The tool stopped working. The answers that it gave before are stored.
    """
    lane = _get_lane_of_chunk(output, chunk)
    calls = [ToolCall(input, context) for input, context in chunk.calls.select(RESULT_KEY_COLUMNS).iter_rows()]

    answers: dict[ToolCall, ToolResult] = {}  # the runner adds each answer as it comes
    try:
        worker.get_runner(lane).run_calls(calls, answers)
    finally:
        # Answers may have cost money, so those that came are stored even if an error follows.
        _store_answers(worker, lane, answers)
    return Work()


def _get_lane_of_chunk(output: TableOutput, chunk: CallChunk) -> Lane:
    """Return the lane whose tool the calls of a chunk are for."""
    lane_by_key = {lane.key: lane for lane in output.lane.chainable_lanes_by_name.values()}
    return lane_by_key[chunk.lane_key]


def _store_answers(worker: Worker, lane: Lane, answers: Mapping[ToolCall, ToolResult]) -> None:
    """Store the answers of a tool. Answers of lost calls are only remembered, in `worker.lost_calls_by_lane`.

    Args:
        answers: The answer to each call. It is `lost` if another try may succeed, for example after a time limit.
    """
    final_answers = [_ResultRow.from_answer(call, answer) for call, answer in answers.items() if not answer.lost]
    lost_answers = [_ResultRow.from_answer(call, answer) for call, answer in answers.items() if answer.lost]

    _open_result_store(worker, lane).append_rows(pl.DataFrame(final_answers, schema=RESULT_SCHEMA, orient="row"))
    worker.lost_calls_by_lane[lane.key].append(pl.DataFrame(lost_answers, schema=RESULT_SCHEMA, orient="row"))


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per distinct call of a shard: its result, or the reason why there is none."""
    return build_answered_rows(worker, output, _read_candidate_calls(output, shard))


def build_answered_rows(worker: Worker, output: TableOutput, candidate_calls: pl.DataFrame) -> PartRows:
    """Look up the results of calls that the tool has run.

    Args:
        output: The table to build. Its lane names the tool and the tool's settings.
        candidate_calls: The calls, possibly repeated, in the columns shard, input and context. If a call has no result,
            it is counted in `rejection_counts`, unless its `shard` is null.

    Returns:
        A row per distinct call: its result, or the reason why there is none.

    Raises:
        StorageError: Results are missing, because they were damaged after they had been computed.
    """
    distinct_calls = candidate_calls.select(RESULT_KEY_COLUMNS).unique()
    answers = _read_answers(worker, output, distinct_calls)
    results = answers.concat_answers()  # lost calls (time limit, broken connection) have a row too

    missing_count = distinct_calls.height - results.height
    require_no_lost_rows(output, "results", missing_count)  # raises StorageError unless it is 0

    counted_calls = candidate_calls.drop_nulls("shard").join(results, on=RESULT_KEY_COLUMNS)
    return PartRows(
        frames=[_build_result_table(output, results)],
        rejection_counts=count_rejected_rows(counted_calls),
        store_names=[_open_result_store(worker, output.lane).name],
        record_fields=_build_retry_fact(answers.lost_answers),  # makes the next run try lost calls again
    )


def _build_result_table(output: TableOutput, result_rows: pl.DataFrame) -> pl.DataFrame:
    """Return results (RESULT_SCHEMA) as sorted rows of the table, with the lane and the version of its tool."""
    lane = output.lane
    rows_with_tool = result_rows.with_columns(tool=pl.lit(lane.key), tool_version=pl.lit(lane.tool.version))
    return output.stage.shape_frame(rows_with_tool).sort(RESULT_KEY_COLUMNS)


def _build_retry_fact(lost_answers: pl.DataFrame) -> dict[str, str]:
    """Return what the record of a table says about lost calls, such as those that ended at a time limit.

    Args:
        lost_answers: The lost calls, in the columns RESULT_SCHEMA.

    Returns:
        The field RETRY_FIELD, which makes the next run try the calls again. {} if no call was lost.
    """
    if lost_answers.is_empty():
        return {}

    distinct_reasons = sorted(set(lost_answers["reason"]))
    return {RETRY_FIELD: f"calls were lost ({', '.join(distinct_reasons)}) and are tried again"}


class _Answers(NamedTuple):
    """Answers to calls, in the columns RESULT_SCHEMA.

    Attributes:
        final_answers: The answers that will not change: results, and reasons why there is none.
        lost_answers: The answers of calls that the tool lost in this update, for example by a time limit.
    """

    final_answers: pl.DataFrame
    lost_answers: pl.DataFrame

    def concat_answers(self) -> pl.DataFrame:
        """Return all answers, the final ones first."""
        return pl.concat([self.final_answers, self.lost_answers])


def _read_answers(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> _Answers:
    """Return the answers to calls, at most one answer per call.

    A call is lost if the tool did not answer it in this update, for example within its time limit. If another process
    has meanwhile stored an answer, or a file gives its result, it is not lost any more.

    Args:
        calls: The distinct calls, in the columns RESULT_KEY_COLUMNS.
    """
    all_lost_answers = _collect_lost_answers(worker, output.lane)
    if not all_lost_answers.is_empty():
        # Another process may have stored an answer to a call that was lost here.
        _open_result_store(worker, output.lane).forget_listed_files()

    final_answers = _read_final_answers(worker, output, calls)

    lost_answers = all_lost_answers.join(calls, on=RESULT_KEY_COLUMNS, how="semi")
    still_lost_answers = lost_answers.join(final_answers, on=RESULT_KEY_COLUMNS, how="anti")
    return _Answers(final_answers=final_answers, lost_answers=still_lost_answers)


def _read_final_answers(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the answers (RESULT_SCHEMA) to calls: the result in a file of calls, else the tool's stored answer."""
    results_in_files = file_proposals.read_results_in_files(output)
    answers_from_files = results_in_files.join(calls, on=RESULT_KEY_COLUMNS, how="semi")

    stored_answers = _open_result_store(worker, output.lane).read_stored_rows(calls)
    answers_from_tool = stored_answers.join(answers_from_files, on=RESULT_KEY_COLUMNS, how="anti")

    timed_answers_from_files = answers_from_files.with_columns(seconds=pl.lit(0.0))
    # The empty frame gives the columns that the files lack.
    return pl.concat([RESULT_SCHEMA.to_frame(), answers_from_tool, timed_answers_from_files], how="diagonal")


def _collect_lost_answers(worker: Worker, lane: Lane) -> pl.DataFrame:
    """Return the distinct calls that a lane's tool lost in this update (RESULT_SCHEMA)."""
    return pl.concat([RESULT_SCHEMA.to_frame(), *worker.lost_calls_by_lane[lane.key]]).unique(RESULT_KEY_COLUMNS)


def _open_result_store(worker: Worker, lane: Lane) -> RowStore:
    """Open the row store of the results of a lane's tool."""
    return worker.open_lane_row_store(lane, "results", collect_result_settings(lane), RESULT_KEY_COLUMNS, RESULT_SCHEMA)


def _read_candidate_calls(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return every call that the tool has to answer for a shard, in the columns shard, input and context.

    They are the proposed calls that could be parsed, and their echoes: if a rule proposed a call for words that it saw
    in the text, the call with these words as input.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard).select(*TEXT_KEY, "context")
    samples = output.get_lane_table("scored_candidates").read_part(shard)
    candidates = samples.filter(pl.col("input").is_not_null())
    # `words` is only needed to build the echoes.
    calls = candidates.join(texts, on=TEXT_KEY, how="left").select("shard", *RESULT_KEY_COLUMNS, "words")
    return pl.concat([calls, _build_echo_calls(calls)]).drop("words")


def _build_echo_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the echo of each call that a rule proposed for words of the text. Its shard is null.

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
    key_columns=("tool", *RESULT_KEY_COLUMNS),
    collect_settings=lambda plan, lane: {
        **collect_result_settings(lane),
        **file_proposals.compute_files_identity(lane),
    },
    reads=("scored_candidates", "heuristic_subset"),
    pool="tools",
    volatile_columns=MEASURED_COLUMNS,
    row_maker=ByChunk(chunks, compute, rows),
    warehouse_form=InWarehouse(
        select_query=(
            "SELECT DISTINCT ON (tool, input, context) * FROM rows ORDER BY tool, input, context, reason NULLS FIRST"
        )
    ),
    asset=StageAsset(list_called_lanes=lambda output: (output.lane,)),
)
