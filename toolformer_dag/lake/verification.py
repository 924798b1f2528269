"""Reading everything that the lake keeps, to name what is damaged: a flipped bit, a truncated or a missing file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.row_store import IDENTITY, RowStore
from toolformer_dag.lake.table import Lake, Table


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file whose content is not what was written, and what is wrong with it."""

    path: Path
    reason: str


def damaged_files(lake: Lake) -> Iterator[DamagedFile]:
    """Yield the damaged pointers, published files and computed rows of the lake; change nothing.

    Checkpoints, tool indexes, the warehouse and shard files are not covered: they are no rows of the lake.
    """
    for folder in _folders(lake.root):
        if (folder / IDENTITY).is_file():
            yield from _computed(folder, str(folder.relative_to(lake.root)))
        elif folder.parent.parent == lake.root:
            table = Table(folder, str(folder.relative_to(lake.root)))
            for part in table.parts():
                yield from (DamagedFile(*found) for found in table.damaged(part))


def _computed(folder: Path, name: str) -> Iterator[DamagedFile]:
    identity = folder / IDENTITY
    try:
        told = fingerprint(json.loads(identity.read_bytes()))
    except (OSError, ValueError, RecursionError):
        told = ""
    if told != folder.name:
        yield DamagedFile(identity, "does not say what its folder is named after")
    yield from (DamagedFile(*found) for found in RowStore(folder, name, (), pl.Schema()).damaged_files())


def _folders(root: Path) -> Iterator[Path]:
    """Folders two and three levels below the lake: tables, and computed rows by fingerprint."""
    for folder in sorted(path for path in root.glob("*/*") if path.is_dir()):
        yield folder
        yield from sorted(path for path in folder.iterdir() if path.is_dir())
