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

from toolformer_dag.computing.lane_tables import get_call_tables
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    CALL_ID_COLUMNS,
    CALL_KEY,
    CHAIN,
    CHAR_OFFSET,
    P_API,
    SAMPLED_INPUT,
    TEXT_KEY,
    TOOL,
    ByChunk,
    Chunk,
    ClaimedKeys,
    Column,
    PartRows,
    Planned,
    RejectionCounts,
    Stage,
    StageAsset,
    StaleInput,
    TableOutput,
    Work,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.pipeline import scored_candidates, tool_results
from toolformer_dag.pipeline.sample_store import ChainedSampleStore, collect_samples_identity
from toolformer_dag.pipeline.scored_candidates import SamplesOfTexts, TextChunk, parse_call_body, read_stored_samples
from toolformer_dag.settings.tool_settings import MODEL_SOURCE
from toolformer_dag.texts import look_ahead
from toolformer_dag.texts.chains import ChainLink, format_chain_json, hash_chain_place, parse_chain
from toolformer_dag.texts.look_ahead import TextUnits

FIRST_CHAINED_SAMPLE_NUMBER = 100_000_000
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
OFFSET_IN_TEXT_COLUMN = (pl.col("char_offset") - pl.col("offset")).alias("offset_in_text")
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
    subset = output.get_lane_table("heuristic_subset").read_part(shard)
    texts = subset.select(*TEXT_KEY, "text_digest", "context", "offset")

    calls = _read_candidate_calls(output, shard, level)
    calls = calls.join(texts, on=TEXT_KEY, how="left")  # one name, so that no second frame is held meanwhile
    calls = _with_results(output, shard, calls, level)
    return calls.filter(pl.col("result").is_not_null()).select(CALL_COLUMNS)


def _read_candidate_calls(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the proposed calls of a shard that could be parsed, with the same columns for every level."""
    candidates = output.get_lane_table(get_call_tables(level).candidates_table).read_part(shard)
    calls = candidates.filter(pl.col("input").is_not_null())

    # Some columns are not stored, because they have the same value in all rows of a level.
    if level == 1:
        return calls.with_columns(called=pl.lit(output.lane.key), before=pl.lit(None, pl.String))
    return calls.with_columns(source=pl.lit(MODEL_SOURCE), words=pl.lit(None, pl.String))


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
    table_name = get_call_tables(level).results_table
    results = output.get_lane_table(table_name).read_part(shard)
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
    tool_name_by_lane = {called_lane.key: name for name, called_lane in lane.chainable_lanes_by_name.items()}

    chain_jsons = []
    call_fields = calls.select("before", "called", "input", "result")
    for earlier_chain_json, lane_key, input, result in call_fields.iter_rows():
        earlier_links = parse_chain(earlier_chain_json)
        last_link = ChainLink(tool=tool_name_by_lane[lane_key], input=input, result=result)
        chain_jsons.append(format_chain_json([*earlier_links, last_link]))
    return pl.Series(chain_jsons, dtype=pl.String)


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
    if lane.rejects_look_ahead:
        units_ahead_of_calls = _list_units_ahead(texts, calls)
    else:
        units_ahead_of_calls = [None] * calls.height
    return pl.Series(units_ahead_of_calls, dtype=pl.List(pl.String()))


def _list_units_ahead(texts: pl.DataFrame, calls: pl.DataFrame) -> list[list[str] | None]:
    """List the numbers and names in the input of each call that the text mentions only after the call.

    Args:
        texts: The texts of the calls, in the columns text_digest and text.
        calls: The calls, in the columns CALL_COLUMNS. `before` has the earlier calls of the chain as JSON: what their
            results say is not listed.

    Returns:
        A list per call, such as ["17"]. None instead of an empty list.
    """
    units_by_digest = _map_text_digest_to_units(texts, calls)

    units_ahead_of_calls: list[list[str] | None] = []
    call_fields = calls.select("text_digest", OFFSET_IN_TEXT_COLUMN, "input", "before")
    for text_digest, offset, input, earlier_chain_json in call_fields.iter_rows():
        earlier_calls = parse_chain(earlier_chain_json)
        units_ahead = _find_units_ahead_of_call(units_by_digest[text_digest], offset, input, earlier_calls)
        units_ahead_of_calls.append(units_ahead or None)
    return units_ahead_of_calls


def _map_text_digest_to_units(texts: pl.DataFrame, calls: pl.DataFrame) -> dict[str, TextUnits]:
    """Find the numbers and names of each text that has calls, and return them by the text's hash."""
    distinct_texts = texts.select("text_digest", "text").unique("text_digest")
    texts_with_calls = distinct_texts.join(calls, on="text_digest", how="semi")
    return {text_digest: TextUnits.from_text(text) for text_digest, text in texts_with_calls.iter_rows()}


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
        units_of_result = text_units.list_units_ahead(offset, call.result)  # those that the text mentions only later
        known_from_results.update(unit.casefold() for unit in units_of_result)

    units_of_input = text_units.list_units_ahead(offset, input)
    return [unit for unit in units_of_input if unit.casefold() not in known_from_results]


class PlacesAfterCalls(NamedTuple):
    """The places of a shard at which a further call of a chain may stand.

    Attributes:
        calls: The calls after which a further one may stand, the first of equal chains at a position of a text. They
            have the columns CALL_COLUMNS, `chain` (the call and those before it, as JSON) and `place` (a hash of text,
            position and chain).
        places: The distinct places, in the columns PLACE_SCHEMA. Equal texts in several documents share them. The hash
            of a place is in the column `text_digest`, so that the row stores and functions for whole texts serve for
            places too.
    """

    calls: pl.DataFrame
    places: pl.DataFrame


def find_places_after_calls(output: TableOutput, shard: str, level: int) -> PlacesAfterCalls:
    """Find the places in a shard where a further call may stand: right after the calls of the level before.

    No call may follow a call that looks ahead: one whose input has numbers or names that the text mentions only after
    the call.

    Args:
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        level: The level of the further calls: 2 for places after a single call, and so on.

    Returns:
        The calls after which a further one may stand, and the distinct places of the further ones.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard).select("text_digest", "text")
    earlier_calls = read_calls_with_results(output, shard, level - 1).sort(CALL_KEY)
    calls_with_places = _select_calls_with_places(output, earlier_calls, texts)
    distinct_places = _select_distinct_places(calls_with_places, texts)
    return PlacesAfterCalls(calls_with_places, distinct_places)


def _select_distinct_places(calls: pl.DataFrame, texts: pl.DataFrame) -> pl.DataFrame:
    """Select the distinct places at which a further call may be sampled, each right after a call.

    Args:
        calls: The calls after which it may stand, with the columns place (the hash of the place), text_digest,
            position, chain (the call and those before it) and others.
        texts: The columns text_digest and text, for the texts of the calls.

    Returns:
        One row per place with the columns PLACE_SCHEMA. There `before` has the chain, and `text_digest` has the hash of
        the place, because functions for whole texts look rows up by this column.
    """
    calls_of_distinct_places = calls.unique("place", maintain_order=True)
    places = calls_of_distinct_places.select("place", "text_digest", "position", before="chain")
    places_with_texts = places.join(texts.unique("text_digest"), on="text_digest", maintain_order="left")

    return places_with_texts.select(pl.col("place").alias("text_digest"), "text", "position", "before")


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
    fit_calls = calls.filter(does_not_look_ahead)
    calls_with_chains = fit_calls.with_columns(chain=build_chains(output.lane, fit_calls))

    # Samples that wrote the same call share their place, so what follows them is sampled once.
    distinct_calls = calls_with_chains.unique((*TEXT_KEY, "position", "chain"), keep="first", maintain_order=True)
    return distinct_calls.with_columns(place=_compute_place_hashes(distinct_calls))


def _compute_place_hashes(calls_with_chains: pl.DataFrame) -> pl.Series:
    """Return a hash of the text, the position and the chain of each call."""
    hashed_fields = calls_with_chains.select("text_digest", "position", "chain")
    hashes = [hash_chain_place(*fields) for fields in hashed_fields.iter_rows()]
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
    schema_by_tool = {
        name: called_lane.tool.arguments_schema for name, called_lane in lane.chainable_lanes_by_name.items()
    }
    return {
        **collect_samples_identity(plan, lane.chain_prompt),  # model, prompt and sampling
        "tau_s": lane.tau_s,  # the least probability of a call
        "m": lane.m,  # samples per place
        "level": level,
        "parsing": PARSING,  # the version of the code that parses samples
        "look_ahead": look_ahead.LOOK_AHEAD_VERSION if lane.rejects_look_ahead else None,
        "tools": {name: fingerprint(schema) for name, schema in schema_by_tool.items()},
    }


def chunks(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys, level: int) -> Planned:
    """Plan the computation for places that lack samples, or the probability of a call there."""
    store = ChainedSampleStore(worker, output.lane)
    places = find_places_after_calls(output, shard, level).places
    return scored_candidates.plan_samples(worker, store, places, claimed_keys)


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
    earlier_calls, places = find_places_after_calls(output, shard, level)
    store = ChainedSampleStore(worker, output.lane)
    stored_samples = read_stored_samples(output, store, places)

    samples_after_calls = _build_next_call_rows(output.lane, earlier_calls, stored_samples)
    numbered_samples = _number_samples(samples_after_calls, level)
    sample_rows = output.stage.shape_frame(numbered_samples).sort(CALL_KEY)

    discarded_samples = count_rejected_rows(numbered_samples)
    calls_without_next_call = _count_calls_without_next_call(earlier_calls, stored_samples)
    return PartRows(
        [sample_rows],
        rejection_counts=discarded_samples + calls_without_next_call,
        store_names=store.store_names,
    )


def _number_samples(samples: pl.DataFrame, level: int) -> pl.DataFrame:
    """Number the samples at each position of a text (`sample`); no two levels share a number."""
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    first_sample = FIRST_CHAINED_SAMPLE_NUMBER * (level - 1)
    return samples.with_columns(sample=number_at_position + first_sample)


def _count_calls_without_next_call(earlier_calls: pl.DataFrame, stored_samples: SamplesOfTexts) -> RejectionCounts:
    """Count the earlier calls that no further call follows, by reason.

    The reason is why the engine refused their place, or no_call if it did not refuse it.
    """
    reason_by_place = stored_samples.refused_texts.select("reason", place="text_digest")
    without_call = earlier_calls.join(stored_samples.positions, left_on="place", right_on="text_digest", how="anti")
    with_reason = without_call.join(reason_by_place, on="place", how="left")
    return count_rejected_rows(with_reason.with_columns(pl.col("reason").fill_null("no_call")))


def _build_next_call_rows(lane: Lane, earlier_calls: pl.DataFrame, stored_samples: SamplesOfTexts) -> pl.DataFrame:
    """Pair earlier calls with what the model sampled right after them, and parse each sample as the next call.

    After `[Calculator(3 * 4) -> 12]` the sample `Calculator(12 + 1)` gives the next call with the input "12 + 1".

    Args:
        lane: The tool with its settings.
        earlier_calls: The earlier calls. `chain` has a call and those before it, as JSON. `place` is a hash of
            the place right after the call.
        stored_samples: What is stored of these places. There the hash of a place is in the column `text_digest`.

    Returns:
        One row per earlier call and sample, with the text and position of the earlier call and these columns:

        - before: the earlier calls, as JSON
        - p_api: the probability of a call after them
        - body, called, input, reason: the parsed sample
    """
    # `text_digest` gets its true name here, `place`.
    probabilities = stored_samples.positions.select("p_api", place="text_digest")
    samples = stored_samples.samples.select("sample", "body", "reason", place="text_digest")

    # These columns describe the earlier call. Columns of the same names will describe the sample.
    places = earlier_calls.drop("sample", "p_api", "input", "called", "before")
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


PARSED_SAMPLE_SCHEMA = pl.Schema(
    {"body": pl.String(), "called": pl.String(), "input": pl.String(), "reason": pl.String()}
)
"""A frame of _ParsedSample."""


def _parse_samples(lane: Lane, samples: pl.DataFrame) -> pl.DataFrame:
    """Parse samples as calls.

    Args:
        lane: The tool with its settings.
        samples: The columns `body` (null if the brackets were not closed), `reason` (why there is no body),
            `chain` (the calls before, as JSON) and others.

    Returns:
        One row per sample with the columns PARSED_SAMPLE_SCHEMA, in the same order.
    """
    parsed_samples = []
    for body, reason, chain in samples.select("body", "reason", "chain").iter_rows():
        if body is None:
            parsed_samples.append(_ParsedSample(body=None, reason=reason or "malformed"))
        else:
            earlier_calls = parse_chain(chain)
            parsed_samples.append(_parse_sample(lane, body, earlier_calls))
    return pl.DataFrame(parsed_samples, schema=PARSED_SAMPLE_SCHEMA, orient="row")


def _parse_sample(lane: Lane, body: str, earlier_calls: Sequence[ChainLink]) -> _ParsedSample:
    """Parse the text between the brackets as a call of one of the tools that a chain may call.

    The sample is discarded as "other_tool" if it names none of these tools, as "repeated_call" if the same call
    is among the earlier ones, and otherwise for the reasons of `parse_call_body`.

    Args:
        lane: The tool with its settings, which name the tools that a chain may call.
        body: The text between the brackets, such as "Calculator(1 + 2)".
        earlier_calls: The calls before it at the same position.
    """
    for called_lane in lane.chainable_lanes_by_name.values():
        parsed = parse_call_body(called_lane, body)
        if parsed.reason == "other_tool":
            continue  # try the next tool

        if _is_repeated_call(called_lane.tool.name, parsed.input, earlier_calls):
            return _ParsedSample(body=body, called=called_lane.key, reason="repeated_call")
        return _ParsedSample(body=body, called=called_lane.key, input=parsed.input, reason=parsed.reason)

    return _ParsedSample(body=body, reason="other_tool")


def _is_repeated_call(tool_name: str, input: str | None, earlier_calls: Sequence[ChainLink]) -> bool:
    """Return whether one of the earlier calls has the same tool and the same input."""
    return any(call.tool == tool_name and call.input == input for call in earlier_calls)


def plan_tool_runs(worker: Worker, output: TableOutput, shard: str, claimed_keys: ClaimedKeys, level: int) -> Planned:
    """Plan which calls of a shard still have to be run, for all tools that they call.

    Args:
        worker: Opens the stored results.
        output: The table to be computed, for one tool with its settings.
        shard: The name of the shard.
        claimed_keys: The calls that earlier shards of this run will run. The calls that are planned here are added.
        level: 2 for calls after one other call, and so on.

    Returns:
        The calls to run, split into chunks, and the counts of calls to run and of results to reuse.
    """
    chunks: list[Chunk] = []
    work = Work()
    for group in _group_calls_by_tool(output, shard, level):
        planned_for_tool = tool_results.plan_tool_calls(worker, group.output, group.candidate_calls, claimed_keys)
        chunks += planned_for_tool.chunks
        work += planned_for_tool.work
    return Planned(chunks, work)


def build_result_rows(worker: Worker, output: TableOutput, shard: str, level: int) -> PartRows:
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
    merged_results = PartRows([output.stage.schema.to_frame()])  # a frame without rows
    for calls_of_tool in _group_calls_by_tool(output, shard, level):
        results_of_tool = tool_results.build_answered_rows(worker, calls_of_tool.output, calls_of_tool.candidate_calls)
        merged_results = _merge_results(merged_results, results_of_tool)

    result_rows = pl.concat(merged_results.frames).sort("tool", *tool_results.RESULT_KEY_COLUMNS)
    return replace(merged_results, frames=[result_rows])


def _merge_results(first: PartRows, second: PartRows) -> PartRows:
    """Merge the results of two tools into one part."""
    return PartRows(
        frames=[*first.frames, *second.frames],
        rejection_counts=first.rejection_counts + second.rejection_counts,
        store_names=[*first.store_names, *second.store_names],
        record_fields={**first.record_fields, **second.record_fields},
    )


class _CallsOfTool(NamedTuple):
    """The calls of a shard to one tool.

    Attributes:
        output: The table of this stage for the lane of that tool.
        candidate_calls: The calls, in the columns shard, input and context.
    """

    output: TableOutput
    candidate_calls: pl.DataFrame


def _group_calls_by_tool(output: TableOutput, shard: str, level: int) -> list[_CallsOfTool]:
    """Group the calls of a shard by the tool that they call.

    Args:
        output: The table to be computed, for the lane (a tool with its settings) with which the chains begin.
        shard: The name of the shard.
        level: Which calls of chains are read: 2 for those after a first call, and so on.

    Returns:
        One group for each tool that a chain may call. It has no rows if the tool is not called.
    """
    calls = _read_calls_with_context(output, shard, level)

    groups = []
    for lane_of_tool in output.lane.chainable_lanes_by_name.values():
        candidates = calls.filter(called=lane_of_tool.key).select("shard", *tool_results.RESULT_KEY_COLUMNS)
        output_for_tool = TableOutput(output.stage, output.plan, lane_of_tool)
        groups.append(_CallsOfTool(output_for_tool, candidates))
    return groups


def _read_calls_with_context(output: TableOutput, shard: str, level: int) -> pl.DataFrame:
    """Read the sampled calls of a level that could be parsed, with the `context` of their texts.

    Their column `called` is the key of the lane (a tool with its settings) whose tool is called.
    """
    texts = output.get_lane_table("heuristic_subset").read_part(shard).select(*TEXT_KEY, "context")
    candidates = output.get_lane_table(get_call_tables(level).candidates_table).read_part(shard)
    calls = candidates.filter(pl.col("input").is_not_null())
    return calls.join(texts, on=TEXT_KEY, how="left")


def collect_run_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the results depend on, apart from the calls: the settings of every tool that may be called."""
    return {
        called.tool.key: tool_results.STAGE.collect_settings(plan, called)
        for called in lane.chainable_lanes_by_name.values()
    }


@cache
def build_level_stages(level: int) -> tuple[Stage, Stage]:
    """Return the two stages of a level of chains: sampling calls after `level` - 1 earlier ones, and running them.

    Level 2 reads the single calls, each further level the level before it.
    """
    candidates, results = get_call_tables(level)
    sampling = Stage(
        name=candidates,
        description=f"Calls that the model would make after {level - 1}, or why a sample was discarded.",
        columns={
            **CALL_ID_COLUMNS,
            "char_offset": CHAR_OFFSET,
            "p_api": P_API,
            "before": BEFORE_COLUMN,
            "called": CALLED_COLUMN,
            "body": scored_candidates.STAGE.columns["body"],
            "input": SAMPLED_INPUT,
            "reason": scored_candidates.STAGE.columns["reason"],
        },
        key_columns=CALL_KEY,
        collect_settings=partial(settings, level=level),
        reads=(*get_call_tables(level - 1), "heuristic_subset"),
        pool="gpu",
        kinds=frozenset({"pytorch", "parquet"}),
        row_maker=ByChunk(partial(chunks, level=level), compute, partial(rows, level=level)),
    )
    running = Stage(
        name=results,
        description="The result per distinct call after others, by the tool that was called, or why there is none.",
        columns=tool_results.STAGE.columns,
        key_columns=tool_results.STAGE.key_columns,
        collect_settings=collect_run_settings,
        reads=(candidates, "heuristic_subset"),
        pool="tools",
        volatile_columns=tool_results.MEASURED_COLUMNS,
        row_maker=ByChunk(
            partial(plan_tool_runs, level=level), tool_results.compute, partial(build_result_rows, level=level)
        ),
        warehouse_form=tool_results.STAGE.warehouse_form,
        asset=StageAsset(list_called_lanes=lambda output: output.lane.chainable_lanes_by_name.values()),
    )
    return sampling, running
