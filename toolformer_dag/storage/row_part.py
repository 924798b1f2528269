"""Names of the part files of a row store: they say age, kind and size, so that no index file has to be kept."""

import re
import time
from dataclasses import dataclass
from uuid import uuid4

CHUNK = "chunk"
MERGED = "merged"
NAME = re.compile(rf"([0-9a-f]{{16}})-({CHUNK}|{MERGED})-([0-9a-f]{{8}})-([0-9]+)\.parquet")


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
    match = NAME.fullmatch(name)
    if match is None:
        return None
    written, kind, unique, size = match.groups()
    return RowPart(int(written, 16), kind, unique, int(size))
