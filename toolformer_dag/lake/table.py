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
        """Say which part another run published first, when, and from which other setting or input.

        Args:
            table: The name of the table.
            part: The name of the part, mostly a shard.
            winner: The part as the other run published it, or None if that run withdrew the part.
            changed: The settings and inputs that differ between the records of the two runs. May be empty.
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
        """Replace the rows of a part (mostly a shard).

        In a batch or a worker, other processes see the new part only once the batch is written (see session.py).
        If anything fails, the part stays as it was and the new files are removed.

        Args:
            part: The name of the part.
            frames: The new rows: at least one frame, all with the same schema. With a generator, only about
                64 MB of rows are in memory at a time.
            record: Returns what the rows were computed from. It is called after the last frame.
            volatile: Columns that do not count in the version of the rows.

        Returns:
            What is published now: the files of the part, the version of its rows, and the record.

        Raises:
            WriteError: The files or the manifest cannot be written.
            NotPlain: The record contains a value that JSON cannot express.
            LostRace: In an object store, another run has withdrawn the part or published something else
                meanwhile.
            Exception: Anything that `frames` raises.
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
        """Collect the new files of a part in a list, and remove them if the `with` block raises.

        Args:
            part: The name of the part.
            published: Files that are published already, by hash. They stay, even if the block adds them to
                the list because their rows are equal.

        Yields:
            The list, empty at first. The block appends the files to it.
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
        """Change the rows of a part by a function, and publish the result.

        If another writer replaces the part meanwhile, this starts again with that writer's rows, so that
        the changes of both are kept.

        Args:
            part: The name of the part.
            revised: Takes the present rows and returns the new ones; may be called several times. It gets
                None if the rows are missing or damaged.
            record: Returns what the rows were computed from.

        Raises:
            StorageError: Other writers replaced the part in each of REVISIONS attempts.
            WriteError: The result cannot be written. Other errors of `publish` are raised too.
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
        """List the paths of the Parquet files of a part, and compare their hashes first.

        Args:
            part: The name of the part.
            retries: How often to start again if a file is gone because the part was replaced meanwhile.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is damaged. The part is then withdrawn, so that it is computed again.
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
        """List the paths of the files of several parts, and compare their hashes first.

        Args:
            parts: The names of the parts, or None for all parts of the table.

        Raises:
            MissingPart: A part is not published.
            DamagedPart: A file is damaged.
        """
        paths: list[str] = []
        with session():
            chosen = self.parts() if parts is None else parts
            # Download all files at once. Otherwise `files` would fetch them one by one.
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
        """Read what a part consists of: its files, the version of its rows, and the record of what made them.

        The files themselves are not looked at.

        Args:
            part: The name of the part.
            manifest: Where to look. The default is the table's manifest, as the open session remembers it
                or, without a session, as it is now.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: The line of the part in the manifest is damaged.
            ReadError: The manifest cannot be read.
        """
        line = (manifest or self._read_manifest()).line(part)
        if line is None:
            raise MissingPart(self.name, part)
        try:
            return decode(line)
        except ValueError as error:
            raise DamagedPart(self.name, part, self.path.name, str(error)) from error

    def checked(self, part: str) -> Pointer:
        """Return the pointer of a part, after a quick check of its files.

        The check compares the size and looks at the last bytes of each file. A session checks a part only
        once, until the part changes.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is missing, cut off or of another size, or the line in the manifest is damaged.
        """
        manifest = self._read_manifest()
        if part not in manifest.checked:
            pointer = self.pointer(part, manifest)
            for file in pointer.files:
                self._check_file(part, file)
            manifest.checked[part] = pointer  # remembered, also for later calls in this session
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
        """Check the files of a part.

        It ends early if the part is replaced or withdrawn meanwhile, or if its line in the manifest is damaged.

        Args:
            part: The name of the part.
            since: 0 compares the hash of every file. Otherwise a time in nanoseconds since 1970: only the
                size is compared of files that have not changed since then.

        Yields:
            Each file with what is wrong with it. Whole files are only yielded if `since` is 0.
        """
        yields_whole_files = since == 0

        with suppress(MissingPart, DamagedPart):
            pointer = self.pointer(part)
            for file in pointer.files:
                damage = self.storage.damage(self._format_file_path(part, file), file.bytes, file.hash, since)
                # A replaced part may have lost its old files to `clean`: that is no damage.
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
        """Answer a question about the published parts, and remember the answer until the manifest changes.

        Args:
            question: A name for the question, such as "version".
            ask: Computes the answer. It is only called if no answer is remembered.
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
        """Write rows to a new Parquet file of a part, unless a published file already has the same content.

        Args:
            part: The name of the part.
            rows: The rows of the file.
            reusable_files: Published files by the hash of their content.

        Returns:
            The new file, or the published one.
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
        # First wait for background writes: a file that is still being written would come back.
        if open_session:
            with suppress(StorageError):
                open_session.settle()

        self.storage.remove(*(self.file_path(part, file) for file in files))

    def _read_manifest(self, anew: bool = False) -> Manifest:
        """Return the manifest of the table, which lists its parts.

        A session reads it once and keeps it, together with changes that are not written yet. Without a
        session it is read at every call.

        Args:
            anew: Read it again even in a session, and in an object store not from this machine's copy.
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
        """Publish or withdraw a part by giving it another line in the manifest, which lists the parts of the table.

        The line is not always written at once: a worker leaves that to the process that leads the step, and a
        batch writes several lines together.

        Args:
            part: The name of the part.
            line_before: The line of the part when the caller began, or None if it had none.
            line: The new line, or None to withdraw the part.
            write_now: Write the manifest at once in any case.

        Returns:
            None, or the pointer of another run that has published equal rows meanwhile. That one then stays.

        Raises:
            LostRace: Another run has published something else meanwhile.
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
        """Write the changes of the manifest that are not written yet.

        Args:
            manifest: The manifest to write. The default is the table's manifest in this session.

        Returns:
            For each part of which another run has published equal rows meanwhile, that run's pointer.

        Raises:
            LostRace: Another run has published other rows meanwhile.
        """
        open_session = get_current_session()
        if open_session:
            open_session.settle()  # waits until the files that the new lines name are written
        lost_lines = (manifest or self._read_manifest()).write()  # this run's, of parts where another run was faster
        return {part: self._give_way(part, lost_line) for part, lost_line in lost_lines.items()}

    def _give_way(self, part: str, lost_line: bytes | None) -> Pointer:
        """Accept that another run was the first to change a part, if its rows are the same.

        The files of this run are removed in any case.

        Args:
            part: The name of the part.
            lost_line: The line that this run wanted to write, or None if it wanted to withdraw the part.

        Returns:
            The part as the other run published it.

        Raises:
            LostRace: The other run withdrew the part, or made it from other settings or inputs, or got other
                rows. Also raised if this run wanted to withdraw the part.
        """
        # None if the other run withdrew the part.
        winner = self._find_pointer(part)
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
        """Yield the paths of the files of a part, each after its hash was compared.

        Args:
            part: The name of the part.
            pointer: The files of the part, as the manifest lists them.

        Raises:
            DamagedPart: A file is missing or damaged. The part is then withdrawn.
            MissingPart: A file is missing or damaged, and another run has withdrawn the part already.
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
        """Withdraw a part that has a damaged file, and rename the file.

        Nothing happens if the part was published again since it was read.

        Args:
            part: The name of the part.
            pointer: The part as it was read.
            damaged_file: One of its files.

        Raises:
            MissingPart: Another run has withdrawn the part already.
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
        """Collect what is published in the `with` block, to write it together.

        Manifests are written every few seconds, and files in the background. The end of the block writes
        what is left and waits for it.

        Yields:
            The session of the block.

        Raises:
            LostRace: Another run has published something else of the same part.
            WriteError: Something cannot be written.
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
        """Write all manifests (the lists of parts of tables) that this session has changed.

        Args:
            due: Skip manifests whose changes are few and recent.
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
        """Open a row store: rows that are computed once and looked up by key.

        Opening marks the store as in use, so that `clean` keeps it.

        Args:
            name: The folder of the stores of this kind.
            identity: Everything that determines the values of the rows, such as a model and a prompt. Each
                identity has a store of its own.
            key: The columns by which rows are looked up.
            schema: All columns; those of the key come first.

        Raises:
            WriteError: The identity cannot be written.
            NotPlain: The identity contains a value that JSON cannot express.
            TypeError: The identity contains a value of a type that has no fingerprint.
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
