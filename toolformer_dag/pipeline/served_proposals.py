"""served_proposals: let a model behind an OpenAI-compatible server write texts again with calls in them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_KEY,
    TEXT_KEY,
    ByChunk,
    Chunk,
    Claimed,
    PartRows,
    Planned,
    Rejected,
    Stage,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import claim, require_whole
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.completions import rewrite_texts
from toolformer_dag.pipeline.placing import (
    PROPOSAL_COLUMNS,
    UnplacedCall,
    build_unplaced_frame,
    place_at_tokens,
    placing_settings,
)
from toolformer_dag.pipeline.work_counts import count_planned_work
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts.calls import take_out, written_calls

WRITTEN_KEY = ("text_digest", "sample")
TEXT_COLUMNS = (*TEXT_KEY, "offset", "text", "context")
"""Columns of a text that each of its calls has too (UnplacedCall)."""
WRITTEN_TEXTS = pl.Schema({"text_digest": pl.String(), "sample": pl.Int32(), "written": pl.String()})
"""Columns of the row store: what the server wrote in answer to the `sample`-th request for a text, from 0."""


def identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what the server's texts depend on: the model, the tool's prompt, and the sampling."""
    model = plan.model_of("proposer")
    return {"model": model.name, "prompt": lane.tool.prompt, "sampling": determining(plan.settings.sampling)}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the texts; a change makes the table out of date."""
    return {**placing_settings(plan, lane), **identity(plan, lane), "m": lane.m}


def _open_store(worker: Worker, lane: Lane) -> RowStore:
    """Open the row store of the lane's written texts."""
    return worker.lane_rows(lane, "written", identity(worker.plan, lane), WRITTEN_KEY, WRITTEN_TEXTS)


def _build_requested_samples(output: TableOutput, subset: pl.DataFrame) -> pl.DataFrame:
    """Return (text_digest, text, sample): m samples of each distinct text of `subset` (heuristic_subset)."""
    numbers = pl.DataFrame({"sample": range(output.lane.m)}, schema={"sample": pl.Int32()})
    distinct = subset.select("text_digest", "text").unique("text_digest", maintain_order=True)
    return distinct.join(numbers, how="cross")


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the requests to the server: it writes each distinct text of a shard again m times, with calls in it.

    Samples (written texts) that are stored are not requested again.

    claimed: samples that earlier shards of this run plan already; the samples that are planned here are added.
    """
    subset = output.lane_table("heuristic_subset").read(shard)
    requested = _build_requested_samples(output, subset)  # m samples of each text, stored or not
    missing = _claim_missing(_open_store(worker, output.lane), requested, claimed)  # adds them to `claimed`
    work = count_planned_work("samples", total=requested.height, missing=missing.height)
    return Planned(_split_into_chunks(missing, worker.plan.settings.execution.chunk_calls), work)


def _claim_missing(store: RowStore, requested: pl.DataFrame, claimed: Claimed) -> pl.DataFrame:
    """Return the requested samples that are not stored and that no earlier shard requests, and claim them."""
    missing = claim(claimed, store.name, store.missing(requested.select(WRITTEN_KEY)))
    return missing.join(requested, on=WRITTEN_KEY, how="left", maintain_order="left")


def _split_into_chunks(samples: pl.DataFrame, size: int) -> list[Chunk]:
    """Cut the samples to request into chunks of at most `size`."""
    return [Chunk(units=batch.height, payload=batch) for batch in samples.iter_slices(size)]


def compute(worker: Worker, output: TableOutput, chunk: pl.DataFrame) -> Work:
    """Let the server write each text of a chunk again with calls in it, and store what it wrote.

    chunk: (text_digest, text, sample). Raises ModelError if the server fails.
    """
    plan = worker.plan
    lane = output.lane
    samples = list(chunk.select("text", "sample").iter_rows())
    completions = rewrite_texts(plan.model_of("proposer"), plan.settings.sampling, lane.tool.prompt, samples)
    written = chunk.select(WRITTEN_KEY).with_columns(written=pl.Series(completions, dtype=pl.String))
    _open_store(worker, lane).append(written)
    return Work()


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls that the server wrote into the texts of a shard, each at its place in the original text.

    Calls are rejected as text_changed if the server changed the text before them, and for other reasons if they are no
    valid calls or stand inside a token. Raises StorageError.
    """
    store = _open_store(worker, output.lane)
    written_texts = _read_written_texts(output, store, shard)
    written = _parse_written_calls(written_texts, output.lane.tool.name)
    calls = build_unplaced_frame(written.calls)
    placed = place_at_tokens(worker, output, calls)
    text_changed: Rejected = Counter({(shard, "text_changed"): written.changed_count})
    return PartRows([placed.rows], rejected=text_changed + placed.rejected, stores=[store.name])


def _read_written_texts(output: TableOutput, store: RowStore, shard: str) -> pl.DataFrame:
    """Return (TEXT_COLUMNS, written): each text of a shard with what the server wrote for it, a row per sample.

    Raises StorageError if samples were damaged since they were computed.
    """
    subset = output.lane_table("heuristic_subset").read(shard)
    requested = _build_requested_samples(output, subset)  # m samples of each distinct text
    stored = store.stored(requested.select(WRITTEN_KEY))  # stored under the text and the number of the sample
    missing_count = requested.height - stored.height
    require_whole(output, "samples", missing_count)  # raises StorageError unless it is 0
    texts = subset.select(*TEXT_COLUMNS, "text_digest")
    samples = texts.join(stored, on="text_digest").sort(*TEXT_KEY, "sample")
    return samples.select(*TEXT_COLUMNS, "written")


class _WrittenCalls(NamedTuple):
    """The calls that the server wrote into a text, or into several."""

    calls: list[UnplacedCall]
    changed_count: int  # calls without a place: what the server wrote before them is not the text's beginning


def _parse_written_calls(texts: pl.DataFrame, tool_name: str) -> _WrittenCalls:
    """Read the calls that the server wrote into texts, and count those before which it changed the text.

    texts: TEXT_COLUMNS of the original text, and `written`: the text with calls, as the server wrote it.
    """
    calls: list[UnplacedCall] = []
    changed_count = 0
    for row in texts.iter_rows(named=True):
        written_text = row.pop("written")  # leaves the columns of the original text
        calls_of_text = _parse_calls_of_text(row, written_text, tool_name)
        calls += calls_of_text.calls
        changed_count += calls_of_text.changed_count
    return _WrittenCalls(calls, changed_count)


def _parse_calls_of_text(text: Mapping[str, Any], written_text: str, tool_name: str) -> _WrittenCalls:
    """Read the calls in what the server wrote for a text (TEXT_COLUMNS), with their characters in the document.

    written_text: the text with calls, as the server wrote it.
    """
    without_calls = take_out(written_text, [tool_name])
    calls = []
    changed_count = 0
    # `written_offset` is the character of the server's text without calls before which a call stands.
    for written_offset, input in written_calls(written_text, [tool_name]):
        offset = _find_offset_in_text(text["text"], without_calls, written_offset)
        if offset is None:  # the server changed the text before the call
            changed_count += 1
        else:
            calls.append(_build_unplaced_call(text, offset, input))
    return _WrittenCalls(calls, changed_count)


def _build_unplaced_call(text: Mapping[str, Any], offset: int, input: str) -> UnplacedCall:
    """Return a call of the model that stands before a character of a text (TEXT_COLUMNS)."""
    return UnplacedCall(**text, source=MODEL, char_offset=text["offset"] + offset, input=input)


def _find_offset_in_text(text: str, server_text: str, offset: int) -> int | None:
    """Return the character of the original text that stands at a character of the server's text.

    None if the server changed the text before it; white space at the beginning may differ. With `"  It is 12."` and
    `"It is 12!"`, 6 gives 8, and 9 gives None.

    server_text: the text as the server wrote it, after its calls are taken out. offset: the character in it.
    """
    server_text_before = server_text[:offset].lstrip()
    start = len(text) - len(text.lstrip())  # where the text begins after white space
    if not text[start:].startswith(server_text_before):
        return None
    return start + len(server_text_before)


STAGE = Stage(
    name="served_proposals",
    description="Calls of a model behind a server, at their places in the texts.",
    columns=PROPOSAL_COLUMNS,
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    pool="tools",
    make=ByChunk(chunks, compute, rows),
)
