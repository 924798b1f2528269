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
from toolformer_dag.computing.stage import REJECTIONS
from toolformer_dag.lake.queries import open_in_memory, rows, run_sql
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.method.decision_sql import CHANCE, ESTIMATING_CONTROL, JUDGED, SCORED, SWAPPED_PLACES
from toolformer_dag.method.record_tables import CHOSEN
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.controls import ESTIMATING, Control
from toolformer_dag.settings.tool_settings import MODEL, ChanceThreshold

OTHER_TOOL = "other_tool"
"""The reason of a sample that names another tool."""
CERTIFIED = "certified"
"""The verdict of chance_thresholds where a threshold has the rate."""
NOT_MEASURED = "not measured"
"""The verdict where no call of the control has another document's result."""
CALL_COLUMNS = {
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
SWAP_COLUMNS = {**CALL_COLUMNS, "swap": "INTEGER"}
"""Columns of a call with a swapped result that they read."""
REMEDY = 'Lower tau_f (`toolformer-dag sql "from kept_at(0.2)"` counts), annotate more text, or change prompt or model'


def query_chance_threshold(plan: Plan, lane: Lane, by_chance: float) -> dict[str, Any]:
    """Find the smallest threshold tau_f of a tool that has the given false discovery rate.

    Args:
        plan: Gives access to the tables.
        lane: The tool with its settings.
        by_chance: The false discovery rate, such as 0.05.

    Returns:
        The tool's row of the view chance_thresholds, by column. It also says why there is no such threshold.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    with _open_database(plan, lane, by_chance) as connection:
        query = f"FROM chance_thresholds WHERE by_chance = {by_chance!r}::DOUBLE"
        return rows(connection, query).row(0, named=True)


class ChanceTables(NamedTuple):
    """A lane's rows of two views, in the order of the threshold tau_f.

    - statistics: swapped_statistics, for a few thresholds how many calls and swaps reach them
    - rates: chance_rates, the false discovery rate as a curve
    """

    statistics: pl.DataFrame
    rates: pl.DataFrame


def query_chance_tables(plan: Plan, lane: Lane, control: Control = ESTIMATING) -> ChanceTables:
    """Count how many calls of a tool are kept by chance at several thresholds, as a control estimates it.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    with _open_database(plan, lane, control=control) as connection:
        return ChanceTables(
            statistics=rows(connection, "FROM swapped_statistics ORDER BY tau_f"),
            rates=rows(connection, "FROM chance_rates ORDER BY tau_f"),
        )


def describe_threshold(chosen: Mapping[str, Any]) -> str:
    """Describe in one line which threshold tau_f was chosen, or why none was and what would help.

    Args:
        chosen: A row of the view chance_thresholds. `verdict` is CERTIFIED if a threshold has the wanted false
            discovery rate, else the reason why there is none, such as NOT_MEASURED. `swaps_needed` is how many
            swapped places would be enough, or None.
    """
    if chosen["verdict"] != CERTIFIED:
        return _explain_uncertified(chosen)
    return (
        f"tau_f = {chosen['tau_f']:.3f} keeps {chosen['kept']} of {chosen['places']} places, a share of "
        f"{chosen['fdr']:.3f} by chance, at most {chosen['fdr_high']:.3f} with 95 % confidence"
    )


def _explain_uncertified(chosen: Mapping[str, Any]) -> str:
    """Explain why no threshold has the wanted false discovery rate, what would help, and what is kept."""
    reason = f"{chosen['verdict']}{_describe_swaps_remedy(chosen)}"
    if chosen["tau_f"] is None:
        outcome = "nothing is kept"
    else:
        outcome = f"the fallback {chosen['tau_f']:.3g} is taken"
    return f"no tau_f is certified at {chosen['by_chance']:.3g} ({reason}); {outcome}"


def _describe_swaps_remedy(chosen: Mapping[str, Any]) -> str:
    """Describe what more swapped calls would change. The text is appended to a verdict and may be empty."""
    more_swaps = "raise evaluation.swapped_texts, or annotate more text"
    if chosen["verdict"] == NOT_MEASURED:
        return f": no call was told another document's result; {more_swaps}"
    if chosen["swaps_needed"] is None:
        return ""
    return f": about {chosen['swaps_needed']} swapped places would do, there are {chosen['swapped']}; {more_swaps}"


def read_chosen_threshold(plan: Plan, lane: Lane) -> Mapping[str, Any] | None:
    """Read which threshold the filter of a tool last used.

    Returns:
        The row of the view chance_thresholds. None if the settings name a threshold, or the filter has not run.
    """
    pointer = plan.lane_table(lane, "filter_rule").find_whole_pointer(WHOLE)
    return pointer.record.get(CHOSEN) if pointer else None


def describe_thresholds_of_lanes(plan: Plan) -> list[str]:
    """Describe which threshold was chosen for each tool by its false discovery rate, or why none was.

    Returns:
        One line per tool. Tools whose settings name a threshold, or whose filter has not run, are left out.
    """
    lines = []
    for lane in plan.lanes:
        chosen = read_chosen_threshold(plan, lane)
        if chosen:
            lines.append(f"{lane.key}: {describe_threshold(chosen)}")
    return lines


def explain_lanes_without_calls(plan: Plan) -> list[str]:
    """Explain for each tool without a kept call how near its calls came to the threshold, and what to do.

    Returns:
        One line per tool without a kept call. Tools whose filter has not run are left out. If no tool keeps a
        call, a last line says that there is nothing to finetune on.

    Raises:
        DamagedPart: A file of a table is damaged.
    """
    lanes_without_calls = [lane for lane in plan.lanes if _has_empty_filter(plan, lane)]

    lines = []
    for lane in lanes_without_calls:
        lines.append(f"{lane.key}: {_explain_no_kept_call(plan, lane)}")

    if lanes_without_calls and len(lanes_without_calls) == len(plan.lanes):
        lines.append(f"No call of any lane is kept: there is nothing to finetune on. {REMEDY}.")
    return lines


def _has_empty_filter(plan: Plan, lane: Lane) -> bool:
    """Return whether the filter of a lane has run and kept no call."""
    parts = plan.lane_table(lane, "filtered_calls").pointers()
    return bool(parts) and not any(part.rows for part in parts.values())


def _explain_no_kept_call(plan: Plan, lane: Lane) -> str:
    """Explain why no call of a tool was kept.

    Usually the explanation gives the best delta, and how many calls other thresholds would keep. If there is no
    place at all (a position of a text with a scored call that may stay), it says at which stage texts or calls
    ended.

    Example:
        "no call is kept at tau_f = 1. Of 30 places the best gains 0.412; kept are ..."
    """
    with _open_database(plan, lane) as connection:
        places = rows(connection, "SELECT count(*) AS places, max(delta) AS delta FROM places").row(0, named=True)
        # One row per threshold: how many calls reach it, with their own results and by chance.
        statistics = rows(connection, "FROM swapped_statistics ORDER BY tau_f").rows(named=True)

    if places["places"] == 0:
        hint = '`toolformer-dag sql "from funnel"` counts what each stage left'
        return f"no call is kept, for {_explain_first_empty_stage(plan, lane)}; {hint}"

    counts = ", ".join(_describe_counts_at_threshold(statistic) for statistic in statistics)
    return (
        f"no call is kept{_format_threshold(lane)}. Of {places['places']} places the best gains "
        f"{places['delta']:.3f}; kept are {counts}. {REMEDY}"
    )


def _format_threshold(lane: Lane) -> str:
    """Return a phrase such as " at tau_f = 0.5", or "" if the settings name no threshold."""
    if isinstance(lane.tau_f, float):
        return f" at tau_f = {lane.tau_f:.3g}"
    return ""


def _describe_counts_at_threshold(statistic: Mapping[str, Any]) -> str:
    """Describe how many calls a threshold keeps, and how many would be kept by chance.

    Example:
        "2 at 0.2 (by chance 1, 95 %: 0-4)"

    Args:
        statistic: A row of the view swapped_statistics.
    """
    if statistic["swaps"]:
        interval = f"{statistic['by_chance_low']}-{statistic['by_chance_high']}"
        by_chance = f"by chance {statistic['by_chance']}, 95 %: {interval}"
    else:
        by_chance = "by chance: not measured"
    return f"{statistic['calls']} at {statistic['tau_f']:.3g} ({by_chance})"


def _explain_first_empty_stage(plan: Plan, lane: Lane) -> str:
    """Explain at which stage no texts or calls were left, and why.

    Example:
        "none of 120 calls has a result (timeout 120)"
    """
    empty_stage = _find_first_empty_stage(plan, lane)
    most_common_first = _count_reasons(plan, lane, empty_stage.stage).most_common()
    if not most_common_first:
        return empty_stage.message

    reasons_with_counts = ", ".join(f"{reason} {count:,}" for reason, count in most_common_first)
    return f"{empty_stage.message} ({reasons_with_counts})"


class _EmptyStage(NamedTuple):
    """A stage that left no texts or calls of a lane."""

    stage: LaneTable
    message: str  # what it left none of


def _find_first_empty_stage(plan: Plan, lane: Lane) -> _EmptyStage:
    """Find the first stage that left no texts or calls of a tool.

    If every stage before the scores left something, the scores (loss_deltas) are returned.
    """
    text_count = _count_present(plan.lane_table(lane, "heuristic_subset"), "text_digest")
    if text_count == 0:
        return _EmptyStage("heuristic_subset", _explain_no_wanted_text(plan, lane))

    call_count = _count_present(plan.lane_table(lane, "scored_candidates"), "input")
    if call_count == 0:
        hint = _describe_proposal_remedy(lane, _count_reasons(plan, lane, "scored_candidates"))
        return _EmptyStage("scored_candidates", f"no call was proposed for {text_count:,} texts{hint}")

    result_count = _count_present(plan.lane_table(lane, "tool_results"), "result")
    if result_count == 0:
        return _EmptyStage("tool_results", f"none of {call_count:,} calls has a result")

    return _EmptyStage("loss_deltas", f"none of {result_count:,} results may stay")


def _explain_no_wanted_text(plan: Plan, lane: Lane) -> str:
    """Say that no document has what the tool looks for: "none of 40 documents has numbers"."""
    parts = plan.lake.table("ccnet/raw_shards").pointers().values()
    documents = sum(part.rows for part in parts)
    return f"none of {documents:,} documents has {lane.tool.looks_for}"


def _count_reasons(plan: Plan, lane: Lane, table: LaneTable) -> Counter[str]:
    """Count the rows that a stage left out for a tool, by reason."""
    counts = Counter[str]()
    for part in plan.lane_table(lane, table).pointers().values():
        for rejection in part.record[REJECTIONS]:
            counts[rejection["reason"]] += rejection["count"]
    return counts


def _describe_proposal_remedy(lane: Lane, reasons: Counter[str]) -> str:
    """Describe what to change so that calls are proposed. The text is appended to a sentence.

    Args:
        lane: The tool with its settings.
        reasons: How many samples or texts were left out for each reason. The most common reason decides.
    """
    if MODEL not in lane.sources.names:
        return "; choose other texts, or add a source to proposals"

    most_common_reasons = [reason for reason, _ in reasons.most_common(1)]  # empty if nothing was left out
    if most_common_reasons == [OTHER_TOOL]:
        return (
            f"; the model writes other names than {lane.tool.name}: add a rule to proposals, or change prompt or model"
        )
    return "; lower tau_s"


def _count_present(table: Table, column: str) -> int:
    """Count the rows of a table that have a value in the column; 0 if nothing was published."""
    if not table.parts():
        return 0
    return int(table.scan().select(pl.col(column).count()).collect().item())


@contextmanager
def _open_database(
    plan: Plan, lane: Lane, by_chance: float | None = None, control: Control = ESTIMATING
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open an in-memory database that tells how many calls of a tool are kept by chance.

    Args:
        plan: Gives access to the files of calls.
        lane: The tool with its settings.
        by_chance: A false discovery rate, such as 0.05, for which the view chance_thresholds gets a row.
        control: The control whose swapped calls show what is kept by chance.

    Yields:
        The connection. The database has the tables loss_deltas (calls with their own results),
        ESTIMATING_CONTROL (calls with the results of `control`), lanes, filter_rules, decisions and
        swapped_places, and the views of kept_by_chance.sql: swapped_statistics, chance_rates and
        chance_thresholds.
    """
    scored_tables = [plan.lane_table(lane, name) for name in lane.scored]
    calls_query = _build_calls_query(plan, lane, scored_tables, are_swaps=False)
    swaps_query = _build_calls_query(plan, lane, control.tables(plan, lane), are_swaps=True)

    with open_in_memory() as connection:
        # The calls, and the settings of the threshold.
        _create_table(connection, SCORED, CALL_COLUMNS, calls_query)  # the table loss_deltas
        _create_table(connection, ESTIMATING_CONTROL, SWAP_COLUMNS, swaps_query)
        _create_threshold_tables(connection, lane, by_chance)  # the tables lanes and filter_rules

        # For each call, whether it is the best of its place. `judged` is copied because many views read it.
        connection.execute(f"CREATE VIEW scored AS SELECT *, rowid AS row FROM {SCORED}")  # what JUDGED reads
        run_sql(connection, JUDGED)  # the view judged
        connection.execute("CREATE TABLE decisions AS FROM judged")

        # The table swapped_places, and the views over all of these.
        run_sql(connection, SWAPPED_PLACES + CHANCE)
        yield connection


def _create_threshold_tables(connection: duckdb.DuckDBPyConnection, lane: Lane, by_chance: float | None) -> None:
    """Create the tables lanes, with the tau_f of the settings, and filter_rules, with `by_chance`: a row each."""
    tau_f = None if isinstance(lane.tau_f, ChanceThreshold) else lane.tau_f
    select = "AS SELECT $tool::VARCHAR AS tool, $value::DOUBLE AS"
    connection.execute(f"CREATE TABLE lanes {select} tau_f", {"tool": lane.key, "value": tau_f})
    connection.execute(f"CREATE TABLE filter_rules {select} by_chance", {"tool": lane.key, "value": by_chance})


def _create_table(
    connection: duckdb.DuckDBPyConnection, name: str, columns: Mapping[str, str], query: str | None
) -> None:
    """Create a table with the rows of a query.

    Args:
        connection: The database.
        name: The name of the table.
        columns: The SQL type of each column, by name.
        query: A SELECT statement, or None for a table without rows.
    """
    typed_columns = ", ".join(f"{column} {sql_type}" for column, sql_type in columns.items())
    connection.execute(f"CREATE TABLE {name} ({typed_columns})")
    if query is not None:
        connection.execute(f"INSERT INTO {name} BY NAME SELECT {', '.join(columns)} FROM ({query})")


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
    files = [file for table in tables for file in table.list_all_files()]
    if not files:
        return None
    shards = tables[0].parts()
    return scores.calls(plan, lane, shards, files, are_swaps)
