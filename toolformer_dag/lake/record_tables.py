"""The rows of the warehouse's own tables, which follow from the records of the lake's parts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from toolformer_dag.lake.record import flat
from toolformer_dag.lake.warehouse_filling import FILTER_RULES, LANES, MADE_WITH, REJECTIONS, SOURCES
from toolformer_dag.settings.rounds import round_of

THRESHOLD = "threshold"
"""The field of the inputs of filtered_calls that holds a threshold by chance: tau_f, by_chance and verdict."""
Records = Mapping[str, Sequence[Mapping[str, Any]]]
"""By lake table the records of its parts."""


def record_rows(
    records: Records, versions: Mapping[str, str], lanes: Mapping[str, str], named: Mapping[str, str]
) -> dict[str, pl.DataFrame]:
    """Return the rows by table.

    `versions`: of every source; `lanes`: key -> name of the tool in the text; `named`: settings that determine nothing.
    """
    # what each lane's calls were filtered with, whatever the settings say by now
    applied = [
        {
            "tool": lane,
            "name": name,
            "round": round_of(lane),
            **next(map(filter_rule, records.get(f"{lane}/filtered_calls", ())), {}),
        }
        for lane, name in lanes.items()
    ]
    made_with: list[tuple[str | None, str | None, str, str]] = [(None, None, *one) for one in named.items()]
    made_with += _made_with(made[0] for made in records.values() if made)
    return {
        "sources": pl.DataFrame(list(versions.items()), SOURCES, orient="row"),
        "rejections": _rejections(record for made in records.values() for record in made),
        "lanes": pl.DataFrame(applied, LANES),
        "filter_rules": pl.DataFrame(applied, FILTER_RULES),
        "settings": pl.DataFrame(made_with, MADE_WITH, orient="row"),
    }


def _rejections(records: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
    """REJECTIONS; those of single calls and of chains together."""
    counts = Counter[tuple[str, str | None, str, str]]()
    for record in records:
        for one in record.get("rejections", []):
            counts[record["stage"], record["tool"], one["shard"], one["reason"]] += one["count"]
    return pl.DataFrame([(*key, count) for key, count in counts.items()], REJECTIONS, orient="row")


def _made_with(records: Iterable[Mapping[str, Any]]) -> list[tuple[str | None, str | None, str, str]]:
    """(stage, tool, setting, value) of the first part of each table, whose settings the others share."""
    return [
        (record["stage"], record["tool"], setting, value if isinstance(value, str) else json.dumps(value))
        for record in records
        for setting, value in flat(record["settings"])
        if setting != "columns"
    ]


def filter_rule(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the threshold of a record of filtered_calls: of the settings, or chosen by chance."""
    by_chance: dict[str, Any] | None = record.get("inputs", {}).get(THRESHOLD)
    return by_chance or {"tau_f": record.get("settings", {}).get("tau_f")}
