"""chained_candidates: sample further calls after a call with its result, wherever the model would call again.

Beyond the paper, which samples every call apart from the others (section 7). A chain is a sequence of calls at one
position of a text, each made after the results of the earlier ones; its second call has level 2. After a call, the
probability of ` [` is compared with tau_s, and m calls are sampled. Both are stored under the text, the position and
the calls before, so that a larger depth, k or m, or a lower tau_s, only computes what is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
    count_by_reason,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.pipeline import scored_candidates, tool_results
from toolformer_dag.pipeline.sample_store import ChainedSampleStore, samples_identity
from toolformer_dag.pipeline.scored_candidates import SamplesOfTexts, TextChunk, parsed_call, samples_of_texts
from toolformer_dag.settings.tool_settings import MODEL
from toolformer_dag.texts import look_ahead
from toolformer_dag.texts.chains import ChainLink, hash_place, parse_chain, to_chain_json
from toolformer_dag.texts.look_ahead import TextUnits

FIRST_SAMPLE = 100_000_000
"""Number (`sample`) of the first call at a position that stands after one other; twice as much after two."""
PARSING = 2
"""Raised when the same bodies would be parsed differently; no sample is computed again."""
CALLED_COLUMN = Column(
    TOOL.dtype, "key of the lane whose tool is called: the lane's own, or one of `then`; null without a body"
)
BEFORE_COLUMN = Column(CHAIN.dtype, "the calls before it at its place, with their results, as JSON")
CALL_COLUMNS = (
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
single call. `text_digest`, `context` and `offset` describe its text.
"""
OFFSET_IN_TEXT = (pl.col("char_offset") - pl.col("offset")).alias("offset_in_text")
"""The character of its text before which a call (CALL_COLUMNS) stands."""


def read_calls_with_results(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the calls of a shard that have a result.

    Args:
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        level: 1 for single calls, 2 for calls after one earlier call, and so on.

    Returns:
        One row per call with the columns CALL_COLUMNS.

    Raises:
        StaleInput: A call was never run.
    """
    subset = output.lane_table("heuristic_subset").read(shard)
    texts = subset.select(*TEXT_KEY, "text_digest", "context", "offset")

    calls = _read_candidate_calls(output, shard, level)
    calls = calls.join(texts, on=TEXT_KEY, how="left")  # one name, so that no second frame is held meanwhile
    calls = _with_results(output, shard, calls, level)
    return calls.filter(pl.col("result").is_not_null()).select(CALL_COLUMNS)


def _read_candidate_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the proposed calls of a shard that could be parsed, with the same columns for every level."""
    candidates = output.lane_table(call_tables(level).candidates).read(shard)
    calls = candidates.filter(pl.col("input").is_not_null())

    # Some columns are not stored, because they have the same value in all rows of a level.
    if level == 1:
        return calls.with_columns(called=pl.lit(output.lane.key), before=pl.lit(None, pl.String))
    return calls.with_columns(source=pl.lit(MODEL), words=pl.lit(None, pl.String))


def _with_results(output: TableOutput, shard: str, calls: pl.DataFrame, level: int) -> pl.DataFrame:
    """Add the column `result` to calls. It is null if a call was run but gave no result.

    Args:
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        calls: The calls, with the columns called, input, context and others.
        level: 1 for single calls, 2 for calls after one earlier call, and so on.

    Raises:
        StaleInput: A call was never run.
    """
    table_name = call_tables(level).results
    results = output.lane_table(table_name).read(shard)
    results = results.select("input", "context", "result", called="tool", was_run=pl.lit(True))

    with_results = calls.join(results, on=("called", "input", "context"), how="left")
    some_were_not_run = with_results["was_run"].has_nulls()  # a call without a row in the table of results
    if some_were_not_run:
        raise StaleInput(output.name, shard, "calls that were not run", f"{output.lane.key}/{table_name}")
    return with_results


def build_chains(lane: Lane, calls: pl.DataFrame) -> pl.Series:
    """Build the chain that ends with each call: the earlier calls and the call itself, with their results.

    Args:
        lane: The tool with its settings, which name the tools that a chain may call.
        calls: The calls, with the columns CALL_COLUMNS.

    Returns:
        A chain per call, as JSON.
    """
    tool_names = {called_lane.key: name for name, called_lane in lane.chainable.items()}

    chains = []
    for before, called, input, result in calls.select("before", "called", "input", "result").iter_rows():
        earlier_links = parse_chain(before)
        last_link = ChainLink(tool=tool_names[called], input=input, result=result)
        chains.append(to_chain_json([*earlier_links, last_link]))
    return pl.Series(chains, dtype=pl.String)


def find_units_ahead(lane: Lane, texts: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    """Find the numbers and names in a call's input that the text mentions only after the call.

    Example:
        In "It took [Calculator(17 + 25)] 42 days, 17 of them at sea" the call gives ["17"], because a reader
        cannot know the 17 yet.

    Args:
        lane: The tool with its settings.
        texts: The columns text_digest and text, for the texts of the calls.
        calls: The calls, with the columns CALL_COLUMNS.

    Returns:
        A list per call, or null if the call has no such numbers and names. All are null if the tool's setting
        `look_ahead` is off.
    """
    if lane.look_ahead:
        lists = _list_units_ahead(texts, calls)
    else:
        lists = [None] * calls.height
    return pl.Series(lists, dtype=pl.List(pl.String()))


def _list_units_ahead(texts: pl.DataFrame, calls: pl.DataFrame) -> list[list[str] | None]:
    """Make the lists of `find_units_ahead`, one per call. An empty list is replaced by None."""
    units_by_digest = _map_digests_to_units(texts, calls)

    lists: list[list[str] | None] = []
    columns = calls.select("text_digest", OFFSET_IN_TEXT, "input", "before")
    for text_digest, offset, input, before in columns.iter_rows():
        earlier_calls = parse_chain(before)
        units = _find_units_ahead_of_call(units_by_digest[text_digest], offset, input, earlier_calls)
        lists.append(units or None)
    return lists


def _map_digests_to_units(texts: pl.DataFrame, calls: pl.DataFrame) -> dict[str, TextUnits]:
    """Find the numbers and names of each text that has calls, and return them by the text's hash."""
    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    texts_with_calls = distinct_texts.join(calls, on="text_digest", how="semi")
    return {text_digest: TextUnits.of(text) for text_digest, text in texts_with_calls.iter_rows()}


def _find_units_ahead_of_call(
    text_units: TextUnits, offset: int, input: str, earlier_calls: Sequence[ChainLink]
) -> list[str]:
    """Find the numbers and names in a call's input that the text mentions only after the call.

    What an earlier result says is left out: after `[Calculator(20 - 3) -> 17]` the 17 is known.

    Args:
        text_units: The numbers and names of the text.
        offset: The character of the text before which the call stands.
        input: The input of the call.
        earlier_calls: The calls before it at the same position, with their results.
    """
    known_from_results: set[str] = set()
    for call in earlier_calls:
        units_of_result = text_units.ahead(offset, call.result)  # those that the text mentions only later
        known_from_results.update(unit.casefold() for unit in units_of_result)

    units_of_input = text_units.ahead(offset, input)
    return [unit for unit in units_of_input if unit.casefold() not in known_from_results]


class PlacesAfterCalls(NamedTuple):
    """The places of a shard at which a further call of a chain may stand.

    - calls: the calls after which a further one may stand, the first of equal chains at a position of a text. Columns:
      CALL_COLUMNS, `chain` (the call and those before it, as JSON) and `place` (a hash of text, position and chain)
    - places (PLACES): the distinct places; equal texts in several documents share them. The hash of a place is in the
      column `text_digest`, so that the row stores and functions for whole texts serve for places too
    """

    calls: pl.DataFrame
    places: pl.DataFrame


def find_places_after_calls(output: TableOutput, shard: str, level: int) -> PlacesAfterCalls:
    """Find the places in a shard where a further call may stand: right after the calls of the level before.

    No call may follow a call that looks ahead (see `find_units_ahead`).

    Args:
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        level: The level of the further calls: 2 for places after a single call, and so on.
    """
    texts = output.lane_table("heuristic_subset").read(shard).select("text_digest", "text")
    earlier_calls = read_calls_with_results(output, shard, level - 1).sort(CALL_KEY)
    calls_with_places = _select_calls_with_places(output, earlier_calls, texts)
    distinct_places = _select_distinct_places(calls_with_places, texts)
    return PlacesAfterCalls(calls_with_places, distinct_places)


def _select_distinct_places(calls: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
    """Select the distinct places after calls, with their texts.

    Args:
        calls: The calls, with the columns place, text_digest, position, chain and others.
        texts: The columns text_digest and text, for the texts of the calls.

    Returns:
        One row per place with the columns PLACES. There `text_digest` has the hash of the place.
    """
    distinct = calls.unique("place", maintain_order=True).select("place", "text_digest", "position", before="chain")
    with_texts = distinct.join(texts.unique("text_digest"), on="text_digest", maintain_order="left")
    return with_texts.select(pl.col("place").alias("text_digest"), "text", "position", "before")


def _select_calls_with_places(output: TableOutput, calls: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
    """Select the calls after which a further call may stand, and add the place of that further call.

    Args:
        output: The table to be computed, for one tool with its settings.
        calls: The calls, with the columns CALL_COLUMNS.
        texts: The columns text_digest and text, for the texts of the calls.

    Returns:
        The selected calls with two more columns:

        - chain: the call and the calls before it at its position, with their results, as JSON
        - place: a hash of text, position and chain, under which the samples of the further call are stored
    """
    does_not_look_ahead = find_units_ahead(output.lane, texts, calls).is_null()
    calls = calls.filter(does_not_look_ahead)

    calls = calls.with_columns(chain=build_chains(output.lane, calls))

    # Samples that wrote the same call share their place, so what follows them is sampled once.
    calls = calls.unique((*TEXT_KEY, "position", "chain"), keep="first", maintain_order=True)
    return calls.with_columns(place=_compute_place_hashes(calls))


def _compute_place_hashes(calls: pl.DataFrame) -> pl.Series:
    """Return a hash of the text, the position and the chain of each call."""
    hashes = [hash_place(*values) for values in calls.select("text_digest", "position", "chain").iter_rows()]
    return pl.Series(hashes, dtype=pl.String)


def settings(plan: Plan, lane: Lane, level: int) -> Mapping[str, Any]:
    """List the settings and code versions that determine the calls of a level. If one changes, they are out of date.

    The earlier calls determine them too and are not listed here.

    Args:
        plan: All settings.
        lane: The tool with its settings.
        level: 2 for calls after one other call, 3 after two, and so on.
    """
    # The schemas of all tools that may be called determine how samples are parsed.
    schema_by_tool = {name: called_lane.tool.schema for name, called_lane in lane.chainable.items()}
    return {
        **samples_identity(plan, lane.chain_prompt),  # model, prompt and sampling
        "tau_s": lane.tau_s,  # the least probability of a call
        "m": lane.m,  # samples per place
        "level": level,
        "parsing": PARSING,  # the version of the code that parses samples
        "look_ahead": look_ahead.VERSION if lane.look_ahead else None,
        "tools": {name: fingerprint(schema) for name, schema in schema_by_tool.items()},
    }


def chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan the computation for places that lack samples, or the probability of a call there."""
    store = ChainedSampleStore(worker, output.lane)
    places = find_places_after_calls(output, shard, level).places
    return scored_candidates.plan_samples(worker, store, places, claimed)


def compute(worker: Worker, output: TableOutput, chunk: TextChunk) -> Work:
    """Compute the probabilities and samples that the places of a chunk lack, and store them."""
    store = ChainedSampleStore(worker, output.lane)
    return scored_candidates.compute_samples(worker, output.lane, store, chunk)


def rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Build the table of calls that the model sampled after earlier calls, for one shard.

    Args:
        worker: Opens the stored samples.
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        level: 2 for samples after a single call, 3 after two, and so on.

    Returns:
        One row per stored sample. If the sample is discarded, the row says why.

    Raises:
        StorageError: Stored samples were damaged.
    """
    # A place is where a further call may stand: right after a call of the level before.
    calls_before, places = find_places_after_calls(output, shard, level)
    store = ChainedSampleStore(worker, output.lane)
    stored = samples_of_texts(output, store, places)

    samples_after_calls = _build_rows_after_calls(output.lane, calls_before, stored)
    numbered_samples = _number_samples(samples_after_calls, level)
    table = output.stage.shaped(numbered_samples).sort(CALL_KEY)

    rejected = count_by_reason(numbered_samples) + _count_without_call(calls_before, stored)
    return PartRows([table], rejected=rejected, stores=store.names)


def _number_samples(table: pl.DataFrame, level: int) -> pl.DataFrame:
    """Number the samples at each position of a text (`sample`); no two levels share a number."""
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    first_sample = FIRST_SAMPLE * (level - 1)
    return table.with_columns(sample=number_at_position + first_sample)


def _count_without_call(calls_before: pl.DataFrame, stored: SamplesOfTexts) -> Rejected:
    """Count the earlier calls that no further call follows, by reason.

    The reason is why the engine refused their place, or no_call if it did not refuse it.
    """
    reason_by_place = stored.refused.select("reason", place="text_digest")
    without_call = calls_before.join(stored.positions, left_on="place", right_on="text_digest", how="anti")
    with_reason = without_call.join(reason_by_place, on="place", how="left")
    return count_by_reason(with_reason.with_columns(pl.col("reason").fill_null("no_call")))


def _build_rows_after_calls(lane: Lane, calls_before: pl.DataFrame, stored: SamplesOfTexts) -> pl.DataFrame:
    """Combine earlier calls with the samples that were drawn after them, and parse these as further calls.

    Args:
        lane: The tool with its settings.
        calls_before: The earlier calls. `chain` has a call and those before it, as JSON. `place` is a hash of
            the place right after the call.
        stored: What is stored of these places. There the hash of a place is in the column `text_digest`.

    Returns:
        One row per earlier call and sample, with the text and position of the earlier call and these columns:

        - before: the earlier calls, as JSON
        - p_api: the probability of a call after them
        - body, called, input, reason: the parsed sample
    """
    probabilities = stored.positions.select("p_api", place="text_digest")
    samples = stored.samples.select("sample", "body", "reason", place="text_digest")

    # These columns describe the earlier call. Columns of the same names will describe the sample.
    places = calls_before.drop("sample", "p_api", "input", "called", "before")
    places = places.join(probabilities, on="place", maintain_order="left")  # drops places without a probable call

    with_samples = places.join(samples.sort("place", "sample"), on="place", maintain_order="left_right")
    parsed_samples = _parse_samples(lane, with_samples)

    without_samples = with_samples.drop("sample", "body", "reason")
    return without_samples.hstack(parsed_samples).rename({"chain": "before"})


class _ParsedSample(NamedTuple):
    """A sample that was drawn after other calls, parsed as a call: columns of the table."""

    body: str | None  # what was sampled between the brackets
    called: str | None = None  # the lane whose tool it calls
    input: str | None = None
    reason: str | None = None  # why the sample is discarded


PARSED_SAMPLES = pl.Schema({"body": pl.String(), "called": pl.String(), "input": pl.String(), "reason": pl.String()})
"""A frame of _ParsedSample."""


def _parse_samples(lane: Lane, samples: pl.DataFrame) -> pl.DataFrame:
    """Parse samples as calls.

    Args:
        lane: The tool with its settings.
        samples: The columns `body` (null if the brackets were not closed), `reason` (why there is no body),
            `chain` (the calls before, as JSON) and others.

    Returns:
        One row per sample with the columns PARSED_SAMPLES, in the same order.
    """
    parsed_samples = []
    for body, reason, chain in samples.select("body", "reason", "chain").iter_rows():
        if body is None:
            parsed_samples.append(_ParsedSample(body=None, reason=reason or "malformed"))
        else:
            earlier_calls = parse_chain(chain)
            parsed_samples.append(_parse_sample(lane, body, earlier_calls))
    return pl.DataFrame(parsed_samples, schema=PARSED_SAMPLES, orient="row")


def _parse_sample(lane: Lane, body: str, earlier_calls: Sequence[ChainLink]) -> _ParsedSample:
    """Parse the text between the brackets as a call of one of the tools that a chain may call.

    The sample is discarded as "other_tool" if it names none of these tools, as "repeated_call" if the same call
    is among the earlier ones, and otherwise for the reasons of `parsed_call`.

    Args:
        lane: The tool with its settings, which name the tools that a chain may call.
        body: The text between the brackets, such as "Calculator(1 + 2)".
        earlier_calls: The calls before it at the same position.
    """
    for called_lane in lane.chainable.values():
        parsed = parsed_call(called_lane, body)
        if parsed.reason == "other_tool":
            continue  # try the next tool

        if _is_repeated(called_lane.tool.name, parsed.input, earlier_calls):
            return _ParsedSample(body=body, called=called_lane.key, reason="repeated_call")
        return _ParsedSample(body=body, called=called_lane.key, input=parsed.input, reason=parsed.reason)

    return _ParsedSample(body=body, reason="other_tool")


def _is_repeated(tool_name: str, input: str | None, earlier_calls: Sequence[ChainLink]) -> bool:
    """Return whether one of the earlier calls has the same tool and the same input."""
    return any(call.tool == tool_name and call.input == input for call in earlier_calls)


def run_chunks(worker: Worker, output: TableOutput, shard: str, claimed: Claimed, level: int) -> Planned:
    """Plan which calls of a shard still have to be run, for all tools that they call.

    Args:
        worker: Opens the stored results.
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        claimed: The calls that earlier shards of this run will run. The calls that are planned here are added.
        level: 2 for calls after one other call, and so on.

    Returns:
        The calls to run, split into chunks, and the counts of calls to run and of results to reuse.
    """
    chunks: list[Chunk] = []
    work = Work()
    for group in _group_calls_by_tool(output, shard, level):
        planned_for_tool = tool_results.plan_calls(worker, group.output, group.candidates, claimed)
        chunks += planned_for_tool.chunks
        work += planned_for_tool.work
    return Planned(chunks, work)


def run_rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
    """Build the table of results for one shard, with the results of all tools that its calls name.

    Args:
        worker: Opens the stored results.
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        level: 2 for calls after one other call, and so on.

    Returns:
        One row per distinct call: its result, or the reason why there is none.

    Raises:
        StorageError: Stored results were damaged.
    """
    merged = PartRows([output.stage.schema.to_frame()])  # a frame without rows
    for group in _group_calls_by_tool(output, shard, level):
        results_of_tool = tool_results.answered(worker, group.output, group.candidates)
        merged = _merge_results(merged, results_of_tool)

    table = pl.concat(merged.frames).sort("tool", *tool_results.RESULT_KEY)
    return replace(merged, frames=[table])


def _merge_results(first: PartRows, second: PartRows) -> PartRows:
    """Merge the results of two tools into one part."""
    return PartRows(
        frames=[*first.frames, *second.frames],
        rejected=first.rejected + second.rejected,
        stores=[*first.stores, *second.stores],
        facts={**first.facts, **second.facts},
    )


class _CallsOfTool(NamedTuple):
    """The calls of a shard to one tool."""

    output: TableOutput  # this stage, for the lane of that tool
    candidates: pl.DataFrame  # (shard, input, context)


def _group_calls_by_tool(output: TableOutput, shard: str, level: int) -> list[_CallsOfTool]:
    """Group the calls of a shard by the tool that they call.

    Returns:
        One group for each tool that a chain may call. It has no rows if the tool is not called.
    """
    calls = _read_calls_with_context(output, shard, level)

    groups = []
    for lane_of_tool in output.lane.chainable.values():
        candidates = calls.filter(called=lane_of_tool.key).select("shard", *tool_results.RESULT_KEY)
        output_for_tool = TableOutput(output.stage, output.plan, lane_of_tool)
        groups.append(_CallsOfTool(output_for_tool, candidates))
    return groups


def _read_calls_with_context(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the sampled calls of a level that could be parsed, with the `context` of their texts.

    Their column `called` is the key of the lane (a tool with its settings) whose tool is called.
    """
    texts = output.lane_table("heuristic_subset").read(shard).select(*TEXT_KEY, "context")
    candidates = output.lane_table(call_tables(level).candidates).read(shard)
    calls = candidates.filter(pl.col("input").is_not_null())
    return calls.join(texts, on=TEXT_KEY, how="left")


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
            "before": BEFORE_COLUMN,
            "called": CALLED_COLUMN,
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
        volatile=tool_results.MEASURED_COLUMNS,
        make=ByChunk(partial(run_chunks, level=level), tool_results.compute, partial(run_rows, level=level)),
        in_warehouse=tool_results.STAGE.in_warehouse,
        asset=StageAsset(calls=lambda output: output.lane.chainable.values()),
    )
    return sampling, running
