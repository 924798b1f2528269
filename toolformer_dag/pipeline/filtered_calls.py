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
    SCORED_COLUMNS,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    ByPart,
    ByParts,
    Check,
    Column,
    InputsFinder,
    PartRows,
    Stage,
    StageAsset,
    TableOutput,
    build_versions_finder,
    count_rejected_rows,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import open_memory_database, open_scratch_connection, quote_sql, read_sql_file, run_sql
from toolformer_dag.lake.queries import query_frame as answer
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Table
from toolformer_dag.method.decided_calls import DECIDED_CALLS_SCHEMA, DECIDED_CALLS_TABLE
from toolformer_dag.method.decision_sql import CHANCE_VIEWS_SQL, JUDGED_VIEW_SQL, KEEP_RULE_SQL, SWAPPED_PLACES_SQL
from toolformer_dag.method.record_tables import CHOSEN_THRESHOLD_FIELD, THRESHOLD_FIELD
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.chance import (
    CERTIFIED_VERDICT,
    describe_threshold,
    query_chance_threshold,
    read_chosen_threshold,
)
from toolformer_dag.pipeline.controls import CHANCE_CONTROL
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.settings.tool_settings import ChanceThreshold

FILTER_RULE = "filter_rule"
LAST_TEXT_FIELD = "last_text"
"""The field of the record of filter_rule that holds the last text that stays, in the order of hashes."""
EXAMPLES_FIELD = "examples"
"""The field of the same record that says how many of its texts stay, by shard."""
THRESHOLD_INPUT_FIELDS = ("tau_f", "by_chance", "verdict")
"""Columns of a threshold by chance that stand in the inputs of filtered_calls."""
SCORED_TEXTS_SQL = read_sql_file(__package__, "scored_texts.sql")
FILTER_RULE_SQL = f"CREATE TEMP {KEEP_RULE_SQL}{read_sql_file(__package__, 'filter_rule.sql')}"
SQL = f"CREATE TEMP {KEEP_RULE_SQL}{JUDGED_VIEW_SQL}{read_sql_file(__package__, 'filtered_calls.sql')}"
"""Creates the table `decided`: every scored call, and why it is left out (`why`), null if it is kept."""
KEPT_CALLS_QUERY = "FROM decided WHERE why IS NULL ORDER BY digest, segment, position"
REASONS_QUERY = f"SELECT {', '.join(CALL_KEY)}, why AS reason FROM decided ORDER BY row"


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from the scored calls: the threshold, the limit and the SQL text."""
    return {**collect_rule_settings(plan, lane), "sql": fingerprint(SQL)}


def collect_rule_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Collect the settings that the filter rule of a lane (a tool with its settings) depends on.

    Returns:
        The limit on texts per tool, the threshold tau_f (or the settings by which tau_f is chosen), the score, and
        hashes of the SQL. If one of them changes, the rule is out of date.
    """
    shared_settings = {
        **select_determining_settings(plan.settings.training, "examples_per_tool"),  # name of the setting -> value
        "sql": fingerprint(FILTER_RULE_SQL),
        **scores.collect_score_settings(lane),  # the score that is compared with tau_f
    }

    if isinstance(lane.tau_f, ChanceThreshold):
        # This SQL estimates how many calls pass a threshold by chance.
        chance_sql = JUDGED_VIEW_SQL + SWAPPED_PLACES_SQL + CHANCE_VIEWS_SQL
        return {**shared_settings, "tau_f": select_determining_settings(lane.tau_f), "chance": fingerprint(chance_sql)}

    return {**shared_settings, "tau_f": lane.tau_f}


class CallFiles(NamedTuple):
    """Parquet files of some shards: of scored calls, and of the texts that the calls stand in."""

    call_files: list[str]
    text_files: list[str]


def _list_call_files(output: TableOutput, parts: Sequence[str]) -> CallFiles:
    """List the Parquet files of the scored calls of some shards, and of the texts in which the calls stand.

    Args:
        output: The table that is built from these files.
        parts: The names of the shards. A shard without scored calls adds no files.

    Raises:
        MissingPart: A shard is missing in one of the tables.
        DamagedPart: A shard of one of the tables cannot be read.
    """
    files = CallFiles(call_files=[], text_files=[])
    for part in parts:
        # Looked up even for a shard without scored calls, so that a missing part is always noticed.
        files_of_part = _list_files_of_part(output, part)

        has_scored_calls = any(table.read_pointer(part).row_count for table in output.scored_tables)
        if has_scored_calls:
            files.call_files.extend(files_of_part.call_files)
            files.text_files.extend(files_of_part.text_files)
    return files


def _list_files_of_part(output: TableOutput, part: str) -> CallFiles:
    """Return the files of a shard's scored calls, chains among them, and of its texts."""
    text_files = list(output.get_lane_table("heuristic_subset").list_part_files(part))
    call_files: list[str] = []
    for table in output.scored_tables:
        call_files += table.list_part_files(part)
    return CallFiles(call_files, text_files)


def _group_rows_by_part(parts: Sequence[str], table_rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the rows of each part, which is a shard, in their order. A part without rows has an empty frame."""
    rows_by_shard = table_rows.partition_by("shard", as_dict=True)
    return {part: rows_by_shard.get((part,), table_rows.clear()) for part in parts}


def build_scored_text_rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Build the rows of the table scored_texts: the texts of some shards that have scored calls.

    The delta of a call says how much its result lowers the loss. The column `delta` of a text is the largest delta of
    its calls. It is null if each of the calls has a reason to be dropped, whatever the threshold.

    Args:
        parts: The names of the shards.

    Returns:
        The rows by the name of their shard.
    """
    files = _list_call_files(output, parts)
    if not files.call_files:
        return {part: PartRows(()) for part in parts}

    scored_texts = _query_scored_texts(output, parts, files)
    texts_by_part = _group_rows_by_part(parts, scored_texts)
    return {part: PartRows([texts]) for part, texts in texts_by_part.items()}


def _query_scored_texts(output: TableOutput, parts: Sequence[str], input_files: CallFiles) -> pl.DataFrame:
    """Return the texts of some shards that have scored calls, each with the largest delta of its calls."""
    with open_scratch_connection() as connection:
        # Creates the table `scored`, which the query reads.
        scores.create_scored_calls(connection, output.plan, output.lane, parts, input_files.call_files)
        run_sql(connection, SCORED_TEXTS_SQL, {"texts": input_files.text_files})  # the table `scored_texts`
        return _cast_to_schema(output, answer(connection, "FROM scored_texts"))


def _cast_to_schema(output: TableOutput, rows: pl.DataFrame) -> pl.DataFrame:
    """Return `rows` with only the columns of the output's stage, in their types and order."""
    schema = output.stage.schema
    return rows.select(schema.names()).cast(schema)


def choose_filter_rule(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose the rule by which the calls of a lane (a tool with its settings) are filtered.

    The rule says which threshold applies and which texts stay.

    Returns:
        No rows. The rule is in the `record_fields`, which are stored in the table's record:
        - LAST_TEXT_FIELD: the hash of the last text that stays, in the order of hashes
        - EXAMPLES_FIELD: how many texts of each shard stay
        - CHOSEN_THRESHOLD_FIELD: the chosen threshold, as a row of the table chance_thresholds. It is only there if the
          settings ask for a false discovery rate instead of a threshold.
    """
    lane = output.lane
    if isinstance(lane.tau_f, ChanceThreshold):
        chosen_threshold = _choose_chance_threshold(output.plan, lane, lane.tau_f)
        kept_texts = _choose_kept_texts(output, chosen_threshold["tau_f"])
        rule_fields = {**kept_texts, CHOSEN_THRESHOLD_FIELD: chosen_threshold}
    else:
        rule_fields = _choose_kept_texts(output, lane.tau_f)
    return PartRows((), record_fields=rule_fields)


def _choose_kept_texts(output: TableOutput, tau_f: float | None) -> dict[str, Any]:
    """Choose which texts of a lane (a tool with its settings) stay after filtering.

    Candidates are the texts that have a call with a delta of at least tau_f. In the order of their hashes, the first
    `training.examples_per_tool` of them stay.

    Args:
        tau_f: The smallest delta of a call that stays. With None no call and no text stays.

    Returns:
        - LAST_TEXT_FIELD: the hash of the last text that stays, None if there is none
        - EXAMPLES_FIELD: how many texts of each shard stay, such as {"en_head_0000": 12}
    """
    files = output.get_lane_table("scored_texts").list_all_files()
    if not files:
        return {LAST_TEXT_FIELD: None, EXAMPLES_FIELD: {}}

    max_texts = output.plan.settings.training.examples_per_tool
    parameters = {"files": files, "tau_f": tau_f, "examples": max_texts}
    with _open_sorting_database() as connection:
        # Creates the tables last_text, with a single value, and examples (shard, number of texts).
        run_sql(connection, FILTER_RULE_SQL, parameters)

        last_text = answer(connection, "FROM last_text").item()
        text_counts = dict(answer(connection, "FROM examples ORDER BY shard").iter_rows())
    return {LAST_TEXT_FIELD: last_text, EXAMPLES_FIELD: text_counts}


@contextmanager
def _open_sorting_database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory DuckDB that sorts in a temporary folder, so that memory does not grow with the corpus."""
    with TemporaryDirectory() as spilled, open_memory_database() as connection:
        connection.execute(f"SET temp_directory = {quote_sql(spilled)}")
        yield connection


def _choose_chance_threshold(plan: Plan, lane: Lane, chance_threshold: ChanceThreshold) -> dict[str, Any]:
    """Choose the threshold of a lane (a tool with its settings) by the false discovery rate that the settings ask for.

    Returns:
        The lane's row of the table chance_thresholds. If no threshold has this rate, its `tau_f` is the fallback of the
        settings, which may be None.
    """
    chosen_threshold = query_chance_threshold(plan, lane, chance_threshold.by_chance)
    if chosen_threshold["tau_f"] is None:
        chosen_threshold["tau_f"] = chance_threshold.fallback
    return chosen_threshold


def rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Filter the scored calls of some shards: keep the calls whose delta reaches the threshold tau_f.

    Args:
        parts: The names of the shards.

    Returns:
        The following for each shard, by its name:
        - `frames`: the kept calls, with the threshold in the column `tau_f`
        - `rejection_counts`: the number of dropped calls by reason. The reasons are below_tau_f, not_best_at_position,
          beyond_examples (the limit on texts per tool), no_threshold (no threshold has the wanted false discovery
          rate), and the reasons that calls got when they were scored.
        - `sibling_rows_by_table`: rows for the table decided_calls, which has every scored call with its reason, null
          if it is kept

    Raises:
        MissingPart: A shard is missing in one of the tables that are read.
        DamagedPart: A shard of one of these tables cannot be read.
    """
    files = _list_call_files(output, parts)
    if not files.call_files:
        return {
            part: PartRows((), sibling_rows_by_table={DECIDED_CALLS_TABLE: DECIDED_CALLS_SCHEMA.to_frame()})
            for part in parts
        }

    decided_calls = _decide_calls(output, parts, files)
    return decided_calls.group_by_part(parts)


class _DecidedCalls(NamedTuple):
    """The scored calls of some shards after the filter.

    Attributes:
        kept_calls: The calls that stay, as rows of the table filtered_calls.
        reason_rows: Every scored call, in the columns CALL_KEY and `reason`: why it is dropped, null if it is kept.
    """

    kept_calls: pl.DataFrame
    reason_rows: pl.DataFrame

    def group_by_part(self, parts: Sequence[str]) -> dict[str, PartRows]:
        """Group the calls by the shard that they belong to.

        Returns:
            For each name in `parts`: its kept calls, the number of its dropped calls by reason, and its rows of the
            table decided_calls.
        """
        kept_by_part = _group_rows_by_part(parts, self.kept_calls)
        reasons_by_part = _group_rows_by_part(parts, self.reason_rows)

        rows_by_part = {}
        for part in parts:
            reasons = reasons_by_part[part]
            rows_by_part[part] = PartRows(
                [kept_by_part[part]],
                rejection_counts=count_rejected_rows(reasons),
                sibling_rows_by_table={DECIDED_CALLS_TABLE: reasons},
            )
        return rows_by_part


def _decide_calls(output: TableOutput, parts: Sequence[str], input_files: CallFiles) -> _DecidedCalls:
    """Decide for each scored call of some shards whether it is kept.

    This follows the rule in the table filter_rule, which was chosen over all shards.

    Args:
        parts: The names of the shards.
        input_files: The Parquet files of their calls and texts.
    """
    rule = output.get_lane_table("filter_rule").read_record(WHOLE_TABLE_PART)
    tau_f = _get_applied_threshold(output.lane, rule)
    # Only texts up to the last text, in the order of their hashes, keep calls. It is None if there are none.
    parameters = {"texts": input_files.text_files, "tau_f": tau_f, "last_text": rule[LAST_TEXT_FIELD]}

    with open_scratch_connection() as connection:
        # Creates the table `scored`: the calls with their score. The next statement reads it.
        scores.create_scored_calls(connection, output.plan, output.lane, parts, input_files.call_files)
        # Creates the table `decided`: every scored call and why it is dropped. Both queries read it.
        run_sql(connection, SQL, parameters)

        kept_calls = answer(connection, KEPT_CALLS_QUERY).with_columns(tau_f=pl.lit(tau_f, pl.Float64))
        reasons = answer(connection, REASONS_QUERY).cast(DECIDED_CALLS_SCHEMA)
    return _DecidedCalls(_cast_to_schema(output, kept_calls), reasons)


def _get_applied_threshold(lane: Lane, rule_record: Mapping[str, Any]) -> float | None:
    """Return the threshold that is applied to the calls of a lane (a tool with its settings).

    Args:
        rule_record: The record of the table filter_rule. It holds the chosen threshold if the settings ask for a false
            discovery rate.

    Returns:
        The smallest delta of a call that is kept. None if no threshold has the wanted rate and the settings have no
        fallback. No call is kept then.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        tau_f: float | None = rule_record[CHOSEN_THRESHOLD_FIELD]["tau_f"]
        return tau_f
    return lane.tau_f


def count_calls_below_tau_f(kept_calls: pl.DataFrame, output: TableOutput) -> int:
    """Return how many kept calls gained less than the threshold. It should be 0."""
    return kept_calls.filter(pl.col("delta") < pl.col("tau_f")).height


def describe_chosen_threshold(output: TableOutput) -> list[LogLine]:
    """Describe the threshold that was chosen by its false discovery rate.

    Returns:
        A single line, which is a warning if the threshold is not certified. Empty if no threshold was chosen, for
        example because the settings name one.
    """
    chosen_threshold = read_chosen_threshold(output.plan, output.lane)
    if chosen_threshold is None:
        return []

    is_certified = chosen_threshold["verdict"] == CERTIFIED_VERDICT
    return [LogLine(describe_threshold(chosen_threshold), is_warning=not is_certified)]


def collect_shown_filtering(output: TableOutput) -> Shown:
    """Collect what Dagster's page shows about the filtering of a tool's calls.

    The delta of a call says how much its result lowers the loss. A call is kept if its delta reaches the threshold
    tau_f.

    Returns:
        Values and plots by their label: the number of kept calls, the threshold, and plots of the deltas. Without a
        scored call there are no plots.
    """
    kept_count = sum(pointer.row_count for pointer in output.table.read_pointers_by_part().values())
    shown: dict[str, ShownValue] = {"calls kept": kept_count}

    chosen_threshold = read_chosen_threshold(output.plan, output.lane)  # None if the settings name it
    if chosen_threshold is not None:
        shown["threshold"] = describe_threshold(chosen_threshold)  # a sentence on how tau_f was chosen

    tau_f = _read_last_threshold(output)
    if tau_f is not None:
        shown["tau_f"] = tau_f

    return {**shown, **_build_shown_deltas(output, kept_count, tau_f)}


def _read_last_threshold(output: TableOutput) -> float | None:
    """Return the threshold that the filter last applied. None if there is none, or none was chosen yet."""
    chosen_threshold = read_chosen_threshold(output.plan, output.lane)
    if chosen_threshold is not None:
        tau_f: float | None = chosen_threshold["tau_f"]
        return tau_f

    threshold_of_settings = output.lane.tau_f
    return threshold_of_settings if isinstance(threshold_of_settings, float) else None


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

    frontier = scores.query_cost_frontier(output.plan, output.lane, tau_f)  # a row per threshold: nats gained, and cost
    if frontier is not None:
        shown["nats over cost"] = CostFrontier(frontier)
    return shown


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: scored calls, texts, costs, and the control if it chooses the threshold."""
    control = CHANCE_CONTROL.list_table_names(lane) if isinstance(lane.tau_f, ChanceThreshold) else ()
    return (*lane.scored_table_names, *control, "heuristic_subset", *scores.list_cost_tables(lane))


def inputs(output: TableOutput) -> InputsFinder:
    """Build a function that lists what the kept calls of a shard depend on.

    If one of the values changes, the shard is out of date.

    Returns:
        A function from the name of a shard to:
        - the versions of its scored calls, and a hash of their costs if the score depends on costs
        - EXAMPLES_FIELD: how many texts of the shard stay
        - THRESHOLD_FIELD: the chosen threshold, such as {"tau_f": 0.7, "by_chance": 0.1, "verdict": "certified"}. It is
          only there if the settings ask for a false discovery rate instead of a threshold.
    """
    list_inputs_of_calls = build_scored_text_inputs(output)

    # The rule has no rows: it is stored in the record of its table, which has a single part.
    pointer = output.get_lane_table("filter_rule").find_checked_pointer(WHOLE_TABLE_PART)
    rule: Mapping[str, Any] = pointer.record if pointer else {}
    threshold = _build_threshold_input(output.lane, rule)

    def list_inputs(shard: str) -> Mapping[str, Any]:
        # Only the number of this shard: a rule that changes for other shards does not make this one out of date.
        text_count = rule.get(EXAMPLES_FIELD, {}).get(shard, 0)
        return {**list_inputs_of_calls(shard), EXAMPLES_FIELD: text_count, **threshold}

    return list_inputs


def _build_threshold_input(lane: Lane, rule_record: Mapping[str, Any]) -> dict[str, Any]:
    """Select the values of a chosen threshold on which the kept calls depend.

    Args:
        rule_record: The record of the table filter_rule.

    Returns:
        These values under the key THRESHOLD_FIELD. Empty if no threshold was chosen, for example because the
        settings name one.
    """
    if not isinstance(lane.tau_f, ChanceThreshold) or CHOSEN_THRESHOLD_FIELD not in rule_record:
        return {}
    return {THRESHOLD_FIELD: {name: rule_record[CHOSEN_THRESHOLD_FIELD][name] for name in THRESHOLD_INPUT_FIELDS}}


def list_tables_of_scored_texts(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the names of the tables from which scored_texts is made."""
    return (*lane.scored_table_names, "heuristic_subset", *scores.list_cost_tables(lane))


def build_scored_text_inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the versions of its scored calls, and a hash of what they cost."""
    names_and_tables = zip(output.lane.scored_table_names, output.scored_tables, strict=True)
    find_call_versions = build_versions_finder(dict(names_and_tables))
    find_cost_hash = scores.build_cost_inputs(output.plan, output.lane)
    return lambda shard: {**find_call_versions(shard), **find_cost_hash(shard)}


def list_tables_of_rule(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the names of the tables from which the filter rule is chosen.

    A threshold by chance also reads all scored calls, and the calls with swapped results.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        return (
            SCORED_TEXTS_STAGE.name,
            *lane.scored_table_names,
            *CHANCE_CONTROL.list_table_names(lane),
            *scores.list_cost_tables(lane),
        )
    return (SCORED_TEXTS_STAGE.name,)


def build_rule_inputs(output: TableOutput) -> InputsFinder:
    """Return a function that tells what the filter rule depends on. If that changes, the rule is chosen anew.

    The function ignores the name of the part that it takes, because the rule is chosen over all shards at once.

    Returns:
        A function that returns the versions of shards by table, such as
        {"calculator/scored_texts": {"en_head_0000": "3f.."}}.
    """
    lake = output.plan.lake

    # The tables of tool results are only read for the costs of calls, and their versions do not cover costs. So these
    # tables get no entries of their own, but one entry for all of them: COST_INPUT.
    cost_tables = {f"{output.lane.key}/{name}" for name in scores.list_cost_tables(output.lane)}

    versions_of_tables = {}
    for name in output.depends_on:
        if name not in cost_tables:
            versions_of_tables[name] = _map_part_to_version(lake.get_table(name))
    if cost_tables.intersection(output.depends_on):
        versions_of_tables[scores.COST_INPUT] = _map_shard_to_cost_version(output)

    return lambda part: versions_of_tables


def _map_shard_to_cost_version(output: TableOutput) -> dict[str, Any]:
    """Return for each shard of the plan what changes with the costs of its calls."""
    costs = scores.build_cost_inputs(output.plan, output.lane)
    return {shard: costs(shard) for shard in output.plan.shards_by_name}


def _map_part_to_version(table: Table) -> dict[str, Any]:
    """Return the version of each part of a table."""
    return {part: table.find_part_version(part) for part in table.list_part_names()}


SCORED_TEXTS_STAGE = Stage(
    name="scored_texts",
    description="The texts with scored calls, each with the best delta of its calls.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "text_digest": Column(pl.String(), "hash of the text, in whose order examples are chosen"),
        "delta": Column(SCORED_COLUMNS["delta"].dtype, "largest delta of its calls; null where none may stay"),
    },
    key_columns=TEXT_KEY,
    collect_settings=lambda plan, lane: {"sql": fingerprint(SCORED_TEXTS_SQL), **scores.collect_score_settings(lane)},
    reads=list_tables_of_scored_texts,
    inputs=build_scored_text_inputs,
    row_maker=ByParts(build_scored_text_rows),
)
FILTER_RULE_STAGE = Stage(
    name=FILTER_RULE,
    description="What a shard's filter has to know of the others; no rows, since the record holds it.",
    columns={"shard": SHARD},
    key_columns=("shard",),
    collect_settings=collect_rule_settings,
    reads=list_tables_of_rule,
    inputs=build_rule_inputs,
    is_sharded=False,
    row_maker=ByPart(choose_filter_rule),
)
COPIED_COLUMNS = (
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
        **{name: Column(SCORED_COLUMNS[name].dtype, SCORED_COLUMNS[name].description) for name in COPIED_COLUMNS},
        "tau_f": Column(pl.Float64(), "the threshold that it passed"),
    },
    key_columns=("tool", "digest", "segment", "position"),
    collect_settings=settings,
    reads=reads,
    inputs=inputs,
    inner_stages=(SCORED_TEXTS_STAGE, FILTER_RULE_STAGE),
    kinds=frozenset({"duckdb", "sql"}),
    volatile_columns=("tau_f",),
    checks={"kept_at_tau_f": Check("Every kept call gains at least tau_f.", count_broken_rows=count_calls_below_tau_f)},
    sibling_table_names=(DECIDED_CALLS_TABLE,),
    row_maker=ByParts(rows),
    asset=StageAsset(
        collect_shown_values=collect_shown_filtering,
        list_final_log_lines=describe_chosen_threshold,
        has_kept_calls=True,
    ),
)
