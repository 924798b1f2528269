"""Gzip without compression: compressors differ between zlib's versions, stored bytes do not."""

import struct
import zlib

_HEADER = b"\x1f\x8b\x08\x00" + bytes(4) + b"\x00\xff"  # deflate, no name, no time, any system
_LONGEST = 0xFFFF


def stored_gzip(data: bytes) -> bytes:
    """`data` as one gzip member of stored blocks (RFC 1951, 3.2.4; RFC 1952)."""
    starts = range(0, max(len(data), 1), _LONGEST)
    blocks = b"".join(_block(data[start : start + _LONGEST], start == starts[-1]) for start in starts)
    return _HEADER + blocks + struct.pack("<LL", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def _block(data: bytes, is_last: bool) -> bytes:
    return struct.pack("<BHH", is_last, len(data), len(data) ^ 0xFFFF) + data
