"""Tell what a file is by its first bytes, and decompress it in blocks.

A file is decompressed in one pass, so a wrong checksum shows only after its last block.
"""

from collections.abc import Iterable, Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import IO

import zstandard
from isal import igzip, igzip_lib

from toolformer_dag.files import require_regular
from toolformer_dag.texts.shard_faults import ShardFault

MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},  # skippable frames
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
"""First bytes of a compressed file -> its compression."""
GIT_LFS = b"version https://git-lfs"
"""The first bytes of a file of Git LFS that was not fetched."""
UTF_BY_ZEROS = {b"\1\0\0\0": "32LE", b"\0\0\0\1": "32BE", b"\1\0\1\0": "16LE", b"\0\1\0\1": "16BE"}
"""Which of a text's first four bytes are zero (1: not zero) -> its encoding, without a byte order mark."""
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
"""First bytes of a file that cannot be read as records -> what it is, with a remedy. The first that fits counts."""
HEAD_BYTES = 512
"""How many bytes at the beginning of a file are looked at to tell what it is."""
BLOCK_BYTES = 1 << 24
"""About the size of a block, 16 MB, so large that the work per block, about a millisecond, does not matter."""
ZSTD_STEP = 1 << 13
"""Compressed bytes that are decompressed at a time. At worst they expand to 256 MB, which cannot be limited."""
LARGEST_WINDOW = 1 << 31
"""The largest window of zstd that is read (`zstd --long=31`); it takes as many bytes of memory."""


def find_compression(head: bytes) -> str | None:
    """Return how a file is compressed, such as "gzip", by its first bytes; None if it is not compressed."""
    for magic, name in MAGIC.items():
        if head.startswith(magic):
            return name
    return None


def is_tar(head: bytes) -> bool:
    """Return whether a file, by its first bytes, is a tar archive; a text that only contains "ustar" is none."""
    return head[257:262] == b"ustar" and b"\0" in head[:257]


def describe_kind(head: bytes) -> str | None:
    """Describe what a file is if it does not hold records, and what to do: "an archive of tar; unpack it".

    Args:
        head: The first bytes of the file, decompressed.

    Returns:
        The description, or None if the first bytes do not show what the file is.
    """
    compression = find_compression(head)
    if compression is not None:
        return f"{compression}; unpack it or compress it once, with gzip or zstd"

    if is_tar(head):
        return "an archive of tar; unpack it"

    encoding = _find_wide_encoding(head)
    if encoding is not None:
        remedy = f"write UTF-8, as `iconv -f UTF-{encoding} -t UTF-8` does"
        return f"UTF-{encoding[:2]} without a byte order mark; {remedy}"

    if head.lstrip().startswith(b"<"):
        return "HTML or XML, such as the error page of a download"
    return _describe_other_file(head)


def _describe_other_file(head: bytes) -> str | None:
    """Return the description of a file in OTHER_FILES by its first bytes; None if it is not listed there."""
    for magic, description in OTHER_FILES.items():
        if head.startswith(magic):
            return description
    return None


def _find_wide_encoding(head: bytes) -> str | None:
    """Return "16LE", "16BE", "32LE" or "32BE" for Latin letters in UTF-16 or UTF-32; None for anything else."""
    zero_pattern = bytes(byte != 0 for byte in head[:4])  # b"\1\0\1\0" for letters in UTF-16LE
    return UTF_BY_ZEROS.get(zero_pattern)


def text_of(file: Path) -> str:
    """Read the text of a UTF-8 file, without a byte order mark.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not text. The message says what it is, if that is known.
    """
    head = _read_first_bytes(file)
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        description = _describe_compression(head) or describe_kind(head) or f"no UTF-8: {error}"
        raise ValueError(f"it is {description}") from error

    # The first bytes of other kinds prove nothing: a text may begin with a word such as ORC.
    is_certainly_no_text = head.startswith(GIT_LFS) or "\0" in text[:HEAD_BYTES]
    if is_certainly_no_text:
        description = describe_kind(head) or "no text: it holds NUL characters"
        raise ValueError(f"it is {description}")
    return text


def _read_first_bytes(file: Path) -> bytes:
    """Return the first HEAD_BYTES bytes of a regular file. Raises OSError."""
    require_regular(file)
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def _describe_compression(head: bytes) -> str | None:
    """Return "gzip; unpack it" for the first bytes of a compressed file; None if it is not compressed."""
    compression = find_compression(head)
    return None if compression is None else f"{compression}; unpack it"


def blocks(stream: IO[bytes], kind: str | None) -> Iterator[bytes]:
    """Read a file in decompressed blocks of about BLOCK_BYTES.

    A file may consist of several gzip members or zstd frames. Zeros after the last gzip member are skipped.

    Args:
        stream: The opened file.
        kind: "gzip" or "zstd", or None for a file that is not compressed.

    Raises:
        ShardFault: The data is damaged or cannot be read (truncated_gzip, corrupt_gzip, truncated_zstd,
            corrupt_zstd, unsupported_compression). The blocks before the damage are yielded first.
    """
    if kind == "zstd":
        yield from _join_pieces(_decompress_zstd(stream))
        return

    content = igzip.open(stream) if kind == "gzip" else stream  # type: ignore[no-untyped-call]
    try:
        while block := content.read(BLOCK_BYTES):
            yield block
    except EOFError as error:
        raise _build_shard_fault("truncated", "gzip") from error
    except (BadGzipFile, igzip_lib.IsalError) as error:  # type: ignore[misc]  # isal's stub has a variable there
        raise _build_shard_fault("corrupt", "gzip") from error


def _build_shard_fault(state: str, kind: str) -> ShardFault:
    """Return the error for compressed data that is "truncated" or "corrupt" (`state`)."""
    return ShardFault(
        f"{state}_{kind}", "the checksum or the end of the compressed data is wrong: no document of it is used"
    )


def _join_pieces(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join consecutive pieces to blocks of at least BLOCK_BYTES.

    Yields:
        The blocks. The last one may be smaller, or even empty.
    """
    waiting: list[bytes] = []  # pieces of the next block
    waiting_bytes = 0

    for piece in pieces:
        waiting.append(piece)
        waiting_bytes += len(piece)
        if waiting_bytes >= BLOCK_BYTES:
            yield b"".join(waiting)
            waiting = []
            waiting_bytes = 0
    yield b"".join(waiting)


def _decompress_zstd(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file in steps of ZSTD_STEP compressed bytes.

    Raises:
        ShardFault: The file is damaged (corrupt_zstd, truncated_zstd), or needs a dictionary
            (unsupported_compression).
    """
    try:
        yield from _decompress_zstd_frames(stream)
    except zstandard.ZstdError as error:
        if "dictionary" in str(error).lower():
            detail = "the zstd file needs the dictionary that it was made with; compress it without one"
            raise ShardFault("unsupported_compression", detail) from error
        raise _build_shard_fault("corrupt", "zstd") from error


def _decompress_zstd_frames(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file, frame after frame.

    Raises:
        ZstdError: The content is damaged.
        ShardFault: The last frame has no end (truncated_zstd).
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW)
    unread = stream.read(ZSTD_STEP)  # compressed bytes that are not decompressed yet

    while unread:  # once per frame
        frame = decompressor.decompressobj()
        while unread and not frame.eof:
            yield frame.decompress(unread)
            # After the end of the frame `unused_data` is the beginning of the next one; before, it is empty.
            unread = frame.unused_data or stream.read(ZSTD_STEP)
        if not frame.eof:
            raise _build_shard_fault("truncated", "zstd")
