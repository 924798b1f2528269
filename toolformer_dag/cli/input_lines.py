"""Read JSON lines from a file or the standard input; a bad line is named by its number."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import orjson
import typer

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import expanded

BATCH = 256
"""Lines that are read before the first of them is answered."""
Parsed = TypeVar("Parsed")
Item = TypeVar("Item")


def open_lines(file: str) -> BinaryIO:
    """Open a file, or the standard input for `-`. Raises UserError where there is no such file."""
    if file == "-":
        return sys.stdin.buffer
    named = expanded(Path(file))
    if not named.is_file():
        raise UserError(f"{file}: no such file; name a file of JSON lines, or - to read standard input")
    return named.open("rb")


def valid_text(source: str, text: str) -> str:
    """Return the text. Raises UserError for bytes that are no UTF-8, which Python keeps as halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{source}: is no text in UTF-8 ({error.reason}); write it in UTF-8") from error
    return text


class BadLines:
    """Names lines that cannot be used on standard error; `any`: whether there were some."""

    any = False

    def tell(self, fault: object) -> None:
        """Name a line."""
        typer.echo(f"error: {fault}", err=True)
        self.any = True

    def left_out(self, lines: Iterable[bytes], parse: Callable[[bytes], Parsed]) -> Iterator[list[tuple[int, Parsed]]]:
        """Yield the good lines, parsed and after their numbers, of up to BATCH lines at a time.

        Blank lines are left out, and count. `parse`: raises UserError for a line that cannot be used; it is named.
        """
        not_blank = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        for batch in batched(not_blank, BATCH):
            parsed = []
            for number, line in batch:
                try:
                    parsed.append((number, parse(line)))
                except UserError as error:
                    self.tell(f"line {number}: {error}")
            yield parsed


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of `size` items, the last one of what is left; nothing where there is no item."""
    iterator = iter(items)
    batch = list(islice(iterator, size))
    while batch:
        yield batch
        batch = list(islice(iterator, size))


def json_record(
    line: bytes, required: Mapping[str, type], optional: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Parse a line whose fields must have these types; further fields may stand beside them. Raises UserError."""
    try:
        record = orjson.loads(line)  # json would let half a character pass, which no tokenizer takes
    except ValueError as error:
        raise UserError(f"not JSON: {error}; write one object per line") from error
    fields = {**required, **(optional or {})}
    for name, kind in fields.items():
        is_object = isinstance(record, dict)
        may_lack = is_object and name not in record and name not in required
        has_kind = is_object and type(record.get(name)) is kind
        if not (has_kind or may_lack):
            raise UserError(f"field {name!r} must be a {kind.__name__}; fields: {', '.join(fields)}")
    return dict(record)
