"""JSON lines -> columns: a block at a time by Arrow's parser, line by line where something in the block is unusual."""

import json
import struct
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from typing import Any

import orjson
import polars as pl
import pyarrow as pa
import pyarrow.json

from toolformer_dag.texts.columns import RAW, Batch, Rejection
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import MISSING, FormatChoice, FormatError, Layout, Steps, layout_of, shown, value_at

MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so records of web pages are far shorter."""
FIRST_RECORDS = 100
"""Lines by whose records a format is recognized; without a record in them, the rest of the first block is looked at."""
WARC = b"WARC/"
RETURN, OPENING, CLOSING = b"\r{}"


class JsonLines:
    """The records of a shard of JSON lines as raw columns. `layout` is known after the first batch."""

    def __init__(self, choice: FormatChoice) -> None:
        self.layout: Layout | None = None
        self._choice = choice

    def batches(self, content: Iterable[bytes]) -> Iterator[Batch]:
        """Yield the records of each block and the lines that hold none, in the order of the file.

        Reasons: not_json, not_utf8, wrong_type, missing_field, line_too_long (over MAX_LINE_BYTES). Raises ShardFault:
        unknown_format, missing_field (no record of the first has what is asked for), not_json_lines (the first block
        has no record, or begins a JSON array), web_archive, empty_shard. Blank lines are passed over.
        """
        parser: pa.json.ParseOptions | None = None
        first = 1
        for block in line_blocks(content):
            if self.layout is None:
                self.layout = self._layout(block)
                parser = parse_options(self.layout)
            batch, lines = _fast(block, first, self.layout, parser) or _slow(block, first, self.layout)
            first += lines
            yield batch
        if self.layout is None:
            raise ShardFault("empty_shard", "the shard has no lines")

    def _layout(self, data: bytes) -> Layout:
        if data.startswith(WARC):
            detail = "the shard is a WARC or WET file; convert it to JSON lines first (docs: Corpora)"
            raise ShardFault("web_archive", detail)
        if data.isspace():
            raise ShardFault("empty_shard", "the shard has only blank lines")
        records = [] if _is_array(data) else _first_records(data)
        if not records:
            array = "one JSON array; write one object per line, as `jq -c '.[]'` does"
            other = "no line of the first block holds a JSON object; write one object per line, as `jq -c .` does"
            raise ShardFault("not_json_lines", array if data.lstrip().startswith(b"[") else other)
        try:
            return layout_of(self._choice, records)
        except FormatError as error:
            raise ShardFault(error.reason, str(error)) from error


def _is_array(data: bytes) -> bool:
    """Return whether a file begins an array of objects, of which no line before the last is an object."""
    start = data.lstrip()
    return start.startswith(b"[") and start[1:].lstrip().startswith(b"{")


def _first_records(data: bytes) -> list[dict[str, Any]]:
    """Return the objects of the first FIRST_RECORDS lines, or without any there the first one after them."""
    found: list[dict[str, Any]] = []
    for number, line in enumerate(BytesIO(data)):
        if number >= FIRST_RECORDS and found:
            break
        if isinstance(record := _parsed(line), dict) and record:
            found.append(record)
    return found


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


def parse_options(layout: Layout) -> pa.json.ParseOptions | None:
    """Return the schema of what a layout reads; None where two paths contradict each other (`a` and `a.b`)."""
    tree: dict[Any, Any] = {}
    for ways in layout.places.values():
        for way in ways:
            node = tree
            for step in way[:-1]:
                node = node.setdefault(step, {})
                if node is None:
                    return None
            if node.setdefault(way[-1], None) is not None:
                return None
    schema = _struct(tree)
    if not isinstance(schema, pa.StructType):
        return None
    return pa.json.ParseOptions(explicit_schema=pa.schema(list(schema)), unexpected_field_behavior="ignore")


def _struct(tree: Mapping[Any, Any] | None) -> pa.DataType | None:
    if tree is None:
        return pa.string()
    kinds = {name: _struct(below) for name, below in tree.items()}
    if None in kinds.values() or len({type(name) for name in kinds}) > 1:
        return None
    if all(isinstance(name, int) for name in kinds):
        items = list(kinds.values())
        return pa.list_(items[0]) if len({str(item) for item in items}) == 1 else None
    return pa.struct(list(kinds.items()))


def _fast(block: bytes, first: int, layout: Layout, options: pa.json.ParseOptions | None) -> tuple[Batch, int] | None:
    """Parse a block at once, whose first line has the number `first`; return the rows and how many lines it has.

    None where a line is not one object with text in the fields that count. Every line begins with `{` and ends with
    `}`, and there are as many objects as lines. No object spans lines then, because no JSON has `}` and `{` beside each
    other, so each line is one object.
    """
    lines = _lines_of_objects(block)
    if options is None or lines is None:
        return None
    reading = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        _check_utf8(block)
        table = pa.json.read_json(pa.BufferReader(block), read_options=reading, parse_options=options)
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    if table.num_rows != lines:
        return None
    numbers = pl.int_range(first, first + lines, eager=True)
    found = raw_columns(pl.DataFrame(pl.from_arrow(table)), layout, numbers)
    return None if any(found[field].has_nulls() for field in layout.required) else (Batch(found), lines)


def _lines_of_objects(block: bytes) -> int | None:
    """Return the number of lines; None unless every line begins with `{`, ends with `}` and is not too long."""
    begin = lines = 0
    while begin < len(block):
        end = block.find(b"\n", begin)
        end = len(block) if end < 0 else end
        last = end - 2 if block[end - 1] == RETURN else end - 1
        if block[begin] != OPENING or block[last] != CLOSING or end - begin >= MAX_LINE_BYTES:
            return None
        begin, lines = end + 1, lines + 1
    return lines


def _check_utf8(block: bytes) -> None:
    """Raise ArrowInvalid where a block is not UTF-8; the parser only looks at the fields that count."""
    ends = pa.py_buffer(struct.pack("=ii", 0, len(block)))
    pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(block)]).validate(full=True)


def raw_columns(frame: pl.DataFrame, layout: Layout, lines: pl.Series) -> pl.DataFrame:
    """Return RAW columns of a table of text; `lines` numbers its rows."""
    found = {field: _coalesced(layout.places[field]) for field in RAW if field != "line"}
    return frame.select(line=lines, **found)


def _coalesced(ways: Iterable[Steps]) -> pl.Expr:
    found = [_at(way) for way in ways]
    return pl.coalesce(found) if found else pl.lit(None, pl.String)


def _at(way: Steps) -> pl.Expr:
    found = pl.col(str(way[0]))
    for step in way[1:]:
        found = found.struct.field(step) if isinstance(step, str) else found.list.get(step, null_on_oob=True)
    return found


class _Refused(ValueError):
    """Arguments: reason, detail."""


def _slow(block: bytes, first: int, layout: Layout) -> tuple[Batch, int]:
    """Parse a block line by line; return as `_fast`."""
    rows, rejections = [], []
    ignored: dict[str, None] = {}
    lines = block.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, first):
        if len(line) < MAX_LINE_BYTES and not line.strip():
            continue
        try:
            rows.append((number, *_values(_record(line), layout, ignored)))
        except _Refused as refused:
            rejections.append(Rejection(number, *refused.args))
    return Batch(pl.DataFrame(rows, schema=RAW, orient="row"), tuple(rejections), tuple(ignored)), len(lines)


def _values(record: Mapping[str, Any], layout: Layout, ignored: dict[str, None]) -> Iterator[str | None]:
    missing = [field for field in layout.required if _value(record, layout, field) is MISSING]
    if missing:
        lacking = ", ".join(layout.paths(field) for field in missing)
        raise _Refused("missing_field", f"{lacking}; the record has {shown(record)}")
    for field in RAW:
        if field != "line":
            yield _text(field, _value(record, layout, field), layout, ignored)


def _value(record: Mapping[str, Any], layout: Layout, field: str) -> Any:
    """Return the first value that is not null, else null where one is there, else MISSING."""
    found: Any = MISSING
    for way in layout.places[field]:
        value = value_at(record, way)
        if value is not MISSING and value is not None:
            return value
        found = value if found is MISSING else found
    return found


def _text(field: str, value: Any, layout: Layout, ignored: dict[str, None]) -> str | None:
    if value is MISSING or (value is None and field not in layout.required):
        return None
    if isinstance(value, str):
        return value
    if type(value) is int and (field == "id" or field not in layout.strict):
        return str(value)
    if field == "date":
        return None
    wrong = f"{layout.paths(field)}: expected text, found {type(value).__name__}"
    if field in layout.strict:
        raise _Refused("wrong_type", wrong)
    ignored[wrong] = None
    return None


def _record(line: bytes) -> dict[str, Any]:
    if len(line) >= MAX_LINE_BYTES:
        raise _Refused("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    record = _parsed(line)
    if record is MISSING:
        raise _Refused(*_why(line))
    if not isinstance(record, dict):
        raise _Refused("wrong_type", f"the line holds a {type(record).__name__}, not an object")
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
