"""Tell what a file is by its first bytes, and decompress it in blocks.

A file is decompressed in one pass, so a wrong checksum shows only after its last block.
"""

from collections.abc import Iterable, Iterator
from gzip import BadGzipFile
from pathlib import Path
from typing import IO

import zstandard
from isal import igzip, igzip_lib

from toolformer_dag.files import require_regular_file
from toolformer_dag.texts.shard_faults import ShardFault

COMPRESSION_BY_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    **{bytes([first]) + b"\x2a\x4d\x18": "zstd" for first in range(0x50, 0x60)},  # skippable frames
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}
"""First bytes of a compressed file -> its compression."""
GIT_LFS_MAGIC = b"version https://git-lfs"
"""The first bytes of a file of Git LFS that was not fetched."""
ENCODING_BY_ZERO_PATTERN = {b"\1\0\0\0": "32LE", b"\0\0\0\1": "32BE", b"\1\0\1\0": "16LE", b"\0\1\0\1": "16BE"}
"""Which of a text's first four bytes are zero (1: not zero) -> its encoding, without a byte order mark."""
DESCRIPTION_BY_MAGIC = {
    GIT_LFS_MAGIC: "a pointer of Git LFS, not the file; fetch the file with `git lfs pull`",
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
ZSTD_STEP_BYTES = 1 << 13
"""Compressed bytes that are decompressed at a time. At worst they expand to 256 MB, which cannot be limited."""
MAX_ZSTD_WINDOW_BYTES = 1 << 31
"""The largest window of zstd that is read (`zstd --long=31`); it takes as many bytes of memory."""


def find_compression(first_bytes: bytes) -> str | None:
    """Find out how a file is compressed, by its first bytes.

    Returns:
        The compression, such as "gzip", or None if the file is not compressed.
    """
    for magic, compression in COMPRESSION_BY_MAGIC.items():
        if first_bytes.startswith(magic):
            return compression
    return None


def is_tar(first_bytes: bytes) -> bool:
    """Check by its first bytes whether a file is a tar archive.

    In a tar archive, "ustar" stands at byte 257, after the name of the first file, which is filled up with zeros. So a
    text that only contains "ustar" is not taken for an archive.
    """
    return first_bytes[257:262] == b"ustar" and b"\0" in first_bytes[:257]


def describe_unreadable_file(first_bytes: bytes) -> str | None:
    """Describe what a file is if it does not hold records, and what to do: "an archive of tar; unpack it".

    Args:
        first_bytes: The first bytes of the file, decompressed.

    Returns:
        The description, or None if the first bytes do not show what the file is.
    """
    compression = find_compression(first_bytes)
    if compression is not None:
        return f"{compression}; unpack it or compress it once, with gzip or zstd"

    if is_tar(first_bytes):
        return "an archive of tar; unpack it"

    encoding = _find_wide_encoding(first_bytes)  # such as "16LE"
    if encoding is not None:
        bit_width = encoding[:2]
        remedy = f"write UTF-8, as `iconv -f UTF-{encoding} -t UTF-8` does"
        return f"UTF-{bit_width} without a byte order mark; {remedy}"

    if first_bytes.lstrip().startswith(b"<"):
        return "HTML or XML, such as the error page of a download"
    return _describe_file_by_magic(first_bytes)


def _describe_file_by_magic(first_bytes: bytes) -> str | None:
    """Find the description of a file in DESCRIPTION_BY_MAGIC, by its first bytes.

    Returns:
        The description, or None if the file is of no kind that is listed there.
    """
    for magic, description in DESCRIPTION_BY_MAGIC.items():
        if first_bytes.startswith(magic):
            return description
    return None


def _find_wide_encoding(first_bytes: bytes) -> str | None:
    """Recognize UTF-16 and UTF-32 without a byte order mark, by the zero bytes around Latin letters.

    Returns:
        "16LE", "16BE", "32LE" or "32BE", or None for anything else.
    """
    zero_pattern = bytes(byte != 0 for byte in first_bytes[:4])  # b"\1\0\1\0" for letters in UTF-16LE
    return ENCODING_BY_ZERO_PATTERN.get(zero_pattern)


def read_utf8_text(file: Path) -> str:
    """Read the text of a UTF-8 file, without a byte order mark.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not text. The message says what it is, if that is known.
    """
    first_bytes = _read_first_bytes(file)
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        known_description = _describe_compression(first_bytes) or describe_unreadable_file(first_bytes)
        description = known_description or f"no UTF-8: {error}"
        raise ValueError(f"it is {description}") from error

    # Other first bytes prove nothing, because a text may begin with a word such as ORC.
    is_certainly_not_text = first_bytes.startswith(GIT_LFS_MAGIC) or "\0" in text[:HEAD_BYTES]
    if is_certainly_not_text:
        description = describe_unreadable_file(first_bytes) or "no text: it holds NUL characters"
        raise ValueError(f"it is {description}")
    return text


def _read_first_bytes(file: Path) -> bytes:
    """Read the first HEAD_BYTES bytes of a file.

    Raises:
        OSError: The file cannot be read, or is not a regular file.
    """
    require_regular_file(file)
    with file.open("rb") as stream:
        return stream.read(HEAD_BYTES)


def _describe_compression(first_bytes: bytes) -> str | None:
    """Describe how a file is compressed and what to do: "gzip; unpack it". Returns None if it is not compressed."""
    compression = find_compression(first_bytes)
    if compression is None:
        return None
    return f"{compression}; unpack it"


def iter_decompressed_blocks(stream: IO[bytes], compression: str | None) -> Iterator[bytes]:
    """Read a file in decompressed blocks of about BLOCK_BYTES.

    A file may consist of several gzip members or zstd frames. Zeros after the last gzip member are skipped.

    Args:
        stream: The opened file.
        compression: "gzip" or "zstd", or None for a file that is not compressed.

    Raises:
        ShardFault: The data is damaged or cannot be read (truncated_gzip, corrupt_gzip, truncated_zstd,
            corrupt_zstd, unsupported_compression). The blocks before the damage are yielded first.
    """
    if compression == "zstd":
        yield from _join_into_blocks(_decompress_zstd(stream))
        return

    content = igzip.open(stream) if compression == "gzip" else stream  # type: ignore[no-untyped-call]
    try:
        while block := content.read(BLOCK_BYTES):
            yield block
    except EOFError as error:
        raise _build_compression_fault("truncated", "gzip") from error
    except (BadGzipFile, igzip_lib.IsalError) as error:  # type: ignore[misc]  # isal's stub has a variable there
        raise _build_compression_fault("corrupt", "gzip") from error


def _build_compression_fault(damage: str, compression: str) -> ShardFault:
    """Build the error for damaged compressed data.

    Args:
        damage: "truncated" or "corrupt".
        compression: "gzip" or "zstd".
    """
    detail = "the checksum or the end of the compressed data is wrong: no document of it is used"
    return ShardFault(f"{damage}_{compression}", detail)


def _join_into_blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Join consecutive pieces to blocks of at least BLOCK_BYTES.

    Yields:
        The blocks. The last one may be smaller, or even empty.
    """
    waiting_pieces: list[bytes] = []  # pieces of the next block
    waiting_bytes = 0

    for piece in pieces:
        waiting_pieces.append(piece)
        waiting_bytes += len(piece)
        if waiting_bytes >= BLOCK_BYTES:
            yield b"".join(waiting_pieces)
            waiting_pieces = []
            waiting_bytes = 0

    yield b"".join(waiting_pieces)


def _decompress_zstd(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file in steps of ZSTD_STEP_BYTES compressed bytes.

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
        raise _build_compression_fault("corrupt", "zstd") from error


def _decompress_zstd_frames(stream: IO[bytes]) -> Iterator[bytes]:
    """Decompress a zstd file, frame after frame.

    Raises:
        ZstdError: The content is damaged.
        ShardFault: The last frame has no end (truncated_zstd).
    """
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_BYTES)
    compressed_bytes = stream.read(ZSTD_STEP_BYTES)  # the bytes to decompress next

    while compressed_bytes:  # once per frame
        frame = decompressor.decompressobj()
        while compressed_bytes and not frame.eof:
            yield frame.decompress(compressed_bytes)
            # After the end of the frame, `unused_data` is the beginning of the next one. Before, it is empty.
            compressed_bytes = frame.unused_data or stream.read(ZSTD_STEP_BYTES)
        if not frame.eof:
            raise _build_compression_fault("truncated", "zstd")
