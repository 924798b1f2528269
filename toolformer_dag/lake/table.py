"""The lake's tables: a set of sealed parts, one per shard, each some Parquet files that never change.

    table-manifests/<group>/<table>.jsonl   the manifest: of each part files, version of the rows, what made them
    <table>/files/<shard>/<random>.parquet  its files, and older ones until `clean` removes them

Concurrent writers are safe: each writes files of its own, and a manifest is replaced only where it is the one that was
read; else it is read again and what this writer changed is put into it. Of two writers of one part the last wins in a
folder; in an object store the first does, and the other raises LostRace. A reader keeps the parts it has read, whose
files stay until the grace period of `clean` is over.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import polars as pl

from toolformer_dag.files import StorageError, as_json, file_name
from toolformer_dag.identity import content_hash, fingerprint
from toolformer_dag.lake import parquet
from toolformer_dag.lake.manifest import Manifest, PartFile, Pointer, decode
from toolformer_dag.lake.object_storage import opened
from toolformer_dag.lake.parquet import ContentHash, UnreadableFile
from toolformer_dag.lake.record import FieldChange, changes
from toolformer_dag.lake.row_store import IDENTITY, RowStore
from toolformer_dag.lake.session import News, Session, current, session
from toolformer_dag.lake.storage import PARTS, CheckedFile, Storage
from toolformer_dag.settings.rounds import named
from toolformer_dag.settings.sections import PathSettings

Answer = TypeVar("Answer")
ATTEMPTS, REVISIONS = 3, 20


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

    def __init__(self, table: str, part: str, winner: Pointer | None, changed: Sequence[FieldChange]) -> None:
        when = f" at {winner.record.get('written')}" if winner else ""
        differs = f" with {changed[0]}" if changed else " with other rows" if winner else ""
        super().__init__(
            f"{table}{behind(', shard', part)}: another run published it{when}{differs}, while this one made it; wait "
            "for that run and run again, computed rows are reused"
        )


class Table:
    """A table of the lake. `name` is its path there: "calculator/loss_deltas"."""

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.folder = storage.root / name
        self.name = name
        self.path = Manifest(storage, name).path
        self._place, self._files = storage.shown(self.path), f"{self.folder}/{PARTS}"

    def publish(
        self,
        part: str,
        frames: Iterable[pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
        volatile: Collection[str] = (),
    ) -> Pointer:
        """Make `frames`, at least one and all of one schema, the content of `part`; readers see it at once.

        `record` is asked after the last frame. `volatile` columns do not count in the data version. Memory holds about
        64 MB of rows. Raises WriteError, NotPlain for a record that JSON has no place for, LostRace where an object
        store has another part by now, and what `frames` raises; the part is then what it was, and the files of the
        frames are removed.
        """
        before = self._manifest().line(part)
        content, there = ContentHash(volatile), self._reusable(part)
        files: list[PartFile] = []
        try:
            files.extend(self._write(part, piece, content, there) for piece in parquet.pieces(frames))
            if not files:
                raise ValueError(f"{self.name}, part {part!r}: publish at least one frame, empty or not")
            pointer = Pointer(tuple(files), content.hexdigest(), record())
            line = pointer.encode(self.name, part)
        except BaseException:  # no pointer will name them
            self._remove_files(part, set(files) - set(there.values()))
            raise
        return self.commit(part, before, line) or pointer

    def revise(
        self,
        part: str,
        revised: Callable[[pl.DataFrame | None], pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
    ) -> Pointer:
        """Publish what `revised` makes of the rows that a part has; None where it has none, or damaged ones.

        Writers of one part take turns, so that the rows of each are kept. Raises as `publish`.
        """
        with session(), self.storage.alone(self.folder / ".revise.lock"):
            for _ in range(REVISIONS):
                rows = None
                self._manifest(anew=True)
                with suppress(MissingPart, DamagedPart):  # damage was set aside, and is named when it is
                    rows = self.read(part)
                with suppress(LostRace):
                    return self.publish(part, [revised(rows)], record)
        raise StorageError(f"{self.name}: others replace {part!r} all the time; run again when they are done")

    def read(self, part: str) -> pl.DataFrame:
        """Return all rows of a part, in the order in which they were published. Raises MissingPart, DamagedPart."""
        return pl.concat(self.batches(part))

    def batches(self, part: str) -> Iterator[pl.DataFrame]:
        """Yield the same rows, a file at a time, for parts larger than memory."""
        yield from (pl.read_parquet(file, glob=False) for file in self.files(part))

    def files(self, part: str, tries: int = ATTEMPTS) -> list[str]:
        """Return the verified paths of a part's files, for DuckDB's read_parquet. Raises MissingPart, DamagedPart."""
        pointer = self.pointer(part)
        try:
            return list(map(str, self._verified(part, pointer)))
        except DamagedPart:  # its files may have been replaced and cleaned away before they were opened
            self._manifest(anew=True)
            if not (tries and self.has(part)) or self.pointer(part) == pointer:
                raise
        return self.files(part, tries - 1)

    def scan(self, parts: Collection[str] | None = None) -> pl.LazyFrame:
        """Scan the rows of these parts, or of all; at least one. Raises as `files`."""
        return pl.scan_parquet(self.all_files(parts), glob=False)  # a folder may have brackets in its name

    def all_files(self, parts: Collection[str] | None = None) -> list[str]:
        """Return the verified paths of the files of these parts, or of all. Raises as `files`."""
        with session():
            chosen = self.parts() if parts is None else parts
            self.bring(chosen)
            return [file for part in chosen for file in self.files(part)]

    def bring(self, parts: Iterable[str]) -> None:
        """Fetch the files of these parts, many at once, where they are not on this machine."""
        self.storage.bring(self._known_files(parts))

    def _known_files(self, parts: Iterable[str]) -> Iterator[tuple[Path, int, str]]:
        for part in parts:
            with suppress(MissingPart, DamagedPart):
                yield from ((self.file_path(part, file), file.bytes, file.hash) for file in self.pointer(part).files)

    def parts(self) -> list[str]:
        """Return the names of the published parts, sorted."""
        return self._manifest().parts()

    def has(self, part: str) -> bool:
        """Return whether something is published, damaged or not."""
        return self._manifest().line(part) is not None

    def pointer(self, part: str, held: Manifest | None = None) -> Pointer:
        """Return what is published now. Raises MissingPart, DamagedPart, ReadError."""
        line = (held or self._manifest()).line(part)
        if line is None:
            raise MissingPart(self.name, part)
        try:
            return decode(line)
        except ValueError as error:
            raise DamagedPart(self.name, part, self.path.name, str(error)) from error

    def checked(self, part: str) -> Pointer:
        """Return the pointer after a look at the sizes and footers of its files; a session looks once.

        Raises MissingPart, DamagedPart.
        """
        held = self._manifest()
        if part not in held.looked:
            pointer = self.pointer(part, held)
            for file in pointer.files:
                try:
                    self.storage.check(self._file(part, file), file.bytes)
                except UnreadableFile as error:
                    raise DamagedPart(self.name, part, file.name, str(error)) from error
            held.looked[part] = pointer
        return held.looked[part]

    def whole_pointer(self, part: str) -> Pointer | None:
        """Return the pointer where it and its files are there, else None. Looks at sizes and footers."""
        try:
            return self.checked(part)
        except (MissingPart, DamagedPart):
            return None

    def checked_files(self, part: str, since: int = 0) -> Iterator[CheckedFile]:
        """Read those files of a part that changed `since` then; whole ones that did not are left out.

        Files of a part that was replaced or withdrawn meanwhile may be gone.
        """
        with suppress(MissingPart, DamagedPart):  # see `damage`
            pointer = self.pointer(part)
            for file in pointer.files:
                reason = self.storage.damage(self._file(part, file), file.bytes, file.hash, since)
                if reason and self.pointer(part, Manifest(self.storage, self.name).read()) != pointer:
                    return
                if reason or not since:
                    yield CheckedFile(self.file_path(part, file), file.bytes, reason)

    def pointers(self) -> dict[str, Pointer]:
        """Return the pointer of every part. Raises DamagedPart, ReadError."""
        with session():
            return {part: self.pointer(part) for part in self.parts()}

    def version(self) -> str | None:
        """Return the version of the whole table: another one whenever a part comes, goes or changes its rows.

        None for a table without parts, or with one that is damaged.
        """
        return self.remembered("version", self._version)

    def _version(self) -> str | None:
        try:
            versions = {part: pointer.data_version for part, pointer in self.pointers().items()}
        except DamagedPart:
            return None
        return fingerprint(versions) if versions else None

    def part_version(self, part: str) -> str | None:
        """Return the version of a part's rows; None where it is missing or damaged. Looks at sizes and footers."""
        pointer = self.whole_pointer(part)
        return pointer.data_version if pointer else None

    def remembered(self, question: str, ask: Callable[[], Answer]) -> Answer:
        """Return the answer to a question about this table; in a session it is asked again when the table changes."""
        answers = self._manifest().answers
        if question not in answers:
            answers[question] = ask()
        answer: Answer = answers[question]
        return answer

    def damage(self) -> str | None:
        """Return what is wrong with the manifest; parts may be lost then."""
        return self._manifest(anew=True).damage()

    def mend(self) -> None:
        """Write the manifest anew with the parts that can be read; what there was is set aside."""
        self._manifest(anew=True).mend()

    def record(self, part: str) -> Mapping[str, Any]:
        """Return what the rows were made from. Raises MissingPart, DamagedPart."""
        return self.pointer(part).record

    def remove(self, part: str) -> None:
        """Withdraw a part; its files go with the next `clean`. Nothing happens where there is none."""
        line = self._manifest().line(part)
        if line is not None:
            self.commit(part, line, None)

    def _reusable(self, part: str) -> dict[str, PartFile]:
        """The files of a part by hash, for rows that stay the same; none where `_winner` would remove them."""
        if self.storage.first_wins or not self.has(part):
            return {}
        pointer = self.whole_pointer(part)
        return {file.hash: file for file in pointer.files} if pointer else {}

    def _write(self, part: str, piece: pl.DataFrame, content: ContentHash, there: Mapping[str, PartFile]) -> PartFile:
        content.update(piece)
        content_bytes = parquet.encode(piece)
        file = PartFile(f"{uuid4().hex}.parquet", len(content_bytes), content_hash(content_bytes), piece.height)
        if known := there.get(file.hash):
            with suppress(UnreadableFile):
                parquet.verify(self.file_path(part, known), known.bytes, known.hash)
                return known
        path, around = self.file_path(part, file), current()
        if around and around.batching:
            around.later(lambda: self.storage.add(path, content_bytes))
        else:
            self.storage.add(path, content_bytes)
        return file

    def _remove_files(self, part: str, files: Iterable[PartFile]) -> None:
        if around := current():  # what is still being written would come back
            with suppress(StorageError):
                around.settle()
        self.storage.remove(*(self.file_path(part, file) for file in files))

    def _manifest(self, anew: bool = False) -> Manifest:
        """In a session the one that it holds; with `anew` read again."""
        around = current()
        held: Manifest | None = around.held.get(self._place) if around else None
        if held is None:
            held = Manifest(self.storage, self.name).read(anew)
            if around:
                around.held[self._place] = held
        elif anew:
            held.read()
        return held

    def commit(self, part: str, before: bytes | None, line: bytes | None, now: bool = False) -> Pointer | None:
        """Let the part have this line, or none; in a batch it is written with others, by a worker's leader.

        Return what another run has published, where it is the same. Raises LostRace.
        """
        held, around = self._manifest(), current()
        held.change(part, before, line)
        if around and around.news is not None and not now:
            around.news.append((self.name, part, before, line))
            return None
        if around and around.batching and not (now or held.is_due()):
            return None
        return self.flush(held).get(part)

    def flush(self, held: Manifest | None = None) -> dict[str, Pointer]:
        """Write what is published and not written yet; return what another run has published that is the same.

        Raises LostRace.
        """
        if around := current():
            around.settle()
        lost = (held or self._manifest()).write()
        return {part: self._winner(part, line) for part, line in lost.items()}

    def _winner(self, part: str, line: bytes | None) -> Pointer:
        """Return what another run published meanwhile, where it is the same; else raise LostRace."""
        winner = None
        with suppress(MissingPart):
            winner = self.pointer(part)
        if line is None:  # this run took away what another has made anew
            raise LostRace(self.name, part, winner, ())
        pointer = decode(line)
        self._remove_files(part, set(pointer.files) - set(winner.files if winner else ()))
        changed = changes(pointer.record, winner.record) if winner else []
        if winner is None or changed or winner.data_version != pointer.data_version:
            raise LostRace(self.name, part, winner, changed)
        return winner

    def _verified(self, part: str, pointer: Pointer) -> Iterator[Path]:
        for file in pointer.files:
            try:
                path = self.storage.fetch(self.file_path(part, file), file.bytes, file.hash)
                parquet.verify(path, file.bytes, file.hash)
            except UnreadableFile as error:
                raise self._set_aside(part, pointer, file, error) from error
            yield path

    def _set_aside(self, part: str, pointer: Pointer, file: PartFile, error: UnreadableFile) -> StorageError:
        """Withdraw a damaged part, so that the next update makes it again; a part published meanwhile stays.

        Return what is to be raised: MissingPart where the part was withdrawn, and `clean` has removed its files.
        """
        line = self._manifest(anew=True).line(part)
        if line is None:
            return MissingPart(self.name, part)
        if decode(line) == pointer:
            with suppress(LostRace):
                self.commit(part, line, None, now=True)
            self.storage.set_aside(self.file_path(part, file))
        return DamagedPart(self.name, part, file.name, str(error))

    def part_folder(self, part: str) -> Path:
        """Return where the files of a part lie, those that were replaced too."""
        return Path(self._files, file_name(part))

    def file_path(self, part: str, file: PartFile) -> Path:
        """Return where a file of a part lies."""
        return Path(self._file(part, file))

    def _file(self, part: str, file: PartFile) -> str:
        return f"{self._files}/{file_name(part)}/{file.name}"  # a text: asked of every part, each step


class Lake:
    """All tables and all computed rows, in a folder or in an object store. Nothing is created before the first write.

    `root`: the folder, or that of the copies on this machine. `suffix`: of the tables that a later
    round has for itself.
    """

    def __init__(self, root: str | Path, storage: Storage | None = None, suffix: str = "") -> None:
        self.root = Path(root)
        self.suffix = suffix
        self.storage = storage or Storage(self.root)
        self._tables: dict[str, Table] = {}

    @staticmethod
    def of(paths: PathSettings, suffix: str = "") -> "Lake":
        """Return the lake that the settings name. Raises ObjectStoreError without the extra `objects`."""
        return Lake.at(str(paths.lake), paths.local, suffix)

    @staticmethod
    def at(place: str, copies: Path, suffix: str = "") -> "Lake":
        """Return the lake in the folder `place`, or the one in an object store with `copies` of it on this machine."""
        return Lake(copies, opened(place, copies), suffix) if "://" in place else Lake(place, suffix=suffix)

    def shown(self, path: Path) -> str:
        """Return where a file lies, for people: of a copy of an object, the object."""
        return self.storage.shown(path) if path.is_relative_to(self.root) else str(path)

    def table(self, name: str) -> Table:
        """Return the table of that name, such as "calculator/loss_deltas", published or not.

        "training/augmented_corpus" is that of the lake's project.
        """
        name = named(name, self.suffix)
        if name not in self._tables:
            self._tables[name] = Table(self.storage, name)
        return self._tables[name]

    @contextmanager
    def batch(self) -> Iterator[Session]:
        """Write manifests in batches inside the block, and what is left at its end. Raises LostRace."""
        with session() as around:
            before, around.batching = around.batching, True
            try:
                yield around
            finally:
                around.batching = before
                self.flush()
                around.settle()

    def flush(self, due: bool = False) -> None:
        """Write what this session has published and not written yet; with `due` only what has waited long enough."""
        around = current()
        for held in list(around.held.values()) if around else ():
            if isinstance(held, Manifest) and held.pending and (held.is_due() or not due):
                Table(held.storage, held.table).flush(held)

    def take(self, news: Iterable[News]) -> None:
        """Publish the parts that a worker has made, and know of the files of rows that it has written."""
        for name, *rest in news:
            if len(rest) == 1:
                RowStore(self.storage, str(name), (), pl.Schema()).note(str(rest[0]))
            else:
                self.table(str(name)).commit(*rest)

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open the computed rows `name` that hold under `identity`: everything that determines their values.

        Another identity is another folder, so a row of another model or prompt is never found. Opening marks the rows
        as in use, which `clean` respects. Raises WriteError; NotPlain or TypeError for an identity that cannot be
        written down or has no fingerprint.
        """
        path, around = f"{name}/{fingerprint(identity)}", current()
        beside = around.later if around and around.batching else None
        self.storage.mark(self.root / path / IDENTITY, as_json(path, identity, sort_keys=True), beside)
        return RowStore(self.storage, path, key, pl.Schema(schema))

    def require_access(self) -> None:
        """Raise StorageError where a file is in the lake's place, ObjectStoreError where a store cannot be used."""
        self.storage.require_access()
