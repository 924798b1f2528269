"""A disk that is full while `judge` runs: its old file stays whole, and it goes on once there is room.

Each `toolformer-dag judge` runs in a process of its own, with the embedded model. Called by `benchmarks.soak`.
"""

import os
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import orjson

from benchmarks.faults import resize_disk, small_disk
from benchmarks.made_traces import records
from toolformer_dag.lake.warehouse import query

CONVERSATIONS = 20
MOST_FREE_KIB = 900
"""The most room that a full disk has left; files of this size are cut in their middle."""
TRIALS = 6
CALLS = "SELECT conversation, turn, verdict, round(gain, 3) AS gain FROM trace_calls ORDER BY ALL"
SETTINGS = """
[paths]
lake = "disk/lake"
[tools.calculator]
[execution]
workers = 1
"""


def wrong_when_judged(folder: Path, draw: random.Random) -> list[str]:
    """Judge on disks with too little room, then with enough; print how many were full, and return what was wrong.

    Raises Skipped where no small disk can be mounted.
    """
    expected_world = _JudgedWorld(folder / "undisturbed")
    expected_world.judge("all.jsonl")
    world = _JudgedWorld(folder / "full")
    wrong = []
    full_disks = 0
    with small_disk(world.disk):
        resize_disk(world.disk, 1 << 20)
        world.judge("some.jsonl")
        for _ in range(TRIALS):
            free_kib = draw.randrange(MOST_FREE_KIB)
            resize_disk(world.disk, _used_kib(world.disk) + free_kib)
            before = world.database_files()
            done = world.judge("all.jsonl", checked=False)
            if done.returncode == 0:
                continue
            full_disks += 1
            wrong += [f"{free_kib} KiB left: {fault}" for fault in _faults(done, before, world.database_files())]
        resize_disk(world.disk, 1 << 20)
        world.judge("all.jsonl")
        if not query(world.database, CALLS).equals(query(expected_world.database, CALLS)):
            wrong.append("judge on a full disk: the calls differ from those of an undisturbed judge")
    print(f"disks filled while judging: {full_disks} in {TRIALS} trials, {len(wrong)} wrong", flush=True)
    return wrong


class _JudgedWorld:
    """A folder with settings, whose lake lies in `disk`, and two files: all conversations, and a few of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.database = self.disk / "lake" / "traces.duckdb"
        self.disk.mkdir(parents=True)
        (folder / "toolformer.toml").write_text(SETTINGS)
        lines = [orjson.dumps(record) + b"\n" for record in records(CONVERSATIONS)]
        (folder / "all.jsonl").write_bytes(b"".join(lines))
        (folder / "some.jsonl").write_bytes(b"".join(lines[:2]))

    def judge(self, conversations: str, *, checked: bool = True) -> "subprocess.CompletedProcess[str]":
        """Judge a file of this folder, and write its conversations again. checked: raise where that fails."""
        command = [sys.executable, "-m", "toolformer_dag.cli", "judge", conversations, "--out", "disk/cleaned"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=checked)

    def database_files(self) -> Mapping[str, bytes]:
        """Return the database with what lies beside it under names that begin with its own."""
        files = self.database.parent.glob(f"*{self.database.name}*")
        return {file.name: file.read_bytes() for file in files if not file.name.endswith(".lock")}


def _faults(
    done: "subprocess.CompletedProcess[str]", before: Mapping[str, bytes], after: Mapping[str, bytes]
) -> list[str]:
    """Return what is wrong with how `judge` ended on a full disk.

    before, after: the database and the files beside it.
    """
    faults = []
    if "Traceback" in done.stderr or "free " not in done.stderr:
        faults.append(f"no remedy is named: {done.stderr[-300:]}")
    if set(after) - set(before):
        faults.append(f"left behind: {sorted(set(after) - set(before))}")
    if any(after.get(name) != content for name, content in before.items()):
        faults.append("the old database is another one")
    return faults


def _used_kib(folder: Path) -> int:
    """Return what is used of the disk that is mounted at a folder, in KiB."""
    disk = os.statvfs(folder)
    return (disk.f_blocks - disk.f_bfree) * disk.f_frsize // 1024
