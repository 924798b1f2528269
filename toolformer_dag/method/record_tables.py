"""Declare and fill the tables of the warehouse whose rows follow from the records of the lake's parts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.lake.record import flat
from toolformer_dag.lake.warehouse_building import Records
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.settings.rounds import round_of

CHOSEN = "chosen"
"""The field of the record of filter_rule that holds a threshold by chance, as a row of chance_thresholds."""
THRESHOLD = "threshold"
"""The field of the inputs of filtered_calls that holds a threshold by chance: tau_f, by_chance and verdict."""

REJECTIONS = WarehouseTable(
    name="rejections",
    comment="What was left out: how many of what, by stage, tool, shard and reason.",
    columns={
        "stage": "the stage that left it out",
        "tool": "key of the lane; null for raw_shards, augmented_corpus and outcomes",
        "shard": "name of the shard file; of the benchmark where a question was left out of outcomes",
        "reason": "short name of the reason",
        "count": "how many",
    },
    schema=pl.Schema(
        {"stage": pl.String(), "tool": pl.String(), "shard": pl.String(), "reason": pl.String(), "count": pl.Int64()}
    ),
    sources=(),
)
LANES = WarehouseTable(
    name="lanes",
    comment="The tools, each with the tau_f that its filtered_calls were made with.",
    columns={
        "tool": "key of the lane",
        "tau_f": "the applied threshold; null where there was none yet, or none certified",
        "name": "name of the tool as it stands in a call: Calculator",
        "round": "the round of annotation, from 1",
    },
    schema=pl.Schema({"tool": pl.String(), "tau_f": pl.Float64(), "name": pl.String(), "round": pl.Int64()}),
    sources=(),
)
MADE_WITH = WarehouseTable(
    name="settings",
    comment="What determined the rows of the stages, as their records have it: model, k, m, tau_s, tau_f, prompts.",
    columns={
        "stage": "the stage; null for the names of profile and model, which determine nothing by themselves",
        "tool": "key of the lane; null for stages of all lanes",
        "setting": "the setting, with the names of its tables before it",
        "value": "its value: text as it is, anything else as JSON",
    },
    schema=pl.Schema({"stage": pl.String(), "tool": pl.String(), "setting": pl.String(), "value": pl.String()}),
    sources=(),
)
FILTER_RULES = WarehouseTable(
    name="filter_rules",
    comment="How the tau_f of each tool was chosen: by chance, with what came out, or as a number of the settings.",
    columns={
        "tool": "key of the lane",
        "by_chance": "the false discovery rate that was asked for; null for a number",
        "verdict": "as in chance_thresholds; where none is certified the fallback was taken, or nothing was kept; "
        "null for a number",
    },
    schema=pl.Schema({"tool": pl.String(), "by_chance": pl.Float64(), "verdict": pl.String()}),
    sources=(),
)
SOURCES = WarehouseTable(
    name="sources",
    comment="The tables of the lake that were copied, each with the version of its rows, rejections and tau_f.",
    columns={"source": "name of the table in the lake", "version": "version that was copied"},
    schema=pl.Schema({"source": pl.String(), "version": pl.String()}),
    sources=(),
)
RECORD_TABLES = (REJECTIONS, LANES, MADE_WITH, FILTER_RULES, SOURCES)


class MadeWith(NamedTuple):
    """A row of the table `settings` (MADE_WITH): a setting with which the rows of a stage were made.

    `stage` and `tool` are null for settings that belong to no stage.
    """

    stage: str | None
    tool: str | None
    setting: str
    value: str


class RejectionKey(NamedTuple):
    """The key of a count in the table `rejections` (REJECTIONS); `tool` is null for stages without lanes."""

    stage: str
    tool: str | None
    shard: str
    reason: str


def record_rows(
    records: Records, versions: Mapping[str, str], lanes: Mapping[str, str], named: Mapping[str, str]
) -> dict[str, pl.DataFrame]:
    """Build the rows of those tables of the warehouse that follow from records.

    A record says what a part of a lake table (the rows of a shard) was made from.

    Args:
        records: For each lake table, the records of its parts.
        versions: The data version of every source, by its name.
        lanes: For each lane (a tool with its settings), the tool's name in the text.
        named: The values of settings that determine no rows, but are shown.

    Returns:
        The rows by the name of the table.
    """
    records_of_all_tables = chain.from_iterable(records.values())
    lane_rows = _build_filter_rules(records, lanes)  # dicts with the columns of both LANES and FILTER_RULES
    setting_rows = _build_setting_rows(records, named)

    return {
        SOURCES.name: pl.DataFrame(list(versions.items()), SOURCES.schema, orient="row"),
        REJECTIONS.name: _sum_rejections(records_of_all_tables),
        # Of dicts, polars takes the columns of the schema and leaves out the others.
        LANES.name: pl.DataFrame(lane_rows, LANES.schema),
        FILTER_RULES.name: pl.DataFrame(lane_rows, FILTER_RULES.schema),
        MADE_WITH.name: pl.DataFrame(setting_rows, MADE_WITH.schema, orient="row"),
    }


def _build_setting_rows(records: Records, named: Mapping[str, str]) -> list[MadeWith]:
    """Return a row per setting: those of no stage (`named`) first, then those of each table."""
    setting_rows = [MadeWith(stage=None, tool=None, setting=setting, value=value) for setting, value in named.items()]
    for table_records in records.values():
        if table_records:  # parts of a table share their settings
            setting_rows += _build_made_with_rows(table_records[0])
    return setting_rows


def _build_filter_rules(records: Records, lanes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Build a row per lane (a tool with its settings): its tool, name and round, and its threshold (`filter_rule`).

    The threshold is the one by which the published calls were filtered, even if the settings have changed since.
    It is missing if calls were not filtered yet.

    Args:
        lanes: For each lane, the tool's name in the text.
    """
    rows = []
    for lane, tool_name in lanes.items():
        row: dict[str, Any] = {"tool": lane, "name": tool_name, "round": round_of(lane)}

        filter_records = records.get(f"{lane}/filtered_calls", ())
        if filter_records:
            row |= filter_rule(filter_records[0])
        rows.append(row)
    return rows


def _sum_rejections(records: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Add up the rejections in the records of all parts, as a row per stage, tool, shard and reason (REJECTIONS).

    The stages for single calls and for chains have the same `stage` in their records, and are counted together.
    """
    counts = Counter[RejectionKey]()
    for record in records:
        for counted in record.get("rejections", []):
            rejection = RejectionKey(
                stage=record["stage"], tool=record["tool"], shard=counted["shard"], reason=counted["reason"]
            )
            counts[rejection] += counted["count"]

    rows = [(*rejection, count) for rejection, count in counts.items()]
    return pl.DataFrame(rows, REJECTIONS.schema, orient="row")


def _build_made_with_rows(record: Mapping[str, Any]) -> list[MadeWith]:
    """Build a row per setting in a record. Nested settings get a dotted path, such as sampling.temperature -> "0.8".

    Values other than text are written as JSON. The fingerprint of the columns is left out.
    """
    rows = []
    for setting, value in flat(record["settings"]):
        if setting == "columns":
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append(MadeWith(stage=record["stage"], tool=record["tool"], setting=setting, value=text))
    return rows


def filter_rule(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the threshold tau_f (the least delta of a kept call) from a record of filtered_calls.

    Returns:
        - `{"tau_f": 0.5}` if the settings have it as a number, and `{"tau_f": None}` if the record does not say it.
        - `{"tau_f": 0.7, "by_chance": 0.1, "verdict": ...}` if it was chosen so that at most a share of 0.1 of the
          kept calls is kept by chance (a false discovery rate). Then it is among the record's inputs.
    """
    threshold_by_chance: dict[str, Any] | None = record.get("inputs", {}).get(THRESHOLD)
    if threshold_by_chance:
        return threshold_by_chance

    threshold_of_settings = record.get("settings", {}).get("tau_f")
    return {"tau_f": threshold_of_settings}
