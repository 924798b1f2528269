"""Several processes at once, and a disk that is full."""

import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import query

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent
SCHEMA = {"key": pl.Int64, "value": pl.Int64}


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_writers_of_the_same_rows_and_parts_with_a_reader_beside_them(tmp_path: Path) -> None:
    writers = [start("together_child.py", tmp_path, seed) for seed in range(2)]
    database, answers = tmp_path / "warehouse.duckdb", 0
    while any(writer.poll() is None for writer in writers):
        if database.exists():
            calls = query(
                database, "SELECT shard, count(*) AS n, count(DISTINCT delta) AS d FROM loss_deltas GROUP BY 1"
            )
            assert set(calls["n"]) <= {5} and set(calls["d"]) <= {1}
            answers += 1
    assert [writer.wait() for writer in writers] == [0, 0], [writer.communicate()[1] for writer in writers]
    assert answers > 0
    written = [*range(10), *range(20, 30)]
    keys = pl.DataFrame({"key": written})
    rows = Lake(tmp_path).rows("calculator/losses", {"model": "m"}, ("key",), SCHEMA).stored(keys)
    assert sorted(rows.rows()) == [(key, 7 * key) for key in written]
    final = query(database, "SELECT shard, min(delta), max(delta) FROM loss_deltas GROUP BY shard ORDER BY shard")
    assert final.rows() == [("both", 9.0, 9.0), ("own 0", 9.0, 9.0), ("own 1", 9.0, 9.0)]


def test_a_full_disk_is_named_and_what_was_committed_stays(tmp_path: Path) -> None:
    lake, schema = Lake(tmp_path), {"key": pl.Int64, "text": pl.String}
    store, table = lake.rows("r", {"model": "m"}, ("key",), schema), lake.table("t")
    before = pl.DataFrame({"key": [1], "text": ["a"]}, schema=schema)
    store.append(before)
    table.publish("s", [before], dict)
    with start("full_disk_child.py", tmp_path) as child:
        told, errors = child.communicate()
    assert child.returncode == 0, errors
    assert told.count("cannot write") == 2 and told.count("run again") == 2
    assert table.read("s").equals(before)
    assert store.stored(pl.DataFrame({"key": [1, 2]})).equals(before)
    assert not list(tmp_path.rglob(".tmp-*"))
