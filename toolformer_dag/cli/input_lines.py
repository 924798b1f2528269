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

LINES_PER_BATCH = 256
"""How many lines are read before the first is answered."""
Parsed = TypeVar("Parsed")
Item = TypeVar("Item")


def open_input_lines(file_name: str) -> BinaryIO:
    """Open a file of lines, or standard input for `-`. The caller closes it.

    Raises:
        UserError: There is no such file.
    """
    if file_name == "-":
        return sys.stdin.buffer
    file_path = expand_home(Path(file_name))
    if not file_path.is_file():
        raise UserError(f"{file_name}: no such file; name a file of JSON lines, or - to read standard input")
    return file_path.open("rb")


def require_utf8(source_name: str, text: str) -> str:
    """Return a text as it is, after a check that it is valid UTF-8.

    Python reads bytes that are not UTF-8 as lone surrogates, which cannot be written again.

    Args:
        source_name: What an error message calls the text, such as "line 3".
        text: The text.

    Raises:
        UserError: The text is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source_name}: is no text in UTF-8 ({error.reason}); write it in UTF-8") from error
    return text


class ParsedLine(NamedTuple, Generic[Parsed]):
    """A line of a file that could be parsed.

    Attributes:
        line_number: Its number, from 1.
        parsed_value: What it was parsed to.
    """

    line_number: int
    parsed_value: Parsed


class BadLines:
    """Reports unusable lines on standard error.

    Attributes:
        has_bad_lines: Whether a line has been reported.
    """

    has_bad_lines = False

    def report_bad_line(self, fault: object) -> None:
        """Print what is wrong with a line."""
        typer.echo(f"error: {fault}", err=True)
        self.has_bad_lines = True

    def iter_usable_batches(
        self, lines: Iterable[bytes], parse_line: Callable[[bytes], Parsed]
    ) -> Iterator[list[ParsedLine[Parsed]]]:
        """Parse lines when they are needed, yield the usable ones in lists, and report the others.

        Args:
            lines: The lines. Blank ones are skipped, but count for the numbers of the lines.
            parse_line: Parses a line. It raises UserError for one that is unusable.

        Yields:
            The usable lines among the next LINES_PER_BATCH ones. The list is empty if all of these are unusable.
        """
        numbered_lines = (NumberedLine(number, line) for number, line in enumerate(lines, 1) if line.strip())
        for batch in split_into_batches(numbered_lines, LINES_PER_BATCH):
            yield list(self._iter_usable_lines(batch, parse_line))

    def _iter_usable_lines(
        self, lines: Iterable["NumberedLine"], parse_line: Callable[[bytes], Parsed]
    ) -> Iterator[ParsedLine[Parsed]]:
        """Yield the lines that can be parsed, and report the others.

        Args:
            lines: The lines with their numbers.
            parse_line: Parses a line. It raises UserError for one that is unusable.
        """
        for line in lines:
            try:
                yield ParsedLine(line.line_number, parse_line(line.line_bytes))
            except UserError as error:
                self.report_bad_line(f"line {line.line_number}: {error}")


class NumberedLine(NamedTuple):
    """A line of a file, with its number from 1."""

    line_number: int
    line_bytes: bytes


def split_into_batches(items: Iterable[Item], batch_size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `batch_size`. The last list may be shorter."""
    iterator = iter(items)
    batch = list(islice(iterator, batch_size))
    while batch:
        yield batch
        batch = list(islice(iterator, batch_size))


def parse_json_record(
    line: bytes, required_types: Mapping[str, type], optional_types: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Parse a line with a JSON object, and check the types of its fields.

    Args:
        line: The line.
        required_types: The type of each field that must be there.
        optional_types: The type of each field that may be there. Fields with other names may have any type.

    Raises:
        UserError: The line holds no JSON object, or a field is missing or has another type.
    """
    record = _parse_json_line(line)
    type_by_field = {**required_types, **(optional_types or {})}

    for field_name, field_type in type_by_field.items():
        is_required = field_name in required_types
        if not _has_valid_field(record, field_name, field_type, is_required):
            raise UserError(f"field {field_name!r} must be a {field_type.__name__}; fields: {', '.join(type_by_field)}")
    return dict(record)


def _parse_json_line(line: bytes) -> Any:
    """Return the JSON value in a line.

    Raises:
        UserError: The line is not JSON.
    """
    try:
        # Python's `json` would let lone surrogates pass (half a character), which no tokenizer takes.
        return orjson.loads(line)
    except ValueError as error:
        raise UserError(f"not JSON: {error}; write one object per line") from error


def _has_valid_field(record: object, field_name: str, field_type: type, is_required: bool) -> bool:
    """Return whether a record is a JSON object that has a field of this type, or may lack the field and does."""
    if not isinstance(record, dict):
        return False
    if field_name in record:
        return type(record[field_name]) is field_type
    return not is_required
