"""The manifest of a table: its parts, a sealed line each, in one file that is replaced as a whole.

    table-manifests/<group>/<table>.jsonl   a line on the whole; then of each part files, version and record

A manifest is replaced only where it is the one that was read; else it is read again and what this writer changed is put
into it. A flipped bit costs the part in whose line it is; a cut costs those behind it. Their rows are made again, from
rows that were computed.
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
from typing import Any

import orjson

from toolformer_dag.files import ReadError, StorageError, as_json
from toolformer_dag.identity import content_hash
from toolformer_dag.lake.parquet import DAMAGED
from toolformer_dag.lake.storage import ABSENT, ASIDE, Overtaken, Storage, Version

FOLDER, SUFFIX = "table-manifests", ".jsonl"
"""Where manifests lie; the hyphen keeps the folder apart from the lanes, which lie beside it."""
LAYOUT = 3
BATCH_SECONDS, BATCH_PARTS = 5.0, 500
"""After how long, or how many parts, a manifest is written while its parts are made."""
GONE = "is gone"
PAUSES = tuple(min(0.02 * 2**number, 2.0) for number in range(10))
"""Seconds between tries to replace a manifest that others replace too."""
HEAD = re.compile(rb'\{"seal": "[0-9a-f]{32}", "layout": (\d+), "parts": \d+\}')
LINE = re.compile(rb'\{"seal": "([0-9a-f]{32})", (?="part": ("(?:[^"\\]|\\.)*"))')


@dataclass(frozen=True, slots=True)
class PartFile:
    """A Parquet file by name, with its size in bytes, the hash of its content and its rows."""

    name: str
    bytes: int
    hash: str
    rows: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a part consists of. `data_version`: hash of the rows; `record`: what made them (see record.py).

    `published`: when, in seconds since 1970 by the clock of its writer.
    """

    files: tuple[PartFile, ...]
    data_version: str
    record: Mapping[str, Any]
    published: float = field(default_factory=lambda: round(time.time(), 3), compare=False)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    def encode(self, table: str, part: str) -> bytes:
        """Return the line of a manifest, sealed by its hash. Raises NotPlain, which names `table`."""
        fields = {name: getattr(self, name) for name in ("data_version", "record", "published")}
        return _line(table, part, {"files": [asdict(file) for file in self.files], **fields})


@lru_cache(maxsize=2**18)
def decode(line: bytes) -> Pointer:
    """Read `Pointer.encode`. Raises ValueError for anything else."""
    match = LINE.match(line)
    if match is None or content_hash(line[match.end() :]).encode() != match[1]:
        raise ValueError(DAMAGED)
    try:
        value = _value(line)
        files = tuple(PartFile(**file) for file in value["files"])
        return Pointer(files, value["data_version"], _shared(value["record"]), value["published"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no part: {error!r}") from error


def _value(line: bytes) -> dict[str, Any]:
    """The fields of a line. Raises ValueError."""
    try:
        value: dict[str, Any] = orjson.loads(line)
    except ValueError:  # a number that is none, or a very large one: json has a place for them
        value = json.loads(line)
    return value


_last: dict[str, Any] = {}


def _shared(record: dict[str, Any]) -> dict[str, Any]:
    """The record with what the one before of its stage says too held once: parts differ in little else."""
    for name in ("settings", "versions"):
        place = f"{record.get('stage')} {record.get('tool')} {name}"
        if name in record and _last.get(place) != record[name]:
            _last[place] = record[name]
        elif name in record:
            record[name] = _last[place]
    return record


_read: dict[Path, tuple[str, dict[str, bytes], str | None, dict[str, Any]]] = {}
"""Of each manifest the hash of what this process read last, its lines, its fault, and what was asked of it since."""


@dataclass
class Manifest:
    """`lines`: by part, as in the file of this `version`; `fault`: what is wrong with that as a whole.

    `pending`: what is not written yet: part -> its line before, its line now; None where there is none. `due`: by when
    it is to be written. `answers`: what was asked of the table since it changed last; `looked`: parts whose
    files were looked at since they changed.
    """

    storage: Storage
    table: str
    lines: dict[str, bytes] = field(default_factory=dict)
    version: Version = ABSENT
    fault: str | None = None
    pending: dict[str, tuple[bytes | None, bytes | None]] = field(default_factory=dict)
    due: float = 0.0
    answers: dict[str, Any] = field(default_factory=dict)
    looked: dict[str, Pointer] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.storage.root / FOLDER / f"{self.table}{SUFFIX}"

    def line(self, part: str) -> bytes | None:
        """Return the line of a part, written or not."""
        return self.pending[part][1] if part in self.pending else self.lines.get(part)

    def parts(self) -> list[str]:
        """Return the names of the parts, sorted."""
        return sorted(part for part in {**self.lines, **self.pending} if self.line(part) is not None)

    def read(self, anew: bool = True) -> "Manifest":
        """Read the file, in a session as it was at its beginning but for `anew`; what is pending stays. Return self.

        Raises ReadError, and StorageError where a later release wrote it.
        """
        self.answers, self.looked = {}, {}
        try:
            content, self.version = self.storage.manifest(self.path, anew)
        except FileNotFoundError:
            self.version, self.fault, self.lines = ABSENT, None, {}
        except OSError as error:
            raise ReadError(self.path, error) from error
        else:
            known, digest = _read.get(self.path), content_hash(content)
            if known is None or known[0] != digest:
                known = _read[self.path] = digest, *_decoded(content), {}
            _, self.lines, self.fault, self.answers = known
        return self

    def change(self, part: str, before: bytes | None, line: bytes | None) -> None:
        """Let the part have this line, or none, in the next file. `before`: the line that this replaces."""
        self.answers = {}
        self.looked.pop(part, None)
        if not self.pending:
            self.due = time.monotonic() + BATCH_SECONDS
        self.pending[part] = self.pending.get(part, (before, None))[0], line

    def is_due(self) -> bool:
        """Return whether what is pending has waited long enough, or is enough."""
        return len(self.pending) >= BATCH_PARTS or (bool(self.pending) and time.monotonic() > self.due)

    def write(self) -> dict[str, bytes | None]:
        """Replace the file by one with what is pending; of a damaged one a copy stays.

        Return what is not in it, part -> line, since another writer was faster where the first one wins. Raises
        StorageError where others replace it all the time.
        """
        for pause in PAUSES:
            lines, lost = self._merged()
            try:
                if self.fault:
                    self.storage.mark(self.path.with_name(f"{self.path.name}{ASIDE}"), _encoded(self.lines))
                if lines != self.lines or self.fault:
                    self.version = self._replace(lines)
            except Overtaken:
                time.sleep(pause * random.random())
                self.read()
                continue
            self.lines, self.pending, self.fault = lines, {}, None
            return lost
        self.pending = {}
        raise StorageError(
            f"{self.storage.shown(self.path)} cannot be replaced: others do so all the time, or the store has no "
            "conditional puts (If-Match); run again, or take another store"
        )

    def mend(self) -> None:
        """Write a damaged file anew with the lines that are whole. Raises as `write`."""
        self.fault = self.damage()
        for part, line in self.lines.items():
            if not _is_whole(line):
                self.change(part, line, None)
        self.write()

    def damage(self) -> str | None:
        """Return what is wrong with the file; parts may be lost then."""
        if self.version == ABSENT:
            return GONE
        return self.fault or (None if all(map(_is_whole, self.lines.values())) else DAMAGED)

    def _merged(self) -> tuple[dict[str, bytes], dict[str, bytes | None]]:
        """The lines with what is pending put into them, and what another writer was faster with."""
        lines, lost = dict(self.lines), dict[str, bytes | None]()
        for part, (before, line) in self.pending.items():
            if self.storage.first_wins and lines.get(part) not in (before, line):
                lost[part] = line
            elif line is None:
                lines.pop(part, None)
            else:
                lines[part] = line
        return lines, lost

    def _replace(self, lines: Mapping[str, bytes]) -> Version:
        return self.storage.replace_manifest(self.path, _encoded(lines), self.version)


def _is_whole(line: bytes) -> bool:
    try:
        decode(line)
    except ValueError:
        return False
    return True


def _line(table: str, part: str, value: Mapping[str, Any]) -> bytes:
    body = as_json(table, {"part": part, **value}, indent=None)[1:]
    return b'{"seal": "%s", ' % content_hash(body).encode() + body


def _encoded(lines: Mapping[str, bytes]) -> bytes:
    body = b"".join(b"%s\n" % line for _, line in sorted(lines.items()))
    return _head(body, len(lines)) + b"\n" + body


def _decoded(content: bytes) -> tuple[dict[str, bytes], str | None]:
    """The line of each part, whole or not, and what is wrong with the whole. Raises StorageError."""
    head, _, body = content.partition(b"\n")
    if (known := HEAD.fullmatch(head)) and int(known[1]) > LAYOUT:
        raise StorageError(f"the lake was written by a later release (layout {int(known[1])}); use that one")
    lines = {}
    for line in body.split(b"\n"):
        if match := LINE.match(line):
            with suppress(ValueError):  # a flipped bit in the name
                lines[str(orjson.loads(match[2]))] = line
    return lines, None if head == _head(body, len(lines)) else DAMAGED


def _head(body: bytes, parts: int) -> bytes:
    return b'{"seal": "%s", "layout": %d, "parts": %d}' % (content_hash(body).encode(), LAYOUT, parts)
