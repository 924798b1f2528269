"""A flipped bit is named by `verify`, never used, and mended by the next run."""

import os
import random
import time
from pathlib import Path

import pytest

from tests.command_line import cli
from tests.runs.conftest import World, assert_same, by_machine, free
from toolformer_dag.cli.project import REPAIRS
from toolformer_dag.lake import storage
from toolformer_dag.lake.verification import VERIFIED
from toolformer_dag.training.verify_project import verified

KINDS = {
    "published rows": "lake/*/*/files/*/*.parquet",
    "manifests": "lake/table-manifests/*/*.jsonl",
    "computed rows": "lake/*/*/*/*.parquet",
    "identities": "lake/*/*/*/identity.json",
    "checkpoints": "lake/training/*/model/*",
    "warehouse": "lake/toolformer.duckdb",
}


def flip(file: Path, random: random.Random) -> None:
    """Flip one bit in place."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def named(world: World) -> set[Path]:
    """Return the files that `verify` names."""
    return {damaged.path for damaged in verified(world.project().plan).damaged}


def test_every_flipped_bit_is_named_by_its_path(world: World) -> None:
    draw = random.Random(0)
    assert named(world) == set()
    for kind, pattern in KINDS.items():
        files = sorted(path for path in world.folder.glob(pattern) if path.is_file())
        assert files, kind
        for file in draw.sample(files, min(2, len(files))):
            content = file.read_bytes()
            flip(file, draw)
            assert named(world) == {file}, kind
            file.write_bytes(content)


@pytest.mark.long
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_run_mends_what_was_flipped_though_nothing_else_changed_at_the_cost_of_what_was_lost(
    world: World, made: World, kind: str
) -> None:
    draw = random.Random(kind)
    files = sorted(path for path in world.folder.glob(KINDS[kind]) if path.is_file())
    flipped = files[:: max(1, len(files) // 5)]
    for file in flipped:
        flip(file, draw)
    assert named(world) >= {file for file in flipped if "/model/" not in str(file)} and named(world)
    report = world.run(training=True)
    assert free(report) or (kind == "checkpoints" and report.spent.calls == 0)  # finetuning is paid again
    assert named(world) == set() and world.stale() == []
    assert_same(world.tables(), made.tables())


@pytest.mark.long
def test_damage_that_keeps_the_times_of_a_file_is_mended_after_verify_has_named_it(world: World, made: World) -> None:
    file = sorted(world.folder.glob(KINDS["published rows"]))[0]
    world.run()
    (world.folder / "lake" / VERIFIED).write_text(str(time.time_ns() + 10**9))  # as if the disk had changed it unseen
    flip(file, random.Random(5))
    time.sleep(1.1)
    assert not world.run().set_aside
    assert named(world) == {file}
    report = world.run()
    assert [one.path for one in report.set_aside] == [file]
    assert named(world) == set()
    assert_same(world.tables(), made.tables())


@pytest.mark.long
def test_a_run_on_a_disk_that_damages_a_table_again_and_again_fails_by_its_name(world: World, monkeypatch) -> None:
    """Every copy of a table loses a bit as soon as it is written."""
    draw, written, write = random.Random(6), [], storage.write_whole

    def written_badly(path: Path, content: bytes) -> None:
        write(path, content)
        if "sums/heuristic_subset/files" in str(path):
            flip(path, draw)
            written.append(path)

    monkeypatch.setattr(storage, "write_whole", written_badly)
    monkeypatch.chdir(world.folder)
    done = cli("stale", "--run", "--set", "corpus.segment_tokens=30", "--set", "corpus.shards=['web/one.json.gz']")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "sums/heuristic_subset, shard 'one': " in done.stderr and "is damaged" in done.stderr
    assert len(written) == REPAIRS
    monkeypatch.setattr(storage, "write_whole", write)
    world.run()
    assert named(world) == set() and by_machine(world.stale()) == []


def test_a_shard_that_changed_under_the_same_size_and_time_is_named(world: World) -> None:
    shard = next((world.folder / "web").iterdir())
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert named(world) == {shard}
