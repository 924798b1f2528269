"""Estimate how many kept calls of a tool are kept by chance, and choose the threshold by it.

A call is kept where it lowers the loss by at least tau_f nats (its delta). A control (controls.py) scores calls again
with results that cannot help: a swapped call that reaches tau_f would be kept by chance. The false discovery rate of a
threshold is the share of kept places that chance explains; a place is a position of a text.

All of it is SQL over the files of one lane (a tool with its settings): judged.sql and kept_by_chance.sql of `method`,
which the warehouse uses too.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import duckdb
import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import REJECTIONS_FIELD
from toolformer_dag.lake.queries import open_memory_database, query_frame, run_sql
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Table
from toolformer_dag.method.decision_sql import (
    CHANCE_VIEWS_SQL,
    ESTIMATING_CONTROL,
    JUDGED_VIEW_SQL,
    SCORED_CALLS_TABLE,
    SWAPPED_PLACES_SQL,
)
from toolformer_dag.method.record_tables import CHOSEN_THRESHOLD_FIELD
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.controls import CHANCE_CONTROL, Control
from toolformer_dag.settings.tool_settings import MODEL_SOURCE, ChanceThreshold

OTHER_TOOL_REASON = "other_tool"
"""The reason of a sample that names another tool."""
CERTIFIED_VERDICT = "certified"
"""The verdict of chance_thresholds where a threshold has the rate."""
NOT_MEASURED_VERDICT = "not measured"
"""The verdict where no call of the control has another document's result."""
CALL_COLUMN_TYPES = {
    "tool": "VARCHAR",
    "shard": "VARCHAR",
    "digest": "VARCHAR",
    "segment": "INTEGER",
    "position": "INTEGER",
    "sample": "INTEGER",
    "delta": "DOUBLE",
    "delta_is_bound": "BOOLEAN",
    "reason": "VARCHAR",
}
"""Columns of a scored call that judged.sql and kept_by_chance.sql read."""
SWAP_COLUMN_TYPES = {**CALL_COLUMN_TYPES, "swap": "INTEGER"}
"""Columns of a call with a swapped result that they read."""
NO_KEPT_CALL_REMEDY = (
    'Lower tau_f (`toolformer-dag sql "from kept_at(0.2)"` counts), annotate more text, or change prompt or model'
)


def query_chance_threshold(plan: Plan, lane: Lane, false_discovery_rate: float) -> dict[str, Any]:
    """Find the smallest threshold tau_f of a tool that has the given false discovery rate.

    Args:
        plan: Gives access to the tables.
        lane: The tool with its settings.
        false_discovery_rate: The false discovery rate, such as 0.05.

    Returns:
        The tool's row of the view chance_thresholds, by column. It also says why there is no such threshold.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    with _open_chance_database(plan, lane, false_discovery_rate) as connection:
        query = f"FROM chance_thresholds WHERE by_chance = {false_discovery_rate!r}::DOUBLE"
        return query_frame(connection, query).row(0, named=True)


class ChanceTables(NamedTuple):
    """A lane's rows of two views, in the order of the threshold tau_f.

    - statistics: swapped_statistics, for a few thresholds how many calls and swaps reach them
    - rates: chance_rates, the false discovery rate as a curve
    """

    statistics: pl.DataFrame
    rates: pl.DataFrame


def query_chance_tables(plan: Plan, lane: Lane, control: Control = CHANCE_CONTROL) -> ChanceTables:
    """Estimate how many calls of a tool are kept by chance, at a few thresholds and as a curve over many.

    For that, a control scores calls with results that cannot help.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    with _open_chance_database(plan, lane, control=control) as connection:
        return ChanceTables(
            statistics=query_frame(connection, "FROM swapped_statistics ORDER BY tau_f"),
            rates=query_frame(connection, "FROM chance_rates ORDER BY tau_f"),
        )


def describe_threshold(chosen_threshold: Mapping[str, Any]) -> str:
    """Describe in one line which threshold tau_f was chosen, or why none was and what would help.

    Args:
        chosen_threshold: A row of the view chance_thresholds. `verdict` is CERTIFIED_VERDICT if a threshold has the
            wanted false discovery rate, else the reason why there is none, such as NOT_MEASURED_VERDICT. `swaps_needed`
            is how many swapped places would be enough, or None.
    """
    if chosen_threshold["verdict"] != CERTIFIED_VERDICT:
        return _explain_uncertified_threshold(chosen_threshold)
    kept_count = chosen_threshold["kept"]
    place_count = chosen_threshold["places"]
    return (
        f"tau_f = {chosen_threshold['tau_f']:.3f} keeps {kept_count} of {place_count} places, a share of "
        f"{chosen_threshold['fdr']:.3f} by chance, at most {chosen_threshold['fdr_high']:.3f} with 95 % confidence"
    )


def _explain_uncertified_threshold(chosen_threshold: Mapping[str, Any]) -> str:
    """Explain why no threshold has the wanted false discovery rate, what would help, and what is kept."""
    reason = f"{chosen_threshold['verdict']}{_describe_swaps_remedy(chosen_threshold)}"
    if chosen_threshold["tau_f"] is None:
        outcome = "nothing is kept"
    else:
        outcome = f"the fallback {chosen_threshold['tau_f']:.3g} is taken"
    return f"no tau_f is certified at {chosen_threshold['by_chance']:.3g} ({reason}); {outcome}"


def _describe_swaps_remedy(chosen_threshold: Mapping[str, Any]) -> str:
    """Describe what more swapped calls would change. The text is appended to a verdict and may be empty.

    Args:
        chosen_threshold: A row of the view chance_thresholds. `swaps_needed` is how many swapped places would be enough
            to certify a threshold, None if no number would.
    """
    more_swaps = "raise evaluation.swapped_texts, or annotate more text"
    if chosen_threshold["verdict"] == NOT_MEASURED_VERDICT:
        return f": no call was told another document's result; {more_swaps}"

    needed_count = chosen_threshold["swaps_needed"]
    swapped_count = chosen_threshold["swapped"]
    if needed_count is None:
        return ""
    return f": about {needed_count} swapped places would do, there are {swapped_count}; {more_swaps}"


def read_chosen_threshold(plan: Plan, lane: Lane) -> Mapping[str, Any] | None:
    """Read which threshold the filter of a tool last used.

    Returns:
        The row of the view chance_thresholds. None if the settings name a threshold, or the filter has not run.
    """
    pointer = plan.get_lane_table(lane, "filter_rule").find_checked_pointer(WHOLE_TABLE_PART)
    return pointer.record.get(CHOSEN_THRESHOLD_FIELD) if pointer else None


def describe_thresholds_of_lanes(plan: Plan) -> list[str]:
    """Describe which threshold was chosen for each tool by its false discovery rate, or why none was.

    Returns:
        One line per tool. Tools whose settings name a threshold, or whose filter has not run, are left out.
    """
    lines = []
    for lane in plan.lanes:
        chosen_threshold = read_chosen_threshold(plan, lane)
        if chosen_threshold:
            lines.append(f"{lane.key}: {describe_threshold(chosen_threshold)}")
    return lines


def explain_lanes_without_calls(plan: Plan) -> list[str]:
    """Explain for each tool without a kept call how near its calls came to the threshold, and what to do.

    Returns:
        One line per tool without a kept call. Tools whose filter has not run are left out. If no tool keeps a
        call, a last line says that there is nothing to finetune on.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    lanes_without_calls = [lane for lane in plan.lanes if _has_kept_no_calls(plan, lane)]

    lines = []
    for lane in lanes_without_calls:
        lines.append(f"{lane.key}: {_explain_no_kept_call(plan, lane)}")

    if lanes_without_calls and len(lanes_without_calls) == len(plan.lanes):
        lines.append(f"No call of any lane is kept: there is nothing to finetune on. {NO_KEPT_CALL_REMEDY}.")
    return lines


def _has_kept_no_calls(plan: Plan, lane: Lane) -> bool:
    """Return whether the filter of a lane has run and kept no call."""
    pointer_by_part = plan.get_lane_table(lane, "filtered_calls").read_pointers_by_part()
    has_run = bool(pointer_by_part)
    has_kept_call = any(pointer.row_count for pointer in pointer_by_part.values())
    return has_run and not has_kept_call


def _explain_no_kept_call(plan: Plan, lane: Lane) -> str:
    """Explain why no call of a tool was kept.

    Usually the explanation gives the best delta, and how many calls other thresholds would keep. If there is no
    place at all (a position of a text with a scored call that may stay), it says at which stage texts or calls
    ended.

    Example:
        "no call is kept at tau_f = 1. Of 30 places the best gains 0.412; kept are ..."
    """
    with _open_chance_database(plan, lane) as connection:
        summary_frame = query_frame(connection, "SELECT count(*) AS places, max(delta) AS delta FROM places")
        # One row per threshold: how many calls reach it, with their own results and by chance.
        statistics = query_frame(connection, "FROM swapped_statistics ORDER BY tau_f").rows(named=True)

    place_summary = summary_frame.row(0, named=True)  # how many places there are, and the best delta
    if place_summary["places"] == 0:
        hint = '`toolformer-dag sql "from funnel"` counts what each stage left'
        return f"no call is kept, for {_explain_first_empty_stage(plan, lane)}; {hint}"

    counts = ", ".join(_describe_counts_at_threshold(threshold_counts) for threshold_counts in statistics)
    return (
        f"no call is kept{_format_threshold_phrase(lane)}. Of {place_summary['places']} places the best gains "
        f"{place_summary['delta']:.3f}; kept are {counts}. {NO_KEPT_CALL_REMEDY}"
    )


def _format_threshold_phrase(lane: Lane) -> str:
    """Return a phrase such as " at tau_f = 0.5", or "" if the settings name no threshold."""
    if isinstance(lane.tau_f, float):
        return f" at tau_f = {lane.tau_f:.3g}"
    return ""


def _describe_counts_at_threshold(threshold_counts: Mapping[str, Any]) -> str:
    """Describe how many calls a threshold keeps, and how many would be kept by chance.

    Example:
        "2 at 0.2 (by chance 1, 95 %: 0-4)"

    Args:
        threshold_counts: A row of the view swapped_statistics.
    """
    if threshold_counts["swaps"]:
        interval = f"{threshold_counts['by_chance_low']}-{threshold_counts['by_chance_high']}"
        by_chance = f"by chance {threshold_counts['by_chance']}, 95 %: {interval}"
    else:
        by_chance = "by chance: not measured"
    return f"{threshold_counts['calls']} at {threshold_counts['tau_f']:.3g} ({by_chance})"


def _explain_first_empty_stage(plan: Plan, lane: Lane) -> str:
    """Explain at which stage no texts or calls were left, and why.

    Example:
        "none of 120 calls has a result (timeout 120)"
    """
    empty_stage = _find_first_empty_stage(plan, lane)
    most_common_first = _count_rejections_by_reason(plan, lane, empty_stage.stage_name).most_common()
    if not most_common_first:
        return empty_stage.message

    reasons_with_counts = ", ".join(f"{reason} {count:,}" for reason, count in most_common_first)
    return f"{empty_stage.message} ({reasons_with_counts})"


class _EmptyStage(NamedTuple):
    """A stage that left no texts or calls of a lane.

    Attributes:
        stage_name: The name of the stage.
        message: A phrase that says so, such as "none of 120 calls has a result".
    """

    stage_name: LaneTable
    message: str


def _find_first_empty_stage(plan: Plan, lane: Lane) -> _EmptyStage:
    """Find the first stage that left no texts or calls of a tool.

    If every stage before the scores left something, the scores (loss_deltas) are returned.
    """
    text_count = _count_rows_with_value(plan.get_lane_table(lane, "heuristic_subset"), "text_digest")
    if text_count == 0:
        return _EmptyStage("heuristic_subset", _explain_no_wanted_text(plan, lane))

    call_count = _count_rows_with_value(plan.get_lane_table(lane, "scored_candidates"), "input")
    if call_count == 0:
        hint = _describe_proposal_remedy(lane, _count_rejections_by_reason(plan, lane, "scored_candidates"))
        return _EmptyStage("scored_candidates", f"no call was proposed for {text_count:,} texts{hint}")

    result_count = _count_rows_with_value(plan.get_lane_table(lane, "tool_results"), "result")
    if result_count == 0:
        return _EmptyStage("tool_results", f"none of {call_count:,} calls has a result")

    return _EmptyStage("loss_deltas", f"none of {result_count:,} results may stay")


def _explain_no_wanted_text(plan: Plan, lane: Lane) -> str:
    """Say that no document has what the tool looks for: "none of 40 documents has numbers"."""
    pointer_by_part = plan.lake.get_table("ccnet/raw_shards").read_pointers_by_part()
    document_count = sum(pointer.row_count for pointer in pointer_by_part.values())
    return f"none of {document_count:,} documents has {lane.tool.looks_for}"


def _count_rejections_by_reason(plan: Plan, lane: Lane, stage_name: LaneTable) -> Counter[str]:
    """Return how many rows a stage left out for a tool, by reason."""
    pointer_by_part = plan.get_lane_table(lane, stage_name).read_pointers_by_part()

    count_by_reason = Counter[str]()
    for pointer in pointer_by_part.values():
        for rejection in pointer.record[REJECTIONS_FIELD]:
            count_by_reason[rejection["reason"]] += rejection["count"]
    return count_by_reason


def _describe_proposal_remedy(lane: Lane, count_by_reason: Counter[str]) -> str:
    """Describe what to change so that calls are proposed. The text is appended to a sentence.

    Args:
        lane: The tool with its settings.
        count_by_reason: How many samples or texts were left out for each reason. The most common reason decides.
    """
    if MODEL_SOURCE not in lane.call_sources.source_names:
        return "; choose other texts, or add a source to proposals"

    most_common_reasons = [reason for reason, _ in count_by_reason.most_common(1)]  # empty if nothing was left out
    if most_common_reasons == [OTHER_TOOL_REASON]:
        return (
            f"; the model writes other names than {lane.tool.name}: add a rule to proposals, or change prompt or model"
        )
    return "; lower tau_s"


def _count_rows_with_value(table: Table, column: str) -> int:
    """Return how many rows of a table have a value in a column. A table that was not made yet has none."""
    if not table.list_part_names():
        return 0

    value_count = table.scan_parts().select(pl.col(column).count())
    return int(value_count.collect().item())


@contextmanager
def _open_chance_database(
    plan: Plan, lane: Lane, false_discovery_rate: float | None = None, control: Control = CHANCE_CONTROL
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database that tells how many calls of a tool are kept by chance.

    For that, a control gives the calls results that cannot help, such as those of other documents (swapped calls). Of
    these, the threshold keeps some by chance. A delta is by how much a result lowers the loss.

    Args:
        plan: Gives access to the files of calls.
        lane: The tool with its settings.
        false_discovery_rate: The accepted share of kept places (positions of texts) that chance explains, such as 0.05.
            If given, the view chance_thresholds has a row for it.
        control: The control.

    Yields:
        The connection. The database has the views of kept_by_chance.sql (swapped_statistics, chance_rates and
        chance_thresholds) and these tables:

        - loss_deltas: the scored calls with their own results
        - ESTIMATING_CONTROL: calls with the results of `control`
        - lanes, filter_rules: the settings of the threshold
        - decisions: the scored calls, and whether each is the best of its place
        - swapped_places: the places of the control, with their best delta with own and with other results
    """
    scored_tables = [plan.get_lane_table(lane, name) for name in lane.scored_table_names]
    calls_query = _build_calls_query(plan, lane, scored_tables, are_swaps=False)
    swaps_query = _build_calls_query(plan, lane, control.list_tables(plan, lane), are_swaps=True)

    with open_memory_database() as connection:
        # The calls, and the settings of the threshold.
        _create_table(connection, SCORED_CALLS_TABLE, CALL_COLUMN_TYPES, calls_query)  # the table loss_deltas
        _create_table(connection, ESTIMATING_CONTROL, SWAP_COLUMN_TYPES, swaps_query)
        _create_threshold_tables(connection, lane, false_discovery_rate)  # the tables lanes and filter_rules

        _create_decisions(connection)

        # The table swapped_places, and the views over all of these.
        run_sql(connection, SWAPPED_PLACES_SQL + CHANCE_VIEWS_SQL)
        yield connection


def _create_decisions(connection: duckdb.DuckDBPyConnection) -> None:
    """Create the table `decisions`: the scored calls, whether each may stay and whether it is the best of its place."""
    # JUDGED_VIEW_SQL reads the calls as `scored`, and makes the view `judged` over them.
    connection.execute(f"CREATE VIEW scored AS SELECT *, rowid AS row FROM {SCORED_CALLS_TABLE}")
    run_sql(connection, JUDGED_VIEW_SQL)
    # The view is copied because many views read it.
    connection.execute("CREATE TABLE decisions AS FROM judged")


def _create_threshold_tables(
    connection: duckdb.DuckDBPyConnection, lane: Lane, false_discovery_rate: float | None
) -> None:
    """Create the tables `lanes` and `filter_rules`, each with the one row of the lane.

    Args:
        lane: Its row in `lanes` has the tau_f of the settings, null if they ask for a false discovery rate.
        false_discovery_rate: The rate for the row in `filter_rules`.
    """
    tau_f = None if isinstance(lane.tau_f, ChanceThreshold) else lane.tau_f
    connection.execute(
        "CREATE TABLE lanes AS SELECT $tool::VARCHAR AS tool, $value::DOUBLE AS tau_f",
        {"tool": lane.key, "value": tau_f},
    )
    connection.execute(
        "CREATE TABLE filter_rules AS SELECT $tool::VARCHAR AS tool, $value::DOUBLE AS by_chance",
        {"tool": lane.key, "value": false_discovery_rate},
    )


def _create_table(
    connection: duckdb.DuckDBPyConnection, table_name: str, column_types: Mapping[str, str], query: str | None
) -> None:
    """Create a table with the rows of a query.

    Args:
        connection: The database.
        table_name: The name of the table.
        column_types: The SQL type of each column, by name.
        query: A SELECT statement, or None for a table without rows.
    """
    typed_columns = ", ".join(f"{column} {sql_type}" for column, sql_type in column_types.items())
    connection.execute(f"CREATE TABLE {table_name} ({typed_columns})")
    if query is not None:
        connection.execute(f"INSERT INTO {table_name} BY NAME SELECT {', '.join(column_types)} FROM ({query})")


def _build_calls_query(plan: Plan, lane: Lane, tables: Sequence[Table], *, are_swaps: bool) -> str | None:
    """Build the SQL query for all calls in some tables of a tool.

    Args:
        plan: The settings.
        lane: The tool with its settings.
        tables: The table of single calls, and the table of chains if there is one. They have the same shards.
        are_swaps: Whether these are the tables of a control, in which calls have other results.

    Returns:
        The query, or None if the tables have no files yet.
    """
    call_files: list[str] = []
    for table in tables:
        call_files += table.list_all_files()
    if not call_files:
        return None

    shards = tables[0].list_part_names()
    return scores.build_lane_calls_query(plan, lane, shards, call_files, are_swaps)
