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
from toolformer_dag.traces.other_results import compute_document_hash, hash_beginnings
from toolformer_dag.traces.row_batches import RowBatch
from toolformer_dag.traces.stored_messages import parse_messages
from toolformer_dag.traces.units import iter_call_positions

CALL_ROWS_VERSION = 1
"""A version number, raised when the same messages would give other rows."""
TABLE_NAME = "traces/recorded_calls"
"""The table of the recorded calls."""
MAX_CALLS_PER_FRAME = 2_000
"""About the maximum number of calls of a frame."""
MAX_CHARACTERS_PER_FRAME = 1 << 23
"""About the maximum number of characters of the results of a frame."""
CALL_POSITION_COLUMNS = {
    "shard": recorded_conversations.SHARD_COLUMN,
    "conversation": recorded_conversations.CONVERSATION_COLUMN,
    "turn": Column(pl.Int32(), "number of the message of the conversation, from 0; results are no messages"),
    "call": Column(pl.Int32(), "number of the call in its message, from 0"),
}
"""The columns that identify a recorded call."""
CALL_KEY_COLUMNS = ("conversation", "turn", "call")


def collect_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the rows, together with the conversations: the version of this method."""
    return {"method": CALL_ROWS_VERSION}


def make_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per call of a shard, in the order of the conversations."""
    return PartRows(_iter_frames(output, shard))


def _iter_frames(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the calls of a shard in frames, which end when their number or the text of their results gets too large.

    The calls of a conversation are never parted.
    """
    batch = RowBatch(MAX_CALLS_PER_FRAME, MAX_CHARACTERS_PER_FRAME)
    for rows_of_conversation in _iter_rows_by_conversation(output, shard):
        for row in rows_of_conversation:
            batch.add_row(row, text=row["result"] or "")
        if batch.is_full:
            yield batch.take_frame(output.stage.schema)
    if batch.rows:
        yield batch.take_frame(output.stage.schema)


def _iter_rows_by_conversation(output: TableOutput, shard: str) -> Iterator[list[dict[str, Any]]]:
    """Yield, for each conversation of a shard in order, the rows of its calls."""
    conversations_table = output.plan.lake.get_table(recorded_conversations.TABLE_NAME)
    conversation_number = 0
    for frame in conversations_table.iter_frames(shard):
        for conversation_row in frame.iter_rows(named=True):
            yield list(_iter_call_rows(conversation_row, conversation_number))
            conversation_number += 1


def _iter_call_rows(conversation_row: Mapping[str, Any], conversation_number: int) -> Iterator[dict[str, Any]]:
    """Yield a row of the table of recorded calls for each call of a conversation, as a dict by column.

    Args:
        conversation_row: The row of the conversation in the table traces/conversations.
        conversation_number: Its number in the shard, from 0.
    """
    messages = parse_messages(conversation_row["messages"])
    positions = list(iter_call_positions(messages))
    if not positions:
        return

    conversation_columns = _build_conversation_columns(conversation_row, conversation_number, messages)
    hashes_of_messages_before = hash_beginnings(messages)  # by the number of the message
    for message_index, call_index in positions:
        call = messages[message_index].calls[call_index]
        yield {
            **conversation_columns,
            "turn": message_index,
            "call": call_index,
            "beginning": hashes_of_messages_before[message_index],
            **_build_call_columns(call),
        }


def _build_conversation_columns(
    conversation_row: Mapping[str, Any], conversation_number: int, messages: Sequence[RecordedMessage]
) -> dict[str, Any]:
    """Return the columns that all calls of a conversation share.

    Args:
        conversation_row: The row of the conversation in the table traces/conversations.
        conversation_number: Its number in the shard, from 0.
        messages: Its messages.
    """
    return {
        "shard": conversation_row["shard"],
        "conversation": conversation_row["conversation"],
        "number": conversation_number,
        "source": conversation_row["source"],
        "record_id": conversation_row["record_id"],
        "digest": conversation_row["digest"],
        "document": compute_document_hash(messages),
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
        **CALL_POSITION_COLUMNS,
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
    key_columns=CALL_KEY_COLUMNS,
    collect_settings=collect_settings,
    reads=(recorded_conversations.TABLE_NAME,),
    shards=lambda plan: plan.conversation_shards_by_name,
    shared=True,
    group="traces",
    row_maker=ByShard(make_rows),
)
