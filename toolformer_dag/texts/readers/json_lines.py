"""JSON lines -> raw columns: a file is read in blocks, and each of their lines is parsed alone."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from toolformer_dag.texts.columns import Batch, Rejection, build_records_batch
from toolformer_dag.texts.compression import describe_kind, is_tar
from toolformer_dag.texts.formats import MISSING, FormatChoice, Layout, choose_layout, read_json
from toolformer_dag.texts.shard_faults import ShardFault

ENDINGS = (".jsonl", ".ndjson", ".json")
"""The endings of names of files with JSON, before that of a compression."""
MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_RECORDS = 100
"""Lines whose records show the format; if they hold no record, the rest of the first block is searched for one."""
ARRAY_BEGINNING = re.compile(rb"\s*\[\s*\{")
"""Matches the beginning of a JSON array of objects, which is not JSON lines."""


def iter_json_batches(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Read the records of a file as batches of raw columns, in the order of the file.

    There is about one batch per block of the file. Blank lines are skipped. A line can be rejected as not_json,
    not_utf8, wrong_type, missing_field or line_too_long.

    Args:
        content: The file in decompressed blocks.
        choice: What the settings say about the format.

    Raises:
        ShardFault: The file cannot be used, for one of these reasons:
            - unknown_format: the first records fit no format
            - missing_field: none of the first records has a field that is needed
            - not_json_lines: the first block has no record, or begins a JSON array or a tar archive
            - empty_shard: the file has no lines, or only blank ones in its first block
    """
    layout: Layout | None = None  # where records keep each field; the first records show it
    first_number = 1  # the number of the first line of a batch

    for lines in iter_line_batches(content):  # never an empty list
        if layout is None:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            layout = choose_layout(choice, _parse_first_records(lines))

        yield _build_batch(layout, lines, first_number)
        first_number += len(lines)
    if layout is None:
        raise ShardFault("empty_shard", "the shard has no lines")


def _build_batch(layout: Layout, lines: Sequence[bytes], first_number: int) -> Batch:
    """Read the records in consecutive lines as raw columns.

    Args:
        layout: Where the records keep each field.
        first_number: The number of the first of these lines in the file.
    """
    line_numbers: list[int] = []  # of each record
    records: list[dict[str, Any]] = []
    rejections: list[Rejection] = []

    for number, line in enumerate(lines, first_number):
        if _is_blank(line):
            continue
        record = _parse_record(number, line)
        if isinstance(record, Rejection):
            rejections.append(record)
        else:
            line_numbers.append(number)
            records.append(record)

    return build_records_batch(layout, line_numbers, records, rejections)


def _is_blank(line: bytes) -> bool:
    """Return whether a line is empty or only white space, and not too long."""
    return not line or (line.isspace() and len(line) < MAX_LINE_BYTES)


def _parse_record(number: int, line: bytes) -> dict[str, Any] | Rejection:
    """Return the object in a line of JSON, or the rejection of a line without one. number: the line's number."""
    value = _parsed(line) if len(line) < MAX_LINE_BYTES else MISSING
    if isinstance(value, dict):
        return value
    fault = _find_line_fault(line, value)
    return Rejection(number, fault.reason, fault.detail)


def _parse_first_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parse the first records of a file, which show its format.

    Returns:
        The objects with fields in the first FIRST_RECORDS lines. If there are none, the first one after them.

    Raises:
        ShardFault: No line holds such an object, or the lines begin a JSON array or a tar archive.
    """
    head = b"\n".join(lines[:FIRST_RECORDS])
    if ARRAY_BEGINNING.match(head) or is_tar(head):
        raise _build_no_records_fault(head)

    first_records = list(_iter_objects_with_fields(lines[:FIRST_RECORDS]))
    if first_records:
        return first_records

    for record in _iter_objects_with_fields(lines[FIRST_RECORDS:]):
        return [record]

    if not any(line.strip() for line in lines):
        raise ShardFault("empty_shard", "the shard has only blank lines")
    raise _build_no_records_fault(head)


def _iter_objects_with_fields(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in lines, without empty objects and other lines."""
    for line in lines:
        value = _parsed(line)
        if isinstance(value, dict) and value:
            yield value


def _build_no_records_fault(head: bytes) -> ShardFault:
    """Build the error for a file without records. Its message says what the file is instead.

    Args:
        head: The first lines of the file.
    """
    shape = describe_other_shape(head)
    if shape is not None:
        return ShardFault("not_json_lines", shape)
    return ShardFault(
        "not_json_lines",
        "no line of the first block holds a JSON object with fields; write one object per line, as `jq -c .` does "
        f"(its first line: {_describe_first_line_fault(head)})",
    )


def _describe_first_line_fault(head: bytes) -> str:
    """Describe why the first line that is not blank holds no object with fields.

    Args:
        head: The first lines of a file.
    """
    visible_lines = [line for line in head.splitlines() if line.strip()]
    first_line = visible_lines[0] if visible_lines else b""

    value = _parsed(first_line)
    if value == {}:
        return "an object without fields"
    return _find_line_fault(first_line, value).detail


def describe_other_shape(head: bytes) -> str | None:
    """Describe what a file is if it is not JSON lines, and what to do.

    Args:
        head: The beginning of the file.

    Returns:
        The description, or None if the beginning does not show it.
    """
    kind = describe_kind(head)
    if kind is not None:
        return f"the content is {kind}"

    if head.lstrip().startswith(b"["):
        return "one JSON array; write one object per line, as `jq -c '.[]'` does"

    first_line, _, _ = head.lstrip().partition(b"\n")
    return _find_comma_fault(first_line, subject="every line")


def _find_comma_fault(line: bytes, subject: str) -> str | None:
    """Find a comma before or after the JSON object in a line.

    Args:
        subject: What the message is about, such as "every line".

    Returns:
        A message, such as "every line ends with a comma; ..." for b'{"text": "a"},', or None.
    """
    line = line.strip()

    if line.endswith(b",") and isinstance(_parsed(line[:-1]), dict):
        return f"{subject} ends with a comma; take it off, as `sed 's/,\\s*$//'` does"
    if line.startswith(b",") and isinstance(_parsed(line[1:]), dict):
        return f"{subject} begins with a comma; take it off, as `sed 's/^\\s*,//'` does"
    return None


def iter_line_batches(content: Iterable[bytes], longest: int = MAX_LINE_BYTES) -> Iterator[list[bytes]]:
    r"""Split the blocks of a file into lines.

    Example:
        The blocks b"a\nb", b"c\n" and b"d" give [b"a"] and [b"bc", b"d"].

    Args:
        content: The blocks.
        longest: A line with more bytes may be cut to longest + 1 bytes.

    Yields:
        For each block in which lines end, a list of these lines without their line ends.
    """
    # Each list waits until the next one is there, because the last of all also gets a last line without an end.
    waiting_lines: list[bytes] = []
    unfinished_line = b""  # what follows the last line end so far

    for block in content:
        lines = block.split(b"\n")
        lines[0] = unfinished_line + lines[0]
        unfinished_line = lines.pop()[: longest + 1]  # cut, so that no line takes more memory
        if not lines:  # no line ends in this block
            continue

        if waiting_lines:
            yield waiting_lines
        waiting_lines = lines

    if unfinished_line:
        waiting_lines = [*waiting_lines, unfinished_line]
    if waiting_lines:
        yield waiting_lines


def _parsed(line: bytes) -> Any:
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
        value = read_json(line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return MISSING
    return value if isinstance(value, dict) else MISSING  # a line such as NaN, which only Python reads, is no JSON


class _LineFault(NamedTuple):
    """Why a line holds no record."""

    reason: str
    detail: str


def _find_line_fault(line: bytes, parsed_value: Any) -> _LineFault:
    """Find out why a line holds no record.

    Args:
        parsed_value: What `_parsed` returned for it, or MISSING for a line that is too long to be parsed.
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
    """Return orjson's message about a line that is no JSON."""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return str(error)
    return "the line is no JSON"
