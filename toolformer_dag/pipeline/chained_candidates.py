"""chained_candidates: where the model would call again after a call with its result, and what it would ask.

Beyond the paper, whose calls are sampled apart from each other (section 7). The place after a call is one more
position: p of ` [` there is held against tau_s, m calls are sampled, and both are stored under the text, the position
and the calls before. So a larger depth, k or m, or a lower tau_s, asks for what is missing.
"""

from collections import Counter
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import polars as pl

from toolformer_dag.computing.lane_tables import call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL,
    CALL_KEY,
    CHAIN,
    CHAR_OFFSET,
    P_API,
    SAMPLED_INPUT,
    TEXT_KEY,
    TOOL,
    ByChunk,
    Claimed,
    Column,
    PartRows,
    Planned,
    Rejected,
    Stage,
    StageAsset,
    StaleInput,
    TableOutput,
    Work,
    counted,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.pipeline import scored_candidates, tool_results
from toolformer_dag.pipeline.scored_candidates import SampleStore, TextChunk, parsed_call
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts import look_ahead
from toolformer_dag.texts.calls import Call
from toolformer_dag.texts.chains import Link, place_of, read_chain, written_chain
from toolformer_dag.texts.look_ahead import TextUnits

FIRST_SAMPLE = 100_000_000
"""Number of the first call at a position that stands after others; those after two begin at twice as much."""
PARSING = 2
"""Raised when the same bodies would be taken otherwise; no sample is computed again."""
CALLED = Column(
    TOOL.dtype, "key of the lane whose tool is called: the lane's own, or one of `then`; null without a body"
)
BEFORE = Column(CHAIN.dtype, "the calls before it at its place, with their results, as JSON")
FINISHED = (
    *(*CALL_KEY, "char_offset", "p_api", "called", "before", "input", "result"),
    *("text_digest", "context", "offset", "source", "words"),
)
"""Columns of calls that have a result, of those after others as of single ones."""


def finished(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Return the calls of a shard after `level` - 1 others that have a result; level 1 is that of single calls.

    FINISHED; `before` is null for single calls. Raises StaleInput where calls were not run.
    """
    lane = output.lane
    tables = call_tables(level)
    texts = output.lane_table("heuristic_subset").read(shard)
    calls = output.lane_table(tables.candidates).read(shard).filter(pl.col("input").is_not_null())
    if level == 1:
        calls = calls.with_columns(called=pl.lit(lane.key), before=pl.lit(None, pl.String))
    else:
        calls = calls.with_columns(source=pl.lit(MODEL), words=pl.lit(None, pl.String))
    answers = output.lane_table(tables.results).read(shard)
    answers = answers.select("input", "context", "result", called="tool", answered=pl.lit(True))
    calls = calls.join(texts.select(*TEXT_KEY, "text_digest", "context", "offset"), on=TEXT_KEY, how="left")
    calls = calls.join(answers, on=("called", "input", "context"), how="left")
    if calls["answered"].has_nulls():
        raise StaleInput(output.name, shard, "calls that were not run", f"{lane.key}/{tables.results}")
    return calls.filter(pl.col("result").is_not_null()).select(FINISHED)


def chains_of(lane: Lane, calls: pl.DataFrame) -> pl.Series:
    """Return each of the `calls` (FINISHED) with those before it, as a chain of which it is the last."""
    named = {one.key: name for name, one in lane.chainable.items()}
    rows = calls.select("before", "called", "input", "result").iter_rows()
    return pl.Series(
        [written_chain([*read_chain(before), Link(named[called], *call)]) for before, called, *call in rows],
        dtype=pl.String,
    )


def ahead(lane: Lane, texts: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Return what each of the `calls` (FINISHED) tells of the text behind it; null where nothing, and without the rule.

    What the result of an earlier call says is known. `texts`: text_digest, text.
    """
    if not lane.look_ahead:
        return pl.Series([None] * calls.height, dtype=pl.List(pl.String()))
    wanted = texts.select("text_digest", "text").unique("text_digest").join(calls, on="text_digest", how="semi")
    units = {digest: TextUnits.of(text) for digest, text in wanted.iter_rows()}
    units_ahead = []
    for digest, place, asked, before in calls.select(
        "text_digest", pl.col("char_offset") - pl.col("offset"), "input", "before"
    ).iter_rows():
        earlier = (units[digest].ahead(place, link.result) for link in read_chain(before))
        known = {unit.casefold() for of_result in earlier for unit in of_result}
        new = [unit for unit in units[digest].ahead(place, asked) if unit.casefold() not in known]
        units_ahead.append(new or None)
    return pl.Series(units_ahead, dtype=pl.List(pl.String()))


def parents(output: TableOutput, shard: str, level: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the calls after which others may stand, distinct by place, and the distinct places.

    The places: text_digest (the hash of text, position and calls before), text, position, before. Calls that look ahead
    are left out.
    """
    calls = finished(output, shard, level - 1).sort(CALL_KEY)
    texts = output.lane_table("heuristic_subset").read(shard).select("text_digest", "text")
    kept = calls.filter(ahead(output.lane, texts, calls).is_null())
    kept = kept.with_columns(chain=chains_of(output.lane, kept))
    kept = kept.unique((*TEXT_KEY, "position", "chain"), keep="first", maintain_order=True)
    places = [place_of(*row) for row in kept.select("text_digest", "position", "chain").iter_rows()]
    kept = kept.with_columns(place=pl.Series(places, dtype=pl.String))
    distinct = kept.unique("place", maintain_order=True).select("place", "text_digest", "position", before="chain")
    texts = distinct.join(texts.unique("text_digest"), on="text_digest", maintain_order="left")
    return kept, texts.select(pl.col("place").alias("text_digest"), "text", "position", "before")


def sample_store(worker: Worker, lane: Lane) -> SampleStore:
    """Open p and samples after calls: under the prompt for these, whatever the level."""
    return SampleStore(worker, lane, "chained_", lane.chain_prompt)


def settings(plan: Plan, lane: Lane, level: int) -> Mapping[str, Any]:
    """Return what determines the rows beside the calls before."""
    sampled = scored_candidates.samples_identity(plan, lane.chain_prompt)
    schemas = {name: one.tool.schema for name, one in lane.chainable.items()}
    return {
        **sampled,
        "tau_s": lane.tau_s,
        "m": lane.m,
        "level": level,
        "parsing": PARSING,
        "look_ahead": look_ahead.VERSION if lane.look_ahead else None,
        "tools": {name: fingerprint(schema) for name, schema in schemas.items()},
    }


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan the places after calls that lack p or samples."""
    _, places = parents(output, shard, level)
    return scored_candidates.planned(worker, sample_store(worker, output.lane), places, claimed)


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute and commit what the places of a chunk lack."""
    return scored_candidates.computed(worker, output.lane, sample_store(worker, output.lane), chunk)


def rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Read the calls after those of a shard. Raises StorageError where some were damaged meanwhile.

    A row is a call, or a discarded sample with its reason: those of scored_candidates, and repeated_call (the same call
    stands before it). Places without a row are counted as no_call, does_not_fit or not_finite.
    """
    lane, (kept, places) = output.lane, parents(output, shard, level)
    store = sample_store(worker, lane)
    asked = store.asked(places)
    samples = scored_candidates.stored_samples(output, store, asked)
    joined = kept.drop("sample", "p_api", "input", "called", "before").join(
        asked.chosen.select("p_api", place="text_digest"), on="place", maintain_order="left"
    )
    drawn = samples.select("sample", "body", "reason", place="text_digest").sort("place", "sample")
    table = joined.join(drawn, on="place", maintain_order="left_right").drop("sample")
    parsed = [
        _parsed(lane, body, why, chain) for body, why, chain in table.select("body", "reason", "chain").iter_rows()
    ]
    columns = pl.DataFrame(
        parsed, schema={"body": pl.String, "called": pl.String, "input": pl.String, "reason": pl.String}, orient="row"
    )
    number = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position") + FIRST_SAMPLE * (level - 1)
    table = table.drop("body", "reason").hstack(columns).with_columns(sample=number, before="chain")
    without = kept.join(asked.chosen, left_on="place", right_on="text_digest", how="anti")
    refused = store.refused(places).select("reason", place="text_digest")
    why = without.join(refused, on="place", how="left").with_columns(pl.col("reason").fill_null("no_call"))
    ordered = table.select(output.stage.schema.names()).sort(CALL_KEY)
    return PartRows([ordered], counted(ordered) + counted(why), [store.positions.name, store.samples.name])


def _parsed(lane: Lane, body: str | None, why: str | None, chain: str) -> tuple[str | None, ...]:
    """The body, the lane that is called, its input, and why it is no call after `chain`."""
    if body is None:
        return None, None, None, why or "malformed"
    reason: str | None = "other_tool"
    for called in lane.chainable.values():
        written, asked, reason = parsed_call(called, body)
        if reason == "other_tool":
            continue
        before = {Call(link.tool, link.input) for link in read_chain(chain)}
        if asked is not None and Call(called.tool.name, asked) in before:
            return written, called.key, None, "repeated_call"
        return written, called.key, asked, reason
    return body, None, None, reason


def run_chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan the calls that no run and no shard has made, of each tool that is called."""
    plans = [tool_results.planned(worker, of_tool, calls, claimed) for of_tool, calls in _by_tool(output, shard, level)]
    work = sum((plan.work for plan in plans), Work())
    return Planned([chunk for plan in plans for chunk in plan.chunks], work)


def run_rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Return a row per distinct call of each tool; see `tool_results.rows`."""
    answers = [tool_results.answered(worker, of_tool, calls) for of_tool, calls in _by_tool(output, shard, level)]
    frames = [frame for answer in answers for frame in answer.frames]
    rejected: Rejected = Counter()
    facts: dict[str, Any] = {}
    for answer in answers:
        rejected.update(answer.rejected)
        facts.update(answer.facts)
    ordered = pl.concat([output.stage.schema.to_frame(), *frames]).sort("tool", *tool_results.KEY)
    return PartRows([ordered], rejected, [store for answer in answers for store in answer.stores], facts)


def _by_tool(output: TableOutput, shard: str, level: int) -> list[tuple[TableOutput, pl.DataFrame]]:
    """The calls (shard, input, context) of each lane that is called, as its own table would have them."""
    lane = output.lane
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    calls = output.lane_table(call_tables(level).candidates).read(shard).filter(pl.col("input").is_not_null())
    placed = calls.join(texts, on=TEXT_KEY, how="left")
    return [
        (
            TableOutput(output.stage, output.plan, called),
            placed.filter(called=called.key).select("shard", *tool_results.KEY),
        )
        for called in lane.chainable.values()
    ]


def run_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the results: of every tool that may be called."""
    return {one.tool.key: tool_results.STAGE.settings(plan, one) for one in lane.chainable.values()}


@cache
def stages(level: int) -> tuple[Stage, Stage]:
    """Return the stages that sample and run the calls after `level` - 1 others; level 2 reads single calls."""
    candidates, results = call_tables(level)
    sampling = Stage(
        name=candidates,
        description=f"Calls that the model would make after {level - 1}, or why a sample was discarded.",
        columns={
            **CALL,
            "char_offset": CHAR_OFFSET,
            "p_api": P_API,
            "before": BEFORE,
            "called": CALLED,
            "body": scored_candidates.STAGE.columns["body"],
            "input": SAMPLED_INPUT,
            "reason": scored_candidates.STAGE.columns["reason"],
        },
        key=CALL_KEY,
        settings=partial(settings, level=level),
        reads=(*call_tables(level - 1), "heuristic_subset"),
        pool="gpu",
        kinds=frozenset({"pytorch", "parquet"}),
        make=ByChunk(partial(chunks, level=level), compute, partial(rows, level=level)),
    )
    running = Stage(
        name=results,
        description="The result per distinct call after others, by the tool that was called, or why there is none.",
        columns=tool_results.STAGE.columns,
        key=tool_results.STAGE.key,
        settings=run_settings,
        reads=(candidates, "heuristic_subset"),
        pool="tools",
        volatile=tool_results.MEASURED,
        make=ByChunk(partial(run_chunks, level=level), tool_results.compute, partial(run_rows, level=level)),
        in_warehouse=tool_results.STAGE.in_warehouse,
        asset=StageAsset(calls=lambda output: output.lane.chainable.values()),
    )
    return sampling, running
