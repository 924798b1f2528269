"""The lake's tables: a set of sealed parts, one per shard, each a pointer to Parquet files that never change.

    <table>/<shard>.json                    the pointer: files, version of the rows, record of what made them
    <table>/files/<shard>/<random>.parquet  its files, and older ones until `clean` removes them

Concurrent writers of one part are safe: both write files of their own. In a folder the last pointer wins; in an object
store the first does, and the other writer is told. A reader keeps the pointer it has read, whose files stay until the
grace period of `clean` is over.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl

from toolformer_dag.files import ReadError, StorageError, as_json, file_name, plain_name, sealed, unsealed
from toolformer_dag.identity import content_hash, fingerprint
from toolformer_dag.lake import parquet
from toolformer_dag.lake.object_storage import ObjectStorage, opened
from toolformer_dag.lake.parquet import ContentHash, UnreadableFile
from toolformer_dag.lake.record import FieldChange, changes
from toolformer_dag.lake.row_store import IDENTITY, RowStore
from toolformer_dag.lake.storage import FolderStorage, Overtaken, Storage, Version, once, remember
from toolformer_dag.settings.sections import PathSettings

ATTEMPTS = 3
LAYOUT = 2
FILE_NAME = re.compile(r"[0-9a-f]{32}\.parquet")


class MissingPart(StorageError):
    """A part of a table that was never published."""

    def __init__(self, table: str, part: str) -> None:
        lacks = behind("has no rows of shard", part) or "was not materialized yet"
        super().__init__(f"{table} {lacks}; run `toolformer-dag stale --run`")


class DamagedPart(StorageError):
    """A published part whose files are missing, truncated or unreadable."""

    def __init__(self, table: str, part: str, file: str, reason: str) -> None:
        super().__init__(
            f"{table}{behind(', shard', part)}: {file} {reason}; run `toolformer-dag stale --run`, computed rows are "
            "reused"
        )


WHOLE = "all"
"""The only part of a table that is not cut by shard."""


def behind(words: str, part: str) -> str:
    """Return `WORDS 'PART'`, or nothing for WHOLE, which people never see."""
    return "" if part == WHOLE else f"{words} {part!r}"


class LostRace(StorageError):
    """A part that another run published while this one made it, from something else."""

    def __init__(self, table: str, part: str, winner: "Pointer | None", changed: Sequence[FieldChange]) -> None:
        when = f" at {winner.record.get('written')}" if winner else ""
        differs = f" with {changed[0]}" if changed else " with other rows" if winner else ""
        super().__init__(
            f"{table}{behind(', shard', part)}: another run published it{when}{differs}, while this one made it; wait "
            "for that run and run again, computed rows are reused"
        )


class OldLake(StorageError):
    """A lake that an earlier release wrote."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A Parquet file by name, with its size in bytes, the hash of its content and its rows."""

    name: str
    bytes: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a part consists of. `data_version`: hash of the rows; `record`: what made them (see record.py)."""

    files: tuple[PartFile, ...]
    data_version: str
    record: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def encode(self, table: str) -> bytes:
        """Return JSON, a line per field, for people too, sealed by its hash. Raises NotPlain, which names `table`."""
        return sealed(table, {"layout": LAYOUT, **asdict(self)})


def decode(content: bytes) -> Pointer:
    """Read `Pointer.encode`. Raises ValueError for anything else: a truncated file, a flipped bit."""
    try:
        value = unsealed(content)
        if value["layout"] != LAYOUT:
            raise ValueError(f"has layout {value['layout']}, this release reads {LAYOUT}")
        files = tuple(PartFile(**file) for file in value["files"])
        return Pointer(files, value["data_version"], value["record"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no pointer: {error!r}") from error


class Table:
    """A table of the lake. `name` is its path there: "calculator/loss_deltas"."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.folder = storage.root / name
        self.name = name

    def publish(
        self,
        part: str,
        frames: Iterable[pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
        volatile: Collection[str] = (),
        before: Version | None = None,
    ) -> Pointer:
        """Make `frames`, at least one and all of one schema, the content of `part`; readers see it at once.

        `record` is asked after the last frame. `volatile` columns do not count in the data version. `before`: what the
        part has been until now; left out, what it is when this begins. Memory holds about 64 MB of rows. Raises
        WriteError, NotPlain for a record that JSON has no place for, LostRace where an object store has another part by
        now, and what `frames` raises; the part is then what it was, and the files of the frames are removed.
        """
        path = self._pointer_path(part)
        before = self.storage.version(path) if before is None else before
        content = ContentHash(volatile)
        files: list[PartFile] = []
        try:
            files.extend(self._write(part, piece, content) for piece in parquet.pieces(frames))
            if not files:
                raise ValueError(f"{self.name}, part {part!r}: publish at least one frame, empty or not")
            pointer = Pointer(tuple(files), content.hexdigest(), record())
            encoded = pointer.encode(self.name)
        except BaseException:  # no pointer will name them
            self._remove_files(part, files)
            raise
        try:
            self.storage.replace(path, encoded, before)
        except Overtaken as error:
            return self._winner(part, pointer, error)
        return pointer

    def revise(
        self,
        part: str,
        revised: Callable[[pl.DataFrame | None], pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
    ) -> Pointer:
        """Publish what `revised` makes of the rows that a part has; None where it has none, or damaged ones.

        Writers of one part take turns, so that the rows of each are kept. Raises as `publish`.
        """
        with self.storage.alone(self.folder / ".revise.lock"):
            while True:
                before = self.storage.version(self._pointer_path(part))
                try:
                    rows = self.read(part)
                except MissingPart:
                    rows = None
                except DamagedPart:  # it was set aside, and is named when it is
                    before, rows = self.storage.version(self._pointer_path(part)), None
                with suppress(LostRace):
                    return self.publish(part, [revised(rows)], record, before=before)

    def read(self, part: str) -> pl.DataFrame:
        """Return all rows of a part, in the order in which they were published. Raises MissingPart, DamagedPart."""
        return pl.concat(self.batches(part))

    def batches(self, part: str) -> Iterator[pl.DataFrame]:
        """Yield the same rows, a file at a time, for parts larger than memory."""
        yield from (pl.read_parquet(file, glob=False) for file in self.files(part))

    def files(self, part: str) -> list[str]:
        """Return the verified paths of a part's files, for DuckDB's read_parquet. Raises MissingPart, DamagedPart."""
        pointer = self.pointer(part)
        for _ in range(ATTEMPTS):
            try:
                return list(map(str, self._verified(part, pointer)))
            except DamagedPart as error:  # its files may have been replaced and cleaned away before they were opened
                try:
                    current = self.pointer(part)
                except MissingPart:  # set aside
                    raise error from error.__cause__
                if current == pointer:
                    raise
                pointer = current
        return list(map(str, self._verified(part, pointer)))

    def scan(self, parts: Collection[str] | None = None) -> pl.LazyFrame:
        """Scan the rows of these parts, or of all; at least one. Raises as `files`."""
        chosen = self.parts() if parts is None else parts
        files = [file for part in chosen for file in self.files(part)]
        return pl.scan_parquet(files, glob=False)  # a folder may have brackets in its name

    def parts(self) -> list[str]:
        """Return the names of the published parts, sorted."""
        names = [name for name in self.storage.names(self.folder) if name.endswith(".json") and name[0] != "."]
        return sorted(plain_name(name.removesuffix(".json")) for name in names)

    def has(self, part: str) -> bool:
        """Return whether something is published, damaged or not."""
        return self.storage.exists(self._pointer_path(part))

    def pointer(self, part: str) -> Pointer:
        """Return what is published now. Raises MissingPart, DamagedPart, ReadError."""
        path = self._pointer_path(part)
        try:
            found = decode(self.storage.read(path)[0])
            remember("version", self._place(part), found.data_version)
            return found
        except FileNotFoundError as error:
            raise MissingPart(self.name, part) from error
        except OSError as error:
            raise ReadError(path, error) from error
        except ValueError as error:
            raise DamagedPart(self.name, part, path.name, str(error)) from error

    def checked(self, part: str) -> Pointer:
        """Return the pointer after a look at the sizes and footers of its files. Raises MissingPart, DamagedPart."""
        pointer = self.pointer(part)
        for file in pointer.files:
            try:
                self.storage.check(self._file_path(part, file), file.bytes)
            except UnreadableFile as error:
                raise DamagedPart(self.name, part, file.name, str(error)) from error
        remember("whole", self._place(part), pointer.data_version)
        return pointer

    def whole_pointer(self, part: str) -> Pointer | None:
        """Return the pointer where it and its files are there, else None. Looks at sizes and footers."""
        try:
            return self.checked(part)
        except (MissingPart, DamagedPart):
            return None

    def damaged(self, part: str, since: int = 0) -> list[tuple[Path, str]]:
        """Read those files of a part that changed `since` then and return the damaged ones, each with what is wrong."""
        try:
            pointer = self.pointer(part)
        except (MissingPart, DamagedPart) as error:
            return [(self._pointer_path(part), str(error))]
        files = [(self._file_path(part, file), file) for file in pointer.files]
        found = [(path, self.storage.damage(path, file.bytes, file.hash, since)) for path, file in files]
        return [(path, reason) for path, reason in found if reason is not None]

    def pointers(self) -> dict[str, Pointer]:
        """Return the pointer of every part. Raises DamagedPart, ReadError."""
        return {part: self.pointer(part) for part in self.parts()}

    def version(self) -> str | None:
        """Return the version of the whole table: another one whenever a part comes, goes or changes its rows.

        None for a table without parts, or with one that is damaged.
        """
        try:
            versions = {part: self._version(part) for part in self.parts()}
        except DamagedPart:
            return None
        return fingerprint(versions) if versions else None

    def part_version(self, part: str) -> str | None:
        """Return the version of a part's rows; None where it is missing or damaged. Looks at sizes and footers."""

        def ask() -> str | None:
            pointer = self.whole_pointer(part)
            return None if pointer is None else pointer.data_version

        return once("whole", self._place(part), ask)

    def changed(self, part: str) -> float:
        """Return when the part was published last, in seconds since 1970. Raises MissingPart."""
        try:
            return self.storage.changed(self._pointer_path(part))
        except FileNotFoundError as error:
            raise MissingPart(self.name, part) from error

    def record(self, part: str) -> Mapping[str, Any]:
        """Return what the rows were made from. Raises MissingPart, DamagedPart."""
        return self.pointer(part).record

    def remove(self, part: str) -> None:
        """Withdraw a part; its files go with the next `clean`. Nothing happens where there is none."""
        self.storage.remove(self._pointer_path(part))

    def _write(self, part: str, piece: pl.DataFrame, content: ContentHash) -> PartFile:
        content.update(piece)
        encoded = parquet.encode(piece)
        file = PartFile(f"{uuid4().hex}.parquet", len(encoded), content_hash(encoded), piece.height)
        self.storage.add(self._file_path(part, file), encoded)
        return file

    def _remove_files(self, part: str, files: Iterable[PartFile]) -> None:
        for file in files:
            self.storage.remove(self._file_path(part, file))

    def _winner(self, part: str, pointer: Pointer, error: Overtaken) -> Pointer:
        """Return what another run published meanwhile, where it is the same; else raise LostRace."""
        try:
            winner = self.pointer(part)
        except MissingPart:
            winner = None
        self._remove_files(part, set(pointer.files) - set(winner.files if winner else ()))
        changed = changes(pointer.record, winner.record) if winner else []
        if winner is None or changed or winner.data_version != pointer.data_version:
            raise LostRace(self.name, part, winner, changed) from error
        return winner

    def _verified(self, part: str, pointer: Pointer) -> Iterator[Path]:
        for file in pointer.files:
            try:
                path = self.storage.fetch(self._file_path(part, file), file.bytes, file.hash)
                parquet.verify(path, file.bytes, file.hash)
            except UnreadableFile as error:
                raise self._set_aside(part, pointer, file, error) from error
            yield path

    def _set_aside(self, part: str, pointer: Pointer, file: PartFile, error: UnreadableFile) -> DamagedPart:
        """Withdraw a damaged part, so that the next update makes it again; a part published meanwhile stays."""
        path = self._pointer_path(part)
        with suppress(FileNotFoundError, Overtaken):
            content, version = self.storage.read(path)
            if content == pointer.encode(self.name):
                self.storage.withdraw(path, version)
                self.storage.set_aside(self._file_path(part, file))
        return DamagedPart(self.name, part, file.name, str(error))

    def _version(self, part: str) -> str:
        return once("version", self._place(part), lambda: self.pointer(part).data_version)

    def _place(self, part: str) -> str:
        """Name a part for what is remembered of it."""
        return f"{self.storage.shown(self.folder)} {part}"

    def _pointer_path(self, part: str) -> Path:
        return self.folder / f"{file_name(part)}.json"

    def _file_path(self, part: str, file: PartFile) -> Path:
        return self.folder.joinpath("files", file_name(part), file.name)


class Lake:
    """All tables and all computed rows, in a folder or in an object store. Nothing is created before the first write.

    `root`: the folder, or that of the copies on this machine.
    """

    def __init__(self, root: str | Path, storage: Storage | None = None) -> None:
        self.root = Path(root)
        self.storage = FolderStorage(self.root) if storage is None else storage

    @staticmethod
    def of(paths: PathSettings) -> "Lake":
        """Return the lake that the settings name. Raises ObjectStoreError without the extra `objects`."""
        return Lake.at(str(paths.lake), paths.local)

    @staticmethod
    def at(place: str, copies: Path) -> "Lake":
        """Return the lake in the folder `place`, or the one in an object store with `copies` of it on this machine."""
        return Lake(copies, opened(place, copies)) if "://" in place else Lake(place)

    def table(self, name: str) -> Table:
        """Return the table of that name, such as "calculator/loss_deltas", published or not."""
        return Table(self.storage, name)

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open the computed rows `name` that hold under `identity`: everything that determines their values.

        Another identity is another folder, so a row of another model or prompt is never found. Opening marks the rows
        as in use, which `clean` respects. Raises WriteError; NotPlain or TypeError for an identity that cannot be
        written down or has no fingerprint.
        """
        path = f"{name}/{fingerprint(identity)}"
        self.storage.mark(self.root / path / IDENTITY, as_json(path, identity, sort_keys=True))
        return RowStore(self.storage, path, key, pl.Schema(schema))

    def refuse_old_layout(self) -> None:
        """Raise OldLake where an earlier release wrote tables: their parts lie in folders named `parts`.

        Raises StorageError where a file stands in the place of the lake, ObjectStoreError where the object store cannot
        be used.
        """
        if isinstance(self.storage, ObjectStorage):
            self.storage.require_access()
            return
        if self.root.is_file():
            raise StorageError(f"{self.root} is a file; set paths.lake to a folder")
        if next(self.root.glob("*/*/parts"), None) is not None:
            raise OldLake(
                f"{self.root} was written by an earlier release; move it away and run again, or set paths.lake to "
                "another folder"
            )
