"""The manifest of a table: its parts, a sealed line each, in one file that is replaced as a whole.

    table-manifests/<group>/<table>.jsonl

    {"seal": "<hash of all other lines>", "layout": 3, "parts": 2}
    {"seal": "<hash of the rest of this line>", "part": "shard-0", "files": [...], "data_version": ..., "record": ...}
    {"seal": ...}

A writer replaces the file only where it is the one that it read. Else it reads the file again and puts its own changes
into that. A flipped bit costs the part in whose line it is; a cut costs the parts after it. These parts are made again
from stored rows: no model and no tool runs.
"""

import json
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from toolformer_dag.files import ReadError, StorageError, encode_json
from toolformer_dag.identity import compute_content_hash
from toolformer_dag.lake.parquet import DAMAGED_REASON
from toolformer_dag.lake.storage import DAMAGED_SUFFIX, NO_FILE_VERSION, Storage, Version, WriteConflict

MANIFESTS_FOLDER = "table-manifests"
"""The folder of the lake where manifests lie; the hyphen keeps it apart from the lanes, which lie beside it."""
MANIFEST_SUFFIX = ".jsonl"
"""How the name of a manifest ends."""
LAYOUT_VERSION = 3
"""The form of the manifest that this release writes; manifests with a higher number are refused."""
MAX_BATCH_SECONDS = 5.0
"""How long a change waits at most, in a batch, until the manifest is written."""
MAX_BATCH_PARTS = 500
"""From how many changed parts on a manifest is written at once."""
MANIFEST_GONE = "is gone"
"""The fault of a manifest that is not there."""
PAUSES = tuple(min(0.02 * 2**number, 2.0) for number in range(10))
"""The longest pause in seconds after each try to replace a manifest that others replace too."""
FIRST_LINE_PATTERN = re.compile(rb'\{"seal": "[0-9a-f]{32}", "layout": (\d+), "parts": \d+\}')
"""The first line of a manifest, of any layout."""
PART_LINE_PATTERN = re.compile(rb'\{"seal": "(?P<seal>[0-9a-f]{32})", (?="part": (?P<part>"(?:[^"\\]|\\.)*"))')
"""The beginning of a part's line: its seal, and the part's name as JSON. The sealed rest begins after the match."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A Parquet file of a part of a table.

    Attributes:
        name: The file name.
        bytes: The size in bytes.
        hash: The hash of the content.
        rows: The number of rows.
    """

    name: str
    bytes: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a part of a table consists of, as its line in the manifest (the list of parts) says.

    Attributes:
        files: The Parquet files.
        data_version: The hash of the rows.
        record: What the rows were computed from (see record.py).
        published_timestamp: When the part was published, in seconds since 1970 by the clock of the writer. It does
            not count when two pointers are compared.
    """

    files: tuple[PartFile, ...]
    data_version: str
    record: Mapping[str, Any]
    published_timestamp: float = field(default_factory=lambda: round(time.time(), 3), compare=False)

    @property
    def row_count(self) -> int:
        """The number of rows in all files."""
        return sum(file.rows for file in self.files)

    def encode_line(self, table_name: str, part_name: str) -> bytes:
        """Encode the part as its line of the manifest, a JSON object.

        Its first field, `seal`, is a hash of everything after it.

        Args:
            table_name: The name of the table, only used in the error message.
            part_name: The name of the part.

        Raises:
            NotPlain: The record contains a value that JSON cannot express.
        """
        value = {
            "part": part_name,
            "files": [asdict(file) for file in self.files],
            "data_version": self.data_version,
            "record": self.record,
            "published": self.published_timestamp,
        }

        # Everything after the opening brace is hashed. The hash is then put between the brace and this text.
        sealed_rest = encode_json(table_name, value, indent=None)[1:]
        beginning = b'{"seal": "%s", ' % compute_content_hash(sealed_rest).encode()
        return beginning + sealed_rest


@lru_cache(maxsize=2**18)
def decode_pointer(line: bytes) -> Pointer:
    """Parse a part's line of the manifest.

    The results are cached: equal lines give the same object.

    Args:
        line: Such as `{"seal": "<hash of the rest>", "part": "en_head_0000", "files": ...}`.

    Raises:
        ValueError: The line is damaged. The message says how.
    """
    _require_seal(line)
    try:
        value = _parse_line(line)
        return Pointer(
            files=tuple(PartFile(**file) for file in value["files"]),
            data_version=value["data_version"],
            record=_with_shared_values(value["record"]),  # equal settings of many parts are kept in memory only once
            published_timestamp=value["published"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no part: {error!r}") from error


def _require_seal(line: bytes) -> None:
    """Check that a line of a part begins with the hash of the text after it, its seal.

    Raises:
        ValueError: The line has another form or another hash, so it is damaged.
    """
    match = PART_LINE_PATTERN.match(line)
    if match is None:
        raise ValueError(DAMAGED_REASON)
    sealed_rest = line[match.end() :]
    if compute_content_hash(sealed_rest).encode() != match["seal"]:
        raise ValueError(DAMAGED_REASON)


def _parse_line(line: bytes) -> dict[str, Any]:
    """Parse the JSON of a line whose seal was checked, so that it is an object that `Pointer.encode_line` has written.

    Raises:
        ValueError: The line is not JSON.
    """
    try:
        value: dict[str, Any] = orjson.loads(line)
    except ValueError:  # orjson refuses NaN and integers of more than 64 bits, which `json` reads
        value = json.loads(line)
    return value


_last_record_values: dict[str, Any] = {}
"""The settings and versions of the record that was decoded last, by stage, lane and field."""


def _with_shared_values(record: dict[str, Any]) -> dict[str, Any]:
    """Make a record share its settings and versions with the last record of the same table, to save memory.

    The many parts of a table mostly have equal settings and versions, so that one object is enough.

    Returns:
        The same record, changed in place.
    """
    for field_name in ("settings", "versions"):
        if field_name not in record:
            continue

        table_and_field = f"{record.get('stage')} {record.get('tool')} {field_name}"
        if _last_record_values.get(table_and_field) == record[field_name]:
            record[field_name] = _last_record_values[table_and_field]  # the equal object that is in memory already
        else:
            _last_record_values[table_and_field] = record[field_name]
    return record


class _ManifestContent(NamedTuple):
    """The content of a manifest as this process has read it last, kept so that an equal file is not parsed again.

    Attributes:
        file_hash: The hash of the file.
        lines_by_part: The line of each part.
        fault: What is wrong with the file as a whole, or None.
        remembered_answers: Answers to questions about this content, which `Table.get_or_compute_answer` adds.
    """

    file_hash: str
    lines_by_part: dict[str, bytes]
    fault: str | None
    remembered_answers: dict[str, Any]


_last_contents_by_path: dict[Path, _ManifestContent] = {}
"""What this process has read last, by the path of a manifest."""


class _LineChange(NamedTuple):
    """A change of a part's line that is not written to the manifest yet.

    Attributes:
        old_line: The line that is replaced, or None if the part had none.
        new_line: The new line, or None if the part is withdrawn.
    """

    old_line: bytes | None
    new_line: bytes | None

    def has_conflict(self, line_in_file: bytes | None) -> bool:
        """Return whether another process has changed the part's line in the file meanwhile."""
        return line_in_file not in (self.old_line, self.new_line)


class _MergedLines(NamedTuple):
    """The result of putting changes into the lines of a manifest.

    Attributes:
        lines_by_part: The lines of the next file.
        lost_lines_by_part: The new lines that are not in it, because another writer was faster. None stands for a
            withdrawal.
    """

    lines_by_part: dict[str, bytes]
    lost_lines_by_part: dict[str, bytes | None]

    def set_line(self, part_name: str, line: bytes | None) -> None:
        """Give a part another line, or withdraw the part if the line is None."""
        if line is None:
            self.lines_by_part.pop(part_name, None)
        else:
            self.lines_by_part[part_name] = line


@dataclass
class Manifest:
    """The manifest (list of parts) of a table in memory: the lines of the file, and changes that are not written yet.

    `read_file` fills it, `change_line` notes that a part is added, changed or withdrawn, and `write_changes` puts the
    changes into the file. `get_line` and `list_part_names` already show the noted changes. An object belongs to one
    session and one thread.

    Attributes:
        storage: The folder or object store that holds the file.
        table_name: The name of the table.
        lines_by_part: The lines of the file, by part.
        file_version: Which content of the file was read. NO_FILE_VERSION if there is no file.
        fault: What is wrong with the file as a whole, or None.
        pending_changes: The changes that are not written yet, by part.
        write_deadline: By when the changes of a batch have to be written, as a time of `time.monotonic`.
        remembered_answers: Answers to questions about the table, until it changes.
        checked_pointers: The pointers of parts whose files `Table.read_checked_pointer` has checked since they changed,
            by part.
    """

    storage: Storage
    table_name: str
    lines_by_part: dict[str, bytes] = field(default_factory=dict)
    file_version: Version = NO_FILE_VERSION
    fault: str | None = None
    pending_changes: dict[str, _LineChange] = field(default_factory=dict)
    write_deadline: float = 0.0
    remembered_answers: dict[str, Any] = field(default_factory=dict)
    checked_pointers: dict[str, Pointer] = field(default_factory=dict)

    @property
    def file_path(self) -> Path:
        """The path of the manifest file."""
        return self.storage.root / MANIFESTS_FOLDER / f"{self.table_name}{MANIFEST_SUFFIX}"

    def get_line(self, part_name: str) -> bytes | None:
        """Return the line of a part, even if it is not written yet, or None if the part is not published."""
        if part_name in self.pending_changes:
            return self.pending_changes[part_name].new_line
        return self.lines_by_part.get(part_name)

    def list_part_names(self) -> list[str]:
        """Return the names of the parts, sorted."""
        part_names = self.lines_by_part.keys() | self.pending_changes.keys()
        return sorted(part_name for part_name in part_names if self.get_line(part_name) is not None)

    def read_file(self, bypass_cache: bool = True) -> "Manifest":
        """Read the file into this object. Changes that are not written yet stay.

        If there is no file, the manifest has no parts.

        Args:
            bypass_cache: Read what is there now. Otherwise a session over an object store may use what was there
                when the session first looked.

        Returns:
            The manifest itself.

        Raises:
            ReadError: The file cannot be read.
            StorageError: A later release wrote the file.
        """
        # Forget what follows from the lines that were read before: answers to questions about the table, and pointers
        # whose files were checked. If a file is read, `_set_content` brings the answers that belong to its content.
        self.remembered_answers = {}
        self.checked_pointers = {}

        try:
            content, self.file_version = self.storage.manifest(self.file_path, bypass_cache)
        except FileNotFoundError:
            self.file_version = NO_FILE_VERSION
            self._set_content(_ManifestContent(file_hash="", lines_by_part={}, fault=None, remembered_answers={}))
        except OSError as error:
            raise ReadError(self.file_path, error) from error
        else:
            self._set_content(_decode_manifest_once(self.file_path, content))

        return self

    def _set_content(self, content: "_ManifestContent") -> None:
        """Replace the lines by those of a file, with the answers that are remembered for this content."""
        self.lines_by_part = content.lines_by_part
        self.fault = content.fault
        self.remembered_answers = content.remembered_answers

    def change_line(self, part_name: str, old_line: bytes | None, new_line: bytes | None) -> None:
        """Note in `pending_changes` that a part of the table gets another line in the manifest.

        `write_changes` later puts it into the file.

        Args:
            part_name: The name of the part.
            old_line: The line of the part when the writer began, or None if it had none.
            new_line: The new line, or None to withdraw the part.
        """
        self.remembered_answers = {}  # what was remembered of the lines may be wrong now
        self.checked_pointers.pop(part_name, None)  # the part's files have to be looked at again

        if not self.pending_changes:  # the first change since the file was written begins a batch
            self.write_deadline = time.monotonic() + MAX_BATCH_SECONDS

        # A part may change twice before the file is written. Then the line before the first change counts.
        if part_name in self.pending_changes:
            old_line = self.pending_changes[part_name].old_line
        self.pending_changes[part_name] = _LineChange(old_line, new_line)

    def is_write_due(self) -> bool:
        """Return whether the changes should be written now, because they are many or have waited for some seconds."""
        if not self.pending_changes:
            return False
        are_many = len(self.pending_changes) >= MAX_BATCH_PARTS
        return are_many or time.monotonic() > self.write_deadline

    def write_changes(self) -> dict[str, bytes | None]:
        """Write the changes to the file. Every other line stays as it is in the file.

        If another process has replaced the file since it was read, the file is read again and the changes are
        put into the new content. In an object store (`Storage.first_wins`), the first of two writers of a
        part wins: a change is dropped if another process has changed the same part.

        Returns:
            The dropped changes: for each part the line that was not written, or None for a withdrawal.
            Mostly empty.

        Raises:
            StorageError: Other processes replaced the file at every attempt.
        """
        for pause in PAUSES:
            merged = self._merge_pending_changes()
            try:
                self._replace_file(merged.lines_by_part)
            except WriteConflict:  # another process has replaced the file
                time.sleep(pause * random.random())  # random, so that two writers do not meet again
                self.read_file()
                continue

            self._mark_as_written(merged.lines_by_part)
            return merged.lost_lines_by_part

        self.pending_changes = {}
        raise StorageError(
            f"{self.storage.format_location(self.file_path)} cannot be replaced: others do so all the time, or the "
            "store has no conditional puts (If-Match); run again, or take another store"
        )

    def _mark_as_written(self, lines_by_part: dict[str, bytes]) -> None:
        """Note that the file now has these lines, so that no change is pending and the file is undamaged."""
        self.lines_by_part = lines_by_part
        self.pending_changes = {}
        self.fault = None

    def _replace_file(self, lines_by_part: dict[str, bytes]) -> None:
        """Replace the file of the manifest by one with other lines, if they differ from those that were read.

        A damaged file is replaced anyway. What could be read of it is kept beside it under another name.

        Args:
            lines_by_part: The new lines by the name of the part.

        Raises:
            WriteConflict: The file has changed since it was read.
        """
        if self.fault:
            damaged_path = self.file_path.with_name(f"{self.file_path.name}{DAMAGED_SUFFIX}")
            self.storage.mark(damaged_path, _encode_manifest(self.lines_by_part))

        if lines_by_part != self.lines_by_part or self.fault:
            content = _encode_manifest(lines_by_part)
            self.file_version = self.storage.replace_manifest(self.file_path, content, self.file_version)

    def repair_file(self) -> None:
        """Write a damaged file of the manifest anew with its undamaged lines. The parts of other lines are withdrawn.

        Raises:
            StorageError: The file cannot be written, or other processes replaced it at every attempt.
        """
        # A file with a fault is kept under another name by `write_changes`, and replaced even if no line changes.
        self.fault = self.find_damage()
        for part_name, line in self.lines_by_part.items():
            if not _is_undamaged_line(line):
                self.change_line(part_name, old_line=line, new_line=None)
        self.write_changes()

    def find_damage(self) -> str | None:
        """Check the whole file of the manifest, including the seal (hash) of every line.

        Returns:
            What is wrong with the file, in words, or None if it is undamaged. A damaged file may have lost parts.
        """
        if self.file_version == NO_FILE_VERSION:
            return MANIFEST_GONE
        if self.fault:
            return self.fault
        if all(_is_undamaged_line(line) for line in self.lines_by_part.values()):
            return None
        return DAMAGED_REASON

    def _merge_pending_changes(self) -> _MergedLines:
        """Put the changes into the lines that were read from the file.

        In an object store (`Storage.first_wins`), a change is lost if another writer has meanwhile changed the line
        of the part. In a folder, no change is lost.

        Returns:
            The lines of the next file, and the lost changes.
        """
        # A copy, so that `self.lines_by_part` keeps the lines as they were read.
        merged = _MergedLines(lines_by_part=dict(self.lines_by_part), lost_lines_by_part={})
        for part_name, change in self.pending_changes.items():
            line_in_file = self.lines_by_part.get(part_name)
            is_lost = self.storage.first_wins and change.has_conflict(line_in_file)
            if is_lost:
                merged.lost_lines_by_part[part_name] = change.new_line
            else:
                merged.set_line(part_name, change.new_line)
        return merged


def _is_undamaged_line(line: bytes) -> bool:
    """Return whether the line of a part can be decoded and has the hash in its seal."""
    try:
        decode_pointer(line)
    except ValueError:
        return False
    return True


def _encode_manifest(lines_by_part: Mapping[str, bytes]) -> bytes:
    """Return the content of a manifest file: a first line with a hash of all others, then the line of each part."""
    part_lines = b"".join(b"%s\n" % line for _, line in sorted(lines_by_part.items()))
    first_line = _build_first_line(part_lines, len(lines_by_part))
    return first_line + b"\n" + part_lines


def _decode_manifest(content: bytes, file_hash: str) -> _ManifestContent:
    """Split the content of a manifest into the lines of its parts, and check that it is whole.

    Args:
        content: The content of the file.
        file_hash: The hash of the content, to be remembered with it.

    Returns:
        The lines by part. If the content is damaged, `fault` is DAMAGED_REASON, otherwise None.

    Raises:
        StorageError: A later release wrote the content.
    """
    first_line, _, part_lines = content.partition(b"\n")
    _require_known_layout(first_line)

    # The first line has a hash of the other lines, and their number.
    lines_by_part = _map_parts_to_lines(part_lines)
    is_undamaged = first_line == _build_first_line(part_lines, len(lines_by_part))
    fault = None if is_undamaged else DAMAGED_REASON
    return _ManifestContent(file_hash, lines_by_part, fault, remembered_answers={})


def _decode_manifest_once(manifest_path: Path, content: bytes) -> _ManifestContent:
    """Split the content of a manifest into lines, or reuse the last result if the content is the same.

    Raises:
        StorageError: A later release wrote the content.
    """
    file_hash = compute_content_hash(content)
    decoded = _last_contents_by_path.get(manifest_path)
    if decoded is None or decoded.file_hash != file_hash:
        decoded = _decode_manifest(content, file_hash)
        _last_contents_by_path[manifest_path] = decoded
    return decoded


def _require_known_layout(first_line: bytes) -> None:
    """Refuse a manifest of a later release.

    Args:
        first_line: The first line of the manifest, which names its layout.

    Raises:
        StorageError: The layout is newer than LAYOUT_VERSION.
    """
    match = FIRST_LINE_PATTERN.fullmatch(first_line)
    if match is None:  # a damaged line, which is noticed elsewhere
        return

    layout = int(match[1])
    if layout > LAYOUT_VERSION:
        raise StorageError(f"the lake was written by a later release (layout {layout}); use that one")


def _map_parts_to_lines(part_lines: bytes) -> dict[str, bytes]:
    """Find the line of each part in a manifest.

    Args:
        part_lines: Lines such as `{"seal": "<hash>", "part": "en_head_0000", ...}`.

    Returns:
        The lines by the name of the part. Lines without a readable name are left out.
    """
    lines_by_part = {}
    for line in part_lines.split(b"\n"):
        match = PART_LINE_PATTERN.match(line)
        if match is None:
            continue
        with suppress(ValueError):  # the name is no JSON, as after a flipped bit
            part_name = str(orjson.loads(match["part"]))
            lines_by_part[part_name] = line
    return lines_by_part


def _build_first_line(part_lines: bytes, part_count: int) -> bytes:
    """Return the first line of a manifest, which seals the other lines by a hash of them.

    Args:
        part_lines: The other lines of the file.
        part_count: The number of these lines.
    """
    seal = compute_content_hash(part_lines).encode()
    return b'{"seal": "%s", "layout": %d, "parts": %d}' % (seal, LAYOUT_VERSION, part_count)
