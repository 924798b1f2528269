"""Removing files that nothing needs any more: replaced files, rows of old models, what killed processes left."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from toolformer_dag.lake.inventory import Item, inventory
from toolformer_dag.lake.local_outputs import contents_in_use
from toolformer_dag.lake.record import STORES
from toolformer_dag.lake.row_store import IDENTITY
from toolformer_dag.lake.session import session
from toolformer_dag.lake.table import Lake


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A file that was removed, or would be; `bytes` of it, and why nothing needs it."""

    path: str
    bytes: int
    reason: str


def clean(lake: Lake, grace: timedelta, dry_run: bool) -> list[RemovedFile]:
    """Remove files of the lake older than `grace` that nothing names; with `dry_run` only list them.

    A file is the lake's by the form of its name: everything else in the folder stays.

    Removed: files of parts that were withdrawn, or replaced longer than `grace` ago, unfinished files, files set aside
    as damaged, and stored rows under an identity that no published part was made with and no run has opened within
    `grace`. Kept: everything that a manifest names; where a manifest is damaged or gone, all files of its table and all
    stored rows. `grace` has to be longer than the longest query over the lake and the longest step: readers and writers
    hold on to files for that long.
    """
    old = (datetime.now(UTC) - grace).timestamp()
    items = list(_unneeded(lake, old))
    if not dry_run:
        items = _removed(lake, items, old)
    return [RemovedFile(lake.storage.shown(item.path), item.bytes, reason) for item, reason in items]


def _removed(lake: Lake, items: Sequence[tuple[Item, str]], old: float) -> list[tuple[Item, str]]:
    """Remove items; return them without stored rows that a run has opened meanwhile."""
    stores = {item.owner for item, _ in items if item.kind == "rows"}
    removed = [one for one in items if one[0].owner not in stores]
    lake.storage.remove(*(item.path for item, _ in removed))
    for store in sorted(stores):
        removed += _removed_rows(lake, store, [one for one in items if one[0].owner == store], old)
    return removed


def _removed_rows(lake: Lake, store: str, items: list[tuple[Item, str]], old: float) -> list[tuple[Item, str]]:
    """Remove stored rows, unless a run has opened them since the lake was listed: their identity is in use again.

    One that opens them in this moment finds them lacking and computes them again.
    """
    with suppress(FileNotFoundError):
        if lake.storage.changed(lake.root / store / IDENTITY) >= old:
            return []
    lake.storage.remove(*(item.path for item, _ in items))
    return items


@dataclass
class _Use:
    """What is in use: files, all files of these folders, row stores.

    `unknown`: whether a manifest is not whole, so that any row store may be in use.
    """

    files: set[Path] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    unknown: bool = False

    def reason(self, item: Item) -> str | None:
        """Return why an old file can go; None where it stays."""
        if item.kind in ("unfinished", "damaged"):
            return item.kind
        if item.kind in ("part", "content"):
            return None if item.path in self.files or item.path.parent in self.folders else "replaced"
        free = item.kind == "rows" and not self.unknown and item.owner not in self.stores
        return "rows of an identity that nothing uses" if free else None


def _unneeded(lake: Lake, old: float) -> Iterator[tuple[Item, str]]:
    """List files before manifests are read, so that a part published in between is not taken for left over."""
    items = sorted(inventory(lake.storage), key=lambda item: item.path)
    use = _use(lake, items, old)
    reasons = ((item, use.reason(item)) for item in items if item.changed < old)
    yield from ((item, reason) for item, reason in reasons if reason)


def _use(lake: Lake, items: Sequence[Item], old: float) -> _Use:
    # opening a row store touches a file, appending makes one
    use = _Use(stores={item.owner for item in items if item.kind == "rows" and item.changed >= old})
    with session():
        for table in sorted({item.owner for item in items if item.kind in ("manifest", "part")}):
            _add_table(use, lake, table, items, old)
    for folder in {item.path.parent for item in items if item.kind == "content"}:
        _add_output(use, lake, folder, old)
    return use


def _add_output(use: _Use, lake: Lake, folder: Path, old: float) -> None:
    contents = contents_in_use(lake.storage, folder, old)
    if contents is None:
        use.folders.add(folder)
    else:
        use.files |= {folder / name for name in contents}


def _add_table(use: _Use, lake: Lake, name: str, items: Sequence[Item], old: float) -> None:
    """Note what a table uses; of a part that changed since `old`, all files: what was replaced may still be read."""
    table = lake.table(name)
    if table.damage():  # what was lost with its lines may be needed
        use.unknown = True
        use.folders |= {item.path.parent for item in items if item.kind == "part" and item.owner == name}
        return
    for part, pointer in table.pointers().items():
        use.stores |= set(pointer.record.get(STORES, ()))
        use.files |= {table.file_path(part, file) for file in pointer.files}
        if pointer.published >= old:
            use.folders.add(table.part_folder(part))
