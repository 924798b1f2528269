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
from toolformer_dag.traces.recorded_calls import KEY, PLACE
from toolformer_dag.traces.recorded_conversations import (
    StoredConversation,
    read_conversations_by_number,
    read_rows_by_number,
)
from toolformer_dag.traces.unit_losses import MEASURED, UnitChunk, UnitLosses, settings
from toolformer_dag.traces.units import CallToJudge, compute_call_key

NAME = "traces/call_losses"
"""The table of the losses."""


def iter_call_keys(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the calls of a shard with their keys, in frames."""
    for file in output.plan.lake.table(exchanged_results.NAME).files(shard):
        yield pl.read_parquet(file, columns=[*PLACE, "key"], glob=False)


def read_calls_of_chunk(plan: Plan, chunk: UnitChunk) -> list[CallToJudge]:
    """Read the calls of a chunk, each with its conversation and the other results to put in place of its own.

    Raises StorageError if another run has replaced the conversations since the chunk was planned.
    """
    rows = _read_call_rows(plan, chunk)
    conversations = read_conversations_by_number(plan, chunk.shard, {row["number"] for row in rows})
    _require_same_keys(chunk, rows, conversations)
    return [_build_call_to_judge(row, conversations[row["number"]]) for row in rows]


def _build_call_to_judge(row: Mapping[str, Any], conversation: StoredConversation) -> CallToJudge:
    """Return the call of a row, as `_read_call_rows` reads it, with its conversation and other results."""
    return CallToJudge(
        messages=conversation.messages,
        message=row["turn"],
        index=row["call"],
        other_results=tuple(row["results"]),
    )


def _read_call_rows(plan: Plan, chunk: UnitChunk) -> list[dict[str, Any]]:
    """Return the rows of a chunk's calls in the table of recorded calls, with the `results` to put in their place."""
    row_numbers = chunk.units["row"]
    calls = read_rows_by_number(plan, recorded_calls.NAME, chunk.shard, row_numbers)
    exchanged = read_rows_by_number(plan, exchanged_results.NAME, chunk.shard, row_numbers)
    return calls.select("number", "turn", "call").with_columns(exchanged["results"]).to_dicts()


def _require_same_keys(
    chunk: UnitChunk, rows: Sequence[Mapping[str, Any]], conversations: Mapping[int, StoredConversation]
) -> None:
    """Raise StorageError if the calls that were read have other keys than the planned ones.

    rows: the calls as they were read. conversations: by their number in the shard.
    """
    keys = []
    for row in rows:
        digest = conversations[row["number"]].digest
        keys.append(compute_call_key(digest, row["turn"], row["call"], row["results"]))
    if keys != chunk.units["key"].to_list():
        raise StorageError(
            f"{NAME}, shard {chunk.shard!r}: another run has replaced its conversations meanwhile; run again"
        )


CALL_LOSSES = UnitLosses(keys=iter_call_keys, read=read_calls_of_chunk)
STAGE = Stage(
    name="call_losses",
    description="The losses of what follows every recorded call: without it, with its result, with other results.",
    columns={**PLACE, **MEASURED},
    key=KEY,
    settings=settings,
    reads=(recorded_conversations.NAME, recorded_calls.NAME, exchanged_results.NAME),
    inputs=(exchanged_results.NAME,),
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    pool="gpu",
    kinds=frozenset({"pytorch", "parquet"}),
    make=ByChunk(CALL_LOSSES.chunks, CALL_LOSSES.compute, CALL_LOSSES.rows),
)
