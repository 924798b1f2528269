"""filtered_calls: keep the calls that reach tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL.

Each shard is filtered on its own; several small shards share a query. The table filter_rule holds what a shard needs of
the others: a threshold that limits how many calls are kept by chance, and how many texts of each shard may stay. Texts
are chosen over scored_texts, a row per text with scored calls. Whether a call stays is decided by rule.sql of `method`,
here and for the warehouse. The reason of each scored call is published with the kept calls, as table decided_calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import duckdb
import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import CostFrontier, DeltaHistogram, LogLine, Shown, ShownValue
from toolformer_dag.computing.stage import (
    CALL_KEY,
    DIGEST,
    SCORED,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    ByPart,
    ByParts,
    Check,
    Column,
    InputsOf,
    PartRows,
    Stage,
    StageAsset,
    TableOutput,
    count_by_reason,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import open_in_memory, open_scratch, quote_sql, read_sql_file, run_sql
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.method.decided_calls import DECIDED, DECIDED_SCHEMA
from toolformer_dag.method.decision_sql import CHANCE, JUDGED, RULE, SWAPPED_PLACES
from toolformer_dag.method.record_tables import CHOSEN, THRESHOLD
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.chance import CERTIFIED, describe_threshold, query_chance_threshold, read_chosen_threshold
from toolformer_dag.pipeline.controls import ESTIMATING
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import ChanceThreshold

FILTER_RULE = "filter_rule"
LAST_TEXT = "last_text"
"""The field of the record of filter_rule that holds the last text that stays, in the order of hashes."""
EXAMPLES = "examples"
"""The field of the same record that says how many of its texts stay, by shard."""
SHOWN_OF_CHOSEN = ("tau_f", "by_chance", "verdict")
"""Columns of a threshold by chance that stand in the inputs of filtered_calls."""
TEXTS_SQL = read_sql_file(__package__, "scored_texts.sql")
RULE_SQL = f"CREATE TEMP {RULE}{read_sql_file(__package__, 'filter_rule.sql')}"
SQL = f"CREATE TEMP {RULE}{JUDGED}{read_sql_file(__package__, 'filtered_calls.sql')}"
"""Creates the table `decided`: every scored call, and why it is left out (`why`), null where it is kept."""
KEPT_QUERY = "FROM decided WHERE why IS NULL ORDER BY digest, segment, position"
REASONS_QUERY = f"SELECT {', '.join(CALL_KEY)}, why AS reason FROM decided ORDER BY row"


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from the scored calls: the threshold, the limit and the SQL text."""
    return {**rule_settings(plan, lane), "sql": fingerprint(SQL)}


def rule_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Collect the settings that the filter rule of a lane (a tool with its settings) depends on.

    Returns:
        The limit on texts per tool, the threshold tau_f (or the settings by which tau_f is chosen), the score, and
        hashes of the SQL. If one of them changes, the rule is out of date.
    """
    shared_settings = {
        **determining(plan.settings.training, "examples_per_tool"),  # name of the setting -> value
        "sql": fingerprint(RULE_SQL),
        **scores.settings(lane),  # the score that is compared with tau_f
    }

    if isinstance(lane.tau_f, ChanceThreshold):
        chance_sql = JUDGED + SWAPPED_PLACES + CHANCE  # estimates how many calls pass a threshold by chance
        return {**shared_settings, "tau_f": determining(lane.tau_f), "chance": fingerprint(chance_sql)}

    return {**shared_settings, "tau_f": lane.tau_f}


class CallFiles(NamedTuple):
    """Parquet files of some shards: of scored calls, and of the texts that the calls stand in."""

    calls: list[str]
    texts: list[str]


def _list_call_files(output: TableOutput, parts: Sequence[str]) -> CallFiles:
    """List the Parquet files of the scored calls of some shards, and of the texts in which the calls stand.

    Args:
        output: The table that is built from these files.
        parts: The names of the shards. A shard without scored calls adds no files.

    Raises:
        MissingPart: A shard is missing in one of the tables.
        DamagedPart: A shard of one of the tables cannot be read.
    """
    files = CallFiles(calls=[], texts=[])
    for part in parts:
        # Looked up even for a shard without scored calls, so that a missing part is always noticed.
        files_of_part = _list_files_of_part(output, part)

        has_scored_calls = any(table.pointer(part).rows for table in output.scored)
        if has_scored_calls:
            files.calls.extend(files_of_part.calls)
            files.texts.extend(files_of_part.texts)
    return files


def _list_files_of_part(output: TableOutput, part: str) -> CallFiles:
    """Return the files of a shard's scored calls, chains among them, and of its texts."""
    texts = list(output.lane_table("heuristic_subset").files(part))
    calls: list[str] = []
    for table in output.scored:
        calls += table.files(part)
    return CallFiles(calls, texts)


def _group_rows_by_part(parts: Sequence[str], rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Group rows by their column `shard`: part (the name of a shard) -> its rows, in their order; maybe none."""
    rows_of = rows.partition_by("shard", as_dict=True)
    return {part: rows_of.get((part,), rows.clear()) for part in parts}


def text_rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Build the rows of the table scored_texts: the texts of some shards that have scored calls.

    The delta of a call says how much its result lowers the loss. The column `delta` of a text is the largest delta of
    its calls. It is null if each of the calls has a reason to be dropped, whatever the threshold.

    Args:
        parts: The names of the shards.

    Returns:
        The rows by the name of their shard.
    """
    files = _list_call_files(output, parts)
    if not files.calls:
        return {part: PartRows(()) for part in parts}

    scored_texts = _query_scored_texts(output, parts, files)
    texts_by_part = _group_rows_by_part(parts, scored_texts)
    return {part: PartRows([texts]) for part, texts in texts_by_part.items()}


def _query_scored_texts(output: TableOutput, parts: Sequence[str], files: CallFiles) -> pl.DataFrame:
    """Return the texts of some shards that have scored calls, each with the largest delta of its calls."""
    with open_scratch() as connection:
        scores.create_scored(connection, output.plan, output.lane, parts, files.calls)  # the table `scored`
        run_sql(connection, TEXTS_SQL, {"texts": files.texts})  # the table `scored_texts`
        return _cast_to_schema(output, answer(connection, "FROM scored_texts"))


def _cast_to_schema(output: TableOutput, rows: pl.DataFrame) -> pl.DataFrame:
    """Return `rows` with only the columns of the output's stage, in their types and order."""
    schema = output.stage.schema
    return rows.select(schema.names()).cast(schema)


def rule_rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose the rule by which the calls of a lane (a tool with its settings) are filtered.

    The rule says which threshold applies and which texts stay.

    Returns:
        No rows. The rule is in the `facts`, which are stored in the table's record:
        - LAST_TEXT: the hash of the last text that stays, in the order of hashes
        - EXAMPLES: how many texts of each shard stay
        - CHOSEN: the chosen threshold, as a row of the table chance_thresholds. It is only there if the settings ask
          for a false discovery rate instead of a threshold.
    """
    lane = output.lane
    if isinstance(lane.tau_f, ChanceThreshold):
        chosen = _choose_threshold(output.plan, lane, lane.tau_f)
        facts = {**_choose_kept_texts(output, chosen["tau_f"]), CHOSEN: chosen}
    else:
        facts = _choose_kept_texts(output, lane.tau_f)
    return PartRows((), facts=facts)


def _choose_kept_texts(output: TableOutput, tau_f: float | None) -> dict[str, Any]:
    """Choose which texts of a lane (a tool with its settings) stay after filtering.

    Candidates are the texts that have a call with a delta of at least tau_f. In the order of their hashes, the first
    `training.examples_per_tool` of them stay.

    Args:
        tau_f: The smallest delta of a call that stays. With None no call and no text stays.

    Returns:
        - LAST_TEXT: the hash of the last text that stays, None if there is none
        - EXAMPLES: how many texts of each shard stay, such as {"en_head_0000": 12}
    """
    files = output.lane_table("scored_texts").list_all_files()
    if not files:
        return {LAST_TEXT: None, EXAMPLES: {}}

    max_texts = output.plan.settings.training.examples_per_tool
    parameters = {"files": files, "tau_f": tau_f, "examples": max_texts}
    with _open_sorting_database() as connection:
        # Creates the tables last_text, with a single value, and examples (shard, number of texts).
        run_sql(connection, RULE_SQL, parameters)

        last_text = answer(connection, "FROM last_text").item()
        text_counts = dict(answer(connection, "FROM examples ORDER BY shard").iter_rows())
    return {LAST_TEXT: last_text, EXAMPLES: text_counts}


@contextmanager
def _open_sorting_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory DuckDB that sorts in a temporary folder, so that memory does not grow with the corpus."""
    with TemporaryDirectory() as spilled, open_in_memory() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")
        yield connection


def _choose_threshold(plan: Plan, lane: Lane, rule: ChanceThreshold) -> dict[str, Any]:
    """Choose the threshold of a lane (a tool with its settings) by the false discovery rate that the settings ask for.

    Returns:
        The lane's row of the table chance_thresholds. If no threshold has this rate, its `tau_f` is the fallback of the
        settings, which may be None.
    """
    chosen = query_chance_threshold(plan, lane, rule.by_chance)
    if chosen["tau_f"] is None:
        chosen["tau_f"] = rule.fallback
    return chosen


def rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Filter the scored calls of some shards: keep the calls whose delta reaches the threshold tau_f.

    Args:
        parts: The names of the shards.

    Returns:
        The following for each shard, by its name:
        - `frames`: the kept calls, with the threshold in the column `tau_f`
        - `rejected`: the number of dropped calls by reason. The reasons are below_tau_f, not_best_at_position,
          beyond_examples (the limit on texts per tool), no_threshold (no threshold has the wanted false discovery
          rate), and the reasons that calls got when they were scored.
        - `beside`: rows for the table decided_calls, which has every scored call with its reason, null if it is kept

    Raises:
        MissingPart: A shard is missing in one of the tables that are read.
        DamagedPart: A shard of one of these tables cannot be read.
    """
    files = _list_call_files(output, parts)
    if not files.calls:
        return {part: PartRows((), beside={DECIDED: DECIDED_SCHEMA.to_frame()}) for part in parts}

    decided_calls = _decide_calls(output, parts, files)
    return decided_calls.group_by_part(parts)


class _DecidedCalls(NamedTuple):
    """The scored calls of some shards after the filter."""

    kept: pl.DataFrame  # the rows of the table
    reasons: pl.DataFrame  # (CALL_KEY, reason) of every scored call; null where it is kept

    def group_by_part(self, parts: Sequence[str]) -> dict[str, PartRows]:
        """Group the calls by the shard that they belong to.

        Returns:
            For each name in `parts`: its kept calls, the number of its dropped calls by reason, and its rows of the
            table decided_calls.
        """
        kept_by_part = _group_rows_by_part(parts, self.kept)
        reasons_by_part = _group_rows_by_part(parts, self.reasons)

        rows_by_part = {}
        for part in parts:
            reasons = reasons_by_part[part]
            rows_by_part[part] = PartRows(
                [kept_by_part[part]], rejected=count_by_reason(reasons), beside={DECIDED: reasons}
            )
        return rows_by_part


def _decide_calls(output: TableOutput, parts: Sequence[str], files: CallFiles) -> _DecidedCalls:
    """Decide for each scored call of some shards whether it is kept.

    This follows the rule in the table filter_rule, which was chosen over all shards.

    Args:
        parts: The names of the shards.
        files: The Parquet files of their calls and texts.
    """
    rule = output.lane_table("filter_rule").record(WHOLE)
    tau_f = _get_applied_threshold(output.lane, rule)
    parameters = {"texts": files.texts, "tau_f": tau_f, "last_text": rule[LAST_TEXT]}

    with open_scratch() as connection:
        # Creates the table `scored`: the calls with their score. The next statement reads it.
        scores.create_scored(connection, output.plan, output.lane, parts, files.calls)
        # Creates the table `decided`: every scored call and why it is dropped. Both queries read it.
        run_sql(connection, SQL, parameters)

        kept_calls = answer(connection, KEPT_QUERY).with_columns(tau_f=pl.lit(tau_f, pl.Float64))
        reasons = answer(connection, REASONS_QUERY).cast(DECIDED_SCHEMA)
    return _DecidedCalls(_cast_to_schema(output, kept_calls), reasons)


def _get_applied_threshold(lane: Lane, rule: Mapping[str, Any]) -> float | None:
    """Return the threshold that is applied to the calls of a lane (a tool with its settings).

    Args:
        rule: The record of the table filter_rule. It holds the chosen threshold if the settings ask for a false
            discovery rate.

    Returns:
        The smallest delta of a call that is kept. None if no threshold has the wanted rate and the
        settings have no fallback. No call is kept then.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        chosen: float | None = rule[CHOSEN]["tau_f"]
        return chosen
    return lane.tau_f


def below_tau_f(kept: pl.DataFrame, output: TableOutput) -> int:
    """Count kept calls that gained less than the threshold."""
    return kept.filter(pl.col("delta") < pl.col("tau_f")).height


def describe_chosen_threshold(output: TableOutput) -> list[LogLine]:
    """Describe the threshold that was chosen by its false discovery rate.

    Returns:
        A single line, which is a warning if the threshold is not certified. Empty if no threshold was chosen, for
        example because the settings name one.
    """
    chosen = read_chosen_threshold(output.plan, output.lane)
    if chosen is None:
        return []
    return [LogLine(describe_threshold(chosen), is_warning=chosen["verdict"] != CERTIFIED)]


def threshold_in_deltas(output: TableOutput) -> Shown:
    """Collect what Dagster's page shows about the filtering of a tool's calls.

    The delta of a call says how much its result lowers the loss. A call is kept if its delta reaches the threshold
    tau_f.

    Returns:
        Values and plots by their label: the number of kept calls, the threshold, and plots of the deltas. Without a
        scored call there are no plots.
    """
    kept_count = sum(pointer.rows for pointer in output.table.pointers().values())
    shown: dict[str, ShownValue] = {"calls kept": kept_count}

    chosen_threshold = read_chosen_threshold(output.plan, output.lane)  # None if the settings name it
    if chosen_threshold is not None:
        shown["threshold"] = describe_threshold(chosen_threshold)  # a sentence on how tau_f was chosen

    tau_f = _read_last_threshold(output)
    if tau_f is not None:
        shown["tau_f"] = tau_f

    return {**shown, **_build_shown_deltas(output, kept_count, tau_f)}


def _read_last_threshold(output: TableOutput) -> float | None:
    """Return the threshold that the filter last applied; None if there is none, or none was chosen yet."""
    chosen = read_chosen_threshold(output.plan, output.lane)
    if chosen is not None:
        tau_f: float | None = chosen["tau_f"]
        return tau_f
    return output.lane.tau_f if isinstance(output.lane.tau_f, float) else None


def _build_shown_deltas(output: TableOutput, kept_count: int, tau_f: float | None) -> dict[str, ShownValue]:
    """Collect what Dagster's page shows about the deltas of a tool's calls.

    The delta of a call says how much its result lowers the loss, in nats.

    Args:
        kept_count: The number of calls that were kept.
        tau_f: The threshold, which the plots mark.

    Returns:
        Values by their label: the share of kept calls, a histogram of all deltas, and a plot of costs if any call has
        a cost. Empty if there are no scored calls.
    """
    deltas = scores.query_deltas(output.plan, output.lane)
    if deltas.is_empty():
        return {}

    shown: dict[str, ShownValue] = {
        "share of the scored calls kept": kept_count / deltas.height,
        "deltas": DeltaHistogram(deltas, tau_f),
    }

    frontier = scores.cost_frontier(output.plan, output.lane, tau_f)  # a row per threshold: nats gained, and cost
    if frontier is not None:
        shown["nats over cost"] = CostFrontier(frontier)
    return shown


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: scored calls, texts, costs, and the control if it chooses the threshold."""
    control = ESTIMATING.table_names(lane) if isinstance(lane.tau_f, ChanceThreshold) else ()
    return (*lane.scored, *control, "heuristic_subset", *scores.reads(lane))


def inputs(output: TableOutput) -> InputsOf:
    """Build a function that lists what the kept calls of a shard depend on.

    If one of the values changes, the shard is out of date.

    Returns:
        A function from the name of a shard to:
        - the versions of its scored calls, and a hash of their costs if the score depends on costs
        - EXAMPLES: how many texts of the shard stay
        - THRESHOLD: the chosen threshold, such as {"tau_f": 0.7, "by_chance": 0.1, "verdict": "certified"}. It is only
          there if the settings ask for a false discovery rate instead of a threshold.
    """
    list_inputs_of_calls = inputs_of_texts(output)

    # The rule has no rows: it is stored in the record of its table, which has a single part.
    pointer = output.lane_table("filter_rule").find_whole_pointer(WHOLE)
    rule: Mapping[str, Any] = pointer.record if pointer else {}
    threshold = _build_threshold_input(output.lane, rule)

    def list_inputs(shard: str) -> Mapping[str, Any]:
        # Only the number of this shard: a rule that changes for other shards does not make this one out of date.
        text_count = rule.get(EXAMPLES, {}).get(shard, 0)
        return {**list_inputs_of_calls(shard), EXAMPLES: text_count, **threshold}

    return list_inputs


def _build_threshold_input(lane: Lane, rule: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values of a chosen threshold on which the kept calls depend.

    Args:
        rule: The record of the table filter_rule.

    Returns:
        These values under the key THRESHOLD. Empty if no threshold was chosen, for example because the
        settings name one.
    """
    if not isinstance(lane.tau_f, ChanceThreshold) or CHOSEN not in rule:
        return {}
    return {THRESHOLD: {name: rule[CHOSEN][name] for name in SHOWN_OF_CHOSEN}}


def reads_of_texts(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the names of the tables that scored_texts is made from."""
    return (*lane.scored, "heuristic_subset", *scores.reads(lane))


def inputs_of_texts(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its scored calls, and a hash of what they cost."""
    calls = versions(dict(zip(output.lane.scored, output.scored, strict=True)))
    costs = scores.inputs(output.plan, output.lane)
    return lambda shard: {**calls(shard), **costs(shard)}


def rule_reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that the rule is chosen from; a threshold by chance also reads all scored and swapped calls."""
    if isinstance(lane.tau_f, ChanceThreshold):
        return (TEXTS.name, *lane.scored, *ESTIMATING.table_names(lane), *scores.reads(lane))
    return (TEXTS.name,)


def rule_inputs(output: TableOutput) -> InputsOf:
    """Build a function that lists what the filter rule depends on: the versions of all tables that it is chosen from.

    Returns:
        A function that takes the name of a part, which it ignores, because the rule is chosen over all shards at once.
        It returns the versions of shards by table, such as {"calculator/scored_texts": {"en_head_0000": "3f.."}}.
    """
    lake = output.plan.lake

    # The tables of tool results are only read for the costs of calls, and their versions do not cover costs. So these
    # tables get no entries of their own, but one entry for all of them: COST_VERSION.
    cost_tables = {f"{output.lane.key}/{name}" for name in scores.reads(output.lane)}

    versions_of_tables = {}
    for name in output.depends_on:
        if name not in cost_tables:
            versions_of_tables[name] = _collect_part_versions(lake.table(name))
    if cost_tables.intersection(output.depends_on):
        versions_of_tables[scores.COST_VERSION] = _collect_cost_versions(output)

    return lambda part: versions_of_tables


def _collect_cost_versions(output: TableOutput) -> dict[str, Any]:
    """Return for each shard of the plan what changes with the costs of its calls."""
    costs = scores.inputs(output.plan, output.lane)
    return {shard: costs(shard) for shard in output.plan.shards}


def _collect_part_versions(table: Table) -> dict[str, Any]:
    """Return the version of each part of a table."""
    return {part: table.part_version(part) for part in table.parts()}


TEXTS = Stage(
    name="scored_texts",
    description="The texts with scored calls, each with the best delta of its calls.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "text_digest": Column(pl.String(), "hash of the text, in whose order examples are chosen"),
        "delta": Column(SCORED["delta"].dtype, "largest delta of its calls; null where none may stay"),
    },
    key=TEXT_KEY,
    settings=lambda plan, lane: {"sql": fingerprint(TEXTS_SQL), **scores.settings(lane)},
    reads=reads_of_texts,
    inputs=inputs_of_texts,
    make=ByParts(text_rows),
)
RULES = Stage(
    name=FILTER_RULE,
    description="What a shard's filter has to know of the others; no rows, since the record holds it.",
    columns={"shard": SHARD},
    key=("shard",),
    settings=rule_settings,
    reads=rule_reads,
    inputs=rule_inputs,
    sharded=False,
    make=ByPart(rule_rows),
)
COPIED = (
    *CALL_KEY,
    "source",
    "char_offset",
    "input",
    "result",
    "p_api",
    "loss_minus",
    "loss_plus",
    "delta",
    "chain",
)
"""Columns of a scored call that a kept one has too."""
STAGE = Stage(
    name="filtered_calls",
    description="The calls that stay: L- - L+ >= tau_f, the best one per position (paper, section 2).",
    columns={
        **{name: Column(SCORED[name].dtype, SCORED[name].description) for name in COPIED},
        "tau_f": Column(pl.Float64(), "the threshold that it passed"),
    },
    key=("tool", "digest", "segment", "position"),
    settings=settings,
    reads=reads,
    inputs=inputs,
    inner=(TEXTS, RULES),
    kinds=frozenset({"duckdb", "sql"}),
    volatile=("tau_f",),
    checks={"kept_at_tau_f": Check("Every kept call gains at least tau_f.", broken=below_tau_f)},
    beside=(DECIDED,),
    make=ByParts(rows),
    asset=StageAsset(shows=threshold_in_deltas, concludes=describe_chosen_threshold, keeps_calls=True),
)
