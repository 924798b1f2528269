"""Export the warehouse as Parquet: every table with its comments, and the SQL that makes the warehouse again."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa

from toolformer_dag.exports.dataset_folder import (
    CARD_FILE_NAME,
    DATA_FOLDER_NAME,
    ROWS_PER_GROUP,
    ExportRecord,
    ParquetFiles,
    build_yaml_header,
    format_columns_table,
    open_replacement_folder,
    refuse_foreign_content,
    write_export_record,
)
from toolformer_dag.lake.queries import quote_sql
from toolformer_dag.lake.warehouse import open_warehouse
from toolformer_dag.method.decision_sql import KEEP_RULE_SQL

CARD_INTRODUCTION = """\
The tables of a Toolformer run (Schick et al. 2023), with the comments of every column. Each table is a config:

```python
from datasets import load_dataset

decisions = load_dataset("FOLDER_OR_REPOSITORY", "decisions")
```

`duckdb warehouse.duckdb < load.sql` makes the warehouse again, with comments, views (`loss_deltas` is one) and macros.
`char_offset` and `offset` count Unicode characters.
"""
"""The beginning of the card."""
DATASET_TITLE = "Toolformer: every proposed call, scored"
"""The name of the data set."""


def export_warehouse(database: Path, folder: Path, license: str, views_sql: str) -> ExportRecord:
    """Export the tables of the warehouse as a data set with a config per table, a card and a record.

    The comments of tables and columns are in the metadata of the Arrow schemas.

    Args:
        database: The file of the warehouse.
        folder: The folder to be replaced.
        license: The license of the data set, as the Hugging Face hub names it.
        views_sql: The SQL of the views, as `build_views_sql` returns it. It becomes a part of `load.sql`, which creates
            the warehouse again.

    Raises:
        WarehouseError: The warehouse cannot be read.
        ExportError: The folder holds something else than an export, or another export is writing to it.
        WriteError: A file cannot be written.
    """
    refuse_foreign_content(folder)
    with open_warehouse(database) as connection, open_replacement_folder(folder) as new_folder:
        written_tables = [_write_table(table, new_folder) for table in iter_tables_to_export(connection)]

        load_sql = _build_load_sql(connection, written_tables, views_sql)
        (new_folder / "load.sql").write_text(load_sql, "utf-8")

        card = _format_card(new_folder, written_tables, license)
        (new_folder / CARD_FILE_NAME).write_text(card, "utf-8")

        row_counts = {table.name: table.row_count for table in written_tables}
        made_from = {"settings": {"license": license}, "inputs": _query_source_versions(connection)}
        return write_export_record(new_folder, row_counts, made_from)


class _WrittenTable(NamedTuple):
    """A table that was written as Parquet: its schema, with its comments as metadata, and the number of rows."""

    name: str
    schema: pa.Schema
    row_count: int

    @property
    def comment(self) -> str:
        """The comment of the table."""
        return str(self.schema.metadata[b"comment"].decode())


def _build_load_sql(connection: duckdb.DuckDBPyConnection, tables: Sequence[_WrittenTable], views_sql: str) -> str:
    """Build the SQL that makes the warehouse again from the Parquet files: tables, macros, views, comments.

    Args:
        connection: An opened warehouse, from which the comments of views are read.
        tables: The tables that were written as Parquet files.
        views_sql: The SQL of the views.
    """
    statements = [
        _build_load_tables_sql(tables),
        views_sql,
        *_build_view_comment_statements(connection),
        *_build_view_column_comment_statements(connection),
    ]
    return "\n".join(statements) + "\n"


def _query_source_versions(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Query the version of each source from which the warehouse was built, by the source's name."""
    rows = connection.execute("SELECT source, version FROM sources ORDER BY source").fetchall()
    return dict(rows)


class ExportedTable(NamedTuple):
    """A table of the warehouse, to be written in another form.

    Attributes:
        name: The name of the table.
        schema: Its columns. The `comment` of a column is in the field's metadata, that of the table in the schema's.
        row_batches: Reads the rows in the order in which they are stored, in batches of ROWS_PER_GROUP. It can be read
            only once.
    """

    name: str
    schema: pa.Schema
    row_batches: Iterator[pa.RecordBatch]


def iter_tables_to_export(connection: duckdb.DuckDBPyConnection) -> Iterator[ExportedTable]:
    """Yield the tables of an opened warehouse, sorted by name.

    The rows of a table have to be read before the next table is taken.
    """
    query = "SELECT table_name, comment FROM duckdb_tables() WHERE NOT internal AND NOT temporary ORDER BY table_name"
    for name, comment in connection.execute(query).fetchall():
        schema = _query_schema(connection, name, comment)
        row_batches = connection.sql(f'FROM "{name}"').to_arrow_reader(ROWS_PER_GROUP)
        yield ExportedTable(name, schema, row_batches)


def _query_schema(connection: duckdb.DuckDBPyConnection, table_name: str, table_comment: str) -> pa.Schema:
    """Query the schema of a table, with the comments of the table and its columns as metadata."""
    schema_without_comments = connection.sql(f'FROM "{table_name}" LIMIT 0').to_arrow_table().schema

    query = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND NOT internal"
    comment_by_column = dict(connection.execute(query, [table_name]).fetchall())

    fields = []
    for field in schema_without_comments:
        comment = comment_by_column[field.name] or ""
        fields.append(field.with_metadata({"comment": comment}))
    return pa.schema(fields, {"comment": table_comment or ""})


def _write_table(table: ExportedTable, folder: Path) -> _WrittenTable:
    """Write a table as Parquet files in the subfolder `data` of a folder."""
    files = ParquetFiles(folder / DATA_FOLDER_NAME, table.name, table.schema)
    for batch in table.row_batches:
        files.write_rows(pa.Table.from_batches([batch]))
    files.close()
    return _WrittenTable(table.name, table.schema, files.written_row_count)


def _build_load_tables_sql(tables: Sequence[_WrittenTable]) -> str:
    """Build the SQL that makes the tables again from their Parquet files, with comments, and then the macro."""
    lines = ["-- The warehouse, from these files: `duckdb warehouse.duckdb < load.sql`, in this folder.", ""]
    for table in tables:
        lines += _build_table_statements(table)
    return "\n".join(lines) + f"\n\nCREATE {KEEP_RULE_SQL}\n"


def _build_table_statements(table: _WrittenTable) -> list[str]:
    """Build the SQL statements that make a table from its Parquet files, and set the comments of it and its columns."""
    files = f"{DATA_FOLDER_NAME}/{table.name}-*.parquet"
    create = f"CREATE TABLE \"{table.name}\" AS FROM read_parquet('{files}');"
    comment = f'COMMENT ON TABLE "{table.name}" IS {quote_sql(table.comment)};'
    column_comments = [_build_column_comment_statement(table.name, field) for field in table.schema]
    return [create, comment, *column_comments]


def _build_column_comment_statement(table_name: str, field: pa.Field) -> str:
    """Build the SQL statement that sets the comment of a column."""
    comment = field.metadata[b"comment"].decode()
    return f'COMMENT ON COLUMN "{table_name}"."{field.name}" IS {quote_sql(comment)};'


def _build_view_comment_statements(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Build the SQL statements that set the comments of the views."""
    query = "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
    comments = connection.execute(query).fetchall()
    return [f'COMMENT ON VIEW "{view}" IS {quote_sql(comment)};' for view, comment in comments]


def _build_view_column_comment_statements(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Build the SQL statements that set the comments of the views' columns."""
    query = (
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal AND comment IS NOT NULL "
        "AND table_name IN (SELECT view_name FROM duckdb_views()) ORDER BY ALL"
    )
    comments = connection.execute(query).fetchall()
    return [f'COMMENT ON COLUMN "{view}"."{column}" IS {quote_sql(comment)};' for view, column, comment in comments]


def _format_card(folder: Path, tables: Sequence[_WrittenTable], license: str) -> str:
    """Format the card of the data set: a YAML header, an introduction, each table with its columns, and the license.

    Args:
        folder: The folder of the data set, whose data files are written already.
        tables: The tables that were written.
        license: The license of the data set, as the Hugging Face hub names it.
    """
    parts = [_format_yaml_header(folder, tables, license), f"# {DATASET_TITLE}\n", CARD_INTRODUCTION]
    for table in tables:
        parts += [
            f"## {table.name}\n",
            f"{table.comment} Rows: {table.row_count:,}.\n",
            format_columns_table(table.schema),
        ]
    parts += [
        "## Licence\n",
        f"`license: {license}` was set by whoever exported this data set. `documents` and `texts` hold web pages; who\n"
        "holds rights in them, and whether they may be passed on, is for whoever publishes or uses them to judge.\n",
    ]
    return "\n".join(parts)


def _format_yaml_header(folder: Path, tables: Sequence[_WrittenTable], license: str) -> str:
    """Format the YAML header of the card, which tells the hub the license, the size and the files of the data set.

    Each table with rows is a configuration of its own.
    """
    configs = []
    for table in tables:
        if table.row_count:
            data_files = f"{DATA_FOLDER_NAME}/{table.name}-*.parquet"
            configs.append({"config_name": table.name, "data_files": data_files})

    return build_yaml_header(
        folder,
        title=DATASET_TITLE,
        license=license,
        languages=[],
        row_count=sum(table.row_count for table in tables),
        configs=configs,
        task_category=None,
    )
