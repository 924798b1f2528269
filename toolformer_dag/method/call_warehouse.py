"""Declare the warehouse of a run, which the lake builds: the tables of the stages, and what follows from their rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.warehouse_building import PartFiles, Records
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decision_sql import JUDGED, RULE, SWAPPED_PLACES
from toolformer_dag.method.record_tables import RECORD_TABLES, filter_rule, record_rows
from toolformer_dag.method.scoring import IDENTITY, list_lanes_reading_cost
from toolformer_dag.method.warehouse_filling import CURVES, DECISIONS, VERDICTS, fill
from toolformer_dag.method.warehouse_views import build_views_sql, has_costs


@dataclass(frozen=True)
class CallWarehouse:
    """Every scored call with its verdict, the tables it comes from, and views over them (a `DeclaredWarehouse`).

    tables: the tables that are filled with rows of the lake, such as `warehouse_tables(outputs)`.
    lanes: key of the lane -> name of its tool in the text.
    named: settings that determine nothing, such as the model's name, for the table of settings.

        build(plan.lake, CallWarehouse(tables, plan.lane_names), database)
    """

    tables: Sequence[WarehouseTable]
    lanes: Mapping[str, str]
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """Return what determines the file beside the lake's rows; a change builds the file from nothing."""
        deciding_sql = RULE + JUDGED + VERDICTS + DECISIONS + SWAPPED_PLACES + CURVES
        return {
            "lanes": dict(self.lanes),
            "tables": fingerprint(self._collect_declared_tables()),
            "views": fingerprint(deciding_sql + build_views_sql(self.tables)),
        }

    def _collect_declared_tables(self) -> dict[str, dict[str, object]]:
        """Return columns, comments and queries of every table, and the SQL of a score other than the paper's."""
        declared: dict[str, dict[str, object]] = {}
        for table in (*self.tables, *RECORD_TABLES):
            declared[table.name] = dict(table.determining())
            if table.scores:
                declared[table.name] |= {"scores": dict(table.scores), "score_sql": IDENTITY}
        return declared

    @property
    def tables_by_file(self) -> list[WarehouseTable]:
        """The tables whose files count as their version: results, if a score reads costs, which no version covers."""
        if not any(list_lanes_reading_cost(table.scores) for table in self.tables):
            return []
        return [table for table in self.tables if has_costs(table)]

    def applied(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the threshold that a part was made with; tau_f is null for parts of other stages than the filter."""
        return filter_rule(record)

    def record_rows(self, records: Records, versions: Mapping[str, str]) -> dict[str, pl.DataFrame]:
        """Return the rows of the tables that follow from records. `versions`: the data version of every source."""
        return record_rows(records, versions, self.lanes, self.named)

    def fill(self, file: Path, folder: Path, files: PartFiles, shards: Collection[str] | None) -> dict[str, int]:
        """Write a new file, or replace the rows of `shards` in a copy; see `warehouse_filling.fill`."""
        return fill(file, folder, (*self.tables, *RECORD_TABLES), files, shards)
