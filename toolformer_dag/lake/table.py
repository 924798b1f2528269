"""The lake's tables: a set of sealed parts, one per shard, each some Parquet files that never change.

    table-manifests/<group>/<table>.jsonl   the manifest: of each part files, version of the rows, what made them
    <table>/files/<shard>/<random>.parquet  its files, and older ones until `clean` removes them

Concurrent writers are safe: each writes files of its own, and a manifest is replaced only where it is the one that was
read; else it is read again and what this writer changed is put into it. Of two writers of one part the last wins in a
folder; in an object store the first does, and the other raises LostRace. A reader keeps the parts it has read, whose
files stay until the grace period of `clean` is over.

A table behaves differently in a session: it reads its manifest once, and in a batch or in a worker it writes the
manifest later (see session.py).
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
from toolformer_dag.lake.session import LakeSession, NewPart, NewRowFile, News, get_current_session, session
from toolformer_dag.lake.storage import PARTS, CheckedFile, FileToFetch, Storage
from toolformer_dag.settings.rounds import named
from toolformer_dag.settings.sections import PathSettings

Answer = TypeVar("Answer")
RETRIES = 3
"""How often a read is tried again where the part was replaced and its files cleaned away before they were opened."""
REVISIONS = 20
"""How often a revision is tried where others replace the part."""
WHOLE = "all"
"""The only part of a table that is not cut by shard."""


def format_part_phrase(words: str, part: str) -> str:
    """Return `WORDS 'PART'`, or nothing for WHOLE, which people never see."""
    return "" if part == WHOLE else f"{words} {part!r}"


class MissingPart(StorageError):
    """A part of a table that was never published, or was withdrawn."""

    def __init__(self, table: str, part: str) -> None:
        lacks = format_part_phrase("has no rows of shard", part) or "was not materialized yet"
        super().__init__(f"{table} {lacks}; run `toolformer-dag stale --run`")


class DamagedPart(StorageError):
    """A published part whose files are missing, truncated or unreadable."""

    def __init__(self, table: str, part: str, file: str, reason: str) -> None:
        shard = format_part_phrase(", shard", part)
        super().__init__(f"{table}{shard}: {file} {reason}; run `toolformer-dag stale --run`, computed rows are reused")


class LostRace(StorageError):
    """A part that another run published while this one made it, from something else.

    winner: what that run has published; None where it withdrew the part.
    changed: what differs between the two records.
    """

    def __init__(self, table: str, part: str, winner: Pointer | None, changed: Sequence[FieldChange]) -> None:
        """Say which part another run published first, when, and with which other setting or input.

        winner: the part as that run published it; None where it withdrew the part. changed: what differs between the
        records of the two runs, which may be nothing.
        """
        when = f" at {winner.record.get('written')}" if winner else ""
        if changed:
            differs = f" with {changed[0]}"
        elif winner:
            differs = " with other rows"
        else:
            differs = ""
        shard = format_part_phrase(", shard", part)
        super().__init__(
            f"{table}{shard}: another run published it{when}{differs}, while this one made it; wait for that run and "
            "run again, computed rows are reused"
        )


class Table:
    """A table of the lake. `name` is its path there: "calculator/loss_deltas".

    A table has no state: what it remembers is in the session, if there is one.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.folder = storage.root / name
        self.name = name
        self.path = Manifest(storage, name).path
        self._held_key = storage.shown(self.path)  # of the manifest in `LakeSession.held`
        self._files_folder = f"{self.folder}/{PARTS}"

    def publish(
        self,
        part: str,
        frames: Iterable[pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
        volatile: Collection[str] = (),
    ) -> Pointer:
        """Replace the rows of a part (mostly a shard) by `frames`; return the pointer that was published.

        In a batch or a worker, other processes see the part only once the batch is written (see session.py).

        frames: at least one, all of one schema. They may be lazy: memory holds about 64 MB of rows.
        record: called after the last frame; returns what the rows were computed from.
        volatile: columns that do not count in the data version.

        Raises WriteError, NotPlain for a record that JSON cannot hold, LostRace where an object store has another part
        by now, and what `frames` raises; the part is then unchanged, and the new files are removed.
        """
        line_before = self._read_manifest().line(part)  # in the list of the table's parts
        reusable_files = self._find_reusable_files(part)
        content = ContentHash(volatile)
        with self._remove_on_error(part, reusable_files) as files:  # a list, which the block fills
            for rows in parquet.pieces(frames):
                content.update(rows)
                files.append(self._write_file(part, rows, reusable_files))
            if not files:
                raise ValueError(f"{self.name}, part {part!r}: publish at least one frame, empty or not")
            pointer = Pointer(tuple(files), content.hexdigest(), record())
            line = pointer.encode(self.name, part)
        pointer_of_faster_run = self.commit(part, line_before, line)  # mostly None; to equal rows, which stay
        return pointer_of_faster_run or pointer

    @contextmanager
    def _remove_on_error(self, part: str, published: Mapping[str, PartFile]) -> Iterator[list[PartFile]]:
        """Yield an empty list, to which the block adds the new files of a part; remove these if it raises.

        published: published files with equal rows, by hash, which may be among those of the list: they stay.
        """
        files: list[PartFile] = []
        try:
            yield files
        except BaseException:
            new_files = set(files).difference(published.values())
            self._remove_files(part, new_files)
            raise

    def revise(
        self,
        part: str,
        revised: Callable[[pl.DataFrame | None], pl.DataFrame],
        record: Callable[[], Mapping[str, Any]],
    ) -> Pointer:
        """Read the rows of a part, change them by a function, and publish the result.

        revised: gets the rows (None where they are missing or damaged) and returns the new ones. It is called again
            where another writer was faster, so that the rows of both are kept.
        record: returns what the rows were computed from.

        Raises what `publish` raises, and StorageError where others replace the part all the time.
        """
        with session(), self.storage.alone(self.folder / ".revise.lock"):
            for _ in range(REVISIONS):
                self._read_manifest(anew=True)  # what another writer has published since the last try
                rows = self._read_rows_or_none(part)
                try:
                    return self.publish(part, [revised(rows)], record)
                except LostRace:  # another writer was faster: try again with its rows
                    continue
        raise StorageError(f"{self.name}: others replace {part!r} all the time; run again when they are done")

    def _read_rows_or_none(self, part: str) -> pl.DataFrame | None:
        """Return the rows of a part; None where it is missing, or damaged and now set aside with a warning."""
        try:
            return self.read(part)
        except (MissingPart, DamagedPart):
            return None

    def read(self, part: str) -> pl.DataFrame:
        """Return all rows of a part, in the order in which they were published. Raises MissingPart, DamagedPart."""
        return pl.concat(self.batches(part))

    def batches(self, part: str) -> Iterator[pl.DataFrame]:
        """Yield the rows of a part, a frame per file, for parts larger than memory.

        Raises MissingPart, DamagedPart before the first frame.
        """
        for file in self.files(part):
            yield pl.read_parquet(file, glob=False)

    def files(self, part: str, retries: int = RETRIES) -> list[str]:
        """Return the paths of the Parquet files of a part, after their hashes were compared.

        Raises MissingPart, and DamagedPart where a file is damaged: the part is then withdrawn, to be computed again.

        retries: how often the manifest is read again where the part was replaced meanwhile and a file is gone.
        """
        while True:
            pointer = self.pointer(part)
            try:
                return [str(path) for path in self._iter_verified_paths(part, pointer)]
            except DamagedPart:
                # The part may have been replaced, and the files of `pointer` cleaned away, before they were opened.
                if not self._has_newer_pointer(part, pointer) or retries == 0:
                    raise
            retries -= 1

    def _has_newer_pointer(self, part: str, pointer: Pointer) -> bool:
        """Read the manifest again, for later calls too; return whether it has another pointer of the part."""
        self._read_manifest(anew=True)
        return self.has(part) and self.pointer(part) != pointer

    def scan(self, parts: Collection[str] | None = None) -> pl.LazyFrame:
        """Scan the rows of at least one part, or of all parts. Raises MissingPart, DamagedPart."""
        return pl.scan_parquet(self.list_all_files(parts), glob=False)  # a folder may have brackets in its name

    def list_all_files(self, parts: Collection[str] | None = None) -> list[str]:
        """Return the paths of the files of parts, or of all parts, after their hashes were compared.

        Raises MissingPart, DamagedPart.
        """
        paths: list[str] = []
        with session():
            chosen = self.parts() if parts is None else parts
            self.bring(chosen)
            for part in chosen:
                paths.extend(self.files(part))
        return paths

    def bring(self, parts: Iterable[str]) -> None:
        """Fetch the files of these parts, many at once, where they are not on this machine."""
        self.storage.bring(self._iter_files_to_fetch(parts))

    def _iter_files_to_fetch(self, parts: Iterable[str]) -> Iterator[FileToFetch]:
        """Yield the files of those of the parts that are published and whole."""
        for part in parts:
            with suppress(MissingPart, DamagedPart):
                for file in self.pointer(part).files:
                    yield FileToFetch(self.file_path(part, file), file.bytes, file.hash)

    def parts(self) -> list[str]:
        """Return the names of the published parts, sorted."""
        return self._read_manifest().parts()

    def has(self, part: str) -> bool:
        """Return whether something is published, damaged or not."""
        return self._read_manifest().line(part) is not None

    def pointer(self, part: str, manifest: Manifest | None = None) -> Pointer:
        """Return the pointer of a part: its files, the version of its rows, the record of what made them.

        manifest: default: the manifest of the open session, or the file as it is now.

        Raises MissingPart, DamagedPart, ReadError. The files themselves are not looked at.
        """
        line = (manifest or self._read_manifest()).line(part)
        if line is None:
            raise MissingPart(self.name, part)
        try:
            return decode(line)
        except ValueError as error:
            raise DamagedPart(self.name, part, self.path.name, str(error)) from error

    def checked(self, part: str) -> Pointer:
        """Return the pointer of a part, after a look at the size and the last bytes of each of its files.

        A session looks once, until the part changes. Raises MissingPart, DamagedPart.
        """
        manifest = self._read_manifest()
        if part not in manifest.checked:
            pointer = self.pointer(part, manifest)
            for file in pointer.files:
                self._check_file(part, file)
            manifest.checked[part] = pointer
        return manifest.checked[part]

    def _check_file(self, part: str, file: PartFile) -> None:
        """Raise DamagedPart where a file is missing, has another size, or does not end as a Parquet file does."""
        try:
            self.storage.check(self._format_file_path(part, file), file.bytes)
        except UnreadableFile as error:
            raise DamagedPart(self.name, part, file.name, str(error)) from error

    def find_whole_pointer(self, part: str) -> Pointer | None:
        """Return the pointer where it and its files are there, else None. Looks at sizes and footers."""
        try:
            return self.checked(part)
        except (MissingPart, DamagedPart):
            return None

    def checked_files(self, part: str, since: int = 0) -> Iterator[CheckedFile]:
        """Check the files of a part; yield each file with what is wrong.

        since: with 0, the hash of every file is compared, and whole files are yielded too. Else a time (nanoseconds
            since 1970): only damaged files are yielded, and of files that did not change since, the size alone is
            compared.

        Stops where the part was replaced or withdrawn meanwhile, or its line in the manifest is damaged.
        """
        yields_whole_files = since == 0
        with suppress(MissingPart, DamagedPart):
            pointer = self.pointer(part)
            for file in pointer.files:
                damage = self.storage.damage(self._format_file_path(part, file), file.bytes, file.hash, since)
                if damage and self._was_replaced(part, pointer):
                    return
                if damage or yields_whole_files:
                    yield CheckedFile(self.file_path(part, file), file.bytes, damage)

    def _was_replaced(self, part: str, pointer: Pointer) -> bool:
        """Return whether the manifest in the storage has another pointer by now.

        Raises MissingPart where the part was withdrawn.
        """
        manifest_now = Manifest(self.storage, self.name).read()
        return self.pointer(part, manifest_now) != pointer

    def pointers(self) -> dict[str, Pointer]:
        """Return the pointer of every part. Raises DamagedPart, ReadError."""
        with session():
            return {part: self.pointer(part) for part in self.parts()}

    def version(self) -> str | None:
        """Return the version of the whole table, which changes whenever a part comes, goes or changes its rows.

        None for a table without parts, or with a damaged part.
        """
        return self.remembered("version", self._compute_version)

    def _compute_version(self) -> str | None:
        """Return the fingerprint of all parts' versions."""
        try:
            versions = {part: pointer.data_version for part, pointer in self.pointers().items()}
        except DamagedPart:
            return None
        return fingerprint(versions) if versions else None

    def part_version(self, part: str) -> str | None:
        """Return the version of a part's rows; None where it is missing or damaged. Looks at sizes and footers."""
        pointer = self.find_whole_pointer(part)
        return pointer.data_version if pointer else None

    def remembered(self, question: str, ask: Callable[[], Answer]) -> Answer:
        """Return the answer to a question about the published parts; it is remembered until the manifest changes.

        ask: computes the answer.
        """
        answers = self._read_manifest().answers
        if question not in answers:
            answers[question] = ask()
        answer: Answer = answers[question]
        return answer

    def damage(self) -> str | None:
        """Return what is wrong with the manifest in the storage, which may have lost parts; None for a whole one."""
        return self._read_manifest(anew=True).damage()

    def mend(self) -> None:
        """Set the manifest aside and write a new one with the parts that can be read."""
        self._read_manifest(anew=True).mend()

    def record(self, part: str) -> Mapping[str, Any]:
        """Return what the rows of a part were computed from. Raises MissingPart, DamagedPart."""
        return self.pointer(part).record

    def remove(self, part: str) -> None:
        """Withdraw a part, if there is one; its files go with the next `clean`."""
        line = self._read_manifest().line(part)
        if line is not None:
            self.commit(part, line, None)

    def _find_reusable_files(self, part: str) -> dict[str, PartFile]:
        """Return the published files of a part by hash, so that equal rows need no new file; {} in an object store."""
        if self.storage.first_wins or not self.has(part):
            return {}
        pointer = self.find_whole_pointer(part)
        if pointer is None:
            return {}
        return {file.hash: file for file in pointer.files}

    def _write_file(self, part: str, rows: pl.DataFrame, reusable_files: Mapping[str, PartFile]) -> PartFile:
        """Write rows as a Parquet file of the part, or return a published file with the same content.

        reusable_files: published files by hash.
        """
        content = parquet.encode(rows)
        digest = content_hash(content)
        published = reusable_files.get(digest)
        if published is not None and self._is_undamaged(part, published):
            return published
        file = PartFile(name=f"{uuid4().hex}.parquet", bytes=len(content), hash=digest, rows=rows.height)
        self._add_file(self.file_path(part, file), content)
        return file

    def _is_undamaged(self, part: str, file: PartFile) -> bool:
        """Return whether a file is there with the content that was written."""
        try:
            parquet.verify(self.file_path(part, file), file.bytes, file.hash)
        except UnreadableFile:
            return False
        return True

    def _add_file(self, path: Path, content: bytes) -> None:
        """Write a new file; in a batch of an open session in the background."""
        open_session = get_current_session()
        if open_session and open_session.batching:
            open_session.later(lambda: self.storage.add(path, content))
        else:
            self.storage.add(path, content)

    def _remove_files(self, part: str, files: Iterable[PartFile]) -> None:
        """Remove files of a part that no manifest names."""
        open_session = get_current_session()
        if open_session:  # a file that is still being written would come back
            with suppress(StorageError):
                open_session.settle()
        self.storage.remove(*(self.file_path(part, file) for file in files))

    def _read_manifest(self, anew: bool = False) -> Manifest:
        """Return the manifest of the table, the list of its parts. A session reads it once; else every call does.

        anew: read it again in a session, too, and over an object store the object itself.
        """
        open_session = get_current_session()
        if open_session is None:
            return Manifest(self.storage, self.name).read(anew)
        manifest: Manifest | None = open_session.held.get(self._held_key)  # with changes that are not written yet
        if manifest is None:
            manifest = Manifest(self.storage, self.name).read(anew)
            open_session.held[self._held_key] = manifest
        elif anew:
            manifest.read()  # changes the object that the session holds
        return manifest

    def commit(
        self, part: str, line_before: bytes | None, line: bytes | None, write_now: bool = False
    ) -> Pointer | None:
        """Publish or withdraw a part: give it another line in the manifest (the list of the table's parts).

        Returns what another run published meanwhile where that is equal and stays, else None. Raises LostRace where
        another run published something else.

        line_before: the part's line when the caller began; None where it had none.
        line: the new line; None withdraws the part.
        write_now: write the manifest at once. Otherwise a worker leaves that to the leading process, and a batch writes
            several lines together.
        """
        manifest = self._read_manifest()
        manifest.change(part, line_before, line)  # in memory; `flush` writes it
        if write_now:
            return self.flush(manifest).get(part)
        open_session = get_current_session()
        if open_session and open_session.news is not None:  # in a worker: the leading process is told, and writes it
            open_session.news.append(NewPart(table=self.name, part=part, line_before=line_before, line=line))
            return None
        if open_session and open_session.batching and not manifest.is_due():  # a later call writes it, with others
            return None
        return self.flush(manifest).get(part)

    def flush(self, manifest: Manifest | None = None) -> dict[str, Pointer]:
        """Write the pending changes of the manifest, by default of the table's manifest in this session.

        Returns, by part, the other run's pointer where it published equal rows meanwhile. Raises LostRace where it
        published other rows.
        """
        open_session = get_current_session()
        if open_session:
            open_session.settle()  # waits until the files that the new lines name are written
        lost_lines = (manifest or self._read_manifest()).write()  # this run's, of parts where another run was faster
        return {part: self._give_way(part, lost_line) for part, lost_line in lost_lines.items()}

    def _give_way(self, part: str, lost_line: bytes | None) -> Pointer:
        """Give way to another run that changed a part first: remove this run's files, return the other's pointer.

        lost_line: what this run would have put into the manifest; None where it would have withdrawn the part.

        Raises LostRace unless the other run has published the same rows, from the same settings and inputs.
        """
        winner = self._find_pointer(part)  # None: the other run withdrew the part
        if lost_line is None:
            raise LostRace(self.name, part, winner, changed=())
        loser = decode(lost_line)
        winner_files = winner.files if winner else ()
        self._remove_files(part, set(loser.files).difference(winner_files))
        if winner is None:
            raise LostRace(self.name, part, winner=None, changed=())
        changed = changes(loser.record, winner.record)
        if changed or winner.data_version != loser.data_version:
            raise LostRace(self.name, part, winner, changed)
        return winner

    def _find_pointer(self, part: str) -> Pointer | None:
        """Return the pointer of a part; None where there is none. Raises DamagedPart."""
        try:
            return self.pointer(part)
        except MissingPart:
            return None

    def _iter_verified_paths(self, part: str, pointer: Pointer) -> Iterator[Path]:
        """Yield the paths of the files of a part, after their hashes were compared.

        A part with a damaged file is withdrawn. Raises DamagedPart then, and MissingPart where another run withdrew it.
        """
        for file in pointer.files:
            try:
                path = self.storage.fetch(self.file_path(part, file), file.bytes, file.hash)
                parquet.verify(path, file.bytes, file.hash)
            except UnreadableFile as error:
                self._withdraw_damaged(part, pointer, file)
                raise DamagedPart(self.name, part, file.name, str(error)) from error
            yield path

    def _withdraw_damaged(self, part: str, pointer: Pointer, damaged_file: PartFile) -> None:
        """Withdraw a part with a damaged file, and rename the file, unless the part was published anew since.

        pointer: the part as it was read. Raises MissingPart where another run has withdrawn the part.
        """
        line_now = self._read_manifest(anew=True).line(part)
        if line_now is None:
            raise MissingPart(self.name, part)
        is_still_published = decode(line_now) == pointer
        if is_still_published:
            self._withdraw_at_once(part, line_now)
            self.storage.set_aside(self.file_path(part, damaged_file))

    def _withdraw_at_once(self, part: str, line: bytes) -> None:
        """Withdraw a part; nothing happens where another run has published it anew. line: of the part as it was."""
        with suppress(LostRace):
            self.commit(part, line, None, write_now=True)

    def get_part_folder(self, part: str) -> Path:
        """Return where the files of a part lie, those that were replaced too."""
        return Path(self._files_folder, file_name(part))

    def file_path(self, part: str, file: PartFile) -> Path:
        """Return where a file of a part lies."""
        return Path(self._format_file_path(part, file))

    def _format_file_path(self, part: str, file: PartFile) -> str:
        """Return where a file lies, as text: every step looks at every part, and a Path takes longer to make."""
        return f"{self._files_folder}/{file_name(part)}/{file.name}"


class Lake:
    """All tables and all computed rows, in a folder or in an object store. Nothing is created before the first write.

    - `root`: the folder, or that of the copies on this machine
    - `suffix`: what the names of the tables end with that a later round has for itself; empty for the first
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
        """Return the lake in the folder `place`, or at its URL in an object store with `copies` on this machine."""
        if "://" in place:
            return Lake(copies, opened(place, copies), suffix)
        return Lake(place, suffix=suffix)

    def shown(self, path: Path) -> str:
        """Return where a file lies, for people: of a copy of an object, the object."""
        return self.storage.shown(path) if path.is_relative_to(self.root) else str(path)

    def table(self, name: str) -> Table:
        """Return the table of that name, such as "calculator/loss_deltas", published or not.

        In a later round, "training/augmented_corpus" is that round's table (see `rounds.named`).
        """
        name = named(name, self.suffix)
        if name not in self._tables:
            self._tables[name] = Table(self.storage, name)
        return self._tables[name]

    @contextmanager
    def batch(self) -> Iterator[LakeSession]:
        """Collect publications inside the block: manifests are written every few seconds, files in the background.

        Yields the session of the block. At its end, what is left is written. Raises LostRace and WriteError.
        """
        with session() as open_session:
            batching_before = open_session.batching
            open_session.batching = True
            try:
                yield open_session
            finally:
                open_session.batching = batching_before  # of an outer batch, which goes on
                self.flush()  # writes the manifests
                open_session.settle()  # waits for the files that are written in the background

    def flush(self, due: bool = False) -> None:
        """Write the manifests (lists of a table's parts) with changes that this session has not written yet.

        due: only those whose changes have waited for some seconds, or are many.
        """
        open_session = get_current_session()
        if open_session is None:  # then every change was written at once
            return
        for manifest in list(open_session.held.values()):
            if not isinstance(manifest, Manifest) or not manifest.pending:  # the session holds names of files, too
                continue
            may_wait = due and not manifest.is_due()
            if not may_wait:
                Table(manifest.storage, manifest.table).flush(manifest)

    def take(self, news: Iterable[News]) -> None:
        """Do in the leading process what a worker has told: publish its parts, note its files of computed rows."""
        for item in news:
            if isinstance(item, NewRowFile):
                RowStore(self.storage, item.store, (), pl.Schema()).note(item.file)
            else:
                self.table(item.table).commit(item.part, item.line_before, item.line)

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open the computed rows `name` that hold under `identity`: everything that determines their values.

        Opening marks the rows as in use, which `clean` respects. Raises WriteError; NotPlain or TypeError for an
        identity that cannot be written down or has no fingerprint.
        """
        path = f"{name}/{fingerprint(identity)}"
        open_session = get_current_session()
        later = None
        if open_session and open_session.batching:
            later = open_session.later  # over an object store, the identity is then written in the background
        self.storage.mark(self.root / path / IDENTITY, as_json(path, identity, sort_keys=True), later)
        return RowStore(self.storage, path, key, pl.Schema(schema))

    def require_access(self) -> None:
        """Raise StorageError where a file is in the lake's place, ObjectStoreError where a store cannot be used."""
        self.storage.require_access()
