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

from toolformer_dag.files import ReadError, StorageError, as_json
from toolformer_dag.identity import content_hash
from toolformer_dag.lake.parquet import DAMAGED
from toolformer_dag.lake.storage import ASIDE, NO_FILE, Overtaken, Storage, Version

FOLDER = "table-manifests"
"""The folder of the lake where manifests lie; the hyphen keeps it apart from the lanes, which lie beside it."""
SUFFIX = ".jsonl"
"""How the name of a manifest ends."""
LAYOUT = 3
"""The form of the manifest that this release writes; manifests with a higher number are refused."""
BATCH_SECONDS = 5.0
"""How long a change waits at most, in a batch, until the manifest is written."""
BATCH_PARTS = 500
"""From how many changed parts on a manifest is written at once."""
MANIFEST_GONE = "is gone"
"""The fault of a manifest that is not there."""
PAUSES = tuple(min(0.02 * 2**number, 2.0) for number in range(10))
"""The longest pause in seconds after each try to replace a manifest that others replace too."""
HEAD = re.compile(rb'\{"seal": "[0-9a-f]{32}", "layout": (\d+), "parts": \d+\}')
"""The first line of a manifest, of any layout."""
LINE = re.compile(rb'\{"seal": "(?P<seal>[0-9a-f]{32})", (?="part": (?P<part>"(?:[^"\\]|\\.)*"))')
"""The beginning of a part's line: its seal, and the part's name as JSON. The sealed rest begins after the match."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A Parquet file by name, with its size in bytes, the hash of its content and its rows."""

    name: str
    bytes: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a part consists of, as its line in the manifest says.

    - `data_version`: the hash of the rows
    - `record`: what the rows were made from (see record.py)
    - `published`: when, in seconds since 1970 by the clock of the writer; two pointers may differ in it and be equal
    """

    files: tuple[PartFile, ...]
    data_version: str
    record: Mapping[str, Any]
    published: float = field(default_factory=lambda: round(time.time(), 3), compare=False)

    @property
    def rows(self) -> int:
        """The number of rows in all files."""
        return sum(file.rows for file in self.files)

    def encode(self, table: str, part: str) -> bytes:
        """Encode the part as its line of the manifest, a JSON object.

        Its first field, `seal`, is a hash of everything after it.

        Args:
            table: The name of the table, only used in the error message.
            part: The name of the part.

        Raises:
            NotPlain: The record contains a value that JSON cannot express.
        """
        value = {
            "part": part,
            "files": [asdict(file) for file in self.files],
            "data_version": self.data_version,
            "record": self.record,
            "published": self.published,
        }

        sealed_rest = as_json(table, value, indent=None)[1:]  # without the brace, which stands before the seal
        beginning = b'{"seal": "%s", ' % content_hash(sealed_rest).encode()
        return beginning + sealed_rest


@lru_cache(maxsize=2**18)
def decode(line: bytes) -> Pointer:
    """Parse a part's line of the manifest.

    The results are cached: equal lines give the same object.

    Args:
        line: Such as `{"seal": "<hash of the rest>", "part": "en_head_0000", "files": ...}`.

    Raises:
        ValueError: The line is damaged. The message says how.
    """
    _require_seal(line)
    try:
        value = _parsed(line)
        return Pointer(
            files=tuple(PartFile(**file) for file in value["files"]),
            data_version=value["data_version"],
            record=_with_shared_values(value["record"]),  # many parts have equal settings: memory holds them once
            published=value["published"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no part: {error!r}") from error


def _require_seal(line: bytes) -> None:
    """Raise ValueError unless a line begins with the hash of its rest."""
    match = LINE.match(line)
    if match is None:
        raise ValueError(DAMAGED)
    sealed_rest = line[match.end() :]
    if content_hash(sealed_rest).encode() != match["seal"]:
        raise ValueError(DAMAGED)


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse the JSON of a line. Raises ValueError."""
    try:
        value: dict[str, Any] = orjson.loads(line)
    except ValueError:  # NaN, or an integer over 64 bits: orjson refuses both, json reads them
        value = json.loads(line)
    return value


_last_values: dict[str, Any] = {}
"""The settings and versions of the record that was decoded last, by stage, lane and field."""


def _with_shared_values(record: dict[str, Any]) -> dict[str, Any]:
    """Make a record share its settings and versions with the last record of the same table, to save memory.

    The many parts of a table mostly have equal settings and versions, so that one object is enough.

    Returns:
        The same record, changed in place.
    """
    for name in ("settings", "versions"):
        if name not in record:
            continue
        table_and_name = f"{record.get('stage')} {record.get('tool')} {name}"
        if _last_values.get(table_and_name) == record[name]:
            record[name] = _last_values[table_and_name]  # the equal object that is in memory already
        else:
            _last_values[table_and_name] = record[name]
    return record


class _Content(NamedTuple):
    """What this process has read of a manifest last, kept so that an equal file is not parsed again.

    - `digest`: the hash of the file
    - `lines`: by part
    - `fault`: what is wrong with the file as a whole
    - `answers`: answers to questions about this content, which `Table.remembered` adds
    """

    digest: str
    lines: dict[str, bytes]
    fault: str | None
    answers: dict[str, Any]


_last_contents: dict[Path, _Content] = {}
"""What this process has read last, by the path of a manifest."""


class _Change(NamedTuple):
    """A line of a part that is not written yet, and the line that it replaces; None where there is none."""

    line_before: bytes | None
    line: bytes | None

    def is_too_late(self, line_in_file: bytes | None) -> bool:
        """Return whether another process has changed the part's line in the file meanwhile."""
        return line_in_file not in (self.line_before, self.line)


class _Merged(NamedTuple):
    """The lines of the next file, and the lines that are not in it because another writer was faster."""

    lines: dict[str, bytes]
    lost: dict[str, bytes | None]

    def put(self, part: str, line: bytes | None) -> None:
        """Give a part another line; None withdraws it."""
        if line is None:
            self.lines.pop(part, None)
        else:
            self.lines[part] = line


@dataclass
class Manifest:
    """The manifest of a table in memory: what the file had when it was read, and changes that are not written yet.

    `read` fills it, `change` notes a part that comes, goes or changes, `write` puts the changes into the file. `line`
    and `parts` already show what is noted. It belongs to one session and one thread.

    - `lines`: by part, as in the file
    - `version`: which content of the file was read; NO_FILE where there is no file
    - `fault`: what is wrong with the file as a whole
    - `pending`: the changes that are not written yet, by part
    - `due`: by when they are to be written (`time.monotonic`)
    - `answers`: answers to questions about the table, until it changes
    - `checked`: the pointers of parts whose files `Table.checked` has looked at since they changed, by part
    """

    storage: Storage
    table: str
    lines: dict[str, bytes] = field(default_factory=dict)
    version: Version = NO_FILE
    fault: str | None = None
    pending: dict[str, _Change] = field(default_factory=dict)
    due: float = 0.0
    answers: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Pointer] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self.storage.root / FOLDER / f"{self.table}{SUFFIX}"

    def line(self, part: str) -> bytes | None:
        """Return the line of a part, written or not; None where it has none."""
        if part in self.pending:
            return self.pending[part].line
        return self.lines.get(part)

    def parts(self) -> list[str]:
        """Return the names of the parts, sorted."""
        names = self.lines.keys() | self.pending.keys()
        return sorted(part for part in names if self.line(part) is not None)

    def read(self, anew: bool = True) -> "Manifest":
        """Read the file, replacing `lines`, `version` and `fault`. Changes that are not written yet stay.

        If there is no file, the manifest has no parts.

        Args:
            anew: Read what is there now. Otherwise a session over an object store may use what was there
                when the session first looked.

        Returns:
            The manifest itself.

        Raises:
            ReadError: The file cannot be read.
            StorageError: A later release wrote the file.
        """
        self.answers = {}  # of `Table.remembered`: computed from the lines that were read before
        self.checked = {}  # parts whose files `Table.checked` has looked at

        try:
            content, self.version = self.storage.manifest(self.path, anew)
        except FileNotFoundError:
            self.version = NO_FILE
            self._hold_content(_Content(digest="", lines={}, fault=None, answers={}))
        except OSError as error:
            raise ReadError(self.path, error) from error
        else:
            self._hold_content(_decode_manifest_once(self.path, content))

        return self

    def _hold_content(self, content: "_Content") -> None:
        """Hold the lines of a file, and what is remembered of them."""
        self.lines = content.lines
        self.fault = content.fault
        self.answers = content.answers

    def change(self, part: str, line_before: bytes | None, line: bytes | None) -> None:
        """Note that a part gets another line. `write` puts it into the file.

        Args:
            part: The name of the part.
            line_before: The line of the part when the writer began, or None if it had none.
            line: The new line, or None to withdraw the part.
        """
        self.answers = {}  # what was remembered of the lines may be wrong now
        self.checked.pop(part, None)  # the part's files have to be looked at again

        if not self.pending:  # the first change since the file was written begins a batch
            self.due = time.monotonic() + BATCH_SECONDS

        # A part may change twice before the file is written. Then the line before the first change counts.
        if part in self.pending:
            line_before = self.pending[part].line_before
        self.pending[part] = _Change(line_before, line)

    def is_due(self) -> bool:
        """Return whether the changes have waited for BATCH_SECONDS, or are BATCH_PARTS or more."""
        if len(self.pending) >= BATCH_PARTS:
            return True
        return bool(self.pending) and time.monotonic() > self.due

    def write(self) -> dict[str, bytes | None]:
        """Write the changes to the file. Every other line stays as it is in the file.

        If another process has replaced the file since it was read, it is read again and the changes are
        put into the new content. In an object store (`Storage.first_wins`), the first of two writers of a
        part wins: changes of a part that another process has changed are dropped.

        Returns:
            The dropped changes: for each part the line that was not written, or None for a withdrawal.
            Mostly empty.

        Raises:
            StorageError: Other processes replaced the file at every attempt.
        """
        for pause in PAUSES:
            merged = self._merge_changes()
            try:
                self._replace_file(merged.lines)
            except Overtaken:  # another process has replaced the file
                time.sleep(pause * random.random())
                self.read()
                continue

            self._note_written(merged.lines)
            return merged.lost

        self.pending = {}
        raise StorageError(
            f"{self.storage.shown(self.path)} cannot be replaced: others do so all the time, or the store has no "
            "conditional puts (If-Match); run again, or take another store"
        )

    def _note_written(self, lines: dict[str, bytes]) -> None:
        """Note that the file has these lines now: nothing is pending, and nothing is wrong with it."""
        self.lines = lines
        self.pending = {}
        self.fault = None

    def _replace_file(self, lines: dict[str, bytes]) -> None:
        """Replace the file by one with other lines, if they differ from those that were read.

        If the file is damaged, what could be read of it is kept beside it under another name.

        Args:
            lines: The new lines by the name of the part.

        Raises:
            Overtaken: The file has changed since it was read.
        """
        if self.fault:
            self.storage.mark(self.path.with_name(f"{self.path.name}{ASIDE}"), _encode_manifest(self.lines))
        if lines != self.lines or self.fault:
            self.version = self.storage.replace_manifest(self.path, _encode_manifest(lines), self.version)

    def mend(self) -> None:
        """Write a damaged file anew with the lines that are whole. Raises as `write`."""
        self.fault = self.damage()
        for part, line in self.lines.items():
            if not _is_whole(line):
                self.change(part, line, None)
        self.write()

    def damage(self) -> str | None:
        """Check the whole file, decoding every line.

        Returns:
            What is wrong with the file, in words, or None if it is whole. A damaged file may have lost parts.
        """
        if self.version == NO_FILE:
            return MANIFEST_GONE
        if self.fault:
            return self.fault
        if all(_is_whole(line) for line in self.lines.values()):
            return None
        return DAMAGED

    def _merge_changes(self) -> _Merged:
        """Put the changes into the lines that were read from the file.

        In an object store (`first_wins`), a change is lost if another writer has changed the line of the
        part since. In a folder, no change is lost.

        Returns:
            The lines of the next file, and the lost changes.
        """
        merged = _Merged(lines=dict(self.lines), lost={})  # a copy: the lines as they were read stay
        for part, change in self.pending.items():
            is_lost = self.storage.first_wins and change.is_too_late(self.lines.get(part))
            if is_lost:
                merged.lost[part] = change.line
            else:
                merged.put(part, change.line)
        return merged


def _is_whole(line: bytes) -> bool:
    """Return whether a line can be decoded."""
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _encode_manifest(lines: Mapping[str, bytes]) -> bytes:
    """Return the content of a manifest with these lines, by part."""
    body = b"".join(b"%s\n" % line for _, line in sorted(lines.items()))
    return _build_head(body, len(lines)) + b"\n" + body


def _decode_manifest(content: bytes, digest: str) -> _Content:
    """Split the content of a manifest into the lines of its parts, and check that it is whole.

    Args:
        content: The content of the file.
        digest: The hash of the content, to be remembered with it.

    Raises:
        StorageError: A later release wrote the content.
    """
    head, _, body = content.partition(b"\n")
    _require_known_layout(head)

    lines = _map_part_to_line(body)
    # The first line holds a hash of the other lines, and their number.
    is_whole = head == _build_head(body, len(lines))
    fault = None if is_whole else DAMAGED
    return _Content(digest, lines, fault, answers={})


def _decode_manifest_once(path: Path, content: bytes) -> _Content:
    """Split the content of a manifest into lines, or reuse the last result if the content is the same.

    Raises:
        StorageError: A later release wrote the content.
    """
    digest = content_hash(content)
    last = _last_contents.get(path)
    if last is None or last.digest != digest:
        last = _decode_manifest(content, digest)
        _last_contents[path] = last
    return last


def _require_known_layout(head: bytes) -> None:
    """Refuse a manifest of a later release.

    Args:
        head: The first line of the manifest, which names its layout.

    Raises:
        StorageError: The layout is newer than LAYOUT.
    """
    match = HEAD.fullmatch(head)
    if match is None:
        return
    layout = int(match[1])
    if layout > LAYOUT:
        raise StorageError(f"the lake was written by a later release (layout {layout}); use that one")


def _map_part_to_line(body: bytes) -> dict[str, bytes]:
    """Find the line of each part in a manifest.

    Args:
        body: Lines such as `{"seal": "<hash>", "part": "en_head_0000", ...}`.

    Returns:
        The lines by the name of the part. Lines without a readable name are left out.
    """
    lines = {}
    for line in body.split(b"\n"):
        match = LINE.match(line)
        if match is None:
            continue
        with suppress(ValueError):  # a flipped bit in the name
            part = str(orjson.loads(match["part"]))
            lines[part] = line
    return lines


def _build_head(body: bytes, parts: int) -> bytes:
    """Return the first line of a manifest, whose other lines are `body`."""
    return b'{"seal": "%s", "layout": %d, "parts": %d}' % (content_hash(body).encode(), LAYOUT, parts)
