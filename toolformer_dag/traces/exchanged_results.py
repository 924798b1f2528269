"""traces/exchanged_results: the alternatives of each recorded call, other results to put in place of its own.

They are results of the same tool in other conversations, else the call's own result with other values, else results of
other tools: `alternatives.py` says why. They come from the calls of the same shard (a file, or a group of small files),
so that another file changes nothing for them. A shard that has too few results of a tool borrows some: from the samples
of all other shards (traces/donor_samples), the LENT results of the tool with the smallest hashes. A borrowed result
changes only if another shard gets one with a smaller hash.

Memory: up to `other_results.DONORS` results of each tool of a shard, and the borrowed ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import ByShard, Column, InputsOf, PartRows, Stage, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.conversations.messages import RecordedCall, RecordedMessage
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.table import Table
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.traces import alternatives, recorded_calls, recorded_conversations
from toolformer_dag.traces.alternatives import (
    NO_ALTERNATIVES,
    OTHER_RESULTS,
    OTHER_TOOLS,
    READ,
    Alternatives,
    of_exchanged_values,
    of_other_results,
    said_before,
)
from toolformer_dag.traces.exchanged_values import StringPools
from toolformer_dag.traces.other_results import (
    DONORS,
    LONGEST_DONOR,
    METHOD,
    Circle,
    Donor,
    Donors,
    hash_call,
    lacks_donors,
)
from toolformer_dag.traces.recorded_calls import KEY, PLACE
from toolformer_dag.traces.recorded_conversations import read_conversations_by_number
from toolformer_dag.traces.units import compute_call_key

NAME = "traces/exchanged_results"
"""The table of the alternatives of calls."""
SAMPLES = "traces/donor_samples"
"""The table of the results that a shard lends to others, and of how many it lacks."""
LENT = 32
"""The maximum number of results of a tool that a shard lends, and that it borrows."""
BATCH = 10_000
"""The most calls of a frame."""
ALTERNATIVE_COLUMNS = pl.Schema({"key": pl.String(), "means": pl.String(), "results": pl.List(pl.String())})
"""The columns that are added to a call."""
CALL_COLUMNS = ("tool", "document", "arguments", "result", "failed")
"""Columns of the table of recorded calls that are read to choose alternatives."""


def sample_settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the samples, together with the calls: versions and limits."""
    return {"exchange": METHOD, "lent": LENT, **_collect_limits(plan)}


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that determine the alternatives, together with the calls and the borrowed results."""
    return {"exchange": METHOD, "alternatives": alternatives.METHOD, **_collect_limits(plan)}


def _collect_limits(plan: Plan) -> dict[str, Any]:
    """Return how many donors are kept and how long they are, and how many alternatives a call gets."""
    return {"donors": DONORS, "longest_donor": LONGEST_DONOR, **determining(plan.settings.traces, "swaps")}


def sample_rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row per donor, a result that calls of other shards may get in place of their own: up to LENT per tool.

    The column `lacks` is true if the shard has too few donors of the tool for its own calls. It then borrows donors
    from these rows of the other shards.
    """
    results_per_call = output.plan.settings.traces.swaps
    samples: list[dict[str, Any]] = []
    for tool, donors in sorted(_collect_donors(output, shard).of_tools()):  # donors come sorted by hash
        shared_columns = {"shard": shard, "tool": tool, "lacks": lacks_donors(donors, results_per_call)}
        samples += [{**shared_columns, **donor._asdict()} for donor in donors[:LENT]]
    return PartRows([pl.DataFrame(samples, schema=output.stage.schema)])


def inputs(output: TableOutput) -> InputsOf:
    """Return a function that gives, for a shard, the versions of what its rows are made from.

    They are the version of its recorded calls, and a fingerprint of the results that it borrows: a shard with too few
    results of a tool takes some of other shards. The rows of a shard are computed anew when one of the two changes.
    """
    samples = output.plan.lake.table(SAMPLES)
    shards = [shard for shard in output.parts if samples.has(shard)]
    # A mapping from shard to fingerprint, computed once for each version of the table of samples.
    borrowed_fingerprints = samples.remembered(
        f"borrowed by {fingerprint(shards)}", partial(_compute_borrowed_fingerprints, output, shards)
    )
    calls = output.plan.lake.table(recorded_calls.NAME)
    return partial(_collect_shard_inputs, calls, borrowed_fingerprints)


def _collect_shard_inputs(calls: Table, fingerprints: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
    """Return the versions of what a shard's rows are made from.

    calls: the table of recorded calls. fingerprints: of the borrowed results, by shard.
    """
    return {"recorded_calls": calls.part_version(shard), "borrowed": fingerprints.get(shard)}


def _compute_borrowed_fingerprints(output: TableOutput, shards: Sequence[str]) -> dict[str, str]:
    """Return, by shard, a fingerprint of the results that it borrows; shards that borrow nothing are left out.

    shards: the ones whose samples are published.
    """
    if not shards:
        return {}
    borrowed = _group_borrowed_results_by_shard(output.plan.lake.table(SAMPLES).scan(shards))
    return {shard: fingerprint(results_of_tools) for shard, results_of_tools in borrowed.items()}


def _group_borrowed_results_by_shard(samples: pl.LazyFrame) -> dict[str, list[object]]:
    """Return, by shard, what identifies the results that it borrows, an item per tool of which it has too few."""
    borrowers = _list_borrowers(samples)
    samples_of_tool = _group_samples_by_tool(samples, borrowers["tool"])
    borrowed: dict[str, list[object]] = {}
    for shard, tool in borrowers.iter_rows():
        results_of_tool = _identify_borrowed_results(samples_of_tool[(tool,)], shard, tool)
        borrowed.setdefault(shard, []).append(results_of_tool)
    return borrowed


def _list_borrowers(samples: pl.LazyFrame) -> pl.DataFrame:
    """Return the pairs of shard and tool for which the shard borrows results, sorted."""
    return samples.filter("lacks").select("shard", "tool").unique().sort("shard", "tool").collect()


def _identify_borrowed_results(samples: pl.DataFrame, shard: str, tool: str) -> list[Any]:
    """Return what identifies the results of a tool that a shard borrows: the tool, their hashes and their documents.

    samples: all samples of the tool, sorted by hash.
    """
    of_other_shards = samples.filter(pl.col("shard") != shard)
    lent = _select_first_distinct(of_other_shards)
    return [tool, lent["hash"].to_list(), lent["document"].to_list()]


def _group_samples_by_tool(samples: pl.LazyFrame, tools: pl.Series) -> dict[tuple[Any, ...], pl.DataFrame]:
    """Return a frame of samples, without results, for each of the tools, by (tool,), sorted by hash and document."""
    without_results = samples.select("shard", "tool", "hash", "document")
    return _read_sorted_samples(without_results, tools.unique()).partition_by("tool", as_dict=True)


def _read_sorted_samples(samples: pl.LazyFrame, tools: pl.Series) -> pl.DataFrame:
    """Return the samples of these tools, sorted by tool, hash and document."""
    is_needed = pl.col("tool").is_in(tools.implode())
    return samples.filter(is_needed).sort("tool", "hash", "document").collect()


def _select_first_distinct(samples: pl.DataFrame) -> pl.DataFrame:
    """Return the first LENT samples of different hashes; of samples with the same hash only the first is kept."""
    distinct = samples.unique("hash", keep="first", maintain_order=True)
    return distinct.head(LENT)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return a row with the alternatives of each call of a shard, in the order of the calls."""
    return PartRows(_iter_frames(output, shard))


@dataclass(frozen=True)
class OtherToolResults:
    """Results for calls whose tool has too few: the first LENT donors of every tool of a shard.

    A donor is a result that other calls may get in place of their own. Filled by `add`, tool by tool.

    Attributes:
        donors: the donors, by the hash of their result.
        tools: by result, the names of the tools that gave it.
        strings: the strings in the results, to put in place of a string in a call's own result.
    """

    donors: dict[str, Donor] = field(default_factory=dict)
    tools: dict[str, set[str]] = field(default_factory=dict)
    strings: StringPools = field(default_factory=StringPools)

    def add(self, tool: str, donors: Sequence[Donor]) -> None:
        """Add the donors of a tool, and the strings in the first READ characters of each."""
        for donor in donors:
            self.donors.setdefault(donor.hash, donor)
            self.tools.setdefault(donor.result, set()).add(tool)
            self.strings.add(tool, donor.result[:READ])

    @cached_property
    def circle(self) -> Circle:
        """The donors of all tools in the order of their hashes."""
        return Circle.of(sorted(self.donors.values()))

    def of_other_tools(self, document: str, call: RecordedCall) -> Iterator[str]:
        """Yield results that other tools than the call's gave in other conversations; document: the call's own."""
        for result in self.circle.others(document, call):
            if call.tool not in self.tools[result]:
                yield result


@dataclass(frozen=True)
class ShardResults:
    """The results that the calls of a shard may get in place of their own.

    A circle is a list of results, sorted by hash; each call takes some, beginning at the one next to its own hash.

    Attributes:
        circles: by tool, a circle of the shard's own results of the tool, then a circle of borrowed results.
        other_tools: results for calls whose tool has too few.
        swaps: how many results a call gets.
    """

    circles: Mapping[str, Sequence[Circle]]
    other_tools: OtherToolResults
    swaps: int

    def of_same_tool(self, row: Mapping[str, Any]) -> Alternatives:
        """Return results of the call's tool in other conversations, none if too few. row: of the table of calls."""
        call = _parse_call(row)
        circles = self.circles.get(call.tool, [])
        others = chain.from_iterable(circle.others(row["document"], call) for circle in circles)
        return of_other_results(OTHER_RESULTS, call, others, self.swaps)

    def of_other_means(self, row: Mapping[str, Any], messages: Sequence[RecordedMessage]) -> Alternatives:
        """Return results to put in place of a call's own, if its tool gave too few in other conversations.

        They are the call's own result with other values, as {"temp": 31} of {"temp": 18}; or, if no value can be
        replaced, results of other tools. row: of the table of calls. messages: its conversation.
        """
        call = _parse_call(row)
        document = row["document"]  # a hash that conversations about the same question share
        if call.result is None:
            return NO_ALTERNATIVES
        own_with_other_values = of_exchanged_values(
            call,
            identity=hash_call(document, call),
            before=said_before(messages, row["turn"], row["call"]),
            pools=self.other_tools.strings,
            most=self.swaps,
        )
        if own_with_other_values.results:
            return own_with_other_values
        other_results = self.other_tools.of_other_tools(document, call)
        return of_other_results(OTHER_TOOLS, call, other_results, most=self.swaps)


def _collect_shard_results(output: TableOutput, shard: str) -> ShardResults:
    """Return the results that calls of a shard may get in place of their own (donors), in two collections:

    - circles: by tool, the shard's own donors, then those borrowed from other shards if there are too few
    - other_tools: the first LENT donors of every tool, for calls whose tool has too few even then
    """
    donors = _collect_donors(output, shard)
    other_tools = OtherToolResults()
    for tool, donors_of_tool in donors.of_tools():
        other_tools.add(tool, donors_of_tool[:LENT])
    circles = _merge_circles(donors, _build_borrowed_circles(output, shard))
    return ShardResults(circles, other_tools, swaps=output.plan.settings.traces.swaps)


def _merge_circles(donors: Donors, borrowed: Mapping[str, Circle]) -> dict[str, list[Circle]]:
    """Return, by tool, the circle of a shard's own results, then the circle of borrowed ones if there are any."""
    circles = {tool: [circle] for tool, circle in donors.circles().items()}
    for tool, circle in borrowed.items():
        circles.setdefault(tool, []).append(circle)
    return circles


def _iter_frames(output: TableOutput, shard: str) -> Iterator[pl.DataFrame]:
    """Yield the table's rows for a shard, a row per call, in frames of at most BATCH calls."""
    results = _collect_shard_results(output, shard)
    for part_file in output.plan.lake.table(recorded_calls.NAME).batches(shard):
        for calls in part_file.iter_slices(BATCH):
            rows = calls.select("digest", "number", "turn", "call", *CALL_COLUMNS).to_dicts()
            alternatives_of_calls = _choose_alternatives(output.plan, shard, rows, results)
            frame = _with_alternatives(calls, rows, alternatives_of_calls)
            yield frame.select(output.stage.schema.names())


def _choose_alternatives(
    plan: Plan, shard: str, rows: Sequence[Mapping[str, Any]], results: ShardResults
) -> list[Alternatives]:
    """Return, for each call, results to put in place of its own, which show whether what follows rests on it.

    They are results of its tool in other conversations; if there are too few, its own with other values, or results of
    other tools. For these a call's conversation is read. rows: of the table of calls.
    """
    chosen = [results.of_same_tool(row) for row in rows]
    lacking = [index for index, alternatives_of_call in enumerate(chosen) if not alternatives_of_call.results]
    conversations = read_conversations_by_number(plan, shard, {rows[index]["number"] for index in lacking})
    for index in lacking:
        row = rows[index]
        messages = conversations[row["number"]].messages
        chosen[index] = results.of_other_means(row, messages)
    return chosen


def _with_alternatives(
    calls: pl.DataFrame, rows: Sequence[Mapping[str, Any]], alternatives_of_calls: Sequence[Alternatives]
) -> pl.DataFrame:
    """Return the frame of calls with three columns added for the results that are to stand in place of their own.

    `results` are these results, `means` is how they were got, such as "other_tools", and `key` is a hash of call and
    results, under which measurements are stored. rows: the calls as mappings.
    """
    added_rows = []
    for row, alternatives_of_call in zip(rows, alternatives_of_calls, strict=True):
        results = alternatives_of_call.results
        key = compute_call_key(row["digest"], row["turn"], row["call"], results)
        added_rows.append({"key": key, "means": alternatives_of_call.means, "results": list(results)})
    return calls.hstack(pl.DataFrame(added_rows, schema=ALTERNATIVE_COLUMNS))


def _collect_donors(output: TableOutput, shard: str) -> Donors:
    """Return the results of the calls of a shard, by tool, that other calls may get (donors)."""
    donors = Donors()
    for calls in output.plan.lake.table(recorded_calls.NAME).batches(shard):
        for row in calls.select(CALL_COLUMNS).iter_rows(named=True):
            donors.add(row["document"], _parse_call(row))
    return donors


def _build_borrowed_circles(output: TableOutput, shard: str) -> dict[str, Circle]:
    """Return, by tool, a circle of the results that a shard borrows; only for tools of which it has too few results."""
    samples_of_tool = _read_lendable_samples(output, shard).group_by("tool", maintain_order=True)
    return {str(tool): _build_borrowed_circle(samples) for [tool], samples in samples_of_tool}


def _read_lendable_samples(output: TableOutput, shard: str) -> pl.DataFrame:
    """Return the samples of other shards, of tools of which this shard has too few results, sorted by tool and hash."""
    table = output.plan.lake.table(SAMPLES)
    samples_of_shard = table.read(shard)
    lacking_tools = samples_of_shard.filter("lacks")["tool"].unique()
    other_shards = [part for part in output.parts if part != shard]
    if lacking_tools.is_empty() or not other_shards:
        return samples_of_shard.clear()
    return _read_sorted_samples(table.scan(other_shards), lacking_tools)


def _build_borrowed_circle(samples: pl.DataFrame) -> Circle:
    """Return the circle of the first LENT distinct samples. samples: of one tool, sorted by hash."""
    rows = _select_first_distinct(samples).iter_rows(named=True)
    return Circle.of([Donor(hash=row["hash"], result=row["result"], document=row["document"]) for row in rows])


def _parse_call(row: Mapping[str, Any]) -> RecordedCall:
    """Return the call of a row of the table of calls, without its place in the record."""
    return RecordedCall(row["tool"], json.loads(row["arguments"]), result=row["result"], failed=row["failed"])


DONOR_SAMPLES = Stage(
    name="donor_samples",
    description="Results of a tool of a shard that calls of other shards may be compared with.",
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
    description="What a recorded call is compared with: results of other conversations, or its own with other values.",
    columns={
        **PLACE,
        "key": Column(pl.String(), "hash of the conversation, the place and the results"),
        "means": Column(
            pl.String(), "what the results are: other_results, exchanged_values, other_tools; null without"
        ),
        "results": Column(pl.List(pl.String()), "results that the call is compared with"),
    },
    key=KEY,
    settings=settings,
    reads=(recorded_conversations.NAME, recorded_calls.NAME),
    inputs=inputs,
    inner=(DONOR_SAMPLES,),
    shards=lambda plan: plan.conversations,
    shared=True,
    group="traces",
    make=ByShard(rows),
)
