"""A flipped bit is named by `verify`, never used, and mended by the next run."""

import random
from pathlib import Path

import pytest

from tests.runs.conftest import World, assert_same
from toolformer_dag.training.verify_project import verified

KINDS = {
    "published rows": "lake/*/*/files/*/*.parquet",
    "pointers": "lake/*/*/*.json",
    "computed rows": "lake/*/*/*/*.parquet",
    "identities": "lake/*/*/*/identity.json",
    "checkpoints": "lake/training/*/model/*",
    "warehouse": "lake/toolformer.duckdb",
}
ROWS = ("published rows", "pointers", "computed rows")


def flip(file: Path, random: random.Random) -> None:
    """Flip one bit in place."""
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def named(world: World) -> set[Path]:
    """Return the files that `verify` names."""
    return {damaged.path for damaged in verified(world.project().plan).damaged}


def every_flip_is_named(world: World, flips: int, seed: int) -> None:
    """Flip a bit of a file, one file after the other, and put it back."""
    draw = random.Random(seed)
    assert named(world) == set()
    for kind, pattern in KINDS.items():
        files = sorted(path for path in world.folder.glob(pattern) if path.is_file())
        assert files, kind
        for _ in range(flips):
            file = draw.choice(files)
            content = file.read_bytes()
            flip(file, draw)
            found = named(world)
            assert len(found) == 1 and (found == {file} or file.name == "training.json"), (kind, file, found)
            file.write_bytes(content)


def test_every_flipped_bit_is_named_by_its_path(world: World) -> None:
    every_flip_is_named(world, 5, 0)


@pytest.mark.soak
def test_two_thousand_flipped_bits_are_named_by_their_path(world: World) -> None:
    every_flip_is_named(world, 2000 // len(KINDS) + 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("kind", ROWS)
def test_a_run_uses_no_damaged_row_and_makes_it_again(world: World, kind: str) -> None:
    before, draw = world.tables(), random.Random(2)
    change = "tools.calculator.tau_f=0.01"  # so that the run reads what it would otherwise skip
    world.run(change)
    undisturbed = world.tables()
    world.run()
    files = sorted(world.folder.glob(KINDS[kind]))
    for file in files[:: max(1, len(files) // 8)]:
        flip(file, draw)
    report = world.run(change)
    assert not report.failed
    assert_same(world.tables(), undisturbed)
    world.run()
    assert_same(world.tables(), before)


def test_a_shard_that_changed_under_the_same_size_and_time_is_named(world: World) -> None:
    import os

    shard = next((world.folder / "web").iterdir())
    status = shard.stat()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert named(world) == {shard}


def test_a_damaged_warehouse_is_stale_and_built_anew(world: World) -> None:
    flip(world.folder / "lake" / "toolformer.duckdb", random.Random(3))
    assert world.stale() == ["warehouse/loss_deltas"]
    report = world.run()
    assert report.ran == ["warehouse/loss_deltas"] and world.stale() == []


def test_a_damaged_checkpoint_is_stale_and_trained_again(world: World) -> None:
    flip(world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors", random.Random(4))
    assert "training/finetuned_checkpoint" in world.stale()
    world.run(training=True)
    assert world.stale() == [] and named(world) == set()
