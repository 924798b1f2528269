"""traces/exchanged_results: the alternatives of each recorded call, other results to put in place of its own.

They are results of the same tool in other conversations, else the call's own result with other values, else results of
other tools: `alternatives` says why. They come from the calls of the same shard (a file, or a group of small files), so
that another file changes nothing for them. A shard that has too few results of a tool borrows some: of the samples of
all other shards (traces/donor_samples), the MAX_LENT_RESULTS results of the tool with the smallest hashes. A borrowed
result changes only if another shard gets one with a smaller hash.

Memory: up to `other_results.MAX_DONORS_PER_TOOL` results of each tool of a shard, and the borrowed ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import ByShard, Column, InputsFinder, PartRows, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Table
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.traces import alternatives, recorded_calls, recorded_conversations
from toolformer_dag.traces.alternatives import (
    MAX_EXCHANGED_CHARACTERS,
    NO_ALTERNATIVES,
    OTHER_RESULTS,
    OTHER_TOOLS,
    Alternatives,
    build_exchanged_alternatives,
    join_text_before_result,
    select_alternatives,
)
from toolformer_dag.traces.exchanged_values import StringPools
from toolformer_dag.traces.other_results import (
    EXCHANGE_VERSION,
    MAX_DONOR_CHARACTERS,
    MAX_DONORS_PER_TOOL,
    Circle,
    Donor,
    Donors,
    has_too_few_donors,
    hash_call,
)
from toolformer_dag.traces.recorded_calls import CALL_KEY_COLUMNS, CALL_POSITION_COLUMNS
from toolformer_dag.traces.recorded_conversations import read_conversations_by_number
from toolformer_dag.traces.units import compute_call_key

TABLE_NAME = "traces/exchanged_results"
"""The table of the alternatives of calls."""
SAMPLES_TABLE_NAME = "traces/donor_samples"
"""The table of the results that a shard lends to others, and of how many it lacks."""
MAX_LENT_RESULTS = 32
"""The maximum number of results of a tool that a shard lends, and that it borrows."""
MAX_CALLS_PER_FRAME = 10_000
"""The maximum number of calls of a frame."""
ALTERNATIVE_COLUMNS = pl.Schema({"key": pl.String(), "means": pl.String(), "results": pl.List(pl.String())})
"""The columns that are added to a call."""
CALL_COLUMNS = ("tool", "document", "arguments", "result", "failed")
"""Columns of the table of recorded calls that are read to choose alternatives."""


def collect_sample_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the samples, together with the calls: versions and limits."""
    return {"exchange": EXCHANGE_VERSION, "lent": MAX_LENT_RESULTS, **_collect_limits(plan)}


def collect_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the alternatives, together with the calls and the borrowed results."""
    return {"exchange": EXCHANGE_VERSION, "alternatives": alternatives.ALTERNATIVES_VERSION, **_collect_limits(plan)}


def _collect_limits(plan: Plan) -> dict[str, Any]:
    """Return how many donors are kept and how long they are, and how many alternatives a call gets."""
    return {
        "donors": MAX_DONORS_PER_TOOL,
        "longest_donor": MAX_DONOR_CHARACTERS,
        **select_determining_settings(plan.settings.traces, "swaps"),
    }


def make_sample_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the results of a shard (donors) that calls of other shards may get in place of their own.

    A tool has up to MAX_LENT_RESULTS rows, with these columns:

    - shard, tool
    - lacks: whether the shard has too few donors of the tool for its own calls, and so borrows from other shards
    - the fields of the donor
    """
    results_per_call = output.plan.settings.traces.swaps
    donors_by_tool = sorted(_collect_donors(output, shard).iter_donors_by_tool())  # those of a tool are sorted by hash

    sample_rows: list[dict[str, Any]] = []
    for tool, donors in donors_by_tool:
        shared_columns = {"shard": shard, "tool": tool, "lacks": has_too_few_donors(donors, results_per_call)}
        for donor in donors[:MAX_LENT_RESULTS]:
            sample_rows.append({**shared_columns, **donor._asdict()})
    return PartRows([pl.DataFrame(sample_rows, schema=output.stage.schema)])


def build_inputs_finder(output: TableOutput) -> InputsFinder:
    """Return a function that gives, for a shard, the versions of what its rows are made from.

    They are the version of its recorded calls, and a fingerprint of the results that it borrows: a shard with too few
    results of a tool takes some of other shards. The rows of a shard are computed anew when one of the two changes.
    """
    samples_table = output.plan.lake.get_table(SAMPLES_TABLE_NAME)
    shards_with_samples = [shard for shard in output.parts if samples_table.has_part(shard)]

    # Computed once for each version of the table of samples.
    borrowed_fingerprint_by_shard = samples_table.get_or_compute_answer(
        f"borrowed by {fingerprint(shards_with_samples)}",
        partial(_compute_borrowed_fingerprints, output, shards_with_samples),
    )

    calls_table = output.plan.lake.get_table(recorded_calls.TABLE_NAME)
    return partial(_collect_shard_inputs, calls_table, borrowed_fingerprint_by_shard)


def _collect_shard_inputs(
    calls_table: Table, borrowed_fingerprint_by_shard: Mapping[str, Any], shard: str
) -> Mapping[str, Any]:
    """Return the versions of what a shard's rows are made from. If one changes, the rows are computed anew.

    The rows are made from the calls of the shard, and from results of other shards that it borrows.

    Args:
        calls_table: The table of recorded calls.
        borrowed_fingerprint_by_shard: Fingerprints of the borrowed results. Shards that borrow nothing have none.
        shard: The name of the shard.
    """
    return {
        "recorded_calls": calls_table.find_part_version(shard),
        "borrowed": borrowed_fingerprint_by_shard.get(shard),
    }


def _compute_borrowed_fingerprints(output: TableOutput, shards_with_samples: Sequence[str]) -> dict[str, str]:
    """Compute a fingerprint of the results that each shard borrows from other shards.

    Args:
        output: The table of alternatives.
        shards_with_samples: The shards whose samples, the results that they lend, are published.

    Returns:
        The fingerprints by shard. Shards that borrow nothing are left out.
    """
    if not shards_with_samples:
        return {}
    samples = output.plan.lake.get_table(SAMPLES_TABLE_NAME).scan_parts(shards_with_samples)
    borrowed_by_shard = _group_borrowed_results_by_shard(samples)
    return {shard: fingerprint(borrowed_results) for shard, borrowed_results in borrowed_by_shard.items()}


def _group_borrowed_results_by_shard(samples: pl.LazyFrame) -> dict[str, list[object]]:
    """Return, by shard, what identifies the results that it borrows, with an item per tool of which it has too few."""
    borrowers = _list_borrowers(samples)
    samples_by_tool = _group_samples_by_tool(samples, borrowers["tool"])

    borrowed_by_shard: dict[str, list[object]] = {}
    for shard, tool in borrowers.iter_rows():
        borrowed_results = _identify_borrowed_results(samples_by_tool[(tool,)], shard, tool)
        borrowed_by_shard.setdefault(shard, []).append(borrowed_results)
    return borrowed_by_shard


def _list_borrowers(samples: pl.LazyFrame) -> pl.DataFrame:
    """Return the pairs of shard and tool for which the shard borrows results, sorted."""
    return samples.filter("lacks").select("shard", "tool").unique().sort("shard", "tool").collect()


def _identify_borrowed_results(tool_samples: pl.DataFrame, shard: str, tool: str) -> list[Any]:
    """Return what identifies the results of a tool that a shard borrows. If it changes, the shard is computed anew.

    Args:
        tool_samples: The samples of the tool from all shards, sorted by hash.
        shard: The shard that borrows. Its own samples are left out.
        tool: The name of the tool.

    Returns:
        A list of three: the tool, the hashes of the results, and their documents.
    """
    samples_of_other_shards = tool_samples.filter(pl.col("shard") != shard)
    borrowed_samples = _select_first_distinct_samples(samples_of_other_shards)
    return [tool, borrowed_samples["hash"].to_list(), borrowed_samples["document"].to_list()]


def _group_samples_by_tool(samples: pl.LazyFrame, tools: pl.Series) -> dict[tuple[Any, ...], pl.DataFrame]:
    """Read the samples of some tools without their results, which are long.

    Returns:
        For each tool a frame of its samples, sorted by hash and document. The key is the tuple `(tool,)`.
    """
    samples_without_results = samples.select("shard", "tool", "hash", "document")
    sorted_samples = _read_sorted_samples(samples_without_results, tools.unique())
    return sorted_samples.partition_by("tool", as_dict=True)


def _read_sorted_samples(samples: pl.LazyFrame, tools: pl.Series) -> pl.DataFrame:
    """Return the samples of these tools, sorted by tool, hash and document."""
    is_needed = pl.col("tool").is_in(tools.implode())
    return samples.filter(is_needed).sort("tool", "hash", "document").collect()


def _select_first_distinct_samples(samples: pl.DataFrame) -> pl.DataFrame:
    """Return the first MAX_LENT_RESULTS samples. Of samples with the same hash only the first is kept."""
    distinct = samples.unique("hash", keep="first", maintain_order=True)
    return distinct.head(MAX_LENT_RESULTS)


def make_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row with the alternatives of each call of a shard, in the order of the calls."""
    return PartRows(_iter_frames(output, shard))


@dataclass(frozen=True)
class OtherToolResults:
    """Results for calls whose tool has too few: the first MAX_LENT_RESULTS donors of every tool of a shard.

    A donor is a result that other calls may get in place of their own. The object is filled by `add_donors`, tool by
    tool.

    Attributes:
        donor_by_hash: the donors, by the hash of their result.
        tools_by_result: by result, the names of the tools that gave it.
        string_pools: the strings in the results, to put in place of a string in a call's own result.
    """

    donor_by_hash: dict[str, Donor] = field(default_factory=dict)
    tools_by_result: dict[str, set[str]] = field(default_factory=dict)
    string_pools: StringPools = field(default_factory=StringPools)

    def add_donors(self, tool: str, donors: Sequence[Donor]) -> None:
        """Add the donors of a tool, and the strings in the first MAX_EXCHANGED_CHARACTERS characters of each."""
        for donor in donors:
            self.donor_by_hash.setdefault(donor.hash, donor)
            self.tools_by_result.setdefault(donor.result, set()).add(tool)
            self.string_pools.add_result_strings(tool, donor.result[:MAX_EXCHANGED_CHARACTERS])

    @cached_property
    def donor_circle(self) -> Circle:
        """The donors of all tools in the order of their hashes."""
        return Circle.from_sorted_donors(sorted(self.donor_by_hash.values()))

    def iter_results_of_other_tools(self, document_hash: str, call: RecordedCall) -> Iterator[str]:
        """Yield results that only other tools than the call's gave, in other conversations.

        Args:
            document_hash: The document of the call: conversations about the same question share it, and their results
                are passed over.
            call: The call. Results with the same values as its own are passed over too.
        """
        for result in self.donor_circle.iter_other_results(document_hash, call):
            if call.tool not in self.tools_by_result[result]:
                yield result


@dataclass(frozen=True)
class ShardResults:
    """The results that the calls of a shard may get in place of their own.

    A circle is a list of results, sorted by hash. Each call takes some, beginning at the one next to its own hash, and
    after the last comes the first.

    Attributes:
        circles_by_tool: by tool, a circle of the shard's own results of the tool, then a circle of borrowed results.
        other_tool_results: results for calls whose tool has too few.
        results_per_call: how many results a call gets.
    """

    circles_by_tool: Mapping[str, Sequence[Circle]]
    other_tool_results: OtherToolResults
    results_per_call: int

    def find_same_tool_alternatives(self, call_row: Mapping[str, Any]) -> Alternatives:
        """Choose results to put in place of a call's own: results that its tool gave in other conversations.

        Args:
            call_row: The row of the call in the table of recorded calls.

        Returns:
            At most `results_per_call` results. NO_ALTERNATIVES if there are fewer than MIN_OTHER_RESULTS.
        """
        call = _build_recorded_call(call_row)
        # A circle is a list of results that is read from somewhere in the middle on, and around its end. The first one
        # holds the tool's results in this shard, the second one those borrowed from other shards.
        circles = self.circles_by_tool.get(call.tool, [])
        # Lazy: a later circle is begun only if the earlier ones have too few results.
        candidate_results = chain.from_iterable(
            circle.iter_other_results(call_row["document"], call) for circle in circles
        )
        return select_alternatives(OTHER_RESULTS, call, candidate_results, self.results_per_call)

    def find_other_alternatives(self, call_row: Mapping[str, Any], messages: Sequence[RecordedMessage]) -> Alternatives:
        """Choose results to put in place of a call's own, if its tool gave too few in other conversations.

        They are the call's own result with other values, such as {"temp": 31} for {"temp": 18}. If no value can be
        replaced, they are results of other tools.

        Args:
            call_row: The row of the call in the table of recorded calls.
            messages: The conversation of the call.

        Returns:
            The results, or no alternatives if the call has no result or if there are too few.
        """
        call = _build_recorded_call(call_row)
        document_hash = call_row["document"]  # conversations about the same question share it
        if call.result is None:
            return NO_ALTERNATIVES

        exchanged_alternatives = build_exchanged_alternatives(
            call,
            call_hash=hash_call(document_hash, call),
            text_before=join_text_before_result(messages, call_row["turn"], call_row["call"]),
            string_pools=self.other_tool_results.string_pools,
            max_count=self.results_per_call,
        )
        if exchanged_alternatives.results:
            return exchanged_alternatives

        candidate_results = self.other_tool_results.iter_results_of_other_tools(document_hash, call)
        return select_alternatives(OTHER_TOOLS, call, candidate_results, max_count=self.results_per_call)


def _collect_shard_results(output: TableOutput, shard: str) -> ShardResults:
    """Collect the results (donors) that calls of a shard may get in place of their own.

    By tool, they are those of the shard itself, then those borrowed from other shards if it has too few. The first
    MAX_LENT_RESULTS of every tool also serve calls of other tools that have too few even then.
    """
    shard_donors = _collect_donors(output, shard)
    other_tool_results = OtherToolResults()
    for tool, donors in shard_donors.iter_donors_by_tool():
        other_tool_results.add_donors(tool, donors[:MAX_LENT_RESULTS])

    circles_by_tool = _merge_circles(shard_donors, _build_borrowed_circles(output, shard))
    return ShardResults(circles_by_tool, other_tool_results, results_per_call=output.plan.settings.traces.swaps)


def _merge_circles(shard_donors: Donors, borrowed_circle_by_tool: Mapping[str, Circle]) -> dict[str, list[Circle]]:
    """Return, by tool, the circle of a shard's own results, then the circle of borrowed ones if there are any."""
    circles_by_tool = {tool: [circle] for tool, circle in shard_donors.build_circle_by_tool().items()}
    for tool, borrowed_circle in borrowed_circle_by_tool.items():
        circles_by_tool.setdefault(tool, []).append(borrowed_circle)
    return circles_by_tool


def _iter_frames(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the table's rows for a shard, a row per call, in frames of at most MAX_CALLS_PER_FRAME calls."""
    shard_results = _collect_shard_results(output, shard)
    for stored_frame in output.plan.lake.get_table(recorded_calls.TABLE_NAME).iter_frames(shard):
        for calls in stored_frame.iter_slices(MAX_CALLS_PER_FRAME):
            call_rows = calls.select("digest", "number", "turn", "call", *CALL_COLUMNS).to_dicts()
            alternatives_of_calls = _choose_alternatives(output.plan, shard, call_rows, shard_results)
            frame = _add_alternatives_columns(calls, call_rows, alternatives_of_calls)
            yield frame.select(output.stage.schema.names())


def _choose_alternatives(
    plan: Plan, shard: str, call_rows: Sequence[Mapping[str, Any]], shard_results: ShardResults
) -> list[Alternatives]:
    """Choose, for each call, results to put in place of its own. They show whether what follows rests on its own.

    They are results of its tool in other conversations. If there are too few, they are its own result with other
    values, or results of other tools. Only then is the conversation of the call read.

    Args:
        plan: The plan with the conversations.
        shard: The name of the shard.
        call_rows: Rows of the shard in the table of recorded calls.
        shard_results: The results to choose from.
    """
    alternatives_of_calls = [shard_results.find_same_tool_alternatives(row) for row in call_rows]

    lacking_indexes = []
    for index, alternatives_of_call in enumerate(alternatives_of_calls):
        if not alternatives_of_call.results:
            lacking_indexes.append(index)

    conversation_numbers = {call_rows[index]["number"] for index in lacking_indexes}
    conversation_by_number = read_conversations_by_number(plan, shard, conversation_numbers)
    for index in lacking_indexes:
        row = call_rows[index]
        messages = conversation_by_number[row["number"]].messages
        alternatives_of_calls[index] = shard_results.find_other_alternatives(row, messages)
    return alternatives_of_calls


def _add_alternatives_columns(
    calls_frame: pl.DataFrame, call_rows: Sequence[Mapping[str, Any]], alternatives_of_calls: Sequence[Alternatives]
) -> pl.DataFrame:
    """Add to a frame of calls three columns about the results that are to stand in place of their own.

    `results` are these results, `means` is how they were got, such as "other_tools", and `key` is a hash of call and
    results, under which measurements are stored.

    Args:
        calls_frame: The calls.
        call_rows: The same calls as mappings, in the same order.
        alternatives_of_calls: For each call the results in place of its own.
    """
    added_rows = []
    for row, alternatives_of_call in zip(call_rows, alternatives_of_calls, strict=True):
        results = alternatives_of_call.results
        key = compute_call_key(row["digest"], row["turn"], row["call"], results)
        added_rows.append({"key": key, "means": alternatives_of_call.means, "results": list(results)})
    return calls_frame.hstack(pl.DataFrame(added_rows, schema=ALTERNATIVE_COLUMNS))


def _collect_donors(output: TableOutput, shard: str) -> Donors:
    """Collect the results of the calls of a shard that other calls may get in place of their own (donors)."""
    donors = Donors()
    for calls in output.plan.lake.get_table(recorded_calls.TABLE_NAME).iter_frames(shard):
        for row in calls.select(CALL_COLUMNS).iter_rows(named=True):
            donors.add_call_result(row["document"], _build_recorded_call(row))
    return donors


def _build_borrowed_circles(output: TableOutput, shard: str) -> dict[str, Circle]:
    """Return a circle of borrowed results for each tool of which a shard has too few results of its own."""
    samples_by_tool = _read_lendable_samples(output, shard).group_by("tool", maintain_order=True)
    return {str(tool): _build_borrowed_circle(tool_samples) for [tool], tool_samples in samples_by_tool}


def _read_lendable_samples(output: TableOutput, shard: str) -> pl.DataFrame:
    """Read the results that other shards lend, only of those tools of which this shard has too few of its own.

    Returns:
        Rows of the table of samples, sorted by tool and hash. An empty frame if no tool lacks results (`lacks`), or if
        there are no other shards.
    """
    samples_table = output.plan.lake.get_table(SAMPLES_TABLE_NAME)
    samples_of_shard = samples_table.read_part(shard)
    lacking_tools = samples_of_shard.filter("lacks")["tool"].unique()
    other_shards = [other_shard for other_shard in output.parts if other_shard != shard]

    if lacking_tools.is_empty() or not other_shards:
        return samples_of_shard.clear()
    return _read_sorted_samples(samples_table.scan_parts(other_shards), lacking_tools)


def _build_borrowed_circle(tool_samples: pl.DataFrame) -> Circle:
    """Return the circle of the first MAX_LENT_RESULTS distinct samples of one tool, which come sorted by hash."""
    donors = []
    for row in _select_first_distinct_samples(tool_samples).iter_rows(named=True):
        donors.append(Donor(hash=row["hash"], result=row["result"], document=row["document"]))
    return Circle.from_sorted_donors(donors)


def _build_recorded_call(call_row: Mapping[str, Any]) -> RecordedCall:
    """Return the call of a row of the table of calls, without its place in the record."""
    return RecordedCall(
        call_row["tool"], json.loads(call_row["arguments"]), result=call_row["result"], failed=call_row["failed"]
    )


DONOR_SAMPLES = Stage(
    name="donor_samples",
    description="Results of a tool of a shard that calls of other shards may be compared with.",
    columns={
        "shard": CALL_POSITION_COLUMNS["shard"],
        "tool": Column(pl.String(), "name of the tool"),
        "hash": Column(pl.String(), "hash of the result: those with the smallest are lent"),
        "document": Column(pl.String(), "what the conversations share in which it was given"),
        "result": Column(pl.String(), "the result, or its beginning"),
        "lacks": Column(pl.Boolean(), "whether the shard has too few results of the tool for its own calls"),
    },
    key_columns=("shard", "tool", "hash"),
    collect_settings=collect_sample_settings,
    reads=(recorded_calls.TABLE_NAME,),
    shards=lambda plan: plan.conversation_shards_by_name,
    shared=True,
    group="traces",
    row_maker=ByShard(make_sample_rows),
)
STAGE = Stage(
    name="exchanged_results",
    description="What a recorded call is compared with: results of other conversations, or its own with other values.",
    columns={
        **CALL_POSITION_COLUMNS,
        "key": Column(pl.String(), "hash of the conversation, the place and the results"),
        "means": Column(
            pl.String(), "what the results are: other_results, exchanged_values, other_tools; null without"
        ),
        "results": Column(pl.List(pl.String()), "results that the call is compared with"),
    },
    key_columns=CALL_KEY_COLUMNS,
    collect_settings=collect_settings,
    reads=(recorded_conversations.TABLE_NAME, recorded_calls.TABLE_NAME),
    inputs=build_inputs_finder,
    inner_stages=(DONOR_SAMPLES,),
    shards=lambda plan: plan.conversation_shards_by_name,
    shared=True,
    group="traces",
    row_maker=ByShard(make_rows),
)
