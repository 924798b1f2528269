"""Declare and fill the tables of the warehouse whose rows follow from the records of the lake's parts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.lake.record import iter_flat_fields
from toolformer_dag.lake.warehouse_building import RecordsByTable
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.settings.rounds import get_round_number

CHOSEN_THRESHOLD_FIELD = "chosen"
"""The field of the record of filter_rule that holds a threshold by chance, as a row of chance_thresholds."""
THRESHOLD_FIELD = "threshold"
"""The field of the inputs of filtered_calls that holds a threshold by chance: tau_f, by_chance and verdict."""

REJECTIONS_TABLE = WarehouseTable(
    name="rejections",
    comment="What was left out: how many of what, by stage, tool, shard and reason.",
    comments_by_column={
        "stage": "the stage that left it out",
        "tool": "key of the lane; null for raw_shards, augmented_corpus and outcomes",
        "shard": "name of the shard file; of the benchmark where a question was left out of outcomes",
        "reason": "short name of the reason",
        "count": "how many",
    },
    schema=pl.Schema(
        {"stage": pl.String(), "tool": pl.String(), "shard": pl.String(), "reason": pl.String(), "count": pl.Int64()}
    ),
    source_names=(),
)
LANES_TABLE = WarehouseTable(
    name="lanes",
    comment="The tools, each with the tau_f that its filtered_calls were made with.",
    comments_by_column={
        "tool": "key of the lane",
        "tau_f": "the applied threshold; null where there was none yet, or none certified",
        "name": "name of the tool as it stands in a call: Calculator",
        "round": "the round of annotation, from 1",
    },
    schema=pl.Schema({"tool": pl.String(), "tau_f": pl.Float64(), "name": pl.String(), "round": pl.Int64()}),
    source_names=(),
)
SETTINGS_TABLE = WarehouseTable(
    name="settings",
    comment="What determined the rows of the stages, as their records have it: model, k, m, tau_s, tau_f, prompts.",
    comments_by_column={
        "stage": "the stage; null for the names of profile and model, which determine nothing by themselves",
        "tool": "key of the lane; null for stages of all lanes",
        "setting": "the setting, with the names of its tables before it",
        "value": "its value: text as it is, anything else as JSON",
    },
    schema=pl.Schema({"stage": pl.String(), "tool": pl.String(), "setting": pl.String(), "value": pl.String()}),
    source_names=(),
)
FILTER_RULES_TABLE = WarehouseTable(
    name="filter_rules",
    comment="How the tau_f of each tool was chosen: by chance, with what came out, or as a number of the settings.",
    comments_by_column={
        "tool": "key of the lane",
        "by_chance": "the false discovery rate that was asked for; null for a number",
        "verdict": "as in chance_thresholds; where none is certified the fallback was taken, or nothing was kept; "
        "null for a number",
    },
    schema=pl.Schema({"tool": pl.String(), "by_chance": pl.Float64(), "verdict": pl.String()}),
    source_names=(),
)
SOURCES_TABLE = WarehouseTable(
    name="sources",
    comment="The tables of the lake that were copied, each with the version of its rows, rejections and tau_f.",
    comments_by_column={"source": "name of the table in the lake", "version": "version that was copied"},
    schema=pl.Schema({"source": pl.String(), "version": pl.String()}),
    source_names=(),
)
RECORD_TABLES = (REJECTIONS_TABLE, LANES_TABLE, SETTINGS_TABLE, FILTER_RULES_TABLE, SOURCES_TABLE)


class SettingRow(NamedTuple):
    """A row of the table `settings` (SETTINGS_TABLE): a setting with which the rows of a stage were made.

    Attributes:
        stage: The stage. None for a setting that belongs to no stage.
        tool: The key of the lane (a tool with its settings). None for stages of all lanes, and for no stage.
        setting: The name of the setting, with the names of its tables before it: sampling.temperature.
        value: Its value as text.
    """

    stage: str | None
    tool: str | None
    setting: str
    value: str


class RejectionKey(NamedTuple):
    """The key of a count in the table `rejections` (REJECTIONS_TABLE).

    Attributes:
        tool: The key of the lane (a tool with its settings). None for stages without lanes.
        shard: The shard from which something was left out.
        reason: A short name of the reason.
    """

    stage: str
    tool: str | None
    shard: str
    reason: str


def build_record_rows(
    records_by_table: RecordsByTable,
    version_by_source: Mapping[str, str],
    tool_name_by_lane: Mapping[str, str],
    shown_settings: Mapping[str, str],
) -> dict[str, pl.DataFrame]:
    """Return the rows of those tables of the warehouse that follow from records.

    A record says what a part of a lake table (the rows of a shard) was made from.

    Args:
        records_by_table: For each lake table, the records of its parts.
        version_by_source: The data version of every source, by its name.
        tool_name_by_lane: For each lane (a tool with its settings), the tool's name in the text.
        shown_settings: The values of settings that determine no rows, but are shown.

    Returns:
        The rows by the name of the table.
    """
    records_of_all_tables = chain.from_iterable(records_by_table.values())
    # Dicts with the columns of both LANES_TABLE and FILTER_RULES_TABLE.
    lane_rows = _build_lane_rows(records_by_table, tool_name_by_lane)
    setting_rows = _build_setting_rows(records_by_table, shown_settings)

    return {
        SOURCES_TABLE.name: pl.DataFrame(list(version_by_source.items()), SOURCES_TABLE.schema, orient="row"),
        REJECTIONS_TABLE.name: _sum_rejections(records_of_all_tables),
        # Of dicts, polars takes the columns of the schema and leaves out the others.
        LANES_TABLE.name: pl.DataFrame(lane_rows, LANES_TABLE.schema),
        FILTER_RULES_TABLE.name: pl.DataFrame(lane_rows, FILTER_RULES_TABLE.schema),
        SETTINGS_TABLE.name: pl.DataFrame(setting_rows, SETTINGS_TABLE.schema, orient="row"),
    }


def _build_setting_rows(records_by_table: RecordsByTable, shown_settings: Mapping[str, str]) -> list[SettingRow]:
    """Return a row per setting: those of no stage (`shown_settings`) first, then those of each table."""
    setting_rows = [
        SettingRow(stage=None, tool=None, setting=setting, value=value) for setting, value in shown_settings.items()
    ]
    for table_records in records_by_table.values():
        if table_records:  # parts of a table share their settings
            setting_rows += _build_setting_rows_of_record(table_records[0])
    return setting_rows


def _build_lane_rows(records_by_table: RecordsByTable, tool_name_by_lane: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row per lane (a tool with its settings): its key, tool, round and threshold.

    The threshold (see `get_filter_threshold`) is the one by which the published calls were filtered, even if the
    settings have changed since. It is missing if calls were not filtered yet.

    Args:
        records_by_table: For each lake table, the records of its parts.
        tool_name_by_lane: For each lane, the tool's name in the text.
    """
    lane_rows = []
    for lane_key, tool_name in tool_name_by_lane.items():
        lane_row: dict[str, Any] = {"tool": lane_key, "name": tool_name, "round": get_round_number(lane_key)}

        filter_records = records_by_table.get(f"{lane_key}/filtered_calls", ())
        if filter_records:
            lane_row |= get_filter_threshold(filter_records[0])

        lane_rows.append(lane_row)
    return lane_rows


def _sum_rejections(records: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """Add up the rejections in the records of all parts, as a row per stage, tool, shard and reason (REJECTIONS_TABLE).

    The stages for single calls and for chains have the same `stage` in their records, and are counted together.
    """
    count_by_key = Counter[RejectionKey]()
    for record in records:
        for rejection in record.get("rejections", []):
            key = RejectionKey(
                stage=record["stage"], tool=record["tool"], shard=rejection["shard"], reason=rejection["reason"]
            )
            count_by_key[key] += rejection["count"]

    rows = [(*key, count) for key, count in count_by_key.items()]
    return pl.DataFrame(rows, REJECTIONS_TABLE.schema, orient="row")


def _build_setting_rows_of_record(record: Mapping[str, Any]) -> list[SettingRow]:
    """Return a row per setting in a record. Nested settings get a dotted path, such as sampling.temperature -> "0.8".

    Values other than text are written as JSON. The fingerprint of the columns is left out.
    """
    setting_rows = []
    for setting_path, value in iter_flat_fields(record["settings"]):
        if setting_path == "columns":
            continue

        value_text = value if isinstance(value, str) else json.dumps(value)
        setting_rows.append(
            SettingRow(stage=record["stage"], tool=record["tool"], setting=setting_path, value=value_text)
        )
    return setting_rows


def get_filter_threshold(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the threshold tau_f (the least delta of a kept call) that a record of filtered_calls names.

    Returns:
        - `{"tau_f": 0.5}` if the settings have it as a number, and `{"tau_f": None}` if the record does not say it.
        - `{"tau_f": 0.7, "by_chance": 0.1, "verdict": ...}` if it was chosen so that at most a share of 0.1 of the
          kept calls is kept by chance (a false discovery rate). Then it is among the record's inputs.
    """
    threshold_by_chance: dict[str, Any] | None = record.get("inputs", {}).get(THRESHOLD_FIELD)
    if threshold_by_chance:
        return threshold_by_chance

    threshold_of_settings = record.get("settings", {}).get("tau_f")
    return {"tau_f": threshold_of_settings}
