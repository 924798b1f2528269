"""filtered_calls: the calls that stay at tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL.

A shard is filtered as if alone; several small shards share a query. What it needs from the other shards stands in the
table filter_rule: a threshold that limits how many calls are kept by chance, and how many texts of each shard the limit
on examples leaves. The texts are chosen over scored_texts, a row per text with scored calls, so that an added shard
costs its rows and a look at the texts of the others; the threshold takes the deltas of all calls. Whether a call stays
is decided by rule.sql of `method`, here and for the warehouse. The reason of each scored call is published with the
kept calls, as the table decided_calls, from which whoever shows a reason reads it.
"""

from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

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
    counted,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, scratch, sql_text
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.method.decided_calls import DECIDED, DECIDED_SCHEMA
from toolformer_dag.method.decision_sql import CHANCE, JUDGED, RULE, SWAPPED_PLACES
from toolformer_dag.method.record_tables import CHOSEN, THRESHOLD
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.chance import CERTIFIED, chance_threshold, chosen_by_chance, threshold_line
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import ChanceThreshold

FILTER_RULE = "filter_rule"
LAST_TEXT = "last_text"
"""The field of the record of filter_rule that holds the last text that stays, in the order of hashes."""
EXAMPLES = "examples"
"""The field of the same record that says how many of its texts stay, by shard."""
SHOWN_OF_CHOSEN = ("tau_f", "by_chance", "verdict")
"""Columns of a threshold by chance that stand in the inputs of filtered_calls."""
TEXTS_SQL = sql_text(__package__, "scored_texts.sql")
RULE_SQL = f"CREATE TEMP {RULE}{sql_text(__package__, 'filter_rule.sql')}"
SQL = f"CREATE TEMP {RULE}{JUDGED}{sql_text(__package__, 'filtered_calls.sql')}"


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what the rows depend on, apart from the scored calls: the threshold, the limit and the SQL text."""
    return {**rule_settings(plan, lane), "sql": fingerprint(SQL)}


def rule_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what is hashed to tell whether the rule of a lane (a tool with its thresholds) has changed.

    That is the threshold tau_f, or how it is chosen where the settings ask for a false discovery rate; the limit on
    texts per tool; and the text of the SQL that applies them. The scored calls are not in it: they are inputs.

    `determining` gives the named settings as name -> value.
    """
    shared = {
        **determining(plan.settings.training, "examples_per_tool"),
        "sql": fingerprint(RULE_SQL),
        **scores.settings(lane),
    }
    if isinstance(lane.tau_f, ChanceThreshold):
        chance_sql = JUDGED + SWAPPED_PLACES + CHANCE  # estimates how many calls pass a threshold by chance
        return {**shared, "tau_f": determining(lane.tau_f), "chance": fingerprint(chance_sql)}
    return {**shared, "tau_f": lane.tau_f}


class CallFiles(NamedTuple):
    """Parquet files of some shards: of scored calls, and of the texts that the calls stand in."""

    calls: list[str]
    texts: list[str]


def _call_files(output: TableOutput, parts: Sequence[str]) -> CallFiles:
    """Return the Parquet files of the scored calls of some shards, and of the texts that the calls stand in.

    A shard without a scored call gives no file. Raises MissingPart, DamagedPart where the table of any of the shards,
    also of one without calls, was not published or is damaged.
    """
    texts = output.lane_table("heuristic_subset")
    files = CallFiles(calls=[], texts=[])
    for part in parts:
        files_of_texts = texts.files(part)  # looked up for every part, so that a damaged one raises
        files_of_calls: list[str] = []
        has_calls = False
        for table in output.scored:  # single calls, and chains where the lane has some
            files_of_calls += table.files(part)
            has_calls = has_calls or table.pointer(part).rows > 0
        if has_calls:
            files.calls.extend(files_of_calls)
            files.texts.extend(files_of_texts)
    return files


def _by_part(parts: Sequence[str], rows: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Split rows by their column `shard`: part (the name of a shard) -> its rows, in their order; maybe none."""
    rows_of = rows.partition_by("shard", as_dict=True)
    return {part: rows_of.get((part,), rows.clear()) for part in parts}


def text_rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Return for each part (the name of a shard) its texts with scored calls, for the table scored_texts.

    A row is a text with the largest `delta` of its calls: by how many nats the best one lowers the loss. `delta` is
    null where every call of the text has a reason not to stay, whatever the threshold.
    """
    files = _call_files(output, parts)
    if not files.calls:
        return {part: PartRows(()) for part in parts}
    with scratch() as connection:
        scores.create_scored(connection, output.plan, output.lane, parts, files.calls)  # `scored`
        run_sql(connection, TEXTS_SQL, {"texts": files.texts})  # `scored_texts`
        texts = answer(connection, "FROM scored_texts")
    texts_of = _by_part(parts, _in_schema(output, texts))
    return {part: PartRows([texts_of[part]]) for part in parts}


def _in_schema(output: TableOutput, rows: pl.DataFrame) -> pl.DataFrame:
    """Return `rows` with the columns of the output's stage alone, in their types and order."""
    schema = output.stage.schema
    return rows.select(schema.names()).cast(schema)


def rule_rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose the rule of a lane (a tool with its thresholds): which threshold applies, and which texts stay.

    Calls stay from the threshold tau_f on. Of the texts with such a call, over all shards, the setting
    `training.examples_per_tool` allows a number; they are taken in the order of their hashes.

    The table filter_rule has a single part and no rows: what is chosen is in the part's record, under `facts`.
    - CHOSEN: only where the settings ask for a false discovery rate (how many kept calls help by chance): the threshold
      that has it, as a row of chance_thresholds
    - LAST_TEXT: the hash of the last text that stays; None where no text has a call that stays
    - EXAMPLES: how many texts of each shard stay, such as {"en_head_0000": 12}

    DuckDB sorts in a temporary folder, so memory does not grow with the corpus.
    """
    lane = output.lane
    facts: dict[str, Any] = {LAST_TEXT: None, EXAMPLES: {}}
    tau_f = lane.tau_f
    if isinstance(tau_f, ChanceThreshold):
        facts[CHOSEN] = _chosen_threshold(output.plan, lane, tau_f)
        tau_f = facts[CHOSEN]["tau_f"]
    files = output.lane_table("scored_texts").all_files()
    if not files:
        return PartRows((), facts=facts)
    limit = output.plan.settings.training.examples_per_tool
    with TemporaryDirectory() as spilled, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        # Creates the tables last_text, with a single value, and examples (shard, number of texts).
        run_sql(connection, RULE_SQL, {"files": files, "tau_f": tau_f, "examples": limit})
        facts[LAST_TEXT] = answer(connection, "FROM last_text").item()
        facts[EXAMPLES] = dict(answer(connection, "FROM examples ORDER BY shard").iter_rows())
    return PartRows((), facts=facts)


def _chosen_threshold(plan: Plan, lane: Lane, rule: ChanceThreshold) -> dict[str, Any]:
    """Return the lane's row of chance_thresholds: the threshold that has the false discovery rate of `rule`.

    Where no threshold has it, `tau_f` is the fallback of the settings, which may be None.
    """
    chosen = chance_threshold(plan, lane, rule.by_chance)
    if chosen["tau_f"] is None:
        chosen["tau_f"] = rule.fallback
    return chosen


def rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Filter the scored calls of some shards: return for each part (the name of a shard) its kept and rejected calls.

    A result holds, for one shard,
    - `frames`: the kept calls, a row each, with the threshold that was applied as `tau_f`
    - `rejected`: how many calls have each reason not to stay
    - `beside`: every scored call with its reason, null where it is kept; published as the table decided_calls

    The rules are SQL (judged.sql, rule.sql, filtered_calls.sql), run in one query over all shards that are given. Their
    reasons: below_tau_f, no_threshold (no threshold has the false discovery rate that the settings ask for, and there
    is no fallback), not_best_at_position, beyond_examples (the limit on texts per tool), or that of loss_deltas.

    Raises MissingPart, DamagedPart.
    """
    files = _call_files(output, parts)
    if not files.calls:
        return {part: PartRows((), beside={DECIDED: DECIDED_SCHEMA.to_frame()}) for part in parts}
    rule = output.lane_table("filter_rule").record(WHOLE)  # what `rule_rows` chose over all shards
    tau_f = _applied_threshold(output.lane, rule)
    with scratch() as connection:
        scores.create_scored(connection, output.plan, output.lane, parts, files.calls)
        run_sql(connection, SQL, {"texts": files.texts, "tau_f": tau_f, "last_text": rule[LAST_TEXT]})
        # `decided` now holds every scored call; `why` is its reason, null where the call is kept.
        kept = answer(connection, "FROM decided WHERE why IS NULL ORDER BY digest, segment, position")
        decided = answer(connection, f"SELECT {', '.join(CALL_KEY)}, why AS reason FROM decided ORDER BY row")

    kept_of = _by_part(parts, _in_schema(output, kept.with_columns(tau_f=pl.lit(tau_f, pl.Float64))))
    decided_of = _by_part(parts, decided.cast(DECIDED_SCHEMA))
    rows_of = {}
    for part in parts:
        reasons = decided_of[part]
        rows_of[part] = PartRows([kept_of[part]], rejected=counted(reasons), beside={DECIDED: reasons})
    return rows_of


def _applied_threshold(lane: Lane, rule: Mapping[str, Any]) -> float | None:
    """Return the threshold of a lane: the setting, or what was chosen where the settings ask for a rate of chance.

    rule: the record of filter_rule. None where no threshold has the rate: nothing is kept then.
    """
    if isinstance(lane.tau_f, ChanceThreshold):
        chosen: float | None = rule[CHOSEN]["tau_f"]
        return chosen
    return lane.tau_f


def below_tau_f(kept: pl.DataFrame, output: TableOutput) -> int:
    """Count kept calls that gained less than the threshold."""
    return kept.filter(pl.col("delta") < pl.col("tau_f")).height


def chosen_threshold(output: TableOutput) -> list[LogLine]:
    """Return a line on the threshold that was chosen by its false discovery rate, a warning where none is certified.

    Empty where the settings name the threshold.
    """
    chosen = chosen_by_chance(output.plan, output.lane)
    if chosen is None:
        return []
    return [LogLine(threshold_line(chosen), is_warning=chosen["verdict"] != CERTIFIED)]


def threshold_in_deltas(output: TableOutput) -> Shown:
    """Return what Dagster's page shows of a lane's filter, by label: values, texts and data for plots.

    - "calls kept", "share of the scored calls kept", "tau_f"
    - "threshold": a sentence, where tau_f was chosen by a false discovery rate
    - "deltas": a histogram of delta over all scored calls, with the threshold
    - "nats over cost": where calls have a cost

    Without a scored call only the first ones are there.
    """
    kept = sum(pointer.rows for pointer in output.table.pointers().values())
    chosen = chosen_by_chance(output.plan, output.lane)
    tau_f = output.lane.tau_f if isinstance(output.lane.tau_f, float) else None
    shown: dict[str, ShownValue] = {"calls kept": kept}
    if chosen is not None:
        tau_f = chosen["tau_f"]
        shown["threshold"] = threshold_line(chosen)
    if tau_f is not None:
        shown["tau_f"] = tau_f
    deltas = scores.scored_deltas(output.plan, output.lane)
    if deltas.is_empty():
        return shown
    shown["share of the scored calls kept"] = kept / deltas.height
    shown["deltas"] = DeltaHistogram(deltas, tau_f)
    frontier = scores.cost_frontier(output.plan, output.lane, tau_f)
    if frontier is not None:
        shown["nats over cost"] = CostFrontier(frontier)
    return shown


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: scored calls, texts, costs, and the control where it chooses the threshold."""
    control = lane.swapped if isinstance(lane.tau_f, ChanceThreshold) else ()
    return (*lane.scored, *control, "heuristic_subset", *scores.reads(lane))


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to what its kept calls depend on; another value makes the shard out of date.

    The mapping that the function returns holds
    - the versions of the shard's scored calls and of what they cost (`inputs_of_texts`)
    - EXAMPLES: how many texts of the shard stay by the rule that was chosen over all shards (see `rule_rows`)
    - THRESHOLD: the chosen threshold, `{"tau_f": 0.7, "by_chance": 0.1, "verdict": "certified"}`; only where the
      settings ask for a rate of chance
    Nothing else of the rule can change the shard: one that changes for other shards does not filter this one again.
    """
    inputs_of_calls = inputs_of_texts(output)
    pointer = output.lane_table("filter_rule").whole_pointer(WHOLE)
    rule: Mapping[str, Any] = pointer.record if pointer else {}
    threshold = {}  # of the row in the record only the columns that change kept calls
    if isinstance(output.lane.tau_f, ChanceThreshold) and CHOSEN in rule:
        threshold[THRESHOLD] = {name: rule[CHOSEN][name] for name in SHOWN_OF_CHOSEN}

    def inputs_of(shard: str) -> Mapping[str, Any]:
        examples = rule.get(EXAMPLES, {}).get(shard, 0)
        return {**inputs_of_calls(shard), EXAMPLES: examples, **threshold}

    return inputs_of


def reads_of_texts(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that scored_texts is made from."""
    return (*lane.scored, "heuristic_subset", *scores.reads(lane))


def inputs_of_texts(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its scored calls, and a hash of what they cost."""
    calls = versions(dict(zip(output.lane.scored, output.scored, strict=True)))
    costs = scores.inputs(output.plan, output.lane)
    return lambda shard: {**calls(shard), **costs(shard)}


def rule_reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that the rule is chosen from; a threshold by chance also takes all scored and swapped calls."""
    if isinstance(lane.tau_f, ChanceThreshold):
        return (TEXTS.name, *lane.scored, *lane.swapped, *scores.reads(lane))
    return (TEXTS.name,)


def rule_inputs(output: TableOutput) -> InputsOf:
    """Return a function from a part to what the rule depends on: the versions of all shards of all tables it reads.

    The rule has a single part, so the function returns the same mapping whatever part it gets, such as
    `{"calculator/scored_texts": {"en_head_0000": "3f.."}}`. Of tables with tool results only the costs matter; they
    stand under COST_VERSION, by shard, where such tables are read.
    """
    plan = output.plan
    cost_tables = {f"{output.lane.key}/{name}" for name in scores.reads(output.lane)}
    versions_of_all: dict[str, dict[str, Any]] = {}
    for name in output.depends_on:
        if name not in cost_tables:
            table = plan.lake.table(name)
            versions_of_all[name] = {part: table.part_version(part) for part in table.parts()}
    reads_costs = any(name in cost_tables for name in output.depends_on)
    if reads_costs:
        costs = scores.inputs(plan, output.lane)
        versions_of_all[scores.COST_VERSION] = {part: costs(part) for part in plan.shards}
    return lambda part: versions_of_all


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
    asset=StageAsset(shows=threshold_in_deltas, concludes=chosen_threshold, keeps_calls=True),
)
