"""The manifest of a table: its parts, a sealed line each, in one file that is replaced as a whole.

    table-manifests/<group>/<table>.jsonl   a line on the whole; then of each part files, version and record

A flipped bit costs the part in whose line it is; a cut costs those behind it. Their rows are made again, from rows that
were computed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolformer_dag.files import NotPlain, StorageError
from toolformer_dag.identity import content_hash
from toolformer_dag.lake.storage import ABSENT, FOLDER, Version

if TYPE_CHECKING:
    from toolformer_dag.lake.table import Table

LAYOUT = 3
SUFFIX = ".jsonl"
DAMAGED = "is damaged: its content is not what was written"
HEAD = re.compile(rb'\{"seal": "[0-9a-f]{32}", "layout": (\d+), "parts": \d+\}')
LINE = re.compile(rb'\{"seal": "([0-9a-f]{32})", (?="part": ("(?:[^"\\]|\\.)*"))')


@dataclass
class Manifest:
    """`lines`: by part, as in the file of this `version`; `fault`: what is wrong with that as a whole.

    `pending`: what is not written yet: part -> its line before, its line now; None where there is none.
    """

    table: "Table"
    lines: dict[str, bytes] = field(default_factory=dict)
    version: Version = ABSENT
    fault: str | None = None
    pending: dict[str, tuple[bytes | None, bytes | None]] = field(default_factory=dict)
    due: float = 0.0

    def line(self, part: str) -> bytes | None:
        """Return the line of a part, written or not."""
        return self.pending[part][1] if part in self.pending else self.lines.get(part)

    def parts(self) -> list[str]:
        """Return the names of the parts, sorted."""
        return sorted(part for part in {**self.lines, **self.pending} if self.line(part) is not None)


def manifest_path(root: Path, table: str) -> Path:
    """Return where the manifest of a table lies."""
    return root / FOLDER / f"{table}{SUFFIX}"


def encoded_line(owner: str, part: str, value: Mapping[str, Any]) -> bytes:
    """Return the line of a part. Raises NotPlain, which names `owner`, for a value without a place in JSON."""
    try:
        body = json.dumps({"part": part, **value}, ensure_ascii=False).encode()[1:]
    except (TypeError, ValueError, RecursionError) as error:
        raise NotPlain(owner, str(error)) from error
    return b'{"seal": "%s", ' % content_hash(body).encode() + body


def decoded_line(line: bytes) -> dict[str, Any]:
    """Read `encoded_line`. Raises ValueError for anything else."""
    match = LINE.match(line)
    if match is None or content_hash(line[match.end() :]).encode() != match[1]:
        raise ValueError(DAMAGED)
    return dict(json.loads(line))


def encoded(lines: Mapping[str, bytes]) -> bytes:
    """Return the content of a manifest."""
    body = b"".join(b"%s\n" % line for _, line in sorted(lines.items()))
    return _head(body, len(lines)) + b"\n" + body


def decoded(content: bytes) -> tuple[dict[str, bytes], str | None]:
    """Return the line of each part, whole or not, and what is wrong with the whole. Raises StorageError."""
    head, _, body = content.partition(b"\n")
    if (known := HEAD.fullmatch(head)) and int(known[1]) > LAYOUT:
        raise StorageError(f"the lake was written by a later release (layout {int(known[1])}); use that one")
    lines = {}
    for line in body.split(b"\n"):
        if match := LINE.match(line):
            lines[str(json.loads(match[2].decode(errors="replace"), strict=False))] = line
    return lines, None if head == _head(body, len(lines)) else DAMAGED


def _head(body: bytes, parts: int) -> bytes:
    return b'{"seal": "%s", "layout": %d, "parts": %d}' % (content_hash(body).encode(), LAYOUT, parts)
