"""Finding what is damaged in the lake, a flipped bit, a truncated or a missing file, and setting it aside."""

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import polars as pl

from toolformer_dag.files import write_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.inventory import inventory, item_of
from toolformer_dag.lake.manifest import GONE
from toolformer_dag.lake.object_storage import ObjectStorage
from toolformer_dag.lake.row_store import IDENTITY, RowStore
from toolformer_dag.lake.session import session
from toolformer_dag.lake.storage import CheckedFile
from toolformer_dag.lake.table import DamagedPart, Lake, MissingPart

COARSE = 10**9
"""Nanoseconds by which a file's time of change may lag behind the clock."""
LOCK = ".lock"
NO_IDENTITY = "does not say what its folder is named after"
VERIFIED = ".verified"
"""The file of the lake that holds up to when it was verified, in nanoseconds since 1970."""


def checked_files(lake: Lake, since: int = 0) -> Iterator[CheckedFile]:
    """Check the manifests, published files and computed rows of the lake that changed `since` then.

    The warehouse, tool indexes and shard files are not covered: they are no rows of the lake.
    """
    items = list(inventory(lake.storage, all_parts=False))
    for store in sorted({item.owner for item in items if item.kind == "rows" and item.path.suffix != LOCK}):
        yield from _computed(lake, store, since)
    for table in sorted({item.owner for item in items if item.kind in ("manifest", "part")}):
        yield from _published(lake, table, since)


def set_aside_damaged(lake: Lake) -> list[CheckedFile]:
    """Set aside what was damaged since the last time, so that it is made again; return the files.

    Files that did not change since then are not read, so this costs a look at every file and a read of the new ones.
    A disk that gives back other bits under the same time of change is noticed by readers, and by `verify`, which
    touches what it finds.

    Nothing is read where the lake is an object store: readers compare what they fetch, and the copies that they have,
    with the hash, and `verify` sets aside what it finds.
    """
    if isinstance(lake.storage, ObjectStorage) or not lake.root.is_dir():
        return []
    began, note = time.time_ns() - COARSE, lake.root / VERIFIED
    checked = checked_files(lake, _verified_until(note))
    damaged = [one for one in checked if one.reason is not None and one.path.exists()]
    for file in damaged:
        set_aside_file(lake, file.path)
    write_whole(note, str(began).encode())
    return damaged


def _verified_until(note: Path) -> int:
    """0 where that is unknown, or lies in the future because the clock was moved back."""
    with suppress(OSError, ValueError):
        until = int(note.read_bytes())
        return until if until <= time.time_ns() else 0
    return 0


def set_aside_file(lake: Lake, path: Path) -> None:
    """Set one damaged file aside. Of a manifest the parts stay that can be read."""
    item = item_of(lake.storage, path)
    if item is None:
        return
    if item.kind == "manifest":
        lake.table(item.owner).mend()
    elif item.kind == "part":
        with suppress(DamagedPart, MissingPart):
            lake.table(item.owner).files(item.part)
    elif item.kind == "rows":
        lake.storage.set_aside(path)


def _published(lake: Lake, name: str, since: int) -> list[CheckedFile]:
    table = lake.table(name)
    with session():
        fault = table.damage()
        checked = [file for part in table.parts() for file in table.checked_files(part, since)]
    if fault == GONE:  # there is none yet where the first run of all was killed, or goes on
        return checked
    size = table.path.stat().st_size if table.path.is_file() else 0
    return [CheckedFile(table.path, size, fault), *checked]


def _computed(lake: Lake, name: str, since: int) -> Iterator[CheckedFile]:
    with suppress(FileNotFoundError):  # whoever uses the rows writes it, or `clean` has removed them
        yield _identity(lake, lake.root / name / IDENTITY)
    yield from RowStore(lake.storage, name, (), pl.Schema()).checked_files(since)


def _identity(lake: Lake, path: Path) -> CheckedFile:
    identity, content = "", b""
    try:
        content, _ = lake.storage.read(path)
        identity = fingerprint(json.loads(content))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError):
        pass
    return CheckedFile(path, len(content), None if identity == path.parent.name else NO_IDENTITY)
