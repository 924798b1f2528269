"""JSON lines -> raw columns: whole lines of a block, each parsed alone."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from toolformer_dag.texts.columns import Batch, Rejection, records_batch
from toolformer_dag.texts.compression import ShardFault, is_tar, kind_in_words
from toolformer_dag.texts.formats import MISSING, FormatChoice, Layout, layout_of, read_json

MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_RECORDS = 100
"""Lines by whose records a format is recognized; without a record in them, the rest of the first block is looked at."""
ARRAY = re.compile(rb"\s*\[\s*\{")
"""The beginning of an array of objects, of which no line before the last is an object."""


def json_batches(content: Iterable[bytes], choice: FormatChoice) -> Iterator[Batch]:
    """Yield the records of each block as raw columns, and the lines that hold none, in the order of the file.

    Reasons: not_json, not_utf8, wrong_type, missing_field, line_too_long (over MAX_LINE_BYTES). Raises ShardFault:
    unknown_format, missing_field (no record of the first has what is asked for), not_json_lines (the first block
    has no record, or begins a JSON array or an archive of tar), empty_shard. Blank lines are passed over.
    """
    layout: Layout | None = None
    first = 1
    for lines in line_batches(content):
        if layout is None:
            lines[0] = lines[0].removeprefix(BOM_UTF8)
            layout = layout_of(choice, _first_records(lines))
        yield _batch(layout, lines, first)
        first += len(lines)
    if layout is None:
        raise ShardFault("empty_shard", "the shard has no lines")


def _batch(layout: Layout, lines: Sequence[bytes], first: int) -> Batch:
    numbers: list[int] = []
    records: list[dict[str, Any]] = []
    rejections: list[Rejection] = []
    for number, line in enumerate(lines, first):
        if not line or (line.isspace() and len(line) < MAX_LINE_BYTES):
            continue
        record = _parsed(line) if len(line) < MAX_LINE_BYTES else MISSING
        if isinstance(record, dict):
            records.append(record)
            numbers.append(number)
        else:
            rejections.append(Rejection(number, *_why(line, record)))
    return records_batch(layout, numbers, records, rejections)


def _first_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return the objects of the first FIRST_RECORDS lines, or without any there the first one after them."""
    head = b"\n".join(lines[:FIRST_RECORDS])
    records: list[dict[str, Any]] = []
    for number, line in enumerate(() if ARRAY.match(head) or is_tar(head) else lines):
        if number >= FIRST_RECORDS and records:
            break
        records += [record] if isinstance(record := _parsed(line), dict) and record else []
    if not records:
        raise _other_file(head, blank=not any(map(bytes.strip, lines)))
    return records


def _other_file(head: bytes, blank: bool) -> ShardFault:
    """Say what a file without a record is."""
    if blank:
        return ShardFault("empty_shard", "the shard has only blank lines")
    first = next(line for line in head.splitlines() if line.strip()) if head.strip() else b""
    record = _parsed(first)
    why = "an object without fields" if record == {} else _why(first, record)[1]
    remedy = "write one object per line, as `jq -c .` does"
    shape = f"no line of the first block holds a JSON object with fields; {remedy} (its first line: {why})"
    return ShardFault("not_json_lines", other_shape(head) or shape)


def other_shape(head: bytes) -> str | None:
    """Say what is in the place of JSON lines, with a remedy, where the beginning tells."""
    if kind := kind_in_words(head):
        return f"the content is {kind}"
    if head.lstrip().startswith(b"["):
        return "one JSON array; write one object per line, as `jq -c '.[]'` does"
    comma = _comma(head.lstrip().partition(b"\n")[0])
    return f"every {comma}" if comma else None


def _comma(line: bytes) -> str | None:
    """Say of a line that holds an object and a comma where the comma is, with a remedy."""
    line = line.strip()
    if line.endswith(b",") and isinstance(_parsed(line[:-1]), dict):
        return "line ends with a comma; take it off, as `sed 's/,\\s*$//'` does"
    if line.startswith(b",") and isinstance(_parsed(line[1:]), dict):
        return "line begins with a comma; take it off, as `sed 's/^\\s*,//'` does"
    return None


def line_batches(content: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Cut blocks into their lines; of a line that is too long the first MAX_LINE_BYTES + 1 bytes may be left.

    A last line without its end is in one batch with the lines before it: the first batch shows the format.
    """
    waiting: list[bytes] = []
    carry = b""
    for block in content:
        lines = block.split(b"\n")
        lines[0] = carry + lines[0]
        carry = lines.pop()[: MAX_LINE_BYTES + 1]
        if waiting and lines:
            yield waiting
        waiting = lines or waiting
    if waiting or carry:
        yield [*waiting, carry] if carry else waiting


def _parsed(line: bytes) -> Any:
    """Parse a line, with NaN and Infinity, as Python's json writes perplexities; MISSING for what is not JSON."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        pass
    try:
        record = read_json(line.removeprefix(BOM_UTF8).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return MISSING
    return record if isinstance(record, dict) else MISSING


def _why(line: bytes, record: Any) -> tuple[str, str]:
    """Return the reason why a line holds no record, and a detail."""
    if len(line) >= MAX_LINE_BYTES:
        return "line_too_long", f"more than {MAX_LINE_BYTES} bytes"
    if record is not MISSING:
        return "wrong_type", f"the line holds a {type(record).__name__}, not an object"
    try:
        line.decode()
        orjson.loads(line)
    except UnicodeDecodeError as error:
        return "not_utf8", str(error)
    except orjson.JSONDecodeError as error:
        comma = _comma(line)
        return "not_json", f"the {comma}" if comma else str(error)
    return "not_json", "the line is no JSON"
