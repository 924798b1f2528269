"""filtered_calls: the calls that stay at tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL.

A shard is filtered as if by itself, small ones in one query. What it has to know of the others stands in filter_rule: a
threshold by chance, and the texts that the limit on examples leaves. These are chosen over scored_texts, a row per text
with scored calls, so that an added shard costs its own rows and a look at the texts of the others; a threshold by
chance takes the deltas of all calls. Does a call stay? rule.sql of the lake says so, here and for the warehouse.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import CostFrontier, DeltaHistogram, LogLine, Shown, ShownValue
from toolformer_dag.computing.stage import (
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
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, scratch, sql_text
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.record_tables import THRESHOLD
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.lake.warehouse import CHOSEN
from toolformer_dag.lake.warehouse_filling import CHANCE, JUDGED, RULE, SWAPPED_PLACES
from toolformer_dag.pipeline import scores
from toolformer_dag.pipeline.chance import CERTIFIED, chance_threshold, chosen_by_chance, threshold_line
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import ChanceThreshold

FILTER_RULE = "filter_rule"
LAST_TEXT, EXAMPLES = "last_text", "examples"
"""Fields of its record: the last text in the order of hashes that stays; by shard, how many of its texts stay."""
TEXTS_SQL = sql_text(__package__, "scored_texts.sql")
RULE_SQL = f"CREATE TEMP {RULE}{sql_text(__package__, 'filter_rule.sql')}"
SQL = f"CREATE TEMP {RULE}{JUDGED}{sql_text(__package__, 'filtered_calls.sql')}"


def rule_settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rule beside the scored calls: the threshold, or how it is chosen, and the limit."""
    made = {**determining(plan.settings.training, "examples_per_tool"), "sql": fingerprint(RULE_SQL)}
    made |= scores.settings(lane)
    if isinstance(lane.tau_f, ChanceThreshold):
        return {**made, "tau_f": determining(lane.tau_f), "chance": fingerprint(JUDGED + SWAPPED_PLACES + CHANCE)}
    return {**made, "tau_f": lane.tau_f}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the scored calls: the threshold, the limit and the SQL text."""
    return {**rule_settings(plan, lane), "sql": fingerprint(SQL)}


def text_rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Return the texts of shards with scored calls; `delta` is null where no call of a text may stay."""
    given = _files(output, parts)
    if not given:
        return {part: PartRows(()) for part in parts}
    lane = output.lane
    with scratch() as connection:
        scores.scored(connection, output.plan, lane, parts, given["files"])
        run_sql(connection, TEXTS_SQL, given)
        frames_of = by_part(output, parts, answer(connection, "FROM scored_texts"))
    return {part: PartRows(frames) for part, frames in frames_of.items()}


def _files(output: TableOutput, parts: Sequence[str]) -> dict[str, list[str]]:
    """The files of scored calls and of their texts, by parameter; those of shards without calls are left out."""
    scored = output.scored
    texts = output.lane_table("heuristic_subset")
    paths: dict[str, list[str]] = {"files": [], "texts": []}
    for part in parts:
        files = [file for table in scored for file in table.files(part)]  # damage is named, rows or not
        of_texts = texts.files(part)
        if any(table.pointer(part).rows for table in scored):
            paths["files"] += files
            paths["texts"] += of_texts
    return paths if paths["files"] else {}


def by_part(output: TableOutput, parts: Sequence[str], rows: pl.DataFrame) -> dict[str, list[pl.DataFrame]]:
    """Return the frames of each part, none for one without rows. Their order stays."""
    schema = output.stage.schema
    frames = rows.select(schema.names()).cast(schema).partition_by("shard", as_dict=True)
    return {part: [frames[part,]] if (part,) in frames else [] for part in parts}


def rule_rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose over all shards of a lane, out of core; what is chosen stands in the record."""
    lane = output.lane
    facts: dict[str, Any] = {LAST_TEXT: None, EXAMPLES: {}}
    given = {"tau_f": lane.tau_f, "examples": output.plan.settings.training.examples_per_tool}
    if isinstance(lane.tau_f, ChanceThreshold):
        facts[CHOSEN] = _chosen(output.plan, lane, lane.tau_f)
        given["tau_f"] = facts[CHOSEN]["tau_f"]
    files = output.lane_table("scored_texts").all_files()
    if not files:
        return PartRows((), facts=facts)
    with TemporaryDirectory() as spilled, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        run_sql(connection, RULE_SQL, {**given, "files": files})
        facts[LAST_TEXT] = answer(connection, "FROM last_text").item()
        facts[EXAMPLES] = dict(answer(connection, "FROM examples ORDER BY shard").iter_rows())
    return PartRows((), facts=facts)


def _chosen(plan: Plan, lane: Lane, rule: ChanceThreshold) -> dict[str, Any]:
    """The lane's row of chance_thresholds, with the fallback as tau_f where no threshold has the rate."""
    chosen = chance_threshold(plan, lane, rule.by_chance)
    return {**chosen, "tau_f": rule.fallback if chosen["tau_f"] is None else chosen["tau_f"]}


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the version of a shard's scored calls, and what the rule says that can change its kept ones."""
    lane, of_texts = output.lane, inputs_of_texts(output)
    pointer = output.lane_table("filter_rule").whole_pointer(WHOLE)
    record: Mapping[str, Any] = pointer.record if pointer else {}
    chosen = record.get(CHOSEN) if isinstance(lane.tau_f, ChanceThreshold) else None
    threshold = {THRESHOLD: {name: chosen[name] for name in ("tau_f", "by_chance", "verdict")}} if chosen else {}

    def of(shard: str) -> Mapping[str, Any]:
        return {**of_texts(shard), EXAMPLES: record.get(EXAMPLES, {}).get(shard, 0), **threshold}

    return of


def rows(worker: Worker, output: TableOutput, parts: Sequence[str]) -> dict[str, PartRows]:
    """Decide over the scored calls of shards; see rule.sql, judged.sql and filter_rule.sql for the rules.

    Every scored call is kept or counted: below_tau_f, no_threshold (none was certified by chance, and there is no
    fallback), not_best_at_position, beyond_examples, or the reason it had in loss_deltas. Another tau_f that keeps the
    same calls gives the same data version. Raises MissingPart, DamagedPart.
    """
    lane = output.lane
    record, given = output.lane_table("filter_rule").record(WHOLE), _files(output, parts)
    tau_f = record[CHOSEN]["tau_f"] if isinstance(lane.tau_f, ChanceThreshold) else lane.tau_f
    if not given:
        return {part: PartRows(()) for part in parts}
    with scratch() as connection:
        scores.scored(connection, output.plan, lane, parts, given["files"])
        run_sql(connection, SQL, {**given, "tau_f": tau_f, "last_text": record[LAST_TEXT]})
        kept = answer(connection, "FROM decided WHERE why IS NULL ORDER BY digest, segment, position")
        rejected = answer(connection, "SELECT shard, why, count(*) FROM decided WHERE why IS NOT NULL GROUP BY ALL")
    counts: dict[str, Rejected] = {part: Counter() for part in parts}
    for shard, reason, count in rejected.iter_rows():
        counts[shard][shard, reason] = count
    frames_of = by_part(output, parts, kept.with_columns(tau_f=pl.lit(tau_f, pl.Float64)))
    return {part: PartRows(frames, counts[part]) for part, frames in frames_of.items()}


def below_tau_f(kept: pl.DataFrame, output: TableOutput) -> int:
    """Count kept calls that gained less than the threshold."""
    return kept.filter(pl.col("delta") < pl.col("tau_f")).height


def chosen_threshold(output: TableOutput) -> list[LogLine]:
    """Say which threshold was chosen by chance, a warning where none is certified. One of the settings is not said."""
    chosen = chosen_by_chance(output.plan, output.lane)
    if chosen is None:
        return []
    return [LogLine(threshold_line(chosen), is_warning=chosen["verdict"] != CERTIFIED)]


def threshold_in_deltas(output: TableOutput) -> Shown:
    """Return the threshold for the asset, what it keeps, and plots of where it cuts the deltas and the costs.

    They are on this asset since it is the one that another threshold runs again.
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
    """Return the tables that are read: the control where it chooses the threshold."""
    control = lane.swapped if isinstance(lane.tau_f, ChanceThreshold) else ()
    return (*lane.scored, *control, "heuristic_subset", *scores.reads(lane))


def reads_of_texts(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that scored_texts is made from."""
    return (*lane.scored, "heuristic_subset", *scores.reads(lane))


def inputs_of_texts(output: TableOutput) -> InputsOf:
    """Return what tells the version of a shard's scored calls, and of what they cost."""
    calls = versions(dict(zip(output.lane.scored, output.scored, strict=True)))
    costs = scores.inputs(output.plan, output.lane)
    return lambda shard: {**calls(shard), **costs(shard)}


def rule_reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that the rule is chosen from; a threshold by chance takes more than the best calls."""
    more = (*lane.scored, *lane.swapped, *scores.reads(lane)) if isinstance(lane.tau_f, ChanceThreshold) else ()
    return (TEXTS.name, *more)


def rule_inputs(output: TableOutput) -> InputsOf:
    """Return the versions of all parts of what the rule is chosen from, and of what the calls of each cost."""
    results = {f"{output.lane.key}/{name}" for name in scores.reads(output.lane)}
    whole = {name: output.plan.lake.table(name) for name in output.depends_on if name not in results}
    costs = scores.inputs(output.plan, output.lane) if results & {*output.depends_on} else None
    part_versions = {name: {part: one.part_version(part) for part in one.parts()} for name, one in whole.items()}
    cost_versions = {scores.COST_VERSION: {part: costs(part) for part in output.plan.shards}} if costs else {}
    return lambda _: part_versions | cost_versions


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
    *("tool", "shard", "digest", "segment", "position", "sample", "source", "char_offset", "input", "result", "p_api"),
    *("loss_minus", "loss_plus", "delta", "chain"),
)
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
    make=ByParts(rows),
    asset=StageAsset(shows=threshold_in_deltas, concludes=chosen_threshold, keeps_calls=True),
)
