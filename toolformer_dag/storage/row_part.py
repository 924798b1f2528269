"""Names of the part files of a row store: they say age, kind and size, so that no index file has to be kept."""

import time
from dataclasses import dataclass
from uuid import uuid4

CHUNK = "chunk"
MERGED = "merged"


@dataclass(frozen=True, slots=True, order=True)
class RowPart:
    """`written` in nanoseconds, `bytes` of the file; parts sort by age."""

    written: int
    kind: str
    unique: str
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.written:016x}-{self.kind}-{self.unique}-{self.bytes}.parquet"


def new_part(kind: str, size: int, written: int | None = None) -> RowPart:
    """A name that nobody has used; `written` defaults to now."""
    return RowPart(time.time_ns() if written is None else written, kind, uuid4().hex[:8], size)


def parse_name(name: str) -> RowPart | None:
    """Reads `RowPart.name`; None for any other file."""
    fields = name.removesuffix(".parquet").split("-")
    if not name.endswith(".parquet") or len(fields) != 4 or not fields[3].isdecimal():
        return None
    return RowPart(int(fields[0], 16), fields[1], fields[2], int(fields[3]))
