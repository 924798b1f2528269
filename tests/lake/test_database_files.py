"""A DuckDB file is whole or the old one, also where the disk takes no more."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import polars as pl
import pytest

from toolformer_dag.files import WriteError
from toolformer_dag.lake.database_files import replace_database
from toolformer_dag.lake.warehouse import query

ROWS = pl.DataFrame({"text": [f"text {number}" for number in range(300)]})


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes: DuckDB meets it as it meets a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write(database: Path) -> None:
    with replace_database(database) as connection:
        connection.register("frame", ROWS.to_arrow())
        connection.execute("CREATE TABLE texts AS FROM frame")


def test_a_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    database = tmp_path / "folder" / "texts.duckdb"
    for _ in range(2):
        write(database)
        assert query(database, "SELECT count(*) FROM texts").item() == 300
        assert list(database.parent.iterdir()) == [database]


# The log of 300 rows has 4 KB and the file 268 KB: with 200 KB the rows fit into the log alone.
@pytest.mark.parametrize("size", [0, 1_000, 200_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, size: int) -> None:
    database = tmp_path / "texts.duckdb"
    write(database)
    before = database.read_bytes()
    with files_of_at_most(size), pytest.raises(WriteError, match=r"cannot write .*texts\.duckdb: .*; free space"):
        write(database)
    assert database.read_bytes() == before
    assert list(tmp_path.iterdir()) == [database]


def test_an_error_in_the_block_is_raised_as_it_is_and_the_old_file_stays(tmp_path: Path) -> None:
    database = tmp_path / "texts.duckdb"
    write(database)
    before = database.read_bytes()
    with pytest.raises(duckdb.CatalogException), replace_database(database) as connection:
        connection.execute("FROM nowhere")
    assert database.read_bytes() == before
    assert list(tmp_path.iterdir()) == [database]
