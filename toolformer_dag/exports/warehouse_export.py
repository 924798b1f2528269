"""Export the warehouse as Parquet: every table with its comments, and the SQL that makes the warehouse again."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa

from toolformer_dag.exports.dataset_folder import (
    CARD,
    DATA,
    GROUP_ROWS,
    Exported,
    ParquetFiles,
    format_columns_table,
    header,
    refuse_foreign,
    replacing,
    write_record,
)
from toolformer_dag.lake.queries import quote_sql
from toolformer_dag.lake.warehouse import open_warehouse
from toolformer_dag.method.decision_sql import RULE

ABOUT = """\
The tables of a Toolformer run (Schick et al. 2023), with the comments of every column. Each table is a config:

```python
from datasets import load_dataset

decisions = load_dataset("FOLDER_OR_REPOSITORY", "decisions")
```

`duckdb warehouse.duckdb < load.sql` makes the warehouse again, with comments, views (`loss_deltas` is one) and macros.
`char_offset` and `offset` count Unicode characters.
"""
"""The beginning of the card."""
TITLE = "Toolformer: every proposed call, scored"
"""The name of the data set."""


def export_warehouse(database: Path, folder: Path, license: str, views: str) -> Exported:
    """Export the tables of the warehouse as a data set with a config per table, a card and a record.

    The comments of tables and columns are in the metadata of the Arrow schemas.

    Args:
        folder: The folder to be replaced.
        views: The SQL of the views, as `build_views_sql` returns it. It becomes a part of `load.sql`, which creates
            the warehouse again.

    Raises:
        WarehouseError: The warehouse cannot be read.
        ExportError: The folder holds something else than an export, or another export is writing to it.
        WriteError: A file cannot be written.
    """
    refuse_foreign(folder)
    with open_warehouse(database) as connection, replacing(folder) as fresh:
        tables = [_write_table(table, fresh) for table in iter_tables_to_export(connection)]
        (fresh / "load.sql").write_text(_build_load_sql(connection, tables, views), "utf-8")
        (fresh / CARD).write_text(_format_card(fresh, tables, license), "utf-8")

        row_counts = {table.name: table.rows for table in tables}
        made_from = {"settings": {"license": license}, "inputs": _query_versions(connection)}
        return write_record(fresh, row_counts, made_from)


class _WrittenTable(NamedTuple):
    """A table that was written as Parquet: its schema, with its comments as metadata, and the number of rows."""

    name: str
    schema: pa.Schema
    rows: int

    @property
    def comment(self) -> str:
        """The comment of the table."""
        return str(self.schema.metadata[b"comment"].decode())


def _build_load_sql(connection: duckdb.DuckDBPyConnection, tables: Sequence[_WrittenTable], views: str) -> str:
    """Return the SQL that makes the warehouse of the Parquet files: tables, macros, views, comments."""
    statements = [
        _build_load_statements(tables),
        views,
        *_build_view_comments(connection),
        *_build_view_column_comments(connection),
    ]
    return "\n".join(statements) + "\n"


def _query_versions(connection: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Return source -> version of what the warehouse was built from."""
    return dict(connection.execute("SELECT source, version FROM sources ORDER BY source").fetchall())


class ExportedTable(NamedTuple):
    """A table of the warehouse, to be written in another form.

    - `name`: its name
    - `schema`: its columns; comments are in the metadata (`comment`) of the fields, its own in that of the schema
    - `rows`: reads its rows in the order in which they are stored, in batches of GROUP_ROWS; can be read once
    """

    name: str
    schema: pa.Schema
    rows: Iterator[pa.RecordBatch]


def iter_tables_to_export(connection: duckdb.DuckDBPyConnection) -> Iterator[ExportedTable]:
    """Yield the tables of an opened warehouse, by name. Read the rows of one before the next."""
    query = "SELECT table_name, comment FROM duckdb_tables() WHERE NOT internal AND NOT temporary ORDER BY table_name"
    for name, comment in connection.execute(query).fetchall():
        schema = _query_schema(connection, name, comment)
        rows = connection.sql(f'FROM "{name}"').to_arrow_reader(GROUP_ROWS)
        yield ExportedTable(name, schema, rows)


def _query_schema(connection: duckdb.DuckDBPyConnection, name: str, comment: str) -> pa.Schema:
    """Return a table's schema, with its comments as metadata."""
    without_comments = connection.sql(f'FROM "{name}" LIMIT 0').to_arrow_table().schema
    query = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND NOT internal"
    comments = dict(connection.execute(query, [name]).fetchall())
    fields = [field.with_metadata({"comment": comments[field.name] or ""}) for field in without_comments]
    return pa.schema(fields, {"comment": comment or ""})


def _write_table(table: ExportedTable, folder: Path) -> _WrittenTable:
    """Write a table as Parquet files in `folder`/data."""
    files = ParquetFiles(folder / DATA, table.name, table.schema)
    for batch in table.rows:
        files.write(pa.Table.from_batches([batch]))
    files.close()
    return _WrittenTable(table.name, table.schema, files.rows)


def _build_load_statements(tables: Sequence[_WrittenTable]) -> str:
    """Return the SQL that makes the tables of the Parquet files, with their comments, and the macros."""
    lines = ["-- The warehouse, from these files: `duckdb warehouse.duckdb < load.sql`, in this folder.", ""]
    for table in tables:
        lines += _build_table_statements(table)
    return "\n".join(lines) + f"\n\nCREATE {RULE}\n"


def _build_table_statements(table: _WrittenTable) -> list[str]:
    """Return the SQL statements that make a table of its Parquet files, and give it and its columns their comments."""
    files = f"{DATA}/{table.name}-*.parquet"
    create = f"CREATE TABLE \"{table.name}\" AS FROM read_parquet('{files}');"
    comment = f'COMMENT ON TABLE "{table.name}" IS {quote_sql(table.comment)};'
    column_comments = [_build_column_comment(table.name, field) for field in table.schema]
    return [create, comment, *column_comments]


def _build_column_comment(table_name: str, field: pa.Field) -> str:
    """Return the SQL statement that gives a column its comment."""
    comment = field.metadata[b"comment"].decode()
    return f'COMMENT ON COLUMN "{table_name}"."{field.name}" IS {quote_sql(comment)};'


def _build_view_comments(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Return the SQL statements that give views their comments."""
    query = "SELECT view_name, comment FROM duckdb_views() WHERE NOT internal ORDER BY ALL"
    comments = connection.execute(query).fetchall()
    return [f'COMMENT ON VIEW "{view}" IS {quote_sql(comment)};' for view, comment in comments]


def _build_view_column_comments(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Return the SQL statements that give the columns of views their comments."""
    query = (
        "SELECT table_name, column_name, comment FROM duckdb_columns() WHERE NOT internal AND comment IS NOT NULL "
        "AND table_name IN (SELECT view_name FROM duckdb_views()) ORDER BY ALL"
    )
    comments = connection.execute(query).fetchall()
    return [f'COMMENT ON COLUMN "{view}"."{column}" IS {quote_sql(comment)};' for view, column, comment in comments]


def _format_card(folder: Path, tables: Sequence[_WrittenTable], license: str) -> str:
    """Return the card of a data set whose files in `folder` are written."""
    parts = [_format_yaml_header(folder, tables, license), f"# {TITLE}\n", ABOUT]
    for table in tables:
        parts += [f"## {table.name}\n", f"{table.comment} Rows: {table.rows:,}.\n", format_columns_table(table.schema)]
    parts += [
        "## Licence\n",
        f"`license: {license}` was set by whoever exported this data set. `documents` and `texts` hold web pages; who\n"
        "holds rights in them, and whether they may be passed on, is for whoever publishes or uses them to judge.\n",
    ]
    return "\n".join(parts)


def _format_yaml_header(folder: Path, tables: Sequence[_WrittenTable], license: str) -> str:
    """Return the YAML header of the card, in which each table with rows is a config."""
    configs = []
    for table in tables:
        if table.rows:
            configs.append({"config_name": table.name, "data_files": f"{DATA}/{table.name}-*.parquet"})
    return header(
        folder,
        title=TITLE,
        license=license,
        languages=[],
        rows=sum(table.rows for table in tables),
        configs=configs,
        task=None,
    )
