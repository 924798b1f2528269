"""Read CCNet shards (Wenzek et al. 2020): JSON lines, gzip or plain, one record at a time."""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import IO, Any, cast

import orjson
from isal import igzip_lib, isal_zlib

from toolformer_dag.files import UserError
from toolformer_dag.texts.document import Document, date_from_url

GZIP = 16 + isal_zlib.MAX_WBITS
INPUT_BYTES = 1 << 10
"""Compressed bytes per read; a fault loses at most the data of a read."""


class Gunzip(RawIOBase):
    """Decompresses gzip data with one or more members; ends at a fault instead of raising.

    After the end, `fault` is None, "truncated_gzip" or "corrupt_gzip". At most the data of the last INPUT_BYTES before
    the fault is lost; the gzip module loses the whole block it was reading.
    """

    def __init__(self, compressed: IO[bytes]) -> None:
        self.fault: str | None = None
        self._compressed = compressed
        self._member = isal_zlib.decompressobj(GZIP)
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        try:
            data = self._read(len(view))
        except igzip_lib.IsalError:  # type: ignore[misc]  # isal's stub declares the class as a variable
            data, self.fault = b"", "corrupt_gzip"
        view[: len(data)] = data
        return len(data)

    def _read(self, size: int) -> bytes:
        while self.fault is None and self._more():
            data: bytes = self._member.decompress(self._pending, size)
            self._pending = self._member.unused_data if self._member.eof else self._member.unconsumed_tail
            if data:
                return data
        return b""

    def _more(self) -> bool:
        """Return whether there is input for the current or next member; zero padding ends the file."""
        if self._member.eof:
            self._pending = (self._pending or self._compressed.read(INPUT_BYTES)).lstrip(b"\0")
            if self._pending:
                self._member = isal_zlib.decompressobj(GZIP)
            return bool(self._pending)
        self._pending = self._pending or self._compressed.read(INPUT_BYTES)
        if not self._pending:
            self.fault = "truncated_gzip"
        return bool(self._pending)


MAX_LINE_BYTES = 8 << 20
"""The longest accepted line. Common Crawl cuts pages at 1 MB, so CCNet's records are far shorter."""
BUFFER_BYTES = 1 << 18
GZIP_MAGIC = b"\x1f\x8b"
OTHER_MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zX": "xz", b"BZh": "bzip2"}
LATEST_DATE = date(2026, 12, 31)
"""A later day in a URL is no date of the page; fixed, so that the same shard gives the same rows on every clock."""
FIELDS = ("digest", "url", "source_domain", "title", "language", "raw_content")
OPTIONAL = {"source_domain": "", "title": "", "language": ""}
"""Fields with their defaults: no decision depends on them, and other corpora lack them."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line that is not a document, or a damaged shard. `line` counts from 1; `reason` is short and stable."""

    shard: str
    line: int
    reason: str
    detail: str


class ShardError(UserError):
    """A shard cannot be opened."""


class _Refused(ValueError):
    """Arguments: reason, detail."""


def read_shard(path: Path | str, shard: str) -> Iterator[Document | Rejection]:
    """Yield the documents of a shard in order, and a Rejection for each line that is not a document.

    - Reasons: not_json, not_utf8, wrong_type, missing_field, empty_text, duplicate_digest, line_too_long (over
      MAX_LINE_BYTES), truncated_gzip, corrupt_gzip, not_gzip (named .gz but not gzip), unsupported_compression,
      empty_shard.
    - The fields OPTIONAL may be missing or null.
    - Duplicate digests are detected within the shard only.
    - Memory: a line and the buffers, plus about 100 bytes per document for its digest.

    Raises ShardError where the file is missing or unreadable.
    """
    try:
        with _open(path) as raw:
            head = raw.peek(4)[:4]
            if head[:2] == GZIP_MAGIC:
                if fault := gzip_fault(path):
                    detail = "the checksum or the end of the compressed data is wrong: no document of it is used"
                    yield Rejection(shard, 0, fault, detail)
                    return
                yield from _records(BufferedReader(Gunzip(raw), BUFFER_BYTES), shard)
            elif other := next((name for magic, name in OTHER_MAGIC.items() if head.startswith(magic)), None):
                detail = f"the file is {other}; unpack it or compress it with gzip"
                yield Rejection(shard, 0, "unsupported_compression", detail)
            elif head and str(path).endswith(".gz"):
                yield Rejection(shard, 0, "not_gzip", f"the file is named .gz but begins with {head[:2]!r}")
            else:
                yield from _records(raw, shard)
    except OSError as error:
        raise ShardError(
            f"shard {path} cannot be read ({error.strerror or error}); correct its path, or the disk"
        ) from error


def gzip_fault(path: Path | str) -> str | None:
    """Decompress a whole file to verify its checksums; return truncated_gzip or corrupt_gzip where they are wrong."""
    with _open(path) as raw:
        gunzip = Gunzip(raw)
        block = bytearray(BUFFER_BYTES)
        while gunzip.readinto(block):
            pass
        return gunzip.fault


def _open(path: Path | str) -> BufferedReader:
    return BufferedReader(cast(RawIOBase, Path(path).open("rb")), BUFFER_BYTES)


def _records(stream: BufferedReader, shard: str) -> Iterator[Document | Rejection]:
    seen, number = set[str](), 0
    for number, line in enumerate(_lines(stream), 1):
        try:
            yield _document(line, shard, seen)
        except _Refused as refused:
            yield Rejection(shard, number, *refused.args)
    if not number:
        yield Rejection(shard, 0, "empty_shard", "the shard has no lines")


def _lines(stream: BufferedReader) -> Iterator[bytes]:
    """Yield lines; a line that is too long is cut after MAX_LINE_BYTES + 1 bytes."""
    while line := stream.readline(MAX_LINE_BYTES + 1):
        yield line
        while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
            rest = stream.readline(BUFFER_BYTES)
            if not rest or rest.endswith(b"\n"):
                break


def _document(line: bytes, shard: str, seen: set[str]) -> Document:
    digest, url, domain, title, language, text = _fields(line)
    if digest in seen:
        raise _Refused("duplicate_digest", digest)
    if not text or text.isspace():
        raise _Refused("empty_text", digest)
    seen.add(digest)
    return Document(shard, digest, url, domain, title, date_from_url(url, LATEST_DATE), language, text)


def _fields(line: bytes) -> tuple[str, ...]:
    record = _record(line)
    values: tuple[Any, ...] = tuple(map(record.get, FIELDS))
    if set(map(type, values)) == {str}:
        return values
    filled = record | {name: default for name, default in OPTIONAL.items() if record.get(name) is None}
    if missing := [name for name in FIELDS if name not in filled]:
        raise _Refused("missing_field", ", ".join(missing))
    if wrong := [name for name in FIELDS if type(filled[name]) is not str]:
        raise _Refused("wrong_type", f"{', '.join(wrong)}: expected text")
    return tuple(filled[name] for name in FIELDS)


def _record(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise _Refused("line_too_long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        record = orjson.loads(line.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        record = _with_nan(line)
        if record is None:
            raise _Refused("not_json" if _is_utf8(line) else "not_utf8", str(error)) from None
    if not isinstance(record, dict):
        raise _Refused("wrong_type", f"the line holds a {type(record).__name__}, not an object")
    return record


def _with_nan(line: bytes) -> dict[str, Any] | None:
    """Parse an object that holds NaN or Infinity, as Python's json writes perplexities; None for anything else."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
        orjson.dumps(record)  # rejects lone surrogates
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return None
    return record if isinstance(record, dict) else None


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True
