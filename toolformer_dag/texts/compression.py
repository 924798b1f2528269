"""Decompressing a shard in blocks, in one pass, so that a wrong checksum shows after its last block."""

from collections.abc import Iterable, Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import IO

import zstandard
from isal import igzip, igzip_lib

from toolformer_dag.files import require_regular

MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},  # skippable frames
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
"""The first bytes of compressed files."""
GIT_LFS = b"version https://git-lfs"
UTF = {b"\1\0\0\0": "32LE", b"\0\0\0\1": "32BE", b"\1\0\1\0": "16LE", b"\0\1\0\1": "16BE"}
"""The encoding that has zeros among the first four bytes of a text as here."""
OTHER_FILES = {
    GIT_LFS: "a pointer of Git LFS, not the file; fetch the file with `git lfs pull`",
    b"\xff\xfe\0\0": "UTF-32; write UTF-8, as `iconv -f UTF-32 -t UTF-8` does",
    b"\0\0\xfe\xff": "UTF-32; write UTF-8, as `iconv -f UTF-32 -t UTF-8` does",
    b"\xff\xfe": "UTF-16; write UTF-8, as `iconv -f UTF-16 -t UTF-8` does",
    b"\xfe\xff": "UTF-16; write UTF-8, as `iconv -f UTF-16 -t UTF-8` does",
    b"PAR1": "Parquet; name the file .parquet and do not compress it again",
    b"PARE": "encrypted Parquet; decrypt it",
    b"ARROW1": "Arrow IPC (Feather); write Parquet or JSON lines",
    b"\xff\xff\xff\xff": "a stream of Arrow; write Parquet or JSON lines",
    b"ORC": "ORC; write Parquet or JSON lines",
    b"Obj\x01": "Avro; write Parquet or JSON lines",
    b"SQLite format 3": "a database of SQLite; write Parquet or JSON lines",
    b"\x80": "a pickle, perhaps; write JSON lines",
    b"%PDF": "a PDF",
}
"""The first bytes of files that hold no records as they are, with the remedy; the first that fits counts."""
HEAD_BYTES = 512
BLOCK_BYTES = 1 << 24
"""About the size of a block: what is done once per block costs a millisecond."""
ZSTD_STEP = 1 << 13
"""Compressed bytes per step. A step's output cannot be limited: at worst these expand to 256 MB."""
LARGEST_WINDOW = 1 << 31
"""The window of `zstd --long=31`, which takes as much memory."""


class ShardFault(Exception):
    """A shard whose content is damaged or in no known form: nothing of it may be used. `reason` is short and stable."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def kind_of(head: bytes) -> str | None:
    """Return gzip, zstd or another compression by the first bytes of a file; None for what is not compressed."""
    return next((name for magic, name in MAGIC.items() if head.startswith(magic)), None)


def is_tar(head: bytes) -> bool:
    """Return whether a file begins as an archive of tar does, whose first member may be lines of text."""
    return head[257:262] == b"ustar" and b"\0" in head[:257]


def kind_in_words(head: bytes) -> str | None:
    """Say what a file, or the content of a compressed one, is by its first bytes; None where they do not say."""
    kind = kind_of(head)
    if kind is not None:
        return f"{kind}; unpack it or compress it once, with gzip or zstd"
    if is_tar(head):
        return "an archive of tar; unpack it"
    if utf := UTF.get(bytes(map(bool, head[:4]))):
        return f"UTF-{utf[:2]} without a byte order mark; write UTF-8, as `iconv -f UTF-{utf} -t UTF-8` does"
    if head.lstrip().startswith(b"<"):
        return "HTML or XML, such as the error page of a download"
    return next((name for magic, name in OTHER_FILES.items() if head.startswith(magic)), None)


def text_of(file: Path) -> str:
    """Return the text of a file, in UTF-8 with or without a byte-order mark.

    Raises OSError, and ValueError, which says what the file is in the place of text where its first bytes tell.
    """
    require_regular(file)
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        kind = kind_of(head)
        raise ValueError(
            f"it is {f'{kind}; unpack it' if kind else kind_in_words(head) or f'no UTF-8: {error}'}"
        ) from error
    if head.startswith(GIT_LFS) or "\0" in text[:HEAD_BYTES]:  # words such as ORC may begin a text
        raise ValueError(f"it is {kind_in_words(head) or 'no text: it holds NUL characters'}")
    return text


def blocks(stream: IO[bytes], kind: str | None) -> Iterator[bytes]:
    """Yield the content in blocks. `kind`: gzip, zstd, or None for a plain file.

    Several gzip members or zstd frames in a row are one content; zeros after the last gzip member are padding, and
    skippable frames are skipped. Raises ShardFault after the blocks before it: truncated_gzip, corrupt_gzip,
    truncated_zstd, corrupt_zstd. A zstd frame without a checksum is only checked for its structure.
    """
    if kind == "zstd":
        yield from _joined(_unzstd(stream))
        return
    content = igzip.open(stream) if kind == "gzip" else stream  # type: ignore[no-untyped-call]
    try:
        while block := content.read(BLOCK_BYTES):
            yield block
    except EOFError as error:
        raise _fault("truncated", "gzip") from error
    except (BadGzipFile, igzip_lib.IsalError) as error:  # type: ignore[misc]  # isal's stub has a variable there
        raise _fault("corrupt", "gzip") from error


def _fault(state: str, kind: str) -> ShardFault:
    return ShardFault(
        f"{state}_{kind}", "the checksum or the end of the compressed data is wrong: no document of it is used"
    )


def _joined(pieces: Iterable[bytes]) -> Iterator[bytes]:
    waiting: list[bytes] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held >= BLOCK_BYTES:
            yield b"".join(waiting)
            waiting, held = [], 0
    yield b"".join(waiting)


def _unzstd(stream: IO[bytes]) -> Iterator[bytes]:
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    frame, begun = decompressor.decompressobj(), False
    pending = b""
    try:
        while pending := pending or stream.read(ZSTD_STEP):
            yield frame.decompress(pending)
            begun, pending = not frame.eof, frame.unused_data
            if frame.eof:
                frame = decompressor.decompressobj()
    except zstandard.ZstdError as error:
        if "dictionary" in str(error).lower():
            detail = "the zstd file needs the dictionary that it was made with; compress it without one"
            raise ShardFault("unsupported_compression", detail) from error
        raise _fault("corrupt", "zstd") from error
    if begun:
        raise _fault("truncated", "zstd")
