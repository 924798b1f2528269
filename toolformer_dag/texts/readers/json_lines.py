"""JSON lines -> raw columns: a file is read in blocks, and each of their lines is parsed alone."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from toolformer_dag.texts.columns import Batch, Rejection, build_records_batch
from toolformer_dag.texts.compression import describe_unreadable_file, is_tar
from toolformer_dag.texts.formats import MISSING, FormatChoice, Layout, choose_layout, parse_json_text
from toolformer_dag.texts.shard_faults import ShardFault

JSON_FILE_ENDINGS = (".jsonl", ".ndjson", ".json")
"""The endings of names of files with JSON, before that of a compression."""
MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_LINE_COUNT = 100
"""Lines whose records show the format; if they hold no record, the rest of the first block is searched for one."""
JSON_ARRAY_BEGINNING_PATTERN = re.compile(rb"\s*\[\s*\{")
"""Matches the beginning of a JSON array of objects, which is not JSON lines."""


def iter_json_batches(blocks: Iterable[bytes], format_choice: FormatChoice) -> Iterator[Batch]:
    """Read the records of a file as batches of raw columns, in the order of the file.

    There is about one batch per block of the file. Blank lines are skipped. A line can be rejected as not_json,
    not_utf8, wrong_type, missing_field or line_too_long.

    Args:
        blocks: The file in decompressed blocks.
        format_choice: What the settings say about the format.

    Raises:
        ShardFault: The file cannot be used, for one of these reasons:
            - unknown_format: the first records fit no format
            - missing_field: none of the first records has a field that is needed
            - not_json_lines: the first block has no record, or begins a JSON array or a tar archive
            - empty_shard: the file has no lines, or only blank ones in its first block
    """
    layout: Layout | None = None  # where records keep each field; the first records show it
    first_number = 1  # the number of the first line of a batch

    for lines in iter_line_batches(blocks):  # never an empty list
        if layout is None:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            layout = choose_layout(format_choice, _parse_first_records(lines))

        yield _build_batch_of_lines(layout, lines, first_number)
        first_number += len(lines)
    if layout is None:
        raise ShardFault("empty_shard", "the shard has no lines")


def _build_batch_of_lines(layout: Layout, lines: Sequence[bytes], first_line_number: int) -> Batch:
    """Read the records in consecutive lines as raw columns.

    Args:
        layout: Where the records keep each field.
        lines: The lines. Blank ones are skipped.
        first_line_number: The number of the first of these lines in the file.
    """
    line_numbers: list[int] = []  # of each record
    records: list[dict[str, Any]] = []
    rejections: list[Rejection] = []

    for number, line in enumerate(lines, first_line_number):
        if _is_blank(line):
            continue
        record = _parse_line_record(number, line)
        if isinstance(record, Rejection):
            rejections.append(record)
        else:
            line_numbers.append(number)
            records.append(record)

    return build_records_batch(layout, line_numbers, records, rejections)


def _is_blank(line: bytes) -> bool:
    """Check whether a line is empty or only white space. A line that is too long does not count as blank."""
    return not line or (line.isspace() and len(line) < MAX_LINE_BYTES)


def _parse_line_record(line_number: int, line: bytes) -> dict[str, Any] | Rejection:
    """Parse the record in a line of JSON.

    Args:
        line_number: The number of the line in the file, from 1.
        line: The line.

    Returns:
        The record, or a Rejection if the line is too long or does not hold a JSON object.
    """
    value = MISSING
    if len(line) < MAX_LINE_BYTES:
        value = _parse_json_line(line)
    if isinstance(value, dict):
        return value

    fault = _find_line_fault(line, value)
    return Rejection(line_number, fault.reason, fault.detail)


def _parse_first_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse the first records of a file, which show its format.

    Returns:
        The objects with fields in the first FIRST_LINE_COUNT lines. If there are none, the first one after them.

    Raises:
        ShardFault: No line holds such an object, or the lines begin a JSON array or a tar archive.
    """
    first_lines = lines[:FIRST_LINE_COUNT]
    later_lines = lines[FIRST_LINE_COUNT:]

    first_bytes = b"\n".join(first_lines)
    if JSON_ARRAY_BEGINNING_PATTERN.match(first_bytes) or is_tar(first_bytes):
        raise _build_no_records_fault(first_bytes)

    first_records = list(_iter_objects_with_fields(first_lines))
    if first_records:
        return first_records

    later_record = next(_iter_objects_with_fields(later_lines), None)
    if later_record is not None:
        return [later_record]

    has_only_blank_lines = not any(line.strip() for line in lines)
    if has_only_blank_lines:
        raise ShardFault("empty_shard", "the shard has only blank lines")
    raise _build_no_records_fault(first_bytes)


def _iter_objects_with_fields(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines, without empty objects and other lines."""
    for line in lines:
        value = _parse_json_line(line)
        if isinstance(value, dict) and value:
            yield value


def _build_no_records_fault(first_bytes: bytes) -> ShardFault:
    """Build the error for a file without records. Its message says what the file is instead.

    Args:
        first_bytes: The first lines of the file.
    """
    other_format = describe_other_file_format(first_bytes)
    if other_format is not None:
        return ShardFault("not_json_lines", other_format)

    return ShardFault(
        "not_json_lines",
        "no line of the first block holds a JSON object with fields; write one object per line, as `jq -c .` does "
        f"(its first line: {_describe_first_line_fault(first_bytes)})",
    )


def _describe_first_line_fault(first_bytes: bytes) -> str:
    """Describe why the first line that is not blank holds no object with fields.

    Args:
        first_bytes: The first lines of a file.
    """
    visible_lines = [line for line in first_bytes.splitlines() if line.strip()]
    first_line = visible_lines[0] if visible_lines else b""

    value = _parse_json_line(first_line)
    if value == {}:
        return "an object without fields"
    return _find_line_fault(first_line, value).detail


def describe_other_file_format(first_bytes: bytes) -> str | None:
    """Describe what a file is if it is not JSON lines, and what to do.

    Args:
        first_bytes: The beginning of the file.

    Returns:
        The description, or None if the beginning does not show it.
    """
    description = describe_unreadable_file(first_bytes)
    if description is not None:
        return f"the content is {description}"

    if first_bytes.lstrip().startswith(b"["):
        return "one JSON array; write one object per line, as `jq -c '.[]'` does"

    first_line, _, _ = first_bytes.lstrip().partition(b"\n")
    return _find_comma_fault(first_line, subject="every line")


def _find_comma_fault(line: bytes, subject: str) -> str | None:
    """Find a comma before or after the JSON object in a line.

    Args:
        line: The line.
        subject: What the message is about, such as "every line".

    Returns:
        A message, such as "every line ends with a comma; ..." for b'{"text": "a"},', or None.
    """
    line = line.strip()

    if line.endswith(b",") and isinstance(_parse_json_line(line[:-1]), dict):
        return f"{subject} ends with a comma; take it off, as `sed 's/,\\s*$//'` does"

    if line.startswith(b",") and isinstance(_parse_json_line(line[1:]), dict):
        return f"{subject} begins with a comma; take it off, as `sed 's/^\\s*,//'` does"
    return None


def iter_line_batches(blocks: Iterable[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    r"""Split the blocks of a file into lines.

    Example:
        The blocks b"a\nb", b"c\n" and b"d" give [b"a"] and [b"bc", b"d"].

    Args:
        blocks: The decompressed blocks of the file.
        max_line_bytes: A line with more bytes may be cut to max_line_bytes + 1 bytes.

    Yields:
        For each block in which lines end, a list of these lines without their line ends.
    """
    # Each list waits until the next one is complete, because a last line without a line end is added to the last list.
    waiting_lines: list[bytes] = []
    unfinished_line = b""  # what follows the last line end so far

    for block in blocks:
        lines = block.split(b"\n")
        lines[0] = unfinished_line + lines[0]
        unfinished_line = lines.pop()[: max_line_bytes + 1]  # cut, so that no line takes more memory
        no_line_ends_here = not lines
        if no_line_ends_here:
            continue

        if waiting_lines:
            yield waiting_lines
        waiting_lines = lines

    if unfinished_line:
        waiting_lines = [*waiting_lines, unfinished_line]
    if waiting_lines:
        yield waiting_lines


def _parse_json_line(line: bytes) -> Any:
    """Parse a line of JSON.

    An object that orjson refuses is parsed by Python's json, which accepts NaN, Infinity and half a surrogate pair.

    Returns:
        The value, or MISSING if the line is not JSON.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass

    try:
        text = line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass")
        value = parse_json_text(text)
    except (ValueError, RecursionError):
        return MISSING

    # Any other value that only Python's json accepts, such as NaN alone, is not JSON.
    return value if isinstance(value, dict) else MISSING


class _LineFault(NamedTuple):
    """Why a line holds no record."""

    reason: str
    detail: str


def _find_line_fault(line: bytes, parsed_value: Any) -> _LineFault:
    """Find out why a line holds no record.

    Args:
        line: The line.
        parsed_value: What `_parse_json_line` returned for it. MISSING if it is not JSON or is too long to be parsed.
    """
    if len(line) >= MAX_LINE_BYTES:
        return _LineFault("line_too_long", f"more than {MAX_LINE_BYTES} bytes")

    if parsed_value is not MISSING:
        return _LineFault("wrong_type", f"the line holds a {type(parsed_value).__name__}, not an object")

    try:
        line.decode()
    except UnicodeDecodeError as error:
        return _LineFault("not_utf8", str(error))

    detail = _find_comma_fault(line, subject="the line") or _describe_json_error(line)
    return _LineFault("not_json", detail)


def _describe_json_error(line: bytes) -> str:
    """Describe why a line is not JSON, in the words of the library orjson."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return str(error)
    return "the line is no JSON"
