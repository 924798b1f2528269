"""The warehouse as Parquet: every row and every comment, and the way back into DuckDB."""

import re
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from datasets import get_dataset_config_names, load_dataset

from tests.command_line import cli
from tests.runs.conftest import World
from toolformer_dag.exports.warehouse_export import export_warehouse

TABLES = "select table_name, comment from duckdb_tables() where not internal order by all"
COLUMNS = (
    "select table_name, column_name, data_type, comment from duckdb_columns() where not internal "
    "and table_name in (select table_name from duckdb_tables()) order by table_name, column_index"
)
VIEWS = "select view_name, comment from duckdb_views() where not internal order by all"


@pytest.fixture(scope="module")
def tables(exported_world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables") / "it's here"
    done = cli("export", str(folder), "--warehouse", "--config", str(exported_world.folder / "toolformer.toml"))
    assert done.returncode == 0, done.stderr
    return folder


def test_load_sql_gives_the_warehouse_back(
    tables: Path, exported_world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tables)
    with (
        duckdb.connect() as again,
        duckdb.connect(str(exported_world.folder / "lake" / "toolformer.duckdb"), read_only=True) as warehouse,
    ):
        again.execute((tables / "load.sql").read_text("utf-8"))
        for told in (TABLES, COLUMNS, VIEWS, "from filter_statistics", "from kept_at(0.1) order by all"):
            assert again.execute(told).fetchall() == warehouse.execute(told).fetchall()
        for [name] in warehouse.execute("select table_name from duckdb_tables() where not internal").fetchall():
            assert again.execute(f'from "{name}"').fetchall() == warehouse.execute(f'from "{name}"').fetchall(), name


def test_every_column_of_a_file_carries_its_comment(tables: Path, exported_world: World) -> None:
    for table, column, _, comment in exported_world.sql(COLUMNS):
        schema = pq.read_schema(tables / "data" / f"{table}-00000.parquet")
        assert schema.field(str(column)).metadata[b"comment"].decode() == comment
    for table, comment in exported_world.sql(TABLES):
        assert pq.read_schema(tables / "data" / f"{table}-00000.parquet").metadata[b"comment"].decode() == comment
        assert f"## {table}\n" in (tables / "README.md").read_text("utf-8")


def test_each_table_with_rows_is_a_config(tables: Path, exported_world: World) -> None:
    counts = {
        str(name): exported_world.sql(f'select count(*) from "{name}"')[0][0] for name, _ in exported_world.sql(TABLES)
    }
    assert set(get_dataset_config_names(str(tables))) == {name for name, count in counts.items() if count}
    assert load_dataset(str(tables), "decisions", split="train").num_rows == counts["decisions"]


def test_the_same_warehouse_gives_the_same_bytes_however_large(tmp_path: Path) -> None:
    database = tmp_path / "large.duckdb"
    with duckdb.connect(str(database)) as connection:
        connection.execute("create table numbers as select range as number, 'row ' || range as told from range(50_500)")
        connection.execute("create table empty (nothing integer)")
        connection.execute("create table sources (source varchar, version varchar)")
        connection.execute("comment on column numbers.number is 'a number; it''s counted'")
    made = [export_warehouse(database, tmp_path / name, "other", "") for name in ("one", "two", "one")]
    assert len({one.content_fingerprint for one in made}) == 1 and made[0].row_counts == {
        "empty": 0,
        "numbers": 50_500,
        "sources": 0,
    }
    parts = sorted((tmp_path / "one" / "data").glob("numbers-*"))
    assert [pq.read_metadata(part).num_rows for part in parts] == [20_000, 20_000, 10_500]
    assert pq.read_metadata(parts[2]).num_row_groups == 11
    assert [row for part in parts for row in pq.read_table(part)["number"].to_pylist()] == list(range(50_500))
    assert not re.search(r"config_name: (empty|sources)", (tmp_path / "one" / "README.md").read_text("utf-8"))
