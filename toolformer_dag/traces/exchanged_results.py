"""traces/exchanged_results: the results of other conversations that each recorded call is held against.

They come from the calls of the same shard (a file, or a group of small files), so that another file changes nothing for
them. Only a tool of which a shard has too few results borrows some: from the samples of all other shards
(traces/donor_samples), the LENT results of the tool with the smallest hashes. A borrowed result changes only where
another shard has one with a smaller hash.

Memory: up to `other_results.DONORS` results of each tool of a shard, and the borrowed ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import ByShard, Column, InputsOf, PartRows, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.traces import recorded_calls
from toolformer_dag.traces.conversations import RecordedCall
from toolformer_dag.traces.other_results import (
    DONORS,
    LONGEST_DONOR,
    METHOD,
    Circle,
    Donor,
    Donors,
    chosen_results,
    lacks_donors,
)
from toolformer_dag.traces.recorded_calls import KEY, PLACE
from toolformer_dag.traces.stored_messages import text_digest

NAME = "traces/exchanged_results"
"""The table of the results that calls are held against."""
SAMPLES = "traces/donor_samples"
"""The table of the results that a shard lends to others, and of how many it lacks."""
LENT = 32
"""Results of a tool that a shard lends, and the most that it borrows."""
CALL_COLUMNS = ("tool", "document", "arguments", "result", "failed")
"""Columns of a recorded call from which its results, and those that others get of it, follow."""


def sample_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the samples beside the calls."""
    return {"exchange": METHOD, "lent": LENT, **_limits(plan)}


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the exchanged results beside the calls and the borrowed results."""
    return {"exchange": METHOD, **_limits(plan)}


def _limits(plan: Plan) -> dict[str, Any]:
    return {"donors": DONORS, "longest_donor": LONGEST_DONOR, **determining(plan.settings.traces, "swaps")}


def sample_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the results of each tool of a shard that it lends; in the order of tools and hashes."""
    donors = _donors(output, shard)
    swaps = output.plan.settings.traces.swaps
    samples = []
    for tool, donors_of_tool in sorted(donors.of_tools()):
        lacks = lacks_donors(donors_of_tool, swaps)
        for donor in donors_of_tool[:LENT]:
            samples.append((shard, tool, donor.hash, donor.document, donor.result, lacks))
    return PartRows([pl.DataFrame(samples, schema=output.stage.schema, orient="row")])


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its calls and of the results that it borrows."""
    calls = output.plan.lake.table(recorded_calls.NAME)
    samples = output.plan.lake.table(SAMPLES)
    parts = [part for part in output.parts if samples.has(part)]
    question = f"borrowed by {fingerprint(parts)}"
    borrowed = samples.remembered(question, partial(_borrowed_hashes, output, parts))

    def inputs_of_shard(shard: str) -> Mapping[str, Any]:
        return {"recorded_calls": calls.part_version(shard), "borrowed": borrowed.get(shard)}

    return inputs_of_shard


def _borrowed_hashes(output: TableOutput, parts: Sequence[str]) -> dict[str, str]:
    """Return a fingerprint of what each shard borrows; shards that borrow nothing are left out.

    parts: the shards whose samples are there.
    """
    if not parts:
        return {}
    samples = output.plan.lake.table(SAMPLES).scan(parts)
    lacking = samples.filter("lacks").select("shard", "tool").unique().collect()
    sample_hashes = samples.join(lacking.lazy().select("tool").unique(), on="tool", how="semi")
    lendable = sample_hashes.select("shard", "tool", "hash", "document").sort("tool", "hash", "document").collect()
    borrowed: dict[str, list[object]] = {}
    for shard, tool in lacking.sort("shard", "tool").iter_rows():
        lent = lendable.filter((pl.col("tool") == tool) & (pl.col("shard") != shard))
        hashes = lent.select("hash", "document").unique("hash", keep="first", maintain_order=True).head(LENT)
        borrowed.setdefault(shard, []).append([tool, [list(row) for row in hashes.iter_rows()]])
    return {shard: fingerprint(hashes_of_tools) for shard, hashes_of_tools in borrowed.items()}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the results that each call of a shard is held against, in the order of the calls."""
    return PartRows(_frames(output, shard))


def _frames(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the results for the calls of a shard, a frame per file of the table of calls."""
    swaps = output.plan.settings.traces.swaps
    circles = {tool: [circle] for tool, circle in _donors(output, shard).circles().items()}
    for tool, circle in _borrowed_circles(output, shard).items():
        circles.setdefault(tool, []).append(circle)
    for calls in output.plan.lake.table(recorded_calls.NAME).batches(shard):
        results: list[list[str]] = []
        keys: list[str] = []
        for row in calls.select("digest", "turn", "call", *CALL_COLUMNS).iter_rows(named=True):
            chosen = chosen_results(circles.get(row["tool"], []), row["document"], _call(row), swaps)
            results.append(list(chosen))
            keys.append(key_of(row["digest"], row["turn"], row["call"], chosen))
        exchanged = calls.with_columns(
            key=pl.Series(keys, dtype=pl.String), results=pl.Series(results, dtype=pl.List(pl.String))
        )
        yield exchanged.select(output.stage.schema.names())


def _donors(output: TableOutput, shard: str) -> Donors:
    """Return the donors of each tool among the calls of a shard."""
    donors = Donors()
    for calls in output.plan.lake.table(recorded_calls.NAME).batches(shard):
        for row in calls.select(CALL_COLUMNS).iter_rows(named=True):
            donors.add(row["document"], _call(row))
    return donors


def _borrowed_circles(output: TableOutput, shard: str) -> dict[str, Circle]:
    """Return the results of other shards for the tools of which a shard has too few, by tool."""
    samples = output.plan.lake.table(SAMPLES)
    lacking = samples.read(shard).filter("lacks")["tool"].unique()
    others = [part for part in output.parts if part != shard]
    if lacking.is_empty() or not others:
        return {}
    lendable = samples.scan(others).filter(pl.col("tool").is_in(lacking.implode()))
    by_hash = lendable.sort("tool", "hash", "document").collect()
    circles = {}
    for [tool], lent in by_hash.group_by("tool", maintain_order=True):
        distinct = lent.unique("hash", keep="first", maintain_order=True).head(LENT)
        donors = [Donor(*row) for row in distinct.select("hash", "result", "document").iter_rows()]
        circles[str(tool)] = Circle.of(donors)
    return circles


def _call(row: Mapping[str, Any]) -> RecordedCall:
    """Return a call from its row, without its places in the record."""
    return RecordedCall(row["tool"], json.loads(row["arguments"]), result=row["result"], failed=row["failed"])


def key_of(digest: str, turn: int, call: int, results: Sequence[str]) -> str:
    """Return what the measurements of a call are stored under.

    digest: of its conversation. turn, call: its place there. results: those that it is held against.
    """
    return text_digest(repr((digest, turn, call, tuple(results))))


DONOR_SAMPLES = Stage(
    name="donor_samples",
    description="Results of a tool of a shard that calls of other shards may be held against.",
    columns={
        "shard": PLACE["shard"],
        "tool": Column(pl.String(), "name of the tool"),
        "hash": Column(pl.String(), "hash of the result: those with the smallest are lent"),
        "document": Column(pl.String(), "what the conversations share in which it was given"),
        "result": Column(pl.String(), "the result, or its beginning"),
        "lacks": Column(pl.Boolean(), "whether the shard has too few results of the tool for its own calls"),
    },
    key=("shard", "tool", "hash"),
    settings=sample_settings,
    reads=(recorded_calls.NAME,),
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    make=ByShard(sample_rows),
)
STAGE = Stage(
    name="exchanged_results",
    description="Results of the same tool in other conversations that each recorded call is held against.",
    columns={
        **PLACE,
        "key": Column(pl.String(), "hash of the conversation, the place and the results"),
        "results": Column(pl.List(pl.String()), "results of other conversations"),
    },
    key=KEY,
    settings=settings,
    reads=(recorded_calls.NAME,),
    inputs=inputs,
    inner=(DONOR_SAMPLES,),
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    make=ByShard(rows),
)
