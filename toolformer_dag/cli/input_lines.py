"""Read JSON lines from a file or the standard input; a bad line is named by its number."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from toolformer_dag.files import UserError

BATCH = 256  # lines


class LineError(UserError):
    """A line that cannot be used."""


def open_lines(file: str) -> BinaryIO:
    """Open a file, or the standard input for `-`. Raises UserError where there is no such file."""
    if file == "-":
        return sys.stdin.buffer
    if not Path(file).is_file():
        raise UserError(f"{file}: no such file; name a file of JSON lines, or - to read standard input")
    return Path(file).open("rb")


def numbered_batches(lines: Iterable[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield up to BATCH lines at a time with their numbers, from 1; blank lines are counted and left out."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    while batch := list(islice(numbered, BATCH)):
        yield batch


def json_record(
    number: int, line: bytes, required: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Parse a line whose fields must have these types; further fields may stand beside them. Raises LineError."""
    try:
        record = orjson.loads(line)  # json would let half a character pass, which no tokenizer takes
    except ValueError as error:
        raise LineError(f"line {number}: not JSON: {error}; write one object per line") from error
    fields = {**required, **(optional or {})}
    for name, kind in fields.items():
        absent = isinstance(record, dict) and name not in record and name not in required
        if not absent and not (isinstance(record, dict) and type(record.get(name)) is kind):
            raise LineError(f"line {number}: field {name!r} must be a {kind.__name__}; fields: {', '.join(fields)}")
    return dict(record)
