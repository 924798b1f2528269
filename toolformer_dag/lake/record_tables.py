"""The rows of the warehouse's own tables, which follow from the records of the lake's parts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.lake.record import flat
from toolformer_dag.lake.warehouse_filling import FILTER_RULES, LANES, MADE_WITH, REJECTIONS, SOURCES
from toolformer_dag.settings.rounds import round_of

THRESHOLD = "threshold"
"""The field of the inputs of filtered_calls that holds a threshold by chance: tau_f, by_chance and verdict."""
PartRecord = Mapping[str, Any]
"""The record of a part: what it was made from, see record.py."""
Records = Mapping[str, Sequence[PartRecord]]
"""The records of the parts of each lake table, by its name, such as "calculator/loss_deltas"."""


class MadeWith(NamedTuple):
    """A row of the table `settings` (MADE_WITH): a setting with which the rows of a stage were made.

    `stage` and `tool` are null for settings that belong to no stage.
    """

    stage: str | None
    tool: str | None
    setting: str
    value: str


class RejectionKey(NamedTuple):
    """What is counted in the table `rejections` (REJECTIONS); `tool` is null for stages without lanes."""

    stage: str
    tool: str | None
    shard: str
    reason: str


def record_rows(
    records: Records, versions: Mapping[str, str], lanes: Mapping[str, str], named: Mapping[str, str]
) -> dict[str, pl.DataFrame]:
    """Return the rows of the warehouse's tables sources, rejections, lanes, filter_rules and settings, by table.

    records: those of every part that the warehouse reads.
    versions: the data version of every source, by its name.
    lanes: the key of each lane (a tool with its settings) -> the tool's name in the text.
    named: settings that determine no rows, but are shown, as name -> value.
    """
    filter_rules = _filter_rules(records, lanes)

    made_with = [MadeWith(stage=None, tool=None, setting=setting, value=value) for setting, value in named.items()]
    for table_records in records.values():
        if table_records:  # parts of a table share their settings
            made_with += _made_with(table_records[0])

    return {
        "sources": pl.DataFrame(list(versions.items()), SOURCES, orient="row"),
        "rejections": _rejections(chain.from_iterable(records.values())),
        "lanes": pl.DataFrame(filter_rules, LANES),
        "filter_rules": pl.DataFrame(filter_rules, FILTER_RULES),
        "settings": pl.DataFrame(made_with, MADE_WITH, orient="row"),
    }


def _filter_rules(records: Records, lanes: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row per lane: tool, name, round, and what its calls were filtered with (`filter_rule`).

    That is what the lane's records say, whatever the settings say by now. A lane whose calls were not filtered yet has
    no threshold.
    """
    rows = []
    for lane, tool_name in lanes.items():
        row: dict[str, Any] = {"tool": lane, "name": tool_name, "round": round_of(lane)}
        filter_records = records.get(f"{lane}/filtered_calls", ())
        if filter_records:
            row |= filter_rule(filter_records[0])
        rows.append(row)
    return rows


def _rejections(records: Iterable[PartRecord]) -> pl.DataFrame:
    """Return the rejections of all parts, with the columns REJECTIONS.

    Stages for single calls and for chains write the same `stage` into their records, and are counted together.
    """
    counts = Counter[RejectionKey]()
    for record in records:
        for counted in record.get("rejections", []):
            rejection = RejectionKey(
                stage=record["stage"], tool=record["tool"], shard=counted["shard"], reason=counted["reason"]
            )
            counts[rejection] += counted["count"]
    rows = [(*rejection, count) for rejection, count in counts.items()]
    return pl.DataFrame(rows, REJECTIONS, orient="row")


def _made_with(record: PartRecord) -> list[MadeWith]:
    """Return a row per setting of a record; values that are no text as JSON. The fingerprint of columns is left out."""
    rows = []
    for setting, value in flat(record["settings"]):
        if setting == "columns":
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append(MadeWith(stage=record["stage"], tool=record["tool"], setting=setting, value=text))
    return rows


def filter_rule(record: PartRecord) -> dict[str, Any]:
    """Return what a record of filtered_calls says of its threshold: `{"tau_f": 0.5}`.

    One that was chosen by chance comes with its fields `by_chance` and `verdict`. tau_f is None where the record does
    not say it.
    """
    by_chance: dict[str, Any] | None = record.get("inputs", {}).get(THRESHOLD)
    if by_chance:
        return by_chance
    return {"tau_f": record.get("settings", {}).get("tau_f")}
