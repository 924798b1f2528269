"""Any failure can be played again: schedules of runs, kills and failing stores that follow from a seed."""

import os
import subprocess
import sys
from contextvars import Context
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from tests.simulated_runs import Wrong, replayed
from toolformer_dag.files import StorageError
from toolformer_dag.lake.cleaning import clean
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.session import Session, session
from toolformer_dag.lake.storage import Storage, Version
from toolformer_dag.lake.table import Lake, MissingPart
from toolformer_dag.lake.verification import checked_files


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
    [(ObjectStorage, "first_wins", False), (Session, "settle", lambda session, in_order=False: None)],
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

    def manifest(self, path: Path, anew: bool = False) -> tuple[bytes, Version]:
        try:
            return super().manifest(path, anew)
        except FileNotFoundError:
            path.with_name("held").rename(path)
            raise

    def read(self, path: Path) -> tuple[bytes, Version]:
        path.unlink()
        return super().read(path)


def test_verify_names_nothing_that_a_first_run_writes_or_clean_removes_meanwhile(tmp_path: Path) -> None:
    """Found by schedules."""
    lake = Lake(tmp_path)
    lake.table("a/b").publish("s", [pl.DataFrame({"n": [1]})], dict)
    lake.rows("a/rows", {"model": "m"}, ["n"], {"n": pl.Int64()})
    lake.table("a/b").path.rename(lake.table("a/b").path.with_name("held"))
    assert [one for one in checked_files(Lake(tmp_path, Beside(tmp_path))) if one.reason] == []
    assert [one.reason for one in checked_files(lake)] == [None, None]


def test_a_part_that_was_withdrawn_and_cleaned_away_is_not_called_damaged(tmp_path: Path) -> None:
    """Found by schedules."""
    lake, other = Lake(tmp_path), Lake(tmp_path)
    for part in ("s", "t"):
        lake.table("a/b").publish(part, [pl.DataFrame({"n": [1]})], dict)
    with session():
        table = lake.table("a/b")
        assert table.parts() == ["s", "t"]
        Context().run(lambda: (other.table("a/b").remove("s"), clean(other, timedelta(0), dry_run=False)))
        found = list(table.checked_files("s"))
        with pytest.raises(MissingPart):
            table.read("s")
    assert (found, [one.reason for one in checked_files(other)]) == ([], [None, None])
