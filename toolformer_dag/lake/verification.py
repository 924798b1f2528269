"""Finding what is damaged in the lake, a flipped bit, a truncated or a missing file, and setting it aside."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from toolformer_dag.files import plain_name, write_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.manifest import SUFFIX
from toolformer_dag.lake.row_store import IDENTITY, RowStore, parse_row_file
from toolformer_dag.lake.session import session
from toolformer_dag.lake.storage import FOLDER, FolderStorage
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart

COARSE = 10**9
"""Nanoseconds by which a file's time of change may lag behind the clock."""
STORE_LEVELS = (2, 3)
"""How many folders below the lake computed rows lie."""
VERIFIED = ".verified"
"""The file of the lake that holds up to when it was verified, in nanoseconds since 1970."""


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file whose content is not what was written, and what is wrong with it."""

    path: Path
    reason: str


def damaged_files(lake: Lake, since: int = 0) -> Iterator[DamagedFile]:
    """Yield the damaged pointers, published files and computed rows of the lake that changed `since` then.

    Checkpoints, tool indexes, the warehouse and shard files are not covered: they are no rows of the lake.
    """
    files = {file.path for file in lake.storage.files()}
    for folder in sorted({path.parent for path in files}):
        name = folder.relative_to(lake.root)
        if len(name.parts) in STORE_LEVELS and folder / IDENTITY in files:
            yield from _computed(lake, name.as_posix(), since)
    for path in sorted(path for path in files if lake.root / FOLDER in path.parents and path.suffix == SUFFIX):
        table = lake.table(path.relative_to(lake.root / FOLDER).with_suffix("").as_posix())
        with session():
            if (fault := table.fault()) is not None:
                yield DamagedFile(path, fault)
            found = [one for part in table.parts() for one in table.damaged(part, since)]
        yield from (DamagedFile(*one) for one in found if one[0] != path)


def set_aside_damaged(lake: Lake) -> list[DamagedFile]:
    """Set aside what was damaged since the last time, so that it is made again; return the files.

    Files that did not change since then are not read, so this costs a look at every file and a read of the new ones.
    A disk that gives back other bits under the same time of change is noticed by readers, and by `verify`, which
    touches what it finds.

    Nothing is read where the lake is an object store: readers compare what they fetch, and the copies that they have,
    with the hash, and `verify` sets aside what it finds.
    """
    if not (isinstance(lake.storage, FolderStorage) and lake.root.is_dir()):
        return []
    began, note = time.time_ns() - COARSE, lake.root / VERIFIED
    found = [one for one in damaged_files(lake, _verified_until(note)) if one.path.exists()]
    for damaged in found:
        set_aside_file(lake, damaged.path)
    write_whole(note, str(began).encode())
    return found


def _verified_until(note: Path) -> int:
    """0 where that is unknown, or lies in the future because the clock was moved back."""
    with suppress(OSError, ValueError):
        until = int(note.read_bytes())
        return until if until <= time.time_ns() else 0
    return 0


def set_aside_file(lake: Lake, path: Path) -> None:
    """Set one damaged file aside. Of a manifest the parts stay that can be read."""
    if lake.root / FOLDER in path.parents:
        lake.table(path.relative_to(lake.root / FOLDER).with_suffix("").as_posix()).mend()
    elif path.parent.parent.name == "files":
        table = lake.table(path.parent.parent.parent.relative_to(lake.root).as_posix())
        with suppress(DamagedPart, MissingPart):
            table.files(plain_name(path.parent.name))
    elif path.name == IDENTITY or parse_row_file(path.name):
        lake.storage.set_aside(path)


def _computed(lake: Lake, name: str, since: int) -> Iterator[DamagedFile]:
    folder = lake.root / name
    identity = folder / IDENTITY
    try:
        told = fingerprint(json.loads(lake.storage.read(identity)[0]))
    except (OSError, ValueError, RecursionError):
        told = ""
    if told != folder.name:
        yield DamagedFile(identity, "does not say what its folder is named after")
    yield from (DamagedFile(*found) for found in RowStore(lake.storage, name, (), pl.Schema()).damaged_files(since))
