"""JSON lines -> raw columns: whole lines of a block, each parsed alone."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any

import orjson

from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import MISSING
from toolformer_dag.texts.records import Records, Refused

MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_RECORDS = 100
"""Lines by whose records a format is recognized; without a record in them, the rest of the first block is looked at."""
WARC = b"WARC/"


def json_batches(content: Iterable[bytes], records: Records) -> Iterator[Batch]:
    """Yield the records of each block and the lines that hold none, in the order of the file.

    Reasons: not_json, not_utf8, wrong_type, missing_field, line_too_long (over MAX_LINE_BYTES). Raises ShardFault:
    unknown_format, missing_field (no record of the first has what is asked for), not_json_lines (the first block
    has no record, or begins a JSON array), web_archive, empty_shard. Blank lines are passed over.
    """
    first = 1
    for block in line_blocks(content):
        if records.layout is None:
            records.look(_first_records(block))
        lines = block.removesuffix(b"\n").split(b"\n")
        numbered = enumerate(lines, first)
        yield records.batch(((n, line) for n, line in numbered if line.strip() or _is_long(line)), _record)
        first += len(lines)
    if records.layout is None:
        raise ShardFault("empty_shard", "the shard has no lines")


def _first_records(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of the first FIRST_RECORDS lines, or without any there the first one after them."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(() if _is_array(data) or data.startswith(WARC) else BytesIO(data)):
        if number >= FIRST_RECORDS and found:
            break
        found += [record] if isinstance(record := _parsed(line), dict) and record else []
    if not found:
        raise _other_file(data)
    return found


def _other_file(data: bytes) -> ShardFault:
    """Say what a file without a record is."""
    if data.startswith(WARC):
        detail = "the shard is a WARC or WET file; convert it to JSON lines first (docs: Corpora)"
        return ShardFault("web_archive", detail)
    if data.isspace():
        return ShardFault("empty_shard", "the shard has only blank lines")
    array = "one JSON array; write one object per line, as `jq -c '.[]'` does"
    other = "no line of the first block holds a JSON object; write one object per line, as `jq -c .` does"
    return ShardFault("not_json_lines", array if data.lstrip().startswith(b"[") else other)


def _is_array(data: bytes) -> bool:
    """Return whether a file begins an array of objects, of which no line before the last is an object."""
    start = data.lstrip()
    return start.startswith(b"[") and start[1:].lstrip().startswith(b"{")


def _is_long(line: bytes) -> bool:
    return len(line) >= MAX_LINE_BYTES


def line_blocks(content: Iterable[bytes]) -> Iterator[bytes]:
    """Regroup blocks into whole lines; of a line that is too long the first MAX_LINE_BYTES + 1 bytes are kept.

    A last line without its end is in one block with the lines before it: the first block shows the format.
    """
    waiting, carry, skipping, begun = b"", b"", False, False
    for block in content:
        if not begun:
            begun, block = True, block.removeprefix(BOM_UTF8)
        if skipping:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, skipping = block[end:], False
        cut = block.rfind(b"\n") + 1
        if cut:
            if waiting:
                yield waiting
            waiting = b"".join((carry, memoryview(block)[:cut]))
            carry = block[cut:]
        else:
            carry += block
        if len(carry) > MAX_LINE_BYTES:
            carry, skipping = carry[: MAX_LINE_BYTES + 1], True
    if waiting or carry:
        yield waiting + carry


def _record(line: bytes) -> dict[str, Any]:
    if _is_long(line):
        raise Refused("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    record = _parsed(line)
    if record is MISSING:
        raise Refused(*_why(line))
    if not isinstance(record, dict):
        raise Refused("wrong_type", f"the line holds a {type(record).__name__}, not an object")
    return record


def _parsed(line: bytes) -> Any:
    """Parse a line, with NaN and Infinity, as Python's json writes perplexities; MISSING for what is not JSON."""
    try:
        return orjson.loads(line.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError:
        pass
    try:
        record = json.loads(line.decode("utf-8-sig"))
        orjson.dumps(record)  # rejects lone surrogates
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return MISSING
    return record if isinstance(record, dict) else MISSING


def _why(line: bytes) -> tuple[str, str]:
    try:
        line.decode()
        orjson.loads(line)
    except UnicodeDecodeError as error:
        return "not_utf8", str(error)
    except orjson.JSONDecodeError as error:
        return "not_json", str(error)
    return "not_json", "the line is no JSON"
