"""Calls of a model behind an OpenAI-compatible server, which writes each text again with calls in it."""

from collections import Counter
from typing import Any

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
    Stage,
    TableOutput,
    Work,
)
from toolformer_dag.computing.stored_rows import claim, require_whole
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.model.completions import written_again
from toolformer_dag.pipeline.placing import COLUMNS, UNPLACED, at_tokens, placing
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts.calls import take_out, written_calls

NAME = "served_proposals"
KEY = ("text_digest", "sample")
WRITTEN = pl.Schema({"text_digest": pl.String(), "sample": pl.Int32(), "written": pl.String()})


def identity(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what determines what the server writes."""
    model = plan.model_of("proposer")
    return {"model": model.name, "prompt": lane.tool.prompt, "sampling": determining(plan.settings.sampling)}


def _store(worker: Worker, lane: Lane) -> RowStore:
    return worker.lane_rows(lane, "written", identity(worker.plan, lane), KEY, WRITTEN)


def _texts(output: TableOutput, shard: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The rows of heuristic_subset, and (text_digest, text, sample) of m samples of each distinct text."""
    texts = output.lane_table("heuristic_subset").read(shard)
    samples = pl.DataFrame({"sample": range(output.lane.m)}, schema={"sample": pl.Int32()})
    distinct = texts.select("text_digest", "text").unique("text_digest", maintain_order=True)
    return texts, distinct.join(samples, how="cross")


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed) -> Planned:
    """Plan the samples that are not stored. Counts samples."""
    _, asked = _texts(output, shard)
    store = _store(worker, output.lane)
    missing = claim(claimed, store.name, store.missing(asked.select(KEY)))
    lacking = missing.join(asked, on=KEY, how="left", maintain_order="left")
    size = worker.plan.settings.execution.chunk_calls
    payloads = [lacking[at : at + size] for at in range(0, lacking.height, size)]
    work = Work(computed=Counter(samples=missing.height), reused=Counter(samples=asked.height - missing.height))
    return Planned([Chunk(payload.height, payload) for payload in payloads], work)


def compute(worker: Worker, output: TableOutput, chunk: pl.DataFrame) -> Work:
    """Ask for a chunk of samples and commit them. Raises ModelError."""
    plan, lane = worker.plan, output.lane
    asked = list(chunk.select("text", "sample").iter_rows())
    completions = written_again(plan.model_of("proposer"), plan.settings.sampling, lane.tool.prompt, asked)
    _store(worker, lane).append(chunk.select(KEY).with_columns(written=pl.Series(completions, dtype=pl.String)))
    return Work()


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls at their places in the texts.

    Rejected: text_changed (what stands before the call is not the text's beginning), inside_a_token, and those of
    `parse_call`. Raises StorageError where samples were damaged meanwhile.
    """
    texts, asked = _texts(output, shard)
    store, rejected = _store(worker, output.lane), Counter[tuple[str, str]]()
    known = store.stored(asked.select(KEY))
    require_whole(output, "samples", asked.height - known.height)
    joined = texts.select(*TEXT_KEY, "offset", "text", "context", "text_digest").join(known, on="text_digest")
    tools, calls = [output.lane.tool.name], []
    for *key, offset, text, context, _, _, written in joined.sort(*TEXT_KEY, "sample").iter_rows():
        plain = take_out(written, tools)
        for at, asked_for in written_calls(written, tools):
            place = _place(text, plain, at)
            if place is None:
                rejected[shard, "text_changed"] += 1
            else:
                calls.append((*key, offset, text, context, MODEL, offset + place, asked_for, None, None, None))
    frame = pl.DataFrame(calls, UNPLACED, orient="row")
    return PartRows([at_tokens(worker, output, shard, frame, rejected)], rejected, [store.name])


def _place(text: str, plain: str, at: int) -> int | None:
    """Return the character of the text at character `at` of what was written; white space may differ at the start."""
    before, begun = plain[:at].lstrip(), len(text) - len(text.lstrip())
    return begun + len(before) if text[begun:].startswith(before) else None


STAGE = Stage(
    name=NAME,
    description="Calls of a model behind a server, at their places in the texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=lambda plan, lane: {**placing(plan, lane), **identity(plan, lane), "m": lane.m},
    reads=("heuristic_subset",),
    pool="tools",
    make=ByChunk(chunks, compute, rows),
)
