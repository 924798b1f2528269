"""Flipped bits: each is named by `verify`, none is used, and a run mends them."""

import random
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.faults import Trial, Undisturbed
from benchmarks.soak_world import SoakWorld, differing
from toolformer_dag.files import StorageError
from toolformer_dag.training.verify_project import verified

KINDS = {
    "published rows": "disk/lake/*/*/files/*/*.parquet",
    "pointers": "disk/lake/*/*/*.json",
    "computed rows": "disk/lake/*/*/*/*.parquet",
    "identities": "disk/lake/*/*/*/identity.json",
    "checkpoints": "disk/lake/training/*/model/*",
    "warehouse": "disk/lake/toolformer.duckdb",
    "indexes": "disk/indexes/*-v?/*",
}
READ_AGAIN = "tools.calculator.tau_f=0.01"
"""A change after which a run reads what it would otherwise leave alone."""


def flip(file: Path, draw: random.Random) -> None:
    """Flip one bit in place."""
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def files_of(world: SoakWorld, kind: str) -> list[Path]:
    """Return the files of a kind that hold something."""
    return sorted(path for path in world.folder.glob(KINDS[kind]) if path.is_file() and path.stat().st_size)


def named_flips(world: SoakWorld, flips: int, draw: random.Random) -> Mapping[str, tuple[int, int]]:
    """Flip a bit of a file of every kind, ask `verify`, and put them back, until there were `flips`.

    Return, by kind of file, how many there were and how many `verify` named. Raises AssertionError where it names more.
    """
    plan = world.project().plan
    kinds = {kind: files_of(world, kind) for kind in KINDS}
    tried: Counter[str] = Counter()
    named: Counter[str] = Counter()
    while tried.total() < flips:
        chosen = {kind: draw.choice(files) for kind, files in kinds.items()}
        if chosen["published rows"].parents[2] == chosen["pointers"].parent:
            continue  # behind a damaged pointer nothing is known
        contents = {file: file.read_bytes() for file in chosen.values()}
        for file in contents:
            flip(file, draw)
        found = {one.path for one in verified(plan).damaged}
        assert found <= contents.keys(), found - contents.keys()
        for kind, file in chosen.items():
            tried[kind] += 1
            named[kind] += file in found
            file.write_bytes(contents[file])
    return {kind: (tried[kind], named[kind]) for kind in KINDS}


def mended_flips(whole: Undisturbed, world: SoakWorld, draw: random.Random) -> Trial:
    """Flip a bit in every eighth file of each kind, then run as before, after a change of a threshold, and back."""
    found = [files_of(world, kind) for kind in KINDS]
    files = [file for kind in found for file in draw.sample(kind, -(-len(kind) // 8))]
    for file in files:
        flip(file, draw)
    tokens, wrong = 0, []
    for change in ((), (READ_AGAIN,), ()):
        ended = world.run(*change, training=not change)
        tokens += ended.tokens
        wrong += [ended.error] if ended.error else []
    try:
        wrong += [f"{name} differs" for name in differing(whole.tables, world.tables())]
    except StorageError as error:
        wrong.append(str(error))
    wrong += [f"{path} is still damaged" for path in world.named()]
    return Trial(len(files), tuple(wrong), tokens / whole.tokens)
