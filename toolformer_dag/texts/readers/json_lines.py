"""JSON lines -> raw columns: whole lines of a block, each parsed alone."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from toolformer_dag.texts.columns import Batch, Rejection, records_batch
from toolformer_dag.texts.compression import is_tar, kind_in_words
from toolformer_dag.texts.formats import MISSING, FormatChoice, Layout, layout_of, read_json
from toolformer_dag.texts.shard_faults import ShardFault

MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_RECORDS = 100
"""Lines by whose records a format is recognized; without a record in them, the rest of the first block is looked at."""
ARRAY = re.compile(rb"\s*\[\s*\{")
"""The beginning of an array of objects, of which no line before the last is an object."""


def json_batches(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Yield the records of a file as raw columns, a batch per block, in the order of the file.

    content: the file in blocks, decompressed. A line without a record is among the batch's rejections, with one of
    these reasons: not_json, not_utf8, wrong_type, missing_field, line_too_long (MAX_LINE_BYTES or more). Blank lines
    are passed over.

    Raises ShardFault: unknown_format, missing_field (no record of the first has what the format needs), not_json_lines
    (the first block has no record, or begins a JSON array or an archive of tar), empty_shard.
    """
    layout: Layout | None = None
    first_number = 1  # of the first line of a block
    for lines in line_batches(content):
        if layout is None:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            layout = layout_of(choice, _first_records(lines))
        yield _batch(layout, lines, first_number)
        first_number += len(lines)
    if layout is None:
        raise ShardFault("empty_shard", "the shard has no lines")


def _batch(layout: Layout, lines: Sequence[bytes], first_number: int) -> Batch:
    """Return the records of consecutive lines, of which the first has this number, as raw columns."""
    numbers: list[int] = []  # of the lines with a record
    records: list[dict[str, Any]] = []
    rejections: list[Rejection] = []
    for number, line in enumerate(lines, first_number):
        is_too_long = len(line) >= MAX_LINE_BYTES
        if not line or (line.isspace() and not is_too_long):
            continue
        value = MISSING if is_too_long else _parsed(line)
        if isinstance(value, dict):
            numbers.append(number)
            records.append(value)
        else:
            fault = _line_fault(line, value)
            rejections.append(Rejection(number, fault.reason, fault.detail))
    return records_batch(layout, numbers, records, rejections)


def _first_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the objects with fields in the first FIRST_RECORDS lines, or without any there the first one after them.

    Raises ShardFault where the lines have none, and where they begin a JSON array or an archive of tar.
    """
    head = b"\n".join(lines[:FIRST_RECORDS])
    records: list[dict[str, Any]] = []
    if not (ARRAY.match(head) or is_tar(head)):
        for number, line in enumerate(lines):
            if number >= FIRST_RECORDS and records:
                break
            value = _parsed(line)
            if isinstance(value, dict) and value:
                records.append(value)
    if not records:
        is_blank = not any(line.strip() for line in lines)
        raise _no_records(head, is_blank=is_blank)
    return records


def _no_records(head: bytes, *, is_blank: bool) -> ShardFault:
    """Return the fault of a file without a record, which says what it is.

    head: its first lines. is_blank: whether all lines of its first block are blank.
    """
    if is_blank:
        return ShardFault("empty_shard", "the shard has only blank lines")
    shape = other_shape(head)
    if shape is not None:
        return ShardFault("not_json_lines", shape)
    first_line = next((line for line in head.splitlines() if line.strip()), b"")
    value = _parsed(first_line)
    why = "an object without fields" if value == {} else _line_fault(first_line, value).detail
    return ShardFault(
        "not_json_lines",
        "no line of the first block holds a JSON object with fields; write one object per line, as `jq -c .` does "
        f"(its first line: {why})",
    )


def other_shape(head: bytes) -> str | None:
    """Say what a file is in place of JSON lines, with a remedy, by its beginning; None where that does not tell."""
    kind = kind_in_words(head)
    if kind is not None:
        return f"the content is {kind}"
    if head.lstrip().startswith(b"["):
        return "one JSON array; write one object per line, as `jq -c '.[]'` does"
    first_line, _, _ = head.lstrip().partition(b"\n")
    comma = _comma_beside_object(first_line)
    return f"every {comma}" if comma else None


def _comma_beside_object(line: bytes) -> str | None:
    """Say where the comma is in a line that holds an object and a comma, with a remedy; None for any other line."""
    line = line.strip()
    if line.endswith(b",") and isinstance(_parsed(line[:-1]), dict):
        return "line ends with a comma; take it off, as `sed 's/,\\s*$//'` does"
    if line.startswith(b",") and isinstance(_parsed(line[1:]), dict):
        return "line begins with a comma; take it off, as `sed 's/^\\s*,//'` does"
    return None


def line_batches(content: Iterable[bytes], longest: int = MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    """Cut blocks of a file into lines, without their ends; yield the lines that end in each block.

    A line that goes over the end of a block is in the batch of the block in which it ends. Of one with more than
    `longest` bytes, only longest + 1 may be left. A last line without an end is in one batch with the lines before it,
    because the first batch shows the format.
    """
    waiting: list[bytes] = []  # the lines of the last block, which are yielded once another line has ended
    open_line = b""  # what the last block has after its last line end
    for block in content:
        lines = block.split(b"\n")
        lines[0] = open_line + lines[0]
        open_line = lines.pop()[: longest + 1]
        if not lines:
            continue
        if waiting:
            yield waiting
        waiting = lines
    if open_line:
        waiting = [*waiting, open_line]
    if waiting:
        yield waiting


def _parsed(line: bytes) -> Any:
    """Return the value of a line of JSON; MISSING for what is not JSON.

    Where orjson refuses a line, an object is read by Python's json: it takes NaN, Infinity and half a surrogate pair,
    which Python writes too.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        value = read_json(line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return MISSING
    return value if isinstance(value, dict) else MISSING


class _LineFault(NamedTuple):
    """Why a line holds no record."""

    reason: str
    detail: str


def _line_fault(line: bytes, value: Any) -> _LineFault:
    """Return why a line holds no record. `value`: what `_parsed` returned for it; MISSING where it was not parsed."""
    if len(line) >= MAX_LINE_BYTES:
        return _LineFault("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    if value is not MISSING:
        return _LineFault("wrong_type", f"the line holds a {type(value).__name__}, not an object")
    try:
        line.decode()
        orjson.loads(line)
    except UnicodeDecodeError as error:
        return _LineFault("not_utf8", str(error))
    except orjson.JSONDecodeError as error:
        comma = _comma_beside_object(line)
        return _LineFault("not_json", f"the {comma}" if comma else str(error))
    return _LineFault("not_json", "the line is no JSON")
