"""Read JSON lines from a file or standard input, and report bad lines by their numbers."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import orjson
import typer

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import expand_home

BATCH = 256
"""How many lines are read before the first is answered."""
Parsed = TypeVar("Parsed")
Item = TypeVar("Item")


def open_lines(file: str) -> BinaryIO:
    """Open a file of lines, or standard input for `-`. Raises UserError where there is no such file."""
    if file == "-":
        return sys.stdin.buffer
    file_path = expand_home(Path(file))
    if not file_path.is_file():
        raise UserError(f"{file}: no such file; name a file of JSON lines, or - to read standard input")
    return file_path.open("rb")


def require_utf8(source: str, text: str) -> str:
    """Return the text. Raises UserError if it is not UTF-8, which Python reads as lone surrogates.

    `source`: what the message calls the text.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: is no text in UTF-8 ({error.reason}); write it in UTF-8") from error
    return text


class ParsedLine(NamedTuple, Generic[Parsed]):
    """A line of a file: its number, from 1, and its parsed value."""

    number: int
    value: Parsed


class BadLines:
    """Reports unusable lines on standard error; `any` says whether there were some."""

    any = False

    def report(self, fault: object) -> None:
        """Print what is wrong with a line."""
        typer.echo(f"error: {fault}", err=True)
        self.any = True

    def left_out(self, lines: Iterable[bytes], parse: Callable[[bytes], Parsed]) -> Iterator[list[ParsedLine[Parsed]]]:
        """Yield the usable lines in lists, each parsed from up to BATCH lines; report the others.

        Blank lines are skipped but counted. `parse` raises UserError for an unusable line.
        """
        not_blank = (NumberedLine(number, line) for number, line in enumerate(lines, 1) if line.strip())
        for batch in split_into_batches(not_blank, BATCH):
            yield list(self._parsed(batch, parse))

    def _parsed(
        self, lines: Iterable["NumberedLine"], parse: Callable[[bytes], Parsed]
    ) -> Iterator[ParsedLine[Parsed]]:
        """Yield the lines that can be parsed; report the others."""
        for line in lines:
            try:
                yield ParsedLine(line.number, parse(line.content))
            except UserError as error:
                self.report(f"line {line.number}: {error}")


class NumberedLine(NamedTuple):
    """A line of a file, with its number from 1."""

    number: int
    content: bytes


def split_into_batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    batch = list(islice(iterator, size))
    while batch:
        yield batch
        batch = list(islice(iterator, size))


def parse_record(
    line: bytes, required: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Return the JSON object in a line. Raises UserError where a field is missing or has another type.

    The mappings have the expected type of each field. Other fields may have any type.
    """
    record = _parse_json(line)
    fields = {**required, **(optional or {})}
    for name, kind in fields.items():
        if not _has_field(record, name, kind, name in required):
            raise UserError(f"field {name!r} must be a {kind.__name__}; fields: {', '.join(fields)}")
    return dict(record)


def _parse_json(line: bytes) -> Any:
    """Return the JSON value in a line. Raises UserError."""
    try:
        return orjson.loads(line)  # json would let half a character pass, which no tokenizer takes
    except ValueError as error:
        raise UserError(f"not JSON: {error}; write one object per line") from error


def _has_field(record: object, name: str, kind: type, is_required: bool) -> bool:
    """Return whether a record is an object with a field of this type, or may lack the field and does."""
    if not isinstance(record, dict):
        return False
    if name in record:
        return type(record[name]) is kind
    return not is_required
