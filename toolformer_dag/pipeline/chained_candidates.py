"""chained_candidates: where the model would call again after a call with its result, and what it would ask.

Beyond the paper, whose calls are sampled apart from each other (section 7). A chain are the calls that stand at one
place; the second of them has level 2. The place after a call is one more position: p of ` [` there is held against
tau_s, m calls are sampled, and both are stored under the text, the position and the calls before. So a larger depth, k
or m, or a lower tau_s, computes what is missing.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

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
    Chunk,
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
from toolformer_dag.pipeline.sample_store import ChainedSampleStore, samples_identity
from toolformer_dag.pipeline.scored_candidates import TextChunk, parsed_call
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts import look_ahead
from toolformer_dag.texts.calls import Call
from toolformer_dag.texts.chains import ChainLink, place_of, read_chain, written_chain
from toolformer_dag.texts.look_ahead import TextUnits

FIRST_SAMPLE = 100_000_000
"""Number (`sample`) of the first call at a position that stands after one other; twice as much after two."""
PARSING = 2
"""Raised when the same bodies would be taken otherwise; no sample is computed again."""
CALLED = Column(
    TOOL.dtype, "key of the lane whose tool is called: the lane's own, or one of `then`; null without a body"
)
BEFORE = Column(CHAIN.dtype, "the calls before it at its place, with their results, as JSON")
FINISHED = (
    *CALL_KEY,
    "char_offset",
    "p_api",
    "called",
    "before",
    "input",
    "result",
    "text_digest",
    "context",
    "offset",
    "source",
    "words",
)
"""Columns of the calls that have a result, whatever their level.

`called` is the key of the lane whose tool is called, `before` the chain of the calls before it (JSON), null for a
single call. `text_digest`, `context` and `offset` are those of its text.
"""


def finished(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Join the candidate calls of a shard with their results; return those that have one (FINISHED).

    level: how many calls stand at the place, the call itself included: 1 for single calls, 2 for those after one call.

    Raises StaleInput where the table of results lacks a call: it has to be brought up to date first.
    """
    lane = output.lane
    tables = call_tables(level)
    calls = output.lane_table(tables.candidates).read(shard).filter(pl.col("input").is_not_null())
    # Single calls and later calls are stored with different columns; each lacks those that are the same for all of it.
    if level == 1:
        calls = calls.with_columns(called=pl.lit(lane.key), before=pl.lit(None, pl.String))
    else:
        calls = calls.with_columns(source=pl.lit(MODEL), words=pl.lit(None, pl.String))

    texts = output.lane_table("heuristic_subset").read(shard)
    calls = calls.join(texts.select(*TEXT_KEY, "text_digest", "context", "offset"), on=TEXT_KEY, how="left")
    results = output.lane_table(tables.results).read(shard)
    results = results.select("input", "context", "result", called="tool", was_run=pl.lit(True))
    calls = calls.join(results, on=("called", "input", "context"), how="left")
    if calls["was_run"].has_nulls():  # a call that was run without a result has a row with a null in `result`
        raise StaleInput(output.name, shard, "calls that were not run", f"{lane.key}/{tables.results}")
    return calls.filter(pl.col("result").is_not_null()).select(FINISHED)


def chains_of(lane: Lane, calls: pl.DataFrame) -> pl.Series:
    """Return for each of the `calls` (FINISHED) the chain that it ends: the calls before it and itself, as JSON."""
    tool_names = {called.key: name for name, called in lane.chainable.items()}
    chains = []
    for before, called, input, result in calls.select("before", "called", "input", "result").iter_rows():
        last = ChainLink(tool=tool_names[called], input=input, result=result)
        chains.append(written_chain([*read_chain(before), last]))
    return pl.Series(chains, dtype=pl.String)


def units_ahead(lane: Lane, texts: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Return for each call the numbers and names of its input that its text says only after the call.

    The input "17 + 25" before a text has said 17 gives ["17"]: a reader could not have asked for it yet. Numbers and
    names that an earlier call of the same chain has as its result are left out: after `[Calculator(20 - 3) -> 17]` the
    17 is known. Null where nothing is left, and for a lane (a tool with its thresholds) without this rule.

    texts: text_digest and text of at least the texts of the calls.
    calls: of their columns (FINISHED) are read text_digest, char_offset (the call's character in the document), offset
        (the text's character in it), input, and before (the earlier calls, as JSON).
    """
    if not lane.look_ahead:
        return pl.Series([None] * calls.height, dtype=pl.List(pl.String()))
    texts_with_calls = texts.select("text_digest", "text").unique("text_digest")
    texts_with_calls = texts_with_calls.join(calls, on="text_digest", how="semi")
    units_of = {digest: TextUnits.of(text) for digest, text in texts_with_calls.iter_rows()}
    place_in_text = pl.col("char_offset") - pl.col("offset")
    lists = []
    for digest, place, input, before in calls.select("text_digest", place_in_text, "input", "before").iter_rows():
        text_units = units_of[digest]
        in_earlier_results: set[str] = set()  # in lower case
        for link in read_chain(before):
            in_earlier_results.update(unit.casefold() for unit in text_units.ahead(place, link.result))
        units = [unit for unit in text_units.ahead(place, input) if unit.casefold() not in in_earlier_results]
        lists.append(units or None)
    return pl.Series(lists, dtype=pl.List(pl.String()))


class PlacesAfterCalls(NamedTuple):
    """The places of a shard at which a further call of a chain may stand.

    - calls: the calls after which a further one may stand, of equal chains at a position of a text the first. Columns:
      FINISHED, `chain` (the call and those before it, as JSON) and `place` (a hash of text, position and chain)
    - places (PLACES): the distinct places; equal texts in several documents share them. As for whole texts, the name of
      a place stands in the column `text_digest`, so that the same row stores and functions serve both
    """

    calls: pl.DataFrame
    places: pl.DataFrame


def places_after_calls(output: TableOutput, shard: str, level: int) -> PlacesAfterCalls:
    """Return the places of a shard where a call of a level may stand: right after the calls of the level before.

    A chain is a sequence of calls at one position of a text, each made after the results of the earlier ones; the n-th
    of them is a call of level n. No call follows a call that looks ahead (`units_ahead`).

    level: 2 for places after a single call, 3 after two calls, and so on.
    """
    texts = output.lane_table("heuristic_subset").read(shard).select("text_digest", "text")
    calls = _calls_with_places(output, finished(output, shard, level - 1).sort(CALL_KEY), texts)
    distinct = calls.unique("place", maintain_order=True).select("place", "text_digest", "position", before="chain")
    with_texts = distinct.join(texts.unique("text_digest"), on="text_digest", maintain_order="left")
    places = with_texts.select(pl.col("place").alias("text_digest"), "text", "position", "before")
    return PlacesAfterCalls(calls, places)


def _calls_with_places(output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
    """Return the calls after which a further one may stand, with the columns `chain` and `place`.

    calls: FINISHED. texts: text_digest and text of at least the texts of the calls.
    """
    does_not_look_ahead = units_ahead(output.lane, texts, calls).is_null()
    calls = calls.filter(does_not_look_ahead)
    calls = calls.with_columns(chain=chains_of(output.lane, calls))
    calls = calls.unique((*TEXT_KEY, "position", "chain"), keep="first", maintain_order=True)
    hashes = [place_of(*values) for values in calls.select("text_digest", "position", "chain").iter_rows()]
    return calls.with_columns(place=pl.Series(hashes, dtype=pl.String))


def settings(plan: Plan, lane: Lane, level: int) -> Mapping[str, Any]:
    """Return what the calls of a level depend on, apart from the earlier calls; a change makes the table out of date.

    The argument schemas of every tool that may be called count, since samples are parsed by them.

    lane: a tool with its thresholds, here tau_s (the least probability of a call) and m (samples per place).
    level: 2 for calls after one other call, 3 after two, and so on.
    """
    schemas = {name: called.tool.schema for name, called in lane.chainable.items()}
    return {
        **samples_identity(plan, lane.chain_prompt),
        "tau_s": lane.tau_s,
        "m": lane.m,
        "level": level,
        "parsing": PARSING,
        "look_ahead": look_ahead.VERSION if lane.look_ahead else None,
        "tools": {name: fingerprint(schema) for name, schema in schemas.items()},
    }


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan the places after calls that lack samples, or the probability of a call there."""
    store = ChainedSampleStore(worker, output.lane)
    places = places_after_calls(output, shard, level).places
    return scored_candidates.planned_samples(worker, store, places, claimed)


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute what the places of a chunk lack, the probability of a call or samples, and store it."""
    store = ChainedSampleStore(worker, output.lane)
    return scored_candidates.compute_samples(worker, output.lane, store, chunk)


def rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Return the rows of a shard from what is stored: a row per sample after each call of the level before.

    level: 2 for samples after a single call, 3 after two calls, and so on.

    A row is a call, or a discarded sample with its reason: a reason of scored_candidates, or repeated_call (the same
    call is in its chain already). Places without a row are counted as no_call (its probability is not above tau_s),
    does_not_fit or not_finite.

    Raises StorageError where samples were damaged since they were computed.
    """
    calls_before, places = places_after_calls(output, shard, level)
    store = ChainedSampleStore(worker, output.lane)
    requested = store.requested(places)
    samples = scored_candidates.stored_samples(output, store, requested)
    samples = samples.select("sample", "body", "reason", place="text_digest").sort("place", "sample")
    chosen_places = requested.positions.select("p_api", place="text_digest")

    table = _rows_after_calls(output.lane, calls_before, chosen_places, samples)
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    first_sample = FIRST_SAMPLE * (level - 1)  # so that the numbers of the levels differ
    table = table.with_columns(sample=number_at_position + first_sample)
    table = table.select(output.stage.schema.names()).sort(CALL_KEY)

    refused = store.refused(places).select("reason", place="text_digest")
    without_call = calls_before.join(chosen_places, on="place", how="anti").join(refused, on="place", how="left")
    without_call = without_call.with_columns(pl.col("reason").fill_null("no_call"))
    return PartRows(
        frames=[table],
        rejected=counted(table) + counted(without_call),
        stores=[store.positions.name, store.samples.name],
    )


def _rows_after_calls(
    lane: Lane, calls_before: pl.DataFrame, chosen_places: pl.DataFrame, samples: pl.DataFrame
) -> pl.DataFrame:
    """Return a row per sample, with the key and the text of the call that it stands after, read as a call.

    calls_before: see PlacesAfterCalls.
    chosen_places: (place, p_api), where a further call is likely enough. samples: (place, sample, body, reason).
    """
    table = calls_before.drop("sample", "p_api", "input", "called", "before")
    table = table.join(chosen_places, on="place", maintain_order="left")
    table = table.join(samples, on="place", maintain_order="left_right").drop("sample")
    parsed = _parsed_samples(lane, table)
    return table.drop("body", "reason").hstack(parsed).rename({"chain": "before"})


class _ParsedSample(NamedTuple):
    """A sample after other calls, read as a call: columns of the table."""

    body: str | None  # what was sampled between the brackets
    called: str | None = None  # the lane whose tool it calls
    input: str | None = None
    reason: str | None = None  # why the sample is discarded


def _parsed_samples(lane: Lane, samples: pl.DataFrame) -> pl.DataFrame:
    """Parse samples as calls; return a frame with the columns of _ParsedSample, in the order of the rows.

    samples: `body` (what was written between the brackets, null where they were not closed), `reason` (why there is no
    body) and `chain` (the calls before the sample, as JSON).
    """
    parsed = []
    for body, reason, chain in samples.select("body", "reason", "chain").iter_rows():
        if body is None:
            parsed.append(_ParsedSample(body=None, reason=reason or "malformed"))
        else:
            parsed.append(_parsed_sample(lane, body, read_chain(chain)))
    schema = {"body": pl.String(), "called": pl.String(), "input": pl.String(), "reason": pl.String()}
    return pl.DataFrame(parsed, schema=schema, orient="row")


def _parsed_sample(lane: Lane, body: str, links: Sequence[ChainLink]) -> _ParsedSample:
    """Parse what was sampled between the brackets as a call of one of the tools that the lane may call.

    links: the calls before it, with their results.

    A call that stands among these already is refused with the reason repeated_call. A call of a tool that the lane may
    not call has the reason other_tool, anything else that is no call a reason of `parsed_call`.
    """
    calls_before = {Call(link.tool, link.input) for link in links}
    for called in lane.chainable.values():
        parsed = parsed_call(called, body)
        if parsed.reason == "other_tool":
            continue
        is_repeated = parsed.input is not None and Call(called.tool.name, parsed.input) in calls_before
        if is_repeated:
            return _ParsedSample(body=body, called=called.key, reason="repeated_call")
        return _ParsedSample(body=body, called=called.key, input=parsed.input, reason=parsed.reason)
    return _ParsedSample(body=body, reason="other_tool")


def run_chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan the calls of a shard, of every tool that stands in them, whose results are not stored yet.

    claimed: calls that earlier shards of this run make already; the planned ones are added.
    level: 2 for calls after one other call, 3 after two, and so on.
    """
    chunks: list[Chunk] = []
    work = Work()
    for calls in _calls_by_tool(output, shard, level):
        planned_of_tool = tool_results.planned_calls(worker, calls.output, calls.candidates, claimed)
        chunks += planned_of_tool.chunks
        work += planned_of_tool.work
    return Planned(chunks, work)


def run_rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Return the result of each distinct call of a shard, of every tool that stands in them (see `tool_results.rows`).

    level: 2 for calls after one other call, 3 after two, and so on.
    """
    frames = [output.stage.schema.to_frame()]  # empty; gives the table its columns where no tool is called
    rejected: Rejected = Counter()
    stores: list[str] = []  # the row stores that the results come from
    facts: dict[str, Any] = {}  # further fields of the record of this part
    for calls in _calls_by_tool(output, shard, level):
        answers = tool_results.answered(worker, calls.output, calls.candidates)
        frames += answers.frames
        rejected.update(answers.rejected)
        stores += answers.stores
        facts.update(answers.facts)
    table = pl.concat(frames).sort("tool", *tool_results.KEY)
    return PartRows([table], rejected=rejected, stores=stores, facts=facts)


class _CallsOfTool(NamedTuple):
    """The calls of a shard to one tool."""

    output: TableOutput  # the same stage for the lane of that tool
    candidates: pl.DataFrame  # (shard, input, context)


def _calls_by_tool(output: TableOutput, shard: str, level: int) -> list[_CallsOfTool]:
    """Group the calls of a shard by the tool that they call; a tool without a call has a group without rows.

    The column `called` of a call is the key of the lane (a tool with its settings) whose tool it calls. Each group
    comes with this stage's output for that lane, through which the tool is run.

    level: 2 for calls after one other call, 3 after two, and so on.
    """
    lane = output.lane
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    calls = output.lane_table(call_tables(level).candidates).read(shard).filter(pl.col("input").is_not_null())
    with_context = calls.join(texts, on=TEXT_KEY, how="left")
    groups = []
    for called in lane.chainable.values():
        candidates = with_context.filter(called=called.key).select("shard", *tool_results.KEY)
        output_of_tool = TableOutput(output.stage, output.plan, called)
        groups.append(_CallsOfTool(output_of_tool, candidates))
    return groups


def run_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the results depend on, apart from the calls: the settings of every tool that may be called."""
    return {called.tool.key: tool_results.STAGE.settings(plan, called) for called in lane.chainable.values()}


@cache
def stages(level: int) -> tuple[Stage, Stage]:
    """Return the two stages of a level of chains: sampling calls after `level` - 1 earlier ones, and running them.

    Level 2 reads the single calls, each further level the level before it.
    """
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
