"""traces/recorded_calls: a row per call of the recorded conversations, with the hashes that compare conversations."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import ByShard, Column, PartRows, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.traces import recorded_conversations
from toolformer_dag.traces.other_results import beginnings, identify_document
from toolformer_dag.traces.row_batches import RowBatch
from toolformer_dag.traces.stored_messages import messages_of
from toolformer_dag.traces.units import iter_call_positions

METHOD = 1
"""A version number, raised when the same messages would give other rows."""
NAME = "traces/recorded_calls"
"""The table of the recorded calls."""
BATCH = 2_000
"""About the maximum number of calls of a frame."""
BATCH_CHARACTERS = 1 << 23
"""About the maximum number of characters of the results of a frame."""
PLACE = {
    "shard": recorded_conversations.SHARD,
    "conversation": recorded_conversations.CONVERSATION,
    "turn": Column(pl.Int32(), "number of the message of the conversation, from 0; results are no messages"),
    "call": Column(pl.Int32(), "number of the call in its message, from 0"),
}
"""The columns that identify a recorded call."""
KEY = ("conversation", "turn", "call")


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the rows, together with the conversations: the version of this method."""
    return {"method": METHOD}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per call of a shard, in the order of the conversations."""
    return PartRows(_iter_frames(output, shard))


def _iter_frames(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the calls of a shard in frames of about BATCH calls, and about BATCH_CHARACTERS characters of results."""
    batch = RowBatch(BATCH, BATCH_CHARACTERS)
    for rows_of_conversation in _iter_rows_by_conversation(output, shard):
        for row in rows_of_conversation:
            batch.add(row, text=row["result"] or "")
        if batch.is_full:
            yield batch.take(output.stage.schema)
    if batch.rows:
        yield batch.take(output.stage.schema)


def _iter_rows_by_conversation(output: TableOutput, shard: str) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each conversation of a shard in order, the rows of its calls."""
    number = 0  # of the conversation in the shard
    for frame in output.plan.lake.table(recorded_conversations.NAME).batches(shard):
        for conversation in frame.iter_rows(named=True):
            yield list(_iter_call_rows(conversation, number))
            number += 1


def _iter_call_rows(conversation: Mapping[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield a row of this table for each call of a conversation, as a dict by column.

    conversation: its row of traces/conversations. number: its number in the shard, from 0.
    """
    messages = messages_of(conversation["messages"])
    positions = list(iter_call_positions(messages))
    if not positions:
        return
    conversation_columns = _build_conversation_columns(conversation, number, messages)
    hashes_of_messages_before = beginnings(messages)  # by the number of the message
    for message_number, call_number in positions:
        call = messages[message_number].calls[call_number]
        yield {
            **conversation_columns,
            "turn": message_number,
            "call": call_number,
            "beginning": hashes_of_messages_before[message_number],
            **_build_call_columns(call),
        }


def _build_conversation_columns(
    conversation: Mapping[str, Any], number: int, messages: Sequence[RecordedMessage]
) -> dict[str, Any]:
    """Return the columns that all calls of a conversation share.

    conversation: its row of traces/conversations. number: its number in the shard, from 0. messages: its messages.
    """
    return {
        "shard": conversation["shard"],
        "conversation": conversation["conversation"],
        "number": number,
        "source": conversation["source"],
        "record_id": conversation["record_id"],
        "digest": conversation["digest"],
        "document": identify_document(messages),
    }


def _build_call_columns(call: RecordedCall) -> dict[str, Any]:
    """Return the columns of a row that say what was called, with what result."""
    return {
        "tool": call.tool,
        "arguments": json.dumps(call.arguments, ensure_ascii=False),
        "result": call.result,
        "failed": call.failed,
    }


STAGE = Stage(
    name="recorded_calls",
    description="Every call of the recorded conversations with its result.",
    columns={
        **PLACE,
        "number": Column(pl.Int32(), "number of the conversation in its shard, from 0"),
        "source": recorded_conversations.STAGE.columns["source"],
        "record_id": recorded_conversations.STAGE.columns["record_id"],
        "digest": recorded_conversations.STAGE.columns["digest"],
        "document": Column(pl.String(), "what conversations about one question share: hash of what was said before"),
        "beginning": Column(pl.String(), "hash of the messages before that of the call"),
        "tool": Column(pl.String(), "name of the tool"),
        "arguments": Column(pl.String(), "arguments of the call"),
        "result": Column(pl.String(), "the recorded result; null where there is none"),
        "failed": Column(pl.Boolean(), "whether the result says that the call failed"),
    },
    key=KEY,
    settings=settings,
    reads=(recorded_conversations.NAME,),
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    make=ByShard(rows),
)
