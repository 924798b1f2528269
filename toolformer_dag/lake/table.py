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

from toolformer_dag.files import StorageError, encode_file_name, encode_json
from toolformer_dag.identity import compute_content_hash, fingerprint
from toolformer_dag.lake import parquet
from toolformer_dag.lake.manifest import Manifest, PartFile, Pointer, decode_pointer
from toolformer_dag.lake.object_storage import open_object_storage
from toolformer_dag.lake.parquet import ContentHash, UnreadableFile
from toolformer_dag.lake.record import FieldChange, list_record_changes
from toolformer_dag.lake.row_store import IDENTITY_FILE_NAME, RowStore
from toolformer_dag.lake.session import LakeSession, NewPart, NewRowFile, News, enter_session, get_current_session
from toolformer_dag.lake.storage import PARTS_FOLDER, CheckedFile, FileToFetch, Storage
from toolformer_dag.settings.rounds import add_round_suffix
from toolformer_dag.settings.sections import PathSettings

Answer = TypeVar("Answer")
MAX_READ_RETRIES = 3
"""How often a read is tried again where the part was replaced and its files cleaned away before they were opened."""
MAX_REVISION_ATTEMPTS = 20
"""How often a revision is tried where others replace the part."""
WHOLE_TABLE_PART = "all"
"""The only part of a table that is not cut by shard."""


def format_part_phrase(words: str, part_name: str) -> str:
    """Return a phrase for an error message, such as ", shard 'en_0'".

    Returns:
        The words and the quoted name of the part. "" for the only part of a table that is not cut into shards,
        because users never see the name of that part.
    """
    return "" if part_name == WHOLE_TABLE_PART else f"{words} {part_name!r}"


class MissingPart(StorageError):
    """A part of a table that was never published, or was withdrawn."""

    def __init__(self, table_name: str, part_name: str) -> None:
        lacks = format_part_phrase("has no rows of shard", part_name) or "was not materialized yet"
        super().__init__(f"{table_name} {lacks}; run `toolformer-dag stale --run`")


class DamagedPart(StorageError):
    """A published part whose files are missing, truncated or unreadable."""

    def __init__(self, table_name: str, part_name: str, damaged_file_name: str, reason: str) -> None:
        shard = format_part_phrase(", shard", part_name)
        super().__init__(
            f"{table_name}{shard}: {damaged_file_name} {reason}; run `toolformer-dag stale --run`, computed rows are "
            "reused"
        )


class LostRace(StorageError):
    """Raised if another run has published something else of a part, or withdrawn it, while this run computed it."""

    def __init__(
        self, table_name: str, part_name: str, winning_pointer: Pointer | None, field_changes: Sequence[FieldChange]
    ) -> None:
        """Build the message: which part another run published first, when, and from which other setting or input.

        It says "published" even if the other run withdrew the part.

        Example: "calculator/loss_deltas, shard 'en_head_0000': another run published it at 2025-01-31T12:00:00+00:00
        with other rows, while this one made it; wait for that run and run again, computed rows are reused".

        Args:
            table_name: The name of the table.
            part_name: The name of the part, mostly a shard.
            winning_pointer: The part as the other run published it, or None if that run withdrew the part.
            field_changes: The settings and inputs that differ between the records of the two runs. May be empty.
        """
        time_phrase = ""
        if winning_pointer:
            time_phrase = f" at {winning_pointer.record.get('written')}"

        difference_phrase = ""
        if field_changes:
            difference_phrase = f" with {field_changes[0]}"
        elif winning_pointer:
            difference_phrase = " with other rows"

        shard_phrase = format_part_phrase(", shard", part_name)
        super().__init__(
            f"{table_name}{shard_phrase}: another run published it{time_phrase}{difference_phrase}, while this one "
            "made it; wait for that run and run again, computed rows are reused"
        )


class Table:
    """A table of the lake: a set of parts, mostly one per shard (slice of the corpus), each some Parquet files.

    A list of the parts, the manifest, says which files each part consists of. A table object has no state: whatever
    is remembered between two calls is kept in the open session, if there is one.

    Attributes:
        storage: The folder or object store that holds the files.
        name: The path of the table in the lake, such as "calculator/loss_deltas".
        folder: The folder of its Parquet files.
        manifest_path: The path of its manifest.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self.storage = storage
        self.folder = storage.root / name
        self.name = name
        self.manifest_path = Manifest(storage, name).file_path
        # The key of the manifest in `LakeSession.cache_by_place`.
        self._manifest_cache_key = storage.format_location(self.manifest_path)
        self._files_folder = f"{self.folder}/{PARTS_FOLDER}"

    def publish(
        self,
        part_name: str,
        frames: Iterable[pl.DataFrame],
        make_record: Callable[[], Mapping[str, Any]],
        volatile_columns: Collection[str] = (),
    ) -> Pointer:
        """Replace the rows of a part (mostly a shard).

        In a batch or a worker, other processes see the new part only once the batch is written (see session.py).
        If anything fails, the part stays as it was and the new files are removed.

        Args:
            part_name: The name of the part.
            frames: The new rows: at least one frame, all with the same schema. With a generator, only about
                64 MB of rows are in memory at a time.
            make_record: Returns what the rows were computed from. It is called after the last frame.
            volatile_columns: Columns that do not count in the version of the rows.

        Returns:
            What is published now: the files of the part, the version of its rows, and the record.

        Raises:
            WriteError: The files or the manifest cannot be written.
            NotPlain: The record contains a value that JSON cannot express.
            LostRace: In an object store, another run has withdrawn the part or published something else
                meanwhile.
            Exception: Anything that `frames` raises.
        """
        # The line of the part in the manifest, to notice later whether another run has changed it meanwhile.
        old_line = self._read_manifest().get_line(part_name)
        reusable_files_by_hash = self._find_reusable_files(part_name)

        content_hash = ContentHash(volatile_columns)
        with self._remove_new_files_on_error(part_name, reusable_files_by_hash) as written_files:
            for rows in parquet.pieces(frames):
                content_hash.update(rows)
                written_files.append(self._write_file(part_name, rows, reusable_files_by_hash))
            if not written_files:
                raise ValueError(f"{self.name}, part {part_name!r}: publish at least one frame, empty or not")

            pointer = Pointer(tuple(written_files), content_hash.hexdigest(), make_record())
            new_line = pointer.encode_line(self.name, part_name)

        # Mostly None. Otherwise another run has published equal rows first, and its files stay.
        faster_pointer = self.commit_line(part_name, old_line, new_line)
        return faster_pointer or pointer

    @contextmanager
    def _remove_new_files_on_error(
        self, part_name: str, published_files_by_hash: Mapping[str, PartFile]
    ) -> Iterator[list[PartFile]]:
        """Collect the new files of a part in a list, and remove them if the `with` block raises.

        Args:
            part_name: The name of the part.
            published_files_by_hash: Files that are published already, by the hash of their content. They stay,
                even if the block adds them to the list because their rows are equal.

        Yields:
            The list, empty at first. The block appends the files to it.
        """
        listed_files: list[PartFile] = []
        try:
            yield listed_files
        except BaseException:
            new_files = set(listed_files).difference(published_files_by_hash.values())
            self._remove_part_files(part_name, new_files)
            raise

    def revise_part(
        self,
        part_name: str,
        revise_rows: Callable[[pl.DataFrame | None], pl.DataFrame],
        make_record: Callable[[], Mapping[str, Any]],
    ) -> Pointer:
        """Change the rows of a part by a function, and publish the result.

        If another writer replaces the part meanwhile, this starts again with that writer's rows, so that
        the changes of both are kept.

        Args:
            part_name: The name of the part.
            revise_rows: Takes the present rows and returns the new ones; may be called several times. It gets
                None if the rows are missing or damaged.
            make_record: Returns what the rows were computed from.

        Raises:
            StorageError: Other writers replaced the part in each of MAX_REVISION_ATTEMPTS attempts.
            WriteError: The result cannot be written. Other errors of `publish` are raised too.
        """
        with enter_session(), self.storage.hold_lock(self.folder / ".revise.lock"):
            for _ in range(MAX_REVISION_ATTEMPTS):
                # Refresh the session's copy of the manifest, to see what other writers have published since.
                self._read_manifest(bypass_cache=True)
                present_rows = self._read_rows_or_none(part_name)
                try:
                    return self.publish(part_name, [revise_rows(present_rows)], make_record)
                except LostRace:  # another writer was faster: try again with its rows
                    continue

        raise StorageError(f"{self.name}: others replace {part_name!r} all the time; run again when they are done")

    def _read_rows_or_none(self, part_name: str) -> pl.DataFrame | None:
        """Return the rows of a part, or None if the part is missing or damaged."""
        try:
            return self.read_part(part_name)
        except (MissingPart, DamagedPart):
            return None

    def read_part(self, part_name: str) -> pl.DataFrame:
        """Return all rows of a part, in the order in which they were published.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is damaged. The part is then withdrawn, so that it is computed again.
        """
        return pl.concat(self.iter_frames(part_name))

    def iter_frames(self, part_name: str) -> Iterator[pl.DataFrame]:
        """Yield the rows of a part, one frame per file, for parts that do not fit into memory.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is damaged. All files are checked before the first frame.
        """
        for file_path in self.list_part_files(part_name):
            yield pl.read_parquet(file_path, glob=False)

    def list_part_files(self, part_name: str, retries: int = MAX_READ_RETRIES) -> list[str]:
        """List the paths of the Parquet files of a part, and compare their hashes first.

        Args:
            part_name: The name of the part.
            retries: How often to start again if a file is gone because the part was replaced meanwhile.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is damaged. The part is then withdrawn, so that it is computed again.
        """
        while True:
            pointer = self.read_pointer(part_name)
            try:
                return [str(path) for path in self._iter_verified_paths(part_name, pointer)]
            except DamagedPart:
                # Another run may have replaced the part, and its old files may have been removed, before they were
                # opened here. Then try again with the new files.
                was_replaced = self._has_newer_pointer(part_name, pointer)
                if not was_replaced or retries == 0:
                    raise
            retries -= 1

    def _has_newer_pointer(self, part_name: str, pointer: Pointer) -> bool:
        """Return whether the part was published anew since `pointer` was read.

        The manifest (the list of the table's parts) is read again, also for later calls in this session.
        """
        self._read_manifest(bypass_cache=True)
        return self.has_part(part_name) and self.read_pointer(part_name) != pointer

    def scan_parts(self, part_names: Collection[str] | None = None) -> pl.LazyFrame:
        """Return a lazy frame of the rows of several parts.

        Args:
            part_names: The names of the parts, at least one, or None for all parts of the table.

        Raises:
            MissingPart: A part is not published.
            DamagedPart: A file is damaged.
        """
        # Without `glob`, Polars would take brackets in the name of a folder for a pattern.
        return pl.scan_parquet(self.list_all_files(part_names), glob=False)

    def list_all_files(self, part_names: Collection[str] | None = None) -> list[str]:
        """List the paths of the files of several parts, and compare their hashes first.

        Args:
            part_names: The names of the parts, or None for all parts of the table.

        Raises:
            MissingPart: A part is not published.
            DamagedPart: A file is damaged.
        """
        file_paths: list[str] = []
        with enter_session():
            if part_names is None:
                part_names = self.list_part_names()

            # Download all files at once. Otherwise `list_part_files` would fetch them one by one.
            self.download_parts(part_names)
            for part_name in part_names:
                file_paths.extend(self.list_part_files(part_name))
        return file_paths

    def download_parts(self, part_names: Iterable[str]) -> None:
        """Download the files of these parts that are not on this machine, many at once.

        Nothing happens if the lake is a folder. Parts that are missing or damaged are skipped.
        """
        self.storage.download_missing_files(self._iter_files_to_fetch(part_names))

    def _iter_files_to_fetch(self, part_names: Iterable[str]) -> Iterator[FileToFetch]:
        """Yield the files of the parts. Parts that are missing, or damaged in the manifest, are skipped."""
        for part_name in part_names:
            with suppress(MissingPart, DamagedPart):
                for file in self.read_pointer(part_name).files:
                    yield FileToFetch(self.get_file_path(part_name, file), file.bytes, file.hash)

    def list_part_names(self) -> list[str]:
        """Return the names of the published parts, sorted."""
        return self._read_manifest().list_part_names()

    def has_part(self, part_name: str) -> bool:
        """Return whether the part is published, even if it is damaged."""
        return self._read_manifest().get_line(part_name) is not None

    def read_pointer(self, part_name: str, manifest: Manifest | None = None) -> Pointer:
        """Read what a part consists of: its files, the version of its rows, and the record of what made them.

        The files themselves are not looked at.

        Args:
            part_name: The name of the part.
            manifest: Where to look. The default is the table's manifest, as the open session remembers it
                or, without a session, as it is now.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: The line of the part in the manifest is damaged.
            ReadError: The manifest cannot be read.
        """
        if manifest is None:
            manifest = self._read_manifest()

        line = manifest.get_line(part_name)
        if line is None:
            raise MissingPart(self.name, part_name)

        try:
            return decode_pointer(line)
        except ValueError as error:
            raise DamagedPart(self.name, part_name, self.manifest_path.name, str(error)) from error

    def read_checked_pointer(self, part_name: str) -> Pointer:
        """Return the pointer of a part, after a quick check of its files.

        The check compares the size and looks at the last bytes of each file. A session checks a part only
        once, until the part changes.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: A file is missing, cut off or of another size, or the line in the manifest is damaged.
        """
        manifest = self._read_manifest()
        if part_name in manifest.checked_pointers:  # checked before, in this session
            return manifest.checked_pointers[part_name]

        pointer = self.read_pointer(part_name, manifest)
        for file in pointer.files:
            self._check_part_file(part_name, file)

        # The session keeps the manifest, and so remembers that this part was checked.
        manifest.checked_pointers[part_name] = pointer
        return pointer

    def _check_part_file(self, part_name: str, part_file: PartFile) -> None:
        """Check quickly that a file is there and has its size, without reading it whole.

        Raises:
            DamagedPart: The file is missing, has another size, or does not end like a Parquet file.
        """
        try:
            self.storage.check_size(self._format_file_path(part_name, part_file), part_file.bytes)
        except UnreadableFile as error:
            raise DamagedPart(self.name, part_name, part_file.name, str(error)) from error

    def find_checked_pointer(self, part_name: str) -> Pointer | None:
        """Return the pointer of a part (its files, version and record) after a quick check of its files.

        The check compares the size and looks at the last bytes of each file.

        Returns:
            None if the part is missing or damaged.
        """
        try:
            return self.read_checked_pointer(part_name)
        except (MissingPart, DamagedPart):
            return None

    def iter_checked_files(self, part_name: str, changed_since_ns: int = 0) -> Iterator[CheckedFile]:
        """Check the files of a part.

        It ends early if the part is replaced or withdrawn meanwhile, or if its line in the manifest is damaged.

        Args:
            part_name: The name of the part.
            changed_since_ns: 0 compares the hash of every file. Otherwise a time in nanoseconds since 1970: only the
                size is compared of files that have not changed since then.

        Yields:
            Each file with what is wrong with it. Whole files are only yielded if `changed_since_ns` is 0.
        """
        yields_whole_files = changed_since_ns == 0

        # MissingPart: the part was withdrawn meanwhile. DamagedPart: its line in the manifest is damaged.
        with suppress(MissingPart, DamagedPart):
            pointer = self.read_pointer(part_name)
            for file in pointer.files:
                path = self._format_file_path(part_name, file)
                damage = self.storage.find_damage(path, file.bytes, file.hash, changed_since_ns)

                # If the part was replaced meanwhile, `clean` may have removed its old files. That is no damage.
                if damage and self._was_part_replaced(part_name, pointer):
                    return
                if damage or yields_whole_files:
                    yield CheckedFile(self.get_file_path(part_name, file), file.bytes, damage)

    def _was_part_replaced(self, part_name: str, pointer: Pointer) -> bool:
        """Return whether a part was published anew since `pointer` was read.

        Raises:
            MissingPart: The part was withdrawn.
            DamagedPart: The line of the part in the manifest is damaged.
        """
        manifest_now = Manifest(self.storage, self.name).read_file()
        return self.read_pointer(part_name, manifest_now) != pointer

    def read_pointers_by_part(self) -> dict[str, Pointer]:
        """Return what each part consists of (files, version of the rows, record), by the name of the part.

        Raises:
            DamagedPart: The line of a part in the manifest is damaged.
            ReadError: The manifest cannot be read.
        """
        # Inside a session, the manifest is read once for all parts.
        with enter_session():
            return {part_name: self.read_pointer(part_name) for part_name in self.list_part_names()}

    def find_version(self) -> str | None:
        """Return a version of the whole table, which changes whenever a part is added, withdrawn or gets other rows.

        Returns:
            A fingerprint, or None if the table has no parts or a damaged part.
        """
        return self.get_or_compute_answer("version", self._compute_version)

    def _compute_version(self) -> str | None:
        """Compute a fingerprint of the versions of all parts. None if there are no parts, or if one is damaged."""
        try:
            pointers_by_part = self.read_pointers_by_part()
        except DamagedPart:
            return None

        if not pointers_by_part:
            return None
        return fingerprint({part_name: pointer.data_version for part_name, pointer in pointers_by_part.items()})

    def find_part_version(self, part_name: str) -> str | None:
        """Return the version of the rows of a part, after a quick check of its files.

        Returns:
            The hash of the rows, or None if the part is missing or damaged.
        """
        pointer = self.find_checked_pointer(part_name)
        return pointer.data_version if pointer else None

    def get_or_compute_answer(self, question_name: str, compute_answer: Callable[[], Answer]) -> Answer:
        """Answer a question about the published parts, and remember the answer until the manifest changes.

        Args:
            question_name: A name for the question, such as "version".
            compute_answer: Computes the answer. It is only called if no answer is remembered.
        """
        answers = self._read_manifest().remembered_answers
        if question_name not in answers:
            answers[question_name] = compute_answer()
        answer: Answer = answers[question_name]
        return answer

    def find_manifest_damage(self) -> str | None:
        """Return what is wrong with the manifest (the list of parts), or None if nothing is.

        A damaged manifest may have lost parts.
        """
        return self._read_manifest(bypass_cache=True).find_damage()

    def repair_manifest(self) -> None:
        """Write a damaged manifest (the list of parts) anew, with the parts that can be read."""
        self._read_manifest(bypass_cache=True).repair_file()

    def read_record(self, part_name: str) -> Mapping[str, Any]:
        """Return the record of a part: what its rows were computed from.

        Raises:
            MissingPart: The part is not published.
            DamagedPart: The line of the part in the manifest is damaged.
        """
        return self.read_pointer(part_name).record

    def withdraw_part(self, part_name: str) -> None:
        """Withdraw a part, if it is published. Its files stay until `clean` removes them."""
        old_line = self._read_manifest().get_line(part_name)
        if old_line is not None:
            self.commit_line(part_name, old_line, new_line=None)

    def _find_reusable_files(self, part_name: str) -> dict[str, PartFile]:
        """Return the published files of a part by hash, so that equal rows need no new file.

        Returns:
            Empty if the part is missing or damaged, and always in an object store.
        """
        # In an object store, the first of two writers of a part wins. In a folder, the last does.
        if self.storage.first_wins or not self.has_part(part_name):
            return {}

        pointer = self.find_checked_pointer(part_name)
        if pointer is None:
            return {}
        return {file.hash: file for file in pointer.files}

    def _write_file(
        self, part_name: str, rows: pl.DataFrame, reusable_files_by_hash: Mapping[str, PartFile]
    ) -> PartFile:
        """Write rows to a new Parquet file of a part, unless a published file already has the same content.

        Args:
            part_name: The name of the part.
            rows: The rows of the file.
            reusable_files_by_hash: Published files by the hash of their content.

        Returns:
            The new file, or the published one.
        """
        content = parquet.encode_rows(rows)
        content_hash = compute_content_hash(content)

        published_file = reusable_files_by_hash.get(content_hash)
        if published_file is not None and self._is_file_undamaged(part_name, published_file):
            return published_file

        file = PartFile(name=f"{uuid4().hex}.parquet", bytes=len(content), hash=content_hash, rows=rows.height)
        self._write_new_file(self.get_file_path(part_name, file), content)
        return file

    def _is_file_undamaged(self, part_name: str, part_file: PartFile) -> bool:
        """Return whether a file is there with the content that was written."""
        try:
            parquet.verify_file(self.get_file_path(part_name, part_file), part_file.bytes, part_file.hash)
        except UnreadableFile:
            return False
        return True

    def _write_new_file(self, path: Path, content: bytes) -> None:
        """Write a new file. If the open session collects publications (a batch), it is written in the background."""
        open_session = get_current_session()
        if open_session and open_session.is_batching:
            open_session.write_in_background(lambda: self.storage.write_new_file(path, content))
        else:
            self.storage.write_new_file(path, content)

    def _remove_part_files(self, part_name: str, part_files: Iterable[PartFile]) -> None:
        """Remove files of a part that no manifest names."""
        # First wait for background writes: a file that is still being written would come back.
        open_session = get_current_session()
        if open_session:
            with suppress(StorageError):  # the session keeps the error of a failed write, and raises it again later
                open_session.settle()

        paths = [self.get_file_path(part_name, file) for file in part_files]
        self.storage.remove(*paths)

    def _read_manifest(self, bypass_cache: bool = False) -> Manifest:
        """Return the manifest of the table, which lists its parts.

        A session reads it once and keeps it, together with changes that are not written yet. Without a
        session it is read at every call.

        Args:
            bypass_cache: Read it again even in a session, and in an object store not from this machine's copy.
        """
        open_session = get_current_session()
        if open_session is None:
            return Manifest(self.storage, self.name).read_file(bypass_cache)

        # The session's manifest also has the changes that are not written yet.
        manifest: Manifest | None = open_session.cache_by_place.get(self._manifest_cache_key)
        if manifest is None:
            manifest = Manifest(self.storage, self.name).read_file(bypass_cache)
            open_session.cache_by_place[self._manifest_cache_key] = manifest
        elif bypass_cache:
            manifest.read_file()  # updates the object that the session holds; unwritten changes stay
        return manifest

    def commit_line(
        self, part_name: str, old_line: bytes | None, new_line: bytes | None, write_now: bool = False
    ) -> Pointer | None:
        """Publish or withdraw a part by giving it another line in the manifest, which lists the parts of the table.

        The line is not always written at once: a worker leaves that to the process that leads the step, and a
        batch writes several lines together.

        Args:
            part_name: The name of the part.
            old_line: The line of the part when the caller began, or None if it had none.
            new_line: The new line, or None to withdraw the part.
            write_now: Write the manifest at once in any case.

        Returns:
            None, or the pointer of another run that has published equal rows meanwhile. That one then stays.

        Raises:
            LostRace: Another run has published something else meanwhile.
        """
        manifest = self._read_manifest()
        manifest.change_line(part_name, old_line, new_line)  # in memory only; `flush_manifest` writes it

        open_session = get_current_session()
        if open_session and not write_now:
            # A worker reports the change to the process that leads the step, which writes it.
            if open_session.unsent_news is not None:
                new_part = NewPart(table_name=self.name, part_name=part_name, old_line=old_line, new_line=new_line)
                open_session.unsent_news.append(new_part)
                return None

            # In a batch, a later call writes this change together with others.
            if open_session.is_batching and not manifest.is_write_due():
                return None

        faster_pointers_by_part = self.flush_manifest(manifest)
        return faster_pointers_by_part.get(part_name)

    def flush_manifest(self, manifest: Manifest | None = None) -> dict[str, Pointer]:
        """Write the changes of the manifest that are not written yet.

        Args:
            manifest: The manifest to write. The default is the table's manifest in this session.

        Returns:
            The parts that another run has published with equal rows meanwhile, by name, as that run published them.
            Mostly empty.

        Raises:
            LostRace: Another run has published other rows meanwhile.
        """
        # First wait for the Parquet files that are written in the background: the manifest will name them.
        open_session = get_current_session()
        if open_session:
            open_session.settle()

        if manifest is None:
            manifest = self._read_manifest()
        lost_lines_by_part = manifest.write_changes()  # not written, because another run has changed these parts first
        return {
            part_name: self._accept_faster_run(part_name, lost_line)
            for part_name, lost_line in lost_lines_by_part.items()
        }

    def _accept_faster_run(self, part_name: str, lost_line: bytes | None) -> Pointer:
        """Accept that another run was the first to change a part, if its rows are the same.

        The files of this run are removed in any case.

        Args:
            part_name: The name of the part.
            lost_line: The line that this run wanted to write, or None if it wanted to withdraw the part.

        Returns:
            The part as the other run published it.

        Raises:
            LostRace: The other run withdrew the part, or made it from other settings or inputs, or got other
                rows. Also raised if this run wanted to withdraw the part.
        """
        winning_pointer = self._find_pointer(part_name)  # None if the other run withdrew the part
        if lost_line is None:
            raise LostRace(self.name, part_name, winning_pointer, field_changes=())

        lost_pointer = decode_pointer(lost_line)
        winning_files = winning_pointer.files if winning_pointer else ()
        self._remove_part_files(part_name, set(lost_pointer.files).difference(winning_files))

        if winning_pointer is None:
            raise LostRace(self.name, part_name, winning_pointer=None, field_changes=())

        field_changes = list_record_changes(lost_pointer.record, winning_pointer.record)
        has_other_rows = winning_pointer.data_version != lost_pointer.data_version
        if field_changes or has_other_rows:
            raise LostRace(self.name, part_name, winning_pointer, field_changes)
        return winning_pointer

    def _find_pointer(self, part_name: str) -> Pointer | None:
        """Return the pointer of a part (its files, version and record), or None if the part is not published.

        Raises:
            DamagedPart: The line of the part in the manifest is damaged.
        """
        try:
            return self.read_pointer(part_name)
        except MissingPart:
            return None

    def _iter_verified_paths(self, part_name: str, pointer: Pointer) -> Iterator[Path]:
        """Yield the paths of the files of a part, each after its hash was compared.

        Args:
            part_name: The name of the part.
            pointer: The files of the part, as the manifest lists them.

        Raises:
            DamagedPart: A file is missing or damaged. The part is then withdrawn.
            MissingPart: A file is missing or damaged, and another run has withdrawn the part already.
        """
        for file in pointer.files:
            try:
                # In an object store, this downloads the file if this machine has no copy.
                path = self.storage.fetch(self.get_file_path(part_name, file), file.bytes, file.hash)
                parquet.verify_file(path, file.bytes, file.hash)
            except UnreadableFile as error:
                self._withdraw_damaged_part(part_name, pointer, file)
                raise DamagedPart(self.name, part_name, file.name, str(error)) from error
            yield path

    def _withdraw_damaged_part(self, part_name: str, pointer: Pointer, damaged_file: PartFile) -> None:
        """Withdraw a part that has a damaged file, and rename the file.

        Nothing happens if the part was published again since it was read.

        Args:
            part_name: The name of the part.
            pointer: The part as it was read.
            damaged_file: One of its files.

        Raises:
            MissingPart: Another run has withdrawn the part already.
        """
        present_line = self._read_manifest(bypass_cache=True).get_line(part_name)
        if present_line is None:
            raise MissingPart(self.name, part_name)

        is_still_published = decode_pointer(present_line) == pointer
        if is_still_published:
            self._withdraw_at_once(part_name, present_line)
            self.storage.set_aside(self.get_file_path(part_name, damaged_file))

    def _withdraw_at_once(self, part_name: str, old_line: bytes) -> None:
        """Withdraw a part and write the manifest now. In an object store, the part stays if its line has changed.

        Args:
            part_name: The name of the part.
            old_line: The line of the part in the manifest, as it was read.
        """
        with suppress(LostRace):
            self.commit_line(part_name, old_line, None, write_now=True)

    def get_part_folder(self, part_name: str) -> Path:
        """Return the folder with the files of a part, including old files that were replaced."""
        return Path(self._files_folder, encode_file_name(part_name))

    def get_file_path(self, part_name: str, part_file: PartFile) -> Path:
        """Return the path of a file of a part."""
        return Path(self._format_file_path(part_name, part_file))

    def _format_file_path(self, part_name: str, part_file: PartFile) -> str:
        """Return the path of a file as text: every step checks every part, and creating a `Path` is slow."""
        return f"{self._files_folder}/{encode_file_name(part_name)}/{part_file.name}"


class Lake:
    """All results of the pipeline: tables, and rows that are computed once. They lie in a folder or an object store.

    Nothing is created before the first write.

    Attributes:
        root: The folder of the lake. For an object store, the folder with copies on this machine.
        storage: The folder or object store that holds the files.
        round_suffix: The end of the names of the tables that belong to a later round. Empty for the first round.
    """

    def __init__(self, root: str | Path, storage: Storage | None = None, round_suffix: str = "") -> None:
        self.root = Path(root)
        self.round_suffix = round_suffix
        self.storage = storage or Storage(self.root)
        self._tables_by_name: dict[str, Table] = {}

    @staticmethod
    def from_settings(path_settings: PathSettings, round_suffix: str = "") -> "Lake":
        """Return the lake that the settings name.

        Raises:
            ObjectStoreError: The lake is in an object store, and the extra `objects` is not installed.
        """
        return Lake.at(str(path_settings.lake), path_settings.local_folder, round_suffix)

    @staticmethod
    def at(location: str, copies_folder: Path, round_suffix: str = "") -> "Lake":
        """Return the lake in a folder or in an object store.

        Args:
            location: The path of the folder, or a URL such as "s3://bucket/lake".
            copies_folder: The folder for copies on this machine. Only used for an object store.
            round_suffix: The end of the names of the tables that belong to a later round.

        Raises:
            ObjectStoreError: `location` is a URL, and the extra `objects` is not installed.
        """
        is_url = "://" in location
        if is_url:
            return Lake(copies_folder, open_object_storage(location, copies_folder), round_suffix)
        return Lake(location, round_suffix=round_suffix)

    def format_location(self, path: Path) -> str:
        """Return where a file lies, for messages: its path, or its URL if it is in an object store."""
        if path.is_relative_to(self.root):
            return self.storage.format_location(path)
        return str(path)

    def get_table(self, table_name: str) -> Table:
        """Return the table with a name such as "calculator/loss_deltas", even if nothing of it is published yet.

        If this lake is used for a later round, "training/augmented_corpus" gives the table of that round (see
        `add_round_suffix`).
        """
        table_name = add_round_suffix(table_name, self.round_suffix)
        if table_name not in self._tables_by_name:
            self._tables_by_name[table_name] = Table(self.storage, table_name)
        return self._tables_by_name[table_name]

    @contextmanager
    def batch_publications(self) -> Iterator[LakeSession]:
        """Collect what is published in the `with` block, to write it together.

        Manifests are written every few seconds, and files in the background. The end of the block writes
        what is left and waits for it.

        Yields:
            The session of the block.

        Raises:
            LostRace: Another run has published something else of the same part.
            WriteError: Something cannot be written.
        """
        with enter_session() as open_session:
            was_batching = open_session.is_batching  # True inside another batch, which goes on after this one
            open_session.is_batching = True
            try:
                yield open_session
            finally:
                open_session.is_batching = was_batching
                self.flush_manifests()
                open_session.settle()  # waits for the files that are written in the background

    def flush_manifests(self, only_due: bool = False) -> None:
        """Write all manifests (the lists of parts of tables) that this session has changed.

        Args:
            only_due: Skip manifests whose changes are few and recent.
        """
        open_session = get_current_session()
        if open_session is None:  # then every change was written at once
            return

        # The session also remembers other things than manifests, such as names of files.
        manifests = [cached for cached in open_session.cache_by_place.values() if isinstance(cached, Manifest)]
        for manifest in manifests:
            may_wait = only_due and not manifest.is_write_due()
            if manifest.pending_changes and not may_wait:
                Table(manifest.storage, manifest.table_name).flush_manifest(manifest)

    def apply_news(self, news: Iterable[News]) -> None:
        """Apply what a worker process has reported: publish or withdraw parts, and note new files of row stores.

        The process that leads a step calls this, because workers do not write manifests, the lists of parts.

        Raises:
            LostRace: In an object store, another run has published something else of the same part.
            StorageError: A manifest cannot be written.
        """
        for item in news:
            if isinstance(item, NewRowFile):
                # Only the list of files changes. No row is read, so the key columns and the schema do not matter.
                RowStore(self.storage, item.store_name, (), pl.Schema()).add_listed_file(item.file_name)
            else:
                self.get_table(item.table_name).commit_line(item.part_name, item.old_line, item.new_line)

    def open_row_store(
        self,
        folder_name: str,
        identity: Mapping[str, object],
        key_columns: Sequence[str],
        schema: Mapping[str, pl.DataType],
    ) -> RowStore:
        """Open a row store: rows that are computed once and looked up by key.

        Opening marks the store as in use, so that `clean` keeps it.

        Args:
            folder_name: The folder of the stores of this kind.
            identity: Everything that determines the values of the rows, such as a model and a prompt. Another
                identity means another store.
            key_columns: The columns by which rows are looked up.
            schema: All columns; those of the key come first.

        Raises:
            WriteError: The identity cannot be written.
            NotPlain: The identity contains a value that JSON cannot express.
            TypeError: The identity contains a value of a type that has no fingerprint.
        """
        store_name = f"{folder_name}/{fingerprint(identity)}"
        identity_path = self.root / store_name / IDENTITY_FILE_NAME

        # In a batch over an object store, the identity is written in the background.
        open_session = get_current_session()
        run_in_background = None
        if open_session and open_session.is_batching:
            run_in_background = open_session.write_in_background

        # If the file is there already, this renews its time, which shows that the store is in use.
        self.storage.mark(identity_path, encode_json(store_name, identity, sort_keys=True), run_in_background)
        return RowStore(self.storage, store_name, key_columns, pl.Schema(schema))

    def require_access(self) -> None:
        """Check that the lake can be used.

        Raises:
            StorageError: There is a file in place of the lake's folder.
            ObjectStoreError: The object store cannot be used.
        """
        self.storage.require_access()
