"""Declare the warehouse of a run, which the lake builds: the tables of the stages, and what follows from their rows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.warehouse_building import FilesByTable, RecordsByTable
from toolformer_dag.lake.warehouse_table import WarehouseTable
from toolformer_dag.method.decision_sql import JUDGED_VIEW_SQL, KEEP_RULE_SQL, SWAPPED_PLACES_SQL
from toolformer_dag.method.record_tables import RECORD_TABLES, build_record_rows, get_filter_threshold
from toolformer_dag.method.scoring import SCORING_SQL, list_lanes_reading_cost
from toolformer_dag.method.warehouse_filling import CURVES_TABLE_SQL, DECISIONS_TABLE_SQL, VERDICTS_VIEW_SQL, fill
from toolformer_dag.method.warehouse_views import build_views_sql, has_costs


@dataclass(frozen=True)
class CallWarehouse:
    """The declaration of a run's warehouse: every scored call with its verdict, the tables it comes from, and views.

    It is a `DeclaredWarehouse`, from which the lake builds the DuckDB file.

    Attributes:
        tables: The tables that are filled with rows of the lake, such as those of `build_warehouse_tables(outputs)`.
        tool_name_by_lane: For each lane (a tool with its settings), the tool's name in the text.
        shown_settings: Settings that determine nothing, such as the model's name, for the table of settings.
    """

    tables: Sequence[WarehouseTable]
    tool_name_by_lane: Mapping[str, str]
    shown_settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """What determines the file besides the lake's rows. After a change, the file is built from nothing."""
        deciding_sql = (
            KEEP_RULE_SQL
            + JUDGED_VIEW_SQL
            + VERDICTS_VIEW_SQL
            + DECISIONS_TABLE_SQL
            + SWAPPED_PLACES_SQL
            + CURVES_TABLE_SQL
        )
        return {
            "lanes": dict(self.tool_name_by_lane),
            "tables": fingerprint(self._collect_table_declarations()),
            "views": fingerprint(deciding_sql + build_views_sql(self.tables)),
        }

    def _collect_table_declarations(self) -> dict[str, dict[str, object]]:
        """Return what declares each table, by its name: its columns, comments and queries.

        If any of it changes, the warehouse file is built from nothing. A table with a score other than the paper's also
        has the SQL of that score.
        """
        declaration_by_table: dict[str, dict[str, object]] = {}
        for table in (*self.tables, *RECORD_TABLES):
            declaration = dict(table.list_determining_values())
            if table.score_sql_by_lane:
                declaration |= {"scores": dict(table.score_sql_by_lane), "score_sql": SCORING_SQL}
            declaration_by_table[table.name] = declaration
        return declaration_by_table

    @property
    def tables_versioned_by_file(self) -> list[WarehouseTable]:
        """The tables whose files count as their version, because the usual version does not cover costs.

        They are the tables of results if a score reads what calls cost; else there are none.
        """
        reads_costs = any(list_lanes_reading_cost(table.score_sql_by_lane) for table in self.tables)
        if not reads_costs:
            return []
        return [table for table in self.tables if has_costs(table)]

    def get_applied_settings(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the threshold with which a part was made. In parts of other stages than the filter, tau_f is None."""
        return get_filter_threshold(record)

    def build_record_rows(
        self, records_by_table: RecordsByTable, versions_by_source: Mapping[str, str]
    ) -> dict[str, pl.DataFrame]:
        """Return the rows of those tables that follow from records, not from the rows of the lake.

        A record says what a part of a lake table was made from.

        Args:
            records_by_table: For each lake table, the records of its parts.
            versions_by_source: The data version of every source.

        Returns:
            The rows by the name of the table.
        """
        return build_record_rows(records_by_table, versions_by_source, self.tool_name_by_lane, self.shown_settings)

    def fill_database(
        self,
        database_path: Path,
        spill_folder: Path,
        files_by_table: FilesByTable,
        changed_shards: Collection[str] | None,
    ) -> dict[str, int]:
        """Write a new file, or replace the rows of some shards in a copy of the last file.

        Args:
            database_path: A new file, or a copy of the last one.
            spill_folder: A folder for data that does not fit into memory.
            files_by_table: The Parquet files of each table.
            changed_shards: The shards whose rows are replaced in the copy. None for a new file.

        Returns:
            The number of rows of each table.
        """
        return fill(database_path, spill_folder, (*self.tables, *RECORD_TABLES), files_by_table, changed_shards)
