"""filter_rule: what the shards of filtered_calls have to know of each other, so that each can be filtered by itself.

A threshold by chance, the documents that several shards have, and the texts that the limit on examples leaves, follow
from all shards. They are chosen over scored_texts, a row per text with scored calls, so that an added shard costs its
own rows and a look at the texts of the others; a threshold by chance takes the deltas of all calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.queries import in_memory, quoted, run_sql, scratch, sql_text
from toolformer_dag.lake.queries import rows as answer
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.lake.warehouse import CHOSEN, THRESHOLD
from toolformer_dag.lake.warehouse_filling import CHANCE, JUDGED, SWAPPED_PLACES
from toolformer_dag.pipeline.chance import chance_threshold
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
    DIGEST,
    SCORED,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    Column,
    InputsOf,
    PartRows,
    Stage,
    TableOutput,
)
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.settings.tool_settings import ChanceThreshold

NAME = "filter_rule"
TEXTS_SQL, SQL = sql_text(__package__, "scored_texts.sql"), sql_text(__package__, "filter_rule.sql")
LAST_TEXT, EXAMPLES, REPEATED = "last_text", "examples", "repeated_documents"
"""Fields of the record: the last text in the order of hashes that stays; by shard, how many of its texts stay, and a
fingerprint of its documents that an earlier shard has."""


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rule beside the scored calls: the threshold, or how it is chosen, and the limit."""
    made = {**determining(plan.settings.training, "examples_per_tool"), "sql": fingerprint(SQL)}
    if isinstance(lane.tau_f, ChanceThreshold):
        return {**made, "tau_f": determining(lane.tau_f), "chance": fingerprint(JUDGED + SWAPPED_PLACES + CHANCE)}
    return {**made, "tau_f": lane.tau_f}


def lane_reads(lane: Lane) -> tuple[str, ...]:
    """Return the tables that choose the threshold, where its control does."""
    return ("loss_deltas", "swapped_results") if isinstance(lane.tau_f, ChanceThreshold) else ()


def text_rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Return the texts of a shard with scored calls; `delta` is null where no call of a text may stay."""
    scored, subset = (
        output.plan.lake.table(f"{output.lane.key}/{name}") for name in ("loss_deltas", "heuristic_subset")
    )
    schema, given = output.stage.schema, {"files": scored.files(part), "texts": subset.files(part)}
    if not scored.pointer(part).rows:
        return PartRows([schema.to_frame()])
    with scratch() as connection:
        run_sql(connection, TEXTS_SQL, given)
        return PartRows([answer(connection, "FROM scored_texts").select(schema.names()).cast(schema)])


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Choose over all shards of a lane, out of core; the rows are the documents that an earlier shard has."""
    lane, schema = output.lane, output.stage.schema
    facts = _chosen(output, lane.tau_f) if isinstance(lane.tau_f, ChanceThreshold) else {}
    table = output.plan.lake.table(f"{lane.key}/{TEXTS.name}")
    files = table.all_files()
    if not files:
        return PartRows([schema.to_frame()], facts={**facts, LAST_TEXT: None, EXAMPLES: {}, REPEATED: {}})
    given = {
        "files": files,
        "tau_f": facts[CHOSEN]["tau_f"] if facts else lane.tau_f,
        "examples": output.plan.settings.training.examples_per_tool,
    }
    with TemporaryDirectory() as scratch, in_memory() as connection:
        connection.execute(f"SET temp_directory = {quoted(scratch)}")
        run_sql(connection, SQL, given)
        repeated = answer(connection, "FROM repeated ORDER BY shard, digest").select(schema.names()).cast(schema)
        by_shard = repeated.group_by("shard", maintain_order=True).agg("digest").iter_rows()
        found = {
            LAST_TEXT: answer(connection, "FROM last_text").item(),
            EXAMPLES: dict(answer(connection, "FROM examples ORDER BY shard").iter_rows()),
            REPEATED: {shard: fingerprint(digests) for shard, digests in by_shard},
        }
    return PartRows([repeated], facts={**facts, **found})


def _chosen(output: TableOutput, rule: ChanceThreshold) -> dict[str, dict[str, Any]]:
    """The lane's row of chance_thresholds, with the fallback as tau_f where no threshold has the rate."""
    chosen = chance_threshold(output.plan, output.lane, rule.by_chance)
    tau_f = rule.fallback if chosen["tau_f"] is None else chosen["tau_f"]
    return {CHOSEN: {**chosen, "tau_f": tau_f}}


@dataclass(frozen=True, slots=True)
class FilterRule:
    """The rule of a lane for one shard; `repeated`: digests of its documents that an earlier shard has."""

    tau_f: float | None
    last_text: str | None
    repeated: list[str]


def rule_of(output: TableOutput, shard: str) -> FilterRule:
    """Return the rule of a table of filtered_calls for a shard. Raises MissingPart, DamagedPart."""
    table = output.plan.lake.table(f"{output.lane.key}/{NAME}")
    record, tau_f = table.record(WHOLE), output.lane.tau_f
    if isinstance(tau_f, ChanceThreshold):
        tau_f = record[CHOSEN]["tau_f"]
    repeated: list[str] = []
    if shard in record[REPEATED]:
        repeated = table.read(WHOLE).filter(pl.col("shard") == shard)["digest"].to_list()
    return FilterRule(tau_f, record[LAST_TEXT], repeated)


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the version of a shard's scored calls, and what the rule says that can change its kept ones."""
    lake, lane = output.plan.lake, output.lane
    scored, pointer = lake.table(f"{lane.key}/loss_deltas"), lake.table(f"{lane.key}/{NAME}").whole_pointer(WHOLE)
    record: Mapping[str, Any] = pointer.record if pointer else {}
    chosen = record.get(CHOSEN) if isinstance(lane.tau_f, ChanceThreshold) else None
    threshold = {THRESHOLD: {name: chosen[name] for name in ("tau_f", "by_chance", "verdict")}} if chosen else {}

    def of(shard: str) -> Mapping[str, Any]:
        found = {"loss_deltas": scored.part_version(shard), EXAMPLES: record.get(EXAMPLES, {}).get(shard, 0)}
        repeated = record.get(REPEATED, {}).get(shard)
        return found | threshold | ({REPEATED: repeated} if repeated else {})

    return of


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
    settings=lambda plan, lane: {"sql": fingerprint(TEXTS_SQL)},
    reads=("loss_deltas",),
    also_reads=("heuristic_subset",),
    rows=text_rows,
)
STAGE = Stage(
    name=NAME,
    description="The documents of a shard that an earlier shard has, whose calls do not count again.",
    columns={"shard": SHARD, "digest": DIGEST},
    key=("shard", "digest"),
    settings=settings,
    reads=(TEXTS.name,),
    lane_reads=lane_reads,
    sharded=False,
    rows=rows,
)
