"""Gzip as a stream that gives every whole byte before a fault, and names the fault."""

from io import RawIOBase
from typing import IO, Any

from isal import igzip_lib, isal_zlib

GZIP = 16 + isal_zlib.MAX_WBITS
INPUT_BYTES = 1 << 10
"""Read at once: what they hold is lost where the fault is among them."""


class Gunzip(RawIOBase):
    """Decompresses `compressed`, several members too; ends where the data ends or break, never raises for them.

    After the end, `fault` is None, "truncated_gzip" or "corrupt_gzip". The gzip module raises instead, and with that
    loses the block it was reading; here at most what the last INPUT_BYTES before the fault hold is lost.
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
        """Whether there is input for the current member, or for the one after it; padding of zeros ends the file."""
        if self._member.eof:
            self._pending = (self._pending or self._compressed.read(INPUT_BYTES)).lstrip(b"\0")
            if self._pending:
                self._member = isal_zlib.decompressobj(GZIP)
            return bool(self._pending)
        self._pending = self._pending or self._compressed.read(INPUT_BYTES)
        if not self._pending:
            self.fault = "truncated_gzip"
        return bool(self._pending)
