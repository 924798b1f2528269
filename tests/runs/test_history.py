"""Dagster's history: what is damaged, or in its place, is named with the remedy; no row of the lake depends on it."""

import os
import re
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import dagster as dg
import pytest

from tests.command_line import cli
from tests.runs.conftest import World
from toolformer_dag.cli.project import open_shared_instance
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import Spent

GARBAGE = bytes(range(256)) * 100
HISTORY = r"error: Dagster's history cannot be used \(.+\); .+ move \.dagster or .+ away"


def told(world: World) -> str:
    """Call `run`, which fails; return its message."""
    done = cli("run", "--config", str(world.folder / "toolformer.toml"))
    assert done.returncode == 1 and "Traceback" not in done.stderr
    return done.stderr


def test_a_garbage_history_is_named_and_begins_anew(world: World) -> None:
    home = world.folder / ".dagster"
    for file in (home / "history/runs.db", home / "history/runs/index.db", home / "schedules/schedules.db"):
        whole = file.read_bytes()
        file.write_bytes(GARBAGE)
        assert re.match(HISTORY, told(world))
        file.write_bytes(whole)
    file.write_bytes(GARBAGE)
    shutil.move(home, world.folder / "away")
    report = world.run()
    assert report.spending == Spent()


DAMAGE = {
    "an event that is no JSON": (
        "runs/index.db",
        "update asset_keys set last_materialization = replace(last_materialization, ':', ';')",
    ),
    "an event of no class": (
        "runs/index.db",
        "update asset_keys set last_materialization = replace(last_materialization, 'Event', 'Evemt')",
    ),
    "a table without a name": (
        "runs.db",
        "pragma writable_schema = on; update sqlite_master set name = cast(x'ff' as text), sql = 'x' where rowid = 1",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_row_of_the_history_is_told_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    open_shared_instance(tmp_path).report_runless_asset_event(dg.AssetMaterialization("made"))
    file, sql = DAMAGE[case]
    with closing(sqlite3.connect(tmp_path / "home/history" / file)) as database, database:
        database.executescript(sql)

    def last(_: object) -> None:
        open_shared_instance(tmp_path).get_latest_materialization_event(dg.AssetKey("made"))

    monkeypatch.setattr(Plan, "from_settings_for_reading", last)
    done = cli("verify", "--set", "tools.calculator.k=1")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert re.match(HISTORY, done.stderr)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"nonsense: 1", b"[1, 2]"])
def test_a_garbage_instance_file_is_named(world: World, content: bytes) -> None:
    file = world.folder / ".dagster" / "dagster.yaml"
    file.write_bytes(content)
    assert told(world).startswith(f"error: {file} cannot be used (")
    file.unlink()
    assert world.project().list_stale_assets() == {}


def test_a_home_that_is_a_file_or_not_utf_8_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    file = world.folder / "a file"
    file.touch()
    monkeypatch.setenv("DAGSTER_HOME", str(file))
    assert f"error: {file}: File exists; name a folder" in told(world)
    monkeypatch.setenv("DAGSTER_HOME", os.fsdecode(bytes(world.folder) + b"/\xff"))
    assert "the path is not UTF-8; set DAGSTER_HOME to another folder" in told(world)
