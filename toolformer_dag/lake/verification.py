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
from toolformer_dag.lake.row_files import parse_row_file
from toolformer_dag.lake.row_store import DAMAGED, IDENTITY, RowStore
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart, Table

COARSE = 10**9
"""Nanoseconds by which a file's time of change may lag behind the clock."""
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
    for folder in _folders(lake.root):
        if (folder / IDENTITY).is_file():
            yield from _computed(folder, str(folder.relative_to(lake.root)), since)
        elif folder.parent.parent == lake.root:
            table = Table(folder, str(folder.relative_to(lake.root)))
            for part in table.parts():
                yield from (DamagedFile(*found) for found in table.damaged(part, since))


def set_aside_damaged(lake: Lake) -> list[DamagedFile]:
    """Set aside what was damaged since the last time, so that it is made again; return the files.

    Files that did not change since then are not read, so this costs a look at every file and a read of the new ones.
    A disk that gives back other bits under the same time of change is noticed by readers, and by `verify`, which
    touches what it finds.
    """
    if not lake.root.is_dir():
        return []
    began, note = time.time_ns() - COARSE, lake.root / VERIFIED
    found = [one for one in damaged_files(lake, _verified_until(note)) if one.path.exists()]
    for damaged in found:
        _set_aside(lake, damaged.path)
    write_whole(note, str(began).encode())
    return found


def _verified_until(note: Path) -> int:
    """0 where that is unknown, or lies in the future because the clock was moved back."""
    with suppress(OSError, ValueError):
        until = int(note.read_bytes())
        return until if until <= time.time_ns() else 0
    return 0


def _set_aside(lake: Lake, path: Path) -> None:
    """A pointer stays: whoever reads it sees the damage, and a new one replaces it."""
    if path.parent.parent.name == "files":
        folder = path.parent.parent.parent
        with suppress(DamagedPart, MissingPart):
            Table(folder, str(folder.relative_to(lake.root))).files(plain_name(path.parent.name))
    elif path.name == IDENTITY or parse_row_file(path.name):
        with suppress(FileNotFoundError):  # merged away since
            path.rename(path.with_name(f"{path.name}{DAMAGED}"))


def _computed(folder: Path, name: str, since: int) -> Iterator[DamagedFile]:
    identity = folder / IDENTITY
    try:
        told = fingerprint(json.loads(identity.read_bytes()))
    except (OSError, ValueError, RecursionError):
        told = ""
    if told != folder.name:
        yield DamagedFile(identity, "does not say what its folder is named after")
    yield from (DamagedFile(*found) for found in RowStore(folder, name, (), pl.Schema()).damaged_files(since))


def _folders(root: Path) -> Iterator[Path]:
    """Folders two and three levels below the lake: tables, and computed rows by fingerprint."""
    for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
        yield folder
        yield from sorted(path for path in folder.iterdir() if path.is_dir())
