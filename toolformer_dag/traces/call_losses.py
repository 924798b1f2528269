"""traces/call_losses: the losses of the messages that follow each recorded call, by variant of the call.

A variant is the conversation with one result in place of another: the recorded result, none, an empty one, or a result
of another call. What was measured of a call is stored under its `key` (row store traces/judged_calls), and each loss
under a digest of its tokens (row store traces/losses). So nothing is computed again when a file was moved or a setting
changed that does not matter here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    ByChunk,
    Chunk,
    Claimed,
    Column,
    PartRows,
    Planned,
    Rejected,
    Stage,
    TableOutput,
    Work,
    counted,
)
from toolformer_dag.computing.stored_rows import chunk_size, claim
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import StorageError
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.traces import exchanged_results, recorded_calls, recorded_conversations
from toolformer_dag.traces.exchanged_results import key_of
from toolformer_dag.traces.judge import LOSSES, Judge, JudgedCall, load_variant_writer, losses_identity
from toolformer_dag.traces.recorded_calls import KEY, PLACE
from toolformer_dag.traces.recorded_conversations import StoredConversation, conversations_by_number, rows_by_number
from toolformer_dag.traces.variants import EMPTY, NONE, OWN, CallToJudge, VariantWriter
from toolformer_dag.traces.windows import WINDOWS

READING = 2
"""Raised when the same conversation would be read as other tokens, or another overlap would be counted."""
NAME = "traces/call_losses"
"""The table of the losses."""
MEASURED = {
    "not_judged": Column(pl.String(), "why there are no losses; null for most"),
    "tokens": Column(pl.Int32(), "weighted tokens"),
    "loss_none": Column(pl.Float64(), "loss of the weighted tokens had the call never been made, nats per token"),
    "loss_empty": Column(pl.Float64(), "the same with the call and an empty result"),
    "loss_result": Column(pl.Float64(), "the same with the recorded result"),
    "overlap": Column(pl.Float64(), "share of the weighted words that stand in the result"),
    "swapped_losses": Column(pl.List(pl.Float64()), "the loss with each of the exchanged results"),
    "swapped_overlaps": Column(pl.List(pl.Float64()), "the overlap with each of the exchanged results"),
}
"""The columns with what is measured of a call."""
JUDGED = pl.Schema({"key": pl.String(), **{name: column.dtype for name, column in MEASURED.items()}})
"""The columns of the stored measurements."""
LONGEST_CHUNK = 1_000
"""The maximum number of calls of a chunk that goes on to the end of a conversation."""
LOOKED_UP = 20_000
"""How many calls are looked up in the row store at once."""


class JudgedStores(NamedTuple):
    """The row stores of the plan's judge.

    Attributes:
        calls: what was measured of calls, a row for each `key` of traces/exchanged_results.
        losses: single losses, a row for each digest of tokens.
    """

    calls: RowStore
    losses: RowStore


class RecordedCallChunk(NamedTuple):
    """Calls of a shard that a worker judges at once.

    Attributes:
        shard: the name of the shard.
        calls: a frame with a row per call: `row`, its row number in the tables of the shard, and `key`.
    """

    shard: str
    calls: pl.DataFrame


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the losses of a call: judge, reading, settings but `swaps`, weights of the window."""
    judge = losses_identity(plan.identity_of("judge"))
    window = WINDOWS[plan.settings.traces.window]
    weights = {"window_weights": list(window.weights)} if window.weights else {}
    return {**judge, "reading": READING, **determining(plan.settings.traces, but=("swaps",)), **weights}


def loss_stores(worker: Worker) -> JudgedStores:
    """Open the two row stores of the plan's judge. They also hold the losses that earlier releases stored there."""
    identity = losses_identity(worker.plan.identity_of("judge"))
    return JudgedStores(
        calls=worker.rows("traces/judged_calls", settings(worker.plan, None), ["key"], JUDGED),
        losses=worker.rows("traces/losses", identity, ["digest"], LOSSES),
    )


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Return the calls of a shard that are not judged yet, cut into chunks. Calls with the same key are judged once.

    claimed: by row store, the keys that earlier shards of this run are judging. They are not planned again, and the
    keys that this shard judges are added.
    """
    calls = _calls_of_shard(output, shard)
    to_judge = _calls_to_judge(calls, loss_stores(worker).calls, claimed)
    planned = []
    for chunk in _call_chunks(to_judge, shard, chunk_size(output.plan.settings)):
        planned.append(Chunk(units=chunk.calls.height, payload=chunk))
    computed = Counter(judged=to_judge.height)
    reused = Counter(judged=calls.height - to_judge.height)
    return Planned(planned, Work(computed=computed, reused=reused))


def _calls_of_shard(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return a frame with a row per call of a shard: its `row` number in the shard, `conversation` and `key`."""
    exchanged = output.plan.lake.table(exchanged_results.NAME).scan([shard])
    return exchanged.select("conversation", "key").collect().with_row_index("row")


def _calls_to_judge(calls: pl.DataFrame, store: RowStore, claimed: Claimed) -> pl.DataFrame:
    """Return the first call of each key that is neither stored nor in `claimed`, and add these keys to `claimed`."""
    missing = claim(claimed, store.name, store.missing(calls))
    distinct_calls = calls.unique("key", keep="first", maintain_order=True)
    return distinct_calls.join(missing, on="key", how="semi").sort("row")


def _call_chunks(calls: pl.DataFrame, shard: str, size: int) -> Iterator[RecordedCallChunk]:
    """Cut calls with the columns row, conversation and key into chunks of at least `size`; the last may be smaller.

    A chunk goes on to the end of its last conversation, so that no two chunks read it, but not above LONGEST_CHUNK
    calls. With size 3, calls of the conversations a a b b b c are cut into a a b b b and c.
    """
    ends = _conversation_ends(calls["conversation"].to_list())
    first = 0
    while first < calls.height:
        earliest_end = min(first + size, calls.height)
        latest_end = first + max(size, LONGEST_CHUNK)
        conversation_end = ends[bisect_left(ends, earliest_end)]  # the first of `ends` from earliest_end on
        end = min(conversation_end, latest_end)
        yield RecordedCallChunk(shard, calls[first:end].select("row", "key"))
        first = end


def _conversation_ends(conversations: Sequence[str]) -> list[int]:
    """Return the index after the last call of each conversation, as [2, 5, 6] for a a b b b c."""
    ends = []
    for number, conversation in enumerate(conversations, 1):
        is_last = number == len(conversations)
        if is_last or conversations[number] != conversation:
            ends.append(number)
    return ends


def compute(worker: Worker, output: TableOutput, chunk: RecordedCallChunk) -> Work:
    """Judge the calls of a chunk, store what was measured, and return the tokens and losses that it took.

    The judge stores single losses while it works, so that a kill loses few of them. At the end a row per call is
    appended to the row store `calls`.
    """
    stores = loss_stores(worker)
    judge = _judge(worker, stores.losses)
    judged_calls = judge.judged(_read_calls(output.plan, chunk))
    rows = []
    for key, call in zip(chunk.calls["key"], judged_calls, strict=True):
        rows.append({"key": key, **_measured(call)})
    stores.calls.append(pl.DataFrame(rows, schema=JUDGED))
    return _work_of(judge)


def _judge(worker: Worker, losses: RowStore) -> Judge:
    """Return the judge of the plan, which stores single losses; its model is loaded for the first one that is new."""
    load_model = partial(worker.engine, "judge")
    return Judge(worker.plan.settings, losses, load=load_model, writer=_variant_writer(worker))


def _work_of(judge: Judge) -> Work:
    """Return how many tokens and losses a judge computed, how many losses it reused, and what ran its model."""
    computed = judge.counts["computed"]
    return Work(
        tokens=judge.tokens,
        computed=Counter(losses=computed),
        reused=Counter(losses=judge.counts["reused"]),
        backends=frozenset({judge.engine.backend.identity}) if computed else frozenset(),
    )


@lru_cache(1)
def _variant_writer(worker: Worker) -> VariantWriter:
    """Load the writer of variants, which turns conversations into tokens; it is kept for later chunks."""
    return load_variant_writer(worker.plan.settings)


def _read_calls(plan: Plan, chunk: RecordedCallChunk) -> list[CallToJudge]:
    """Read the calls of a chunk, each with its conversation and the other results to put in place of its own.

    Raises StorageError if another run has replaced the conversations since the chunk was planned.
    """
    rows = _rows_of_calls(plan, chunk)
    conversations = conversations_by_number(plan, chunk.shard, {row["number"] for row in rows})
    _require_same_keys(chunk, rows, conversations)
    return [_call_to_judge(row, conversations[row["number"]]) for row in rows]


def _call_to_judge(row: Mapping[str, Any], conversation: StoredConversation) -> CallToJudge:
    """Return the call of a row, as `_rows_of_calls` reads it, with its conversation and other results."""
    return CallToJudge(
        messages=conversation.messages,
        message=row["turn"],
        index=row["call"],
        other_results=tuple(row["results"]),
    )


def _rows_of_calls(plan: Plan, chunk: RecordedCallChunk) -> list[dict[str, Any]]:
    """Return the rows of a chunk's calls in the table of recorded calls, with the `results` to put in their place."""
    row_numbers = chunk.calls["row"]
    calls = rows_by_number(plan, recorded_calls.NAME, chunk.shard, row_numbers)
    exchanged = rows_by_number(plan, exchanged_results.NAME, chunk.shard, row_numbers)
    return calls.select("number", "turn", "call").with_columns(exchanged["results"]).to_dicts()


def _require_same_keys(
    chunk: RecordedCallChunk, rows: Sequence[Mapping[str, Any]], conversations: Mapping[int, StoredConversation]
) -> None:
    """Raise StorageError if the calls that were read have other keys than the planned ones.

    rows: the calls as they were read. conversations: by their number in the shard.
    """
    keys = []
    for row in rows:
        digest = conversations[row["number"]].digest
        keys.append(key_of(digest, row["turn"], row["call"], row["results"]))
    if keys != chunk.calls["key"].to_list():
        raise StorageError(
            f"{NAME}, shard {chunk.shard!r}: another run has replaced its conversations meanwhile; run again"
        )


def _measured(call: JudgedCall) -> dict[str, Any]:
    """Return a row with the columns of MEASURED. Losses are null, and lists empty, if the call could not be judged."""
    swapped_losses = [call.losses[str(number)] for number in range(len(call.other_results))]
    return {
        "not_judged": call.reason,
        "tokens": call.tokens,
        "loss_none": call.losses.get(NONE),
        "loss_empty": call.losses.get(EMPTY),
        "loss_result": call.losses.get(OWN),
        "overlap": call.overlap[0] if call.overlap else None,  # with the recorded result
        "swapped_losses": swapped_losses,
        "swapped_overlaps": list(call.overlap[1:]),
    }


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the rows of every call of a shard. The rejections count calls by the reason why they were not judged."""
    stores = loss_stores(worker)
    rejected: Rejected = Counter()
    return PartRows(_frames(output, stores.calls, shard, rejected), rejected, [store.name for store in stores])


def _frames(output: TableOutput, store: RowStore, shard: str, rejected: Rejected) -> Iterator[pl.DataFrame]:
    """Yield the calls of a shard with what was measured of them; count calls that were not judged in `rejected`.

    rejected: numbers of calls by reason, complete when all frames were yielded. Raises StorageError if the row store
    lacks a call.
    """
    for exchanged in output.plan.lake.table(exchanged_results.NAME).batches(shard):
        for calls in exchanged.select(*PLACE, "key").iter_slices(LOOKED_UP):
            measured = _measured_calls(calls, store)
            rejected.update(counted(measured, "not_judged"))
            yield measured.select(output.stage.schema.names())


def _measured_calls(calls: pl.DataFrame, store: RowStore) -> pl.DataFrame:
    """Return calls with the columns of MEASURED, looked up by `key`. Raises StorageError if the store lacks a call."""
    measured = calls.join(store.stored(calls), on="key", how="left", maintain_order="left")
    lacking = measured["tokens"].null_count()  # every stored row has tokens
    if lacking:
        raise StorageError(f"{lacking} judged calls were damaged while they were read; run again")
    return measured


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
    make=ByChunk(chunks, compute, rows),
)
