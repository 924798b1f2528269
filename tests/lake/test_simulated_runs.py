"""Failing stores, schedules of runs and kills that follow from a seed, and several processes at once on a full disk."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextvars import Context
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from tests.simulated_runs import Wrong, replayed
from toolformer_dag.computing.spending import COSTS_TABLE, StepCost, add_cost
from toolformer_dag.files import StorageError
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.cleaning import clean_lake
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.session import LakeSession, enter_session
from toolformer_dag.lake.storage import Storage, StoredFile, Version, WriteConflict
from toolformer_dag.lake.table import Lake, MissingPart
from toolformer_dag.lake.verification import iter_checked_files
from toolformer_dag.lake.warehouse import query


@pytest.mark.long
def test_200_schedules_end_with_the_tables_of_an_undisturbed_run() -> None:
    command = [sys.executable, "-m", "tests.simulated_runs", "--seeds", "200"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_plays_the_same_schedule_again(tmp_path: Path) -> None:
    once, again, other = (replayed(seed, tmp_path) for seed in (1, 1, 2))
    assert once == again != other


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(ObjectStorage, "first_wins", False), (LakeSession, "settle", lambda session, in_order=False: None)],
)
def test_a_lake_that_loses_something_fails_by_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, value: object
) -> None:
    """Two writers of a part both win; a manifest names files that the store does not have yet."""
    monkeypatch.setattr(owner, name, value)
    with pytest.raises((Wrong, StorageError)) as error:
        for seed in range(200):
            replayed(seed, tmp_path)
    assert "again: python -m tests.simulated_runs --seeds 1 --first" in error.value.__notes__[-1]


class Beside(Storage):
    """A folder in which another process writes a manifest, or removes stored rows, while `verify` looks."""

    def manifest(self, path: Path, bypass_cache: bool = False) -> tuple[bytes, Version]:
        try:
            return super().manifest(path, bypass_cache)
        except FileNotFoundError:
            path.with_name("held").rename(path)
            raise

    def read(self, path: Path) -> tuple[bytes, Version]:
        path.unlink()
        return super().read(path)


def test_verify_names_nothing_that_a_first_run_writes_or_clean_removes_meanwhile(tmp_path: Path) -> None:
    """Found by schedules."""
    lake = Lake(tmp_path)
    lake.get_table("a/b").publish("s", [pl.DataFrame({"n": [1]})], dict)
    lake.open_row_store("a/rows", {"model": "m"}, ["n"], {"n": pl.Int64()})
    lake.get_table("a/b").manifest_path.rename(lake.get_table("a/b").manifest_path.with_name("held"))
    assert [one for one in iter_checked_files(Lake(tmp_path, Beside(tmp_path))) if one.reason] == []
    assert [one.reason for one in iter_checked_files(lake)] == [None, None]


def test_a_part_that_was_withdrawn_and_cleaned_away_is_not_called_damaged(tmp_path: Path) -> None:
    """Found by schedules."""
    lake = Lake(tmp_path)
    other = Lake(tmp_path)
    for part in ("s", "t"):
        lake.get_table("a/b").publish(part, [pl.DataFrame({"n": [1]})], dict)
    with enter_session():
        table = lake.get_table("a/b")
        assert table.list_part_names() == ["s", "t"]
        Context().run(
            lambda: (other.get_table("a/b").withdraw_part("s"), clean_lake(other, timedelta(0), dry_run=False))
        )
        found = list(table.iter_checked_files("s"))
        with pytest.raises(MissingPart):
            table.read_part("s")
    assert (found, [one.reason for one in iter_checked_files(other)]) == ([], [None, None])


class Opening(Storage):
    """A folder in which a run opens stored rows as soon as `clean` has listed them."""

    def iter_files(self, include_all_parts: bool = True) -> Iterator[StoredFile]:
        yield from list(super().iter_files(include_all_parts))
        os.utime(self.root / f"a/rows/{fingerprint({'model': 'm'})}/identity.json")


def test_clean_leaves_stored_rows_that_a_run_has_opened_since_it_looked(tmp_path: Path) -> None:
    """Found by schedules."""
    rows = pl.DataFrame({"n": [1]})
    lake = Lake(tmp_path)
    lake.open_row_store("a/rows", {"model": "m"}, ["n"], {"n": pl.Int64()}).append_rows(rows)
    for path in tmp_path.rglob("*.*"):
        os.utime(path, (0, 0))
    assert clean_lake(Lake(tmp_path, Opening(tmp_path)), timedelta(hours=1), dry_run=False) == []
    assert lake.open_row_store("a/rows", {"model": "m"}, ["n"], {"n": pl.Int64()}).read_stored_rows(rows).equals(rows)


class Answerless(Storage):
    """A store that loses the answer to a put: the client asks again, and is told that others were faster."""

    first_wins = True
    lost = False

    def another_row(self) -> None:
        table = Lake(self.root).get_table(COSTS_TABLE)
        rows = table.read_part("a/b")
        table.publish("a/b", [pl.concat([rows.with_columns(run=pl.lit("other")), rows])], dict)

    def replace_manifest(self, path: Path, content: bytes, expected_version: Version) -> Version:
        version = super().replace_manifest(path, content, expected_version)
        if self.lost:
            return version
        self.lost = True
        Context().run(self.another_row)
        raise WriteConflict(path.name)


def test_a_cost_whose_put_had_no_answer_is_counted_once(tmp_path: Path) -> None:
    """Found by schedules."""
    add_cost(Lake(tmp_path, Answerless(tmp_path)), "run", "a/b", StepCost(1.0))
    assert sorted(Lake(tmp_path).get_table(COSTS_TABLE).read_part("a/b")["run"]) == ["other", "run"]


FOLDER = Path(__file__).parent
SCHEMA = {"key": pl.Int64, "value": pl.Int64}


def start(script: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_writers_of_the_same_rows_and_parts_with_a_reader_beside_them(tmp_path: Path) -> None:
    writers = [start("together_child.py", tmp_path, seed) for seed in range(2)]
    database = tmp_path / "warehouse.duckdb"
    answers = 0
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
    rows = Lake(tmp_path).open_row_store("calculator/losses", {"model": "m"}, ("key",), SCHEMA).read_stored_rows(keys)
    assert sorted(rows.rows()) == [(key, 7 * key) for key in written]
    final = query(database, "SELECT shard, min(delta), max(delta) FROM loss_deltas GROUP BY shard ORDER BY shard")
    assert final.rows() == [("both", 9.0, 9.0), ("own 0", 9.0, 9.0), ("own 1", 9.0, 9.0)]


@pytest.mark.long
def test_a_full_disk_is_named_and_what_was_committed_stays(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    schema = {"key": pl.Int64, "text": pl.String}
    store = lake.open_row_store("r", {"model": "m"}, ("key",), schema)
    table = lake.get_table("t")
    before = pl.DataFrame({"key": [1], "text": ["a"]}, schema=schema)
    store.append_rows(before)
    table.publish("s", [before], dict)
    with start("full_disk_child.py", tmp_path) as child:
        told, errors = child.communicate()
    assert child.returncode == 0, errors
    assert told.count("cannot write") == 2 and told.count("run again") == 2
    assert table.read_part("s").equals(before)
    assert store.read_stored_rows(pl.DataFrame({"key": [1, 2]})).equals(before)
    assert not list(tmp_path.rglob(".tmp-*"))
