"""What the control says about a lane: false discovery rates by swapped results, and the threshold that they allow.

All of it is SQL: judged.sql and chance.sql of `method`, which the warehouse is made with, over the files of one lane.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import REJECTIONS
from toolformer_dag.lake.queries import in_memory, rows, run_sql
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.method.decision_sql import CHANCE, JUDGED, SCORED, SWAPPED_PLACES
from toolformer_dag.method.record_tables import CHOSEN
from toolformer_dag.pipeline import scores
from toolformer_dag.settings.tool_settings import MODEL, ChanceThreshold

CALL = (
    "tool VARCHAR, shard VARCHAR, digest VARCHAR, segment INTEGER, position INTEGER, sample INTEGER, delta DOUBLE, "
    "delta_is_bound BOOLEAN, reason VARCHAR"
)
OTHER_TOOL = "other_tool"
"""Why a sample is no call of the lane: it names another tool."""
CERTIFIED, NOT_MEASURED = "certified", "not measured"
TABLES = {"loss_deltas": CALL, "swapped_results": f"{CALL}, swap INTEGER"}


def chance_threshold(plan: Plan, lane: Lane, by_chance: float) -> dict[str, Any]:
    """Return the lane's row of the view chance_thresholds at this false discovery rate. Raises DamagedPart."""
    with _control(plan, lane, by_chance) as connection:
        level = f"FROM chance_thresholds WHERE by_chance = {by_chance!r}::DOUBLE"
        return rows(connection, level).row(0, named=True)


def chance_tables(plan: Plan, lane: Lane) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the lane's rows of the views swapped_statistics and chance_rates, by threshold. Raises DamagedPart."""
    with _control(plan, lane) as connection:
        statistics = rows(connection, "FROM swapped_statistics ORDER BY tau_f")
        return statistics, rows(connection, "FROM chance_rates ORDER BY tau_f")


def threshold_line(chosen: Mapping[str, Any]) -> str:
    """Say which threshold was chosen by chance, or why none was, with the remedy. `chosen`: CHOSEN of a record."""
    if chosen["verdict"] == CERTIFIED:
        kept = f"tau_f = {chosen['tau_f']:.3f} keeps {chosen['kept']} of {chosen['places']} places"
        return (
            f"{kept}, a share of {chosen['fdr']:.3f} by chance, at most {chosen['fdr_high']:.3f} with 95 % confidence"
        )
    remedy, more = "", "raise evaluation.swapped_texts, or annotate more text"
    if chosen["verdict"] == NOT_MEASURED:
        remedy = f": no call was told another document's result; {more}"
    elif (needed := chosen["swaps_needed"]) is not None:
        remedy = f": about {needed} swapped places would do, there are {chosen['swapped']}; {more}"
    taken = "nothing is kept" if chosen["tau_f"] is None else f"the fallback {chosen['tau_f']:.3g} is taken"
    return f"no tau_f is certified at {chosen['by_chance']:.3g} ({chosen['verdict']}{remedy}); {taken}"


def chosen_by_chance(plan: Plan, lane: Lane) -> Mapping[str, Any] | None:
    """Return the lane's row of chance_thresholds that the filter took last; None where the settings say tau_f."""
    pointer = plan.lane_table(lane, "filter_rule").whole_pointer(WHOLE)
    return pointer.record.get(CHOSEN) if pointer else None


def threshold_lines(plan: Plan) -> list[str]:
    """Say what was chosen by chance, a line per lane."""
    chosen = {lane.key: chosen_by_chance(plan, lane) for lane in plan.lanes}
    return [f"{lane}: {threshold_line(one)}" for lane, one in chosen.items() if one]


def kept_nothing(plan: Plan) -> list[str]:
    """Say of each lane whose filter ran and kept no call how near its calls came, and what to do; a line per lane.

    Where no lane keeps a call, a last line says that there is nothing to finetune on. Raises DamagedPart.
    """
    filtered = {lane: plan.lane_table(lane, "filtered_calls").pointers() for lane in plan.lanes}
    empty = [lane for lane, parts in filtered.items() if parts and not sum(part.rows for part in parts.values())]
    lines = [f"{lane.key}: {_why_nothing(plan, lane)}" for lane in empty]
    if lines and len(lines) == len(filtered):
        lines.append(f"No call of any lane is kept: there is nothing to finetune on. {REMEDY}.")
    return lines


REMEDY = 'Lower tau_f (`toolformer-dag sql "from kept_at(0.2)"` counts), annotate more text, or change prompt or model'


def _why_nothing(plan: Plan, lane: Lane) -> str:
    with _control(plan, lane) as connection:
        [(places, best)] = rows(connection, "SELECT count(*), max(delta) FROM places").rows()
        statistics = rows(connection, "FROM swapped_statistics ORDER BY tau_f").rows(named=True)
    if not places:
        hint = '`toolformer-dag sql "from funnel"` counts what each stage left'
        return f"no call is kept, for {_none_judged(plan, lane)}; {hint}"
    own = f" at tau_f = {lane.tau_f:.3g}" if isinstance(lane.tau_f, float) else ""
    counts = [
        f"{row['calls']} at {row['tau_f']:.3g} (by chance {row['by_chance']}, 95 %: {row['by_chance_low']}-"
        f"{row['by_chance_high']})"
        if row["swaps"]
        else f"{row['calls']} at {row['tau_f']:.3g} (by chance: not measured)"
        for row in statistics
    ]
    return f"no call is kept{own}. Of {places} places the best gains {best:.3f}; kept are {', '.join(counts)}. {REMEDY}"


def _none_judged(plan: Plan, lane: Lane) -> str:
    """Say at which stage the lane's texts or calls ended, with the stage's reasons."""
    documents = sum(part.rows for part in plan.lake.table("ccnet/raw_shards").pointers().values())
    texts = _present(plan.lane_table(lane, "heuristic_subset"), "text_digest")
    calls = _present(plan.lane_table(lane, "scored_candidates"), "input")
    answered = _present(plan.lane_table(lane, "tool_results"), "result")
    stage: LaneTable
    if not texts:
        stage, none = "heuristic_subset", f"none of {documents:,} documents has {lane.tool.looks_for}"
    elif not calls:
        stage, none = "scored_candidates", f"no call was proposed for {texts:,} texts"
    elif not answered:
        stage, none = "tool_results", f"none of {calls:,} calls has a result"
    else:
        stage, none = "loss_deltas", f"none of {answered:,} results may stay"
    reasons = Counter[str]()
    for part in plan.lane_table(lane, stage).pointers().values():
        reasons.update({one["reason"]: one["count"] for one in part.record[REJECTIONS]})
    remedy = _proposing(lane, reasons) if texts and not calls else ""
    counted = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
    return f"{none}{remedy}" + f" ({counted})" * bool(counted)


def _proposing(lane: Lane, reasons: Counter[str]) -> str:
    """Say what would propose calls, by the commonest reason why there is none."""
    if MODEL not in lane.sources.names:
        return "; choose other texts, or add a source to proposals"
    if dict(reasons.most_common(1)).keys() == {OTHER_TOOL}:
        return (
            f"; the model writes other names than {lane.tool.name}: add a rule to proposals, or change prompt or model"
        )
    return "; lower tau_s"


def _present(table: Table, column: str) -> int:
    """Count the rows of a table that have a value in the column; 0 where nothing was published."""
    if not table.parts():
        return 0
    return int(table.scan().select(pl.col(column).count()).collect().item())


@contextmanager
def _control(plan: Plan, lane: Lane, by_chance: float | None = None) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the views of chance.sql over the lane's tables as they are now; none published, no rows."""
    with in_memory() as connection:
        for name, columns in TABLES.items():
            connection.execute(f"CREATE TABLE {name} ({columns})")
            tables = [plan.lane_table(lane, source) for source in (lane.swapped if "swap" in columns else lane.scored)]
            if files := [file for table in tables for file in table.all_files()]:
                names = ", ".join(column.split()[0] for column in columns.split(", "))
                read = scores.calls(plan, lane, tables[0].parts(), files, swaps="swap" in columns)
                connection.execute(f"INSERT INTO {name} BY NAME SELECT {names} FROM ({read})")
        tau_f = None if isinstance(lane.tau_f, ChanceThreshold) else lane.tau_f
        select = "AS SELECT $tool::VARCHAR AS tool, $value::DOUBLE AS"
        connection.execute(f"CREATE TABLE lanes {select} tau_f", {"tool": lane.key, "value": tau_f})
        connection.execute(f"CREATE TABLE filter_rules {select} by_chance", {"tool": lane.key, "value": by_chance})
        connection.execute(f"CREATE VIEW scored AS SELECT *, rowid AS row FROM {SCORED}")
        run_sql(connection, JUDGED)
        connection.execute("CREATE TABLE decisions AS FROM judged")
        run_sql(connection, SWAPPED_PLACES + CHANCE)
        yield connection
