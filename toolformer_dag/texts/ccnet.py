"""Reading CCNet shards (Wenzek et al. 2020): one JSON record per line, gzip or plain, one line at a time."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from io import BufferedReader, RawIOBase
from operator import itemgetter
from pathlib import Path
from typing import cast

import orjson
from upath import UPath

from toolformer_dag.errors import UserError
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.gunzip import Gunzip
from toolformer_dag.texts.url_date import date_from_url

MAX_LINE_BYTES = 8 << 20
"""Common Crawl cuts pages at 1 MB, so CCNet's records stay far below this."""
BUFFER_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
FIELDS = ("digest", "url", "source_domain", "title", "language", "raw_content")
VALUES = itemgetter(*FIELDS)


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line that is no document, or a shard that ends badly. `line` counts from 1; `reason` is short and stable."""

    shard: str
    line: int
    reason: str
    detail: str


class ShardError(UserError):
    """A shard that cannot be opened at all."""


class _Refused(ValueError):
    """Arguments: reason, detail."""


def read_shard(path: Path | UPath | str, shard: str) -> Iterator[Document | Rejection]:
    """Documents in the order of the file, and a Rejection for each line that is none; the rest goes through.

    Reasons: not_json, not_utf8, wrong_type, missing_field, empty_text, duplicate_digest, line_too_long (over
    MAX_LINE_BYTES, never held whole), truncated_gzip, corrupt_gzip, not_gzip (named .gz, but it is not), empty_shard.
    Memory: one line and the buffers, plus about 100 bytes per document for the digests seen. Digests are compared
    within the shard only. Raises ShardError where the file is missing or unreadable.
    """
    with _open(path) as raw:
        head = raw.peek(2)[:2]
        if head == GZIP_MAGIC:
            gunzip = Gunzip(raw)
            yield from _records(BufferedReader(gunzip, BUFFER_BYTES), shard, gunzip)
        elif head and str(path).endswith(".gz"):
            yield Rejection(shard, 0, "not_gzip", f"the file is named .gz but begins with {head!r}")
        else:
            yield from _records(raw, shard, None)


def _open(path: Path | UPath | str) -> BufferedReader:
    try:
        return BufferedReader(cast(RawIOBase, UPath(path).open("rb")), BUFFER_BYTES)
    except OSError as error:
        raise ShardError(f"shard {path} cannot be read ({error.strerror or error}); correct its path") from error


def _records(stream: BufferedReader, shard: str, gunzip: Gunzip | None) -> Iterator[Document | Rejection]:
    today, seen, number = date.today(), set[str](), 0
    for number, line in enumerate(_lines(stream), 1):
        try:
            yield _document(line, shard, today, seen)
        except _Refused as refused:
            # where the data breaks off within a line, the fault below names it; a record that is cut is no JSON
            if not (gunzip and gunzip.fault) or line.endswith(b"\n"):
                yield Rejection(shard, number, *refused.args)
    if gunzip and gunzip.fault:
        yield Rejection(shard, number, gunzip.fault, f"the data breaks off in or after line {number}; fetch it again")
    elif not number:
        yield Rejection(shard, 0, "empty_shard", "the shard has no lines")


def _lines(stream: BufferedReader) -> Iterator[bytes]:
    """Lines; of one that is too long, the first MAX_LINE_BYTES + 1 bytes."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            rest = stream.readline(BUFFER_BYTES)
            if not rest or rest.endswith(b"\n"):
                break


def _document(line: bytes, shard: str, today: date, seen: set[str]) -> Document:
    digest, url, domain, title, language, text = _fields(line)
    if digest in seen:
        raise _Refused("duplicate_digest", digest)
    if not text or text.isspace():
        raise _Refused("empty_text", digest)
    seen.add(digest)
    return Document(shard, digest, url, domain, title, date_from_url(url, today), language, text)


def _fields(line: bytes) -> tuple[str, ...]:
    record = _record(line)
    try:
        values: tuple[str, ...] = VALUES(record)
    except KeyError:
        raise _Refused("missing_field", ", ".join(name for name in FIELDS if name not in record)) from None
    if set(map(type, values)) != {str}:
        wrong = ", ".join(name for name in FIELDS if type(record[name]) is not str)
        raise _Refused("wrong_type", f"{wrong}: expected text")
    return values


def _record(line: bytes) -> dict[str, str]:
    if len(line) > MAX_LINE_BYTES:
        raise _Refused("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        record = orjson.loads(line.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise _Refused("not_json" if _is_utf8(line) else "not_utf8", str(error)) from None
    if not isinstance(record, dict):
        raise _Refused("wrong_type", f"the line holds a {type(record).__name__}, not an object")
    return record


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
