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
    ClaimedKeys,
    PartRows,
    Planned,
    RejectionCounts,
    Stage,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import claim_keys, require_no_lost_rows
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.completions import rewrite_texts
from toolformer_dag.pipeline.placing import (
    PROPOSAL_COLUMNS,
    UnplacedCall,
    build_unplaced_frame,
    collect_placing_settings,
    place_calls_at_tokens,
)
from toolformer_dag.pipeline.work_counts import count_planned_work
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.settings.tool_settings import MODEL_SOURCE
from toolformer_dag.texts.calls import list_call_offsets_and_inputs, remove_calls

WRITTEN_TEXT_KEY = ("text_digest", "sample")
TEXT_COLUMNS = (*TEXT_KEY, "offset", "text", "context")
"""Columns of a text that each of its calls has too (UnplacedCall)."""
WRITTEN_TEXT_SCHEMA = pl.Schema({"text_digest": pl.String(), "sample": pl.Int32(), "written": pl.String()})
"""Columns of the row store: what the server wrote in answer to the `sample`-th request for a text, from 0."""


def collect_server_identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return the settings on which the server's texts depend: the model, the tool's prompt, and the sampling."""
    model = plan.get_model_settings("proposer")
    return {
        "model": model.name,
        "prompt": lane.tool.prompt,
        "sampling": select_determining_settings(plan.settings.sampling),
    }


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings on which the rows depend, apart from the texts. A change makes the table out of date."""
    return {**collect_placing_settings(plan, lane), **collect_server_identity(plan, lane), "m": lane.m}


def _open_written_text_store(worker: Worker, lane: Lane) -> RowStore:
    """Open the store of the texts that the server wrote for a lane (a tool with its settings)."""
    server_identity = collect_server_identity(worker.plan, lane)
    return worker.open_lane_row_store(lane, "written", server_identity, WRITTEN_TEXT_KEY, WRITTEN_TEXT_SCHEMA)


def _build_requested_samples(output: TableOutput, text_rows: pl.DataFrame) -> pl.DataFrame:
    """Return the samples that the lane wants: each distinct text m times, with the numbers 0 to m - 1.

    Args:
        text_rows: Rows of the table heuristic_subset, in which equal texts may repeat.

    Returns:
        A row per sample with the columns text_digest, text and sample.
    """
    sample_numbers = pl.DataFrame({"sample": range(output.lane.m)}, schema={"sample": pl.Int32()})
    distinct_texts = text_rows.select("text_digest", "text").unique("text_digest", maintain_order=True)
    return distinct_texts.join(sample_numbers, how="cross")


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys) -> Planned:
    """Plan the requests to the server: it writes each distinct text of a shard again m times, with calls in it.

    A sample is one of these m versions of a text. Those that are stored are not requested again.

    Args:
        claimed_keys: The samples that earlier shards of this run request. The newly planned ones are added to it.

    Returns:
        The samples to request in chunks, and the counts of samples to request and to reuse.
    """
    text_rows = output.get_lane_table("heuristic_subset").read_part(shard)
    requested_samples = _build_requested_samples(output, text_rows)

    written_text_store = _open_written_text_store(worker, output.lane)
    missing_samples = _claim_missing_samples(written_text_store, requested_samples, claimed_keys)

    work = count_planned_work("samples", total_count=requested_samples.height, missing_count=missing_samples.height)
    samples_per_chunk = worker.plan.settings.execution.chunk_calls
    return Planned(_split_into_chunks(missing_samples, samples_per_chunk), work)


def _claim_missing_samples(
    written_text_store: RowStore, requested_samples: pl.DataFrame, claimed_keys: ClaimedKeys
) -> pl.DataFrame:
    """Return the requested samples that are not stored and that no earlier shard requests.

    Their keys are added to `claimed_keys`, so that no later shard requests them again.
    """
    unstored_keys = written_text_store.find_missing_keys(requested_samples.select(WRITTEN_TEXT_KEY))
    newly_claimed_keys = claim_keys(claimed_keys, written_text_store.name, unstored_keys)
    return newly_claimed_keys.join(requested_samples, on=WRITTEN_TEXT_KEY, how="left", maintain_order="left")


def _split_into_chunks(samples: pl.DataFrame, samples_per_chunk: int) -> list[Chunk]:
    """Cut the samples to request into chunks of at most `samples_per_chunk` rows."""
    return [Chunk(unit_count=batch.height, payload=batch) for batch in samples.iter_slices(samples_per_chunk)]


def compute(worker: Worker, output: TableOutput, chunk: pl.DataFrame) -> Work:
    """Let the server write each text of a chunk again with calls in it, and store what it wrote.

    Args:
        chunk: The samples to request, in the columns text_digest, text and sample.

    Returns:
        No work of a local model, since the server does it.

    Raises:
        ModelError: The server fails.
    """
    plan = worker.plan
    lane = output.lane

    samples = list(chunk.select("text", "sample").iter_rows())
    completions = rewrite_texts(plan.get_model_settings("proposer"), plan.settings.sampling, lane.tool.prompt, samples)

    written_texts = chunk.select(WRITTEN_TEXT_KEY).with_columns(written=pl.Series(completions, dtype=pl.String))
    _open_written_text_store(worker, lane).append_rows(written_texts)
    return Work()


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls that the server wrote into the texts of a shard, each at its place in the original text.

    Calls are rejected as text_changed if the server changed the text before them, and for other reasons if they are no
    valid calls or stand inside a token.

    Raises:
        StorageError: Samples were damaged after they had been computed.
    """
    written_text_store = _open_written_text_store(worker, output.lane)
    written_texts = _read_written_texts(output, written_text_store, shard)
    written_calls = _parse_written_calls(written_texts, output.lane.tool.name)

    unplaced_calls = build_unplaced_frame(written_calls.calls)
    placed_calls = place_calls_at_tokens(worker, output, unplaced_calls)

    text_changed: RejectionCounts = Counter({(shard, "text_changed"): written_calls.misplaced_call_count})
    return PartRows(
        [placed_calls.rows],
        rejection_counts=text_changed + placed_calls.rejected,
        store_names=[written_text_store.name],
    )


def _read_written_texts(output: TableOutput, written_text_store: RowStore, shard: str) -> pl.DataFrame:
    """Return the texts of a shard with what the server wrote for them.

    Returns:
        A row per text and sample, sorted, with TEXT_COLUMNS of the original text and `written`, the server's text.

    Raises:
        StorageError: Samples were damaged after they had been computed.
    """
    text_rows = output.get_lane_table("heuristic_subset").read_part(shard)

    requested_samples = _build_requested_samples(output, text_rows)
    stored_samples = written_text_store.read_stored_rows(requested_samples.select(WRITTEN_TEXT_KEY))
    missing_count = requested_samples.height - stored_samples.height
    require_no_lost_rows(output, "samples", missing_count)  # raises StorageError unless it is 0

    # A distinct text was written once, and stands in each document that has it.
    texts = text_rows.select(*TEXT_COLUMNS, "text_digest")
    written_texts = texts.join(stored_samples, on="text_digest").sort(*TEXT_KEY, "sample")
    return written_texts.select(*TEXT_COLUMNS, "written")


class _WrittenCalls(NamedTuple):
    """The calls that the server wrote into one or several texts.

    Attributes:
        calls: The calls whose character in the original text is known.
        misplaced_call_count: How many calls have no place, because the server changed the text before them.
    """

    calls: list[UnplacedCall]
    misplaced_call_count: int


def _parse_written_calls(written_texts: pl.DataFrame, tool_name: str) -> _WrittenCalls:
    """Read the calls that the server wrote into texts, and count those without a place, since the text before changed.

    Args:
        written_texts: A row per text, with TEXT_COLUMNS of the original text and `written`, the text with calls as the
            server wrote it.
    """
    calls: list[UnplacedCall] = []
    misplaced_call_count = 0

    for text_row in written_texts.iter_rows(named=True):
        written_text = text_row.pop("written")  # leaves the columns of the original text
        written_calls = _parse_calls_of_text(text_row, written_text, tool_name)
        calls += written_calls.calls
        misplaced_call_count += written_calls.misplaced_call_count

    return _WrittenCalls(calls, misplaced_call_count)


def _parse_calls_of_text(text_row: Mapping[str, Any], written_text: str, tool_name: str) -> _WrittenCalls:
    """Read the calls that the server wrote into one text, and find where they stand in the original text.

    Args:
        text_row: The original text, with the fields TEXT_COLUMNS.
        written_text: The text with calls, as the server wrote it.
    """
    server_text = remove_calls(written_text, [tool_name])
    calls = []
    misplaced_call_count = 0

    # `server_offset` is the character of the server's text without calls before which a call stands.
    for server_offset, input in list_call_offsets_and_inputs(written_text, [tool_name]):
        offset = _find_offset_in_text(text_row["text"], server_text, server_offset)
        if offset is None:
            misplaced_call_count += 1
        else:
            calls.append(_build_unplaced_call(text_row, offset, input))

    return _WrittenCalls(calls, misplaced_call_count)


def _build_unplaced_call(text_row: Mapping[str, Any], offset_in_text: int, input: str) -> UnplacedCall:
    """Return a call of the model that stands before a character of a text (TEXT_COLUMNS)."""
    char_offset = text_row["offset"] + offset_in_text
    return UnplacedCall(**text_row, source=MODEL_SOURCE, char_offset=char_offset, input=input)


def _find_offset_in_text(text: str, server_text: str, server_offset: int) -> int | None:
    """Return the character of the original text that stands at a character of the server's text.

    White space at the beginning may differ. With the text `"  It is 12."` and the server's `"It is 12!"`, 6 gives 8,
    and 9 gives None.

    Args:
        text: The original text.
        server_text: The text as the server wrote it, without its calls.
        server_offset: A character of the server's text.

    Returns:
        The index of the character. None if the server changed the text before it.
    """
    server_text_before = server_text[:server_offset].lstrip()
    start = len(text) - len(text.lstrip())  # where the text begins after white space

    if not text[start:].startswith(server_text_before):
        return None
    return start + len(server_text_before)


STAGE = Stage(
    name="served_proposals",
    description="Calls of a model behind a server, at their places in the texts.",
    columns=PROPOSAL_COLUMNS,
    key_columns=CALL_KEY,
    collect_settings=settings,
    reads=("heuristic_subset",),
    pool="tools",
    row_maker=ByChunk(chunks, compute, rows),
)
