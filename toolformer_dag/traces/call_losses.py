"""traces/call_losses: the losses of the messages that follow each recorded call, by variant of the call.

A variant is the conversation with one result in place of another: the recorded result, none, an empty one, or a result
of another call. `unit_losses` says how they are computed and stored.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import ByChunk, Stage, TableOutput
from toolformer_dag.files import StorageError
from toolformer_dag.traces import exchanged_results, recorded_calls, recorded_conversations
from toolformer_dag.traces.recorded_calls import CALL_KEY_COLUMNS, CALL_POSITION_COLUMNS
from toolformer_dag.traces.recorded_conversations import (
    StoredConversation,
    read_conversations_by_number,
    read_rows_by_number,
)
from toolformer_dag.traces.unit_losses import MEASURED_COLUMNS, UnitChunk, UnitLosses, collect_settings
from toolformer_dag.traces.units import CallToJudge, compute_call_key

TABLE_NAME = "traces/call_losses"
"""The table of the losses."""


def iter_call_keys(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the calls of a shard with their keys, in frames."""
    for file in output.plan.lake.get_table(exchanged_results.TABLE_NAME).list_part_files(shard):
        yield pl.read_parquet(file, columns=[*CALL_POSITION_COLUMNS, "key"], glob=False)


def read_calls_of_chunk(plan: Plan, chunk: UnitChunk) -> list[CallToJudge]:
    """Read some recorded calls of a shard (a chunk), whose results the model is to judge.

    Each has its conversation, and results of other calls, which the model reads in place of its own for comparison.

    Raises:
        StorageError: Another run has replaced the conversations since the chunk was planned.
    """
    call_rows = _read_call_rows(plan, chunk)
    conversation_numbers = {row["number"] for row in call_rows}
    conversation_by_number = read_conversations_by_number(plan, chunk.shard, conversation_numbers)
    _require_same_keys(chunk, call_rows, conversation_by_number)
    return [_build_call_to_judge(row, conversation_by_number[row["number"]]) for row in call_rows]


def _build_call_to_judge(call_row: Mapping[str, Any], conversation: StoredConversation) -> CallToJudge:
    """Return the call of a row, as `_read_call_rows` reads it, with its conversation and other results."""
    return CallToJudge(
        messages=conversation.messages,
        message_index=call_row["turn"],
        call_index=call_row["call"],
        other_results=tuple(call_row["results"]),
    )


def _read_call_rows(plan: Plan, chunk: UnitChunk) -> list[dict[str, Any]]:
    """Return the rows of a chunk's calls in the table of recorded calls, with the `results` to put in their place."""
    row_numbers = chunk.units["row"]
    calls = read_rows_by_number(plan, recorded_calls.TABLE_NAME, chunk.shard, row_numbers)
    exchanged = read_rows_by_number(plan, exchanged_results.TABLE_NAME, chunk.shard, row_numbers)
    return calls.select("number", "turn", "call").with_columns(exchanged["results"]).to_dicts()


def _require_same_keys(
    chunk: UnitChunk, call_rows: Sequence[Mapping[str, Any]], conversation_by_number: Mapping[int, StoredConversation]
) -> None:
    """Check that the calls that were read have the same keys as the planned ones.

    A key is a hash of a call, its conversation and the other results.

    Args:
        chunk: The planned calls.
        call_rows: The calls as they were read.
        conversation_by_number: Their conversations, by the number in the shard.

    Raises:
        StorageError: The keys differ.
    """
    keys = []
    for row in call_rows:
        digest = conversation_by_number[row["number"]].digest
        keys.append(compute_call_key(digest, row["turn"], row["call"], row["results"]))

    if keys != chunk.units["key"].to_list():
        raise StorageError(
            f"{TABLE_NAME}, shard {chunk.shard!r}: another run has replaced its conversations meanwhile; run again"
        )


CALL_LOSSES = UnitLosses(iter_units=iter_call_keys, read_units=read_calls_of_chunk)
STAGE = Stage(
    name="call_losses",
    description="The losses of what follows every recorded call: without it, with its result, with other results.",
    columns={**CALL_POSITION_COLUMNS, **MEASURED_COLUMNS},
    key_columns=CALL_KEY_COLUMNS,
    collect_settings=collect_settings,
    reads=(recorded_conversations.TABLE_NAME, recorded_calls.TABLE_NAME, exchanged_results.TABLE_NAME),
    inputs=(exchanged_results.TABLE_NAME,),
    shards=lambda plan: plan.conversation_shards_by_name,
    shared=True,
    group="traces",
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    row_maker=ByChunk(CALL_LOSSES.plan_part, CALL_LOSSES.compute_chunk, CALL_LOSSES.make_rows),
)
