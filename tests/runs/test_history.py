"""Dagster's history: what is damaged, or in its place, is named with the remedy; no row of the lake depends on it."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.command_line import cli
from tests.runs.conftest import World
from toolformer_dag.pipeline.spending import Spent

GARBAGE = bytes(range(256)) * 100


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
        assert re.match(r"error: Dagster's history cannot be used \(.+\); .+ move \.dagster or .+ away", told(world))
        file.write_bytes(whole)
    file.write_bytes(GARBAGE)
    shutil.move(home, world.folder / "away")
    report = world.run()
    assert report.spent == Spent()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a: [", b"nonsense: 1", b"[1, 2]"])
def test_a_garbage_instance_file_is_named(world: World, content: bytes) -> None:
    file = world.folder / ".dagster" / "dagster.yaml"
    file.write_bytes(content)
    assert told(world).startswith(f"error: {file} cannot be used (")
    file.unlink()
    assert world.project().stale() == {}


def test_a_home_that_is_a_file_or_not_utf_8_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    file = world.folder / "a file"
    file.touch()
    monkeypatch.setenv("DAGSTER_HOME", str(file))
    assert f"error: {file}: File exists; name a folder" in told(world)
    monkeypatch.setenv("DAGSTER_HOME", os.fsdecode(bytes(world.folder) + b"/\xff"))
    assert "the path is not UTF-8; set DAGSTER_HOME to another folder" in told(world)


@pytest.fixture
def mounted(tmp_path: Path):
    """Mount a small file system, and unmount it; skip where this user may not."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    made: list[Path] = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting needs rights that this user does not have")
        made.append(folder)
        return folder

    yield mount
    for one in made:
        subprocess.run(["umount", "-l", str(one)], check=False)


@pytest.mark.parametrize(
    ("options", "told"),
    [("ro,size=1m", "Read-only file system"), ("size=64k", "No space left on device; free space")],
)
def test_a_disk_that_cannot_be_written_or_is_full_is_named(
    world: World, mounted: Callable[[str], Path], options: str, told: str
) -> None:
    folder = mounted(options)
    done = cli("run", "--config", str(world.folder / "toolformer.toml"), "--set", f"paths.lake={folder}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert str(folder) in done.stderr and told in done.stderr
