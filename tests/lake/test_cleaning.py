"""What `clean` removes, and what it never does."""

import os
import time
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from toolformer_dag.lake.cleaning import clean_lake
from toolformer_dag.lake.record import STORES_FIELD
from toolformer_dag.lake.table import Lake, Table

DAY = timedelta(days=1)
"""A usual grace period."""
NOW = timedelta(seconds=-5)
"""A grace period that is over for everything."""
UNFINISHED = f".tmp-{'0' * 32}"
SCHEMA = {"a": pl.Int64}


def age(folder: Path, days: float = 2) -> None:
    then = time.time() - days * 86400
    for path in folder.rglob("*"):
        os.utime(path, (then, then))


def spoil(table: Table) -> None:
    """Flip a bit in the line of a table's only part."""
    content = bytearray(table.manifest_path.read_bytes())
    content[-9] ^= 1
    table.manifest_path.write_bytes(content)


def frame(*values: int) -> pl.DataFrame:
    return pl.DataFrame({"a": values}, schema=SCHEMA)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def test_replaced_files_go_and_current_ones_stay(lake: Lake, tmp_path: Path) -> None:
    table = lake.get_table("calculator/loss_deltas")
    table.publish("s", [frame(1)], dict)
    table.publish("gone", [frame(1)], dict)
    table.publish("s", [frame(2)], dict)
    table.withdraw_part("gone")
    told = clean_lake(lake, NOW, dry_run=True)
    assert [file.reason for file in told] == ["replaced", "replaced"]
    assert all(Path(file.path).stat().st_size == file.size_bytes > 0 for file in told)
    assert clean_lake(lake, NOW, dry_run=False) == told
    assert not any(Path(file.path).exists() for file in told)
    assert table.read_part("s").equals(frame(2))
    assert clean_lake(lake, NOW, dry_run=False) == []


def test_nothing_young_goes(lake: Lake) -> None:
    table = lake.get_table("t")
    table.publish("s", [frame(1)], dict)
    table.publish("s", [frame(2)], dict)
    (table.folder / UNFINISHED).write_bytes(b"x")
    lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA).append_rows(frame(1))
    assert clean_lake(lake, DAY, dry_run=False) == []


def test_unfinished_and_damaged_files_go(lake: Lake, tmp_path: Path) -> None:
    store = lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA)
    store.append_rows(frame(1))
    (store.folder / UNFINISHED).write_bytes(b"x")
    (store.folder / f"{UNFINISHED}.duckdb").write_bytes(b"x")
    (store.folder / f"{0:016x}-{0:032x}-1.parquet.damaged").write_bytes(b"x")
    age(tmp_path)
    lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA)
    assert sorted(file.reason for file in clean_lake(lake, DAY, dry_run=False)) == [
        "damaged",
        "unfinished",
        "unfinished",
    ]
    assert lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA).read_stored_rows(frame(1)).height == 1


@pytest.mark.parametrize(
    "file",
    [
        "wiki/files/0001/dump.jsonl",
        "agent/identity.json",
        "agent/private.pem",
        "0123456789abcdef/private.pem",
        "notes.damaged",
        ".tmp-draft.txt",
        "a-b-c-1.parquet",
    ],
)
def test_files_that_the_lake_did_not_write_stay(lake: Lake, tmp_path: Path, file: str) -> None:
    lake.get_table("t").publish("s", [frame(1)], dict)
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(b"x")
    (tmp_path / file).with_name("identity.json").write_bytes(b"{}")
    (tmp_path / "r" / "0123456789abcdef").mkdir(parents=True)
    (tmp_path / "r" / "0123456789abcdef" / "identity.json").write_bytes(b"{}")
    age(tmp_path)
    gone = [Path(one.path).relative_to(tmp_path) for one in clean_lake(lake, DAY, dry_run=False)]
    assert set(gone) - {Path("0123456789abcdef/identity.json")} == {Path("r/0123456789abcdef/identity.json")}
    assert (tmp_path / file).is_file()


def test_rows_stay_while_a_part_was_made_with_them(lake: Lake, tmp_path: Path) -> None:
    used, unused = (lake.open_row_store("r", {"model": model}, ("a",), SCHEMA) for model in (1, 2))
    for store in (used, unused):
        store.append_rows(frame(1))
    lake.get_table("t").publish("s", [frame(1)], lambda: {STORES_FIELD: [used.name]})
    age(tmp_path)
    gone = clean_lake(lake, DAY, dry_run=False)
    assert {Path(file.path).parent.name for file in gone} == {unused.folder.name}
    assert used.read_stored_rows(frame(1)).height == 1
    assert unused.read_stored_rows(frame(1)).is_empty()


def test_a_pointer_that_cannot_be_read_protects_everything_it_may_name(lake: Lake, tmp_path: Path) -> None:
    lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA).append_rows(frame(1))
    lake.get_table("t").publish("s", [frame(1)], dict)
    spoil(lake.get_table("t"))
    age(tmp_path)
    assert clean_lake(lake, DAY, dry_run=False) == []


def test_a_lake_that_is_not_there_has_nothing_to_remove(tmp_path: Path) -> None:
    assert clean_lake(Lake(tmp_path / "none"), DAY, dry_run=False) == []


def test_what_was_replaced_just_now_stays_however_old_it_is(lake: Lake, tmp_path: Path) -> None:
    table = lake.get_table("t")
    table.publish("s", [frame(1)], dict)
    age(tmp_path)
    reader = table.scan_parts(["s"])
    table.publish("s", [frame(2)], dict)
    assert clean_lake(lake, DAY, dry_run=False) == []
    assert reader.collect().equals(frame(1))
    assert [file.reason for file in clean_lake(lake, NOW, dry_run=False)] == ["replaced"]


def test_a_file_that_was_set_aside_just_now_stays(lake: Lake, tmp_path: Path) -> None:
    lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA).append_rows(frame(1))
    [part] = (tmp_path / "r").glob("*/*.parquet")
    part.write_bytes(b"")
    age(tmp_path)
    assert lake.open_row_store("r", {"model": 1}, ("a",), SCHEMA).read_stored_rows(frame(1)).is_empty()
    assert clean_lake(lake, DAY, dry_run=False) == []
    age(tmp_path)
    assert "damaged" in [file.reason for file in clean_lake(lake, DAY, dry_run=False)]
