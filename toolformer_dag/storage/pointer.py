"""A pointer: the small file that says which part files a partition consists of now, and what they were made from."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from uuid import uuid4

from toolformer_dag.storage.plain_json import as_json

FORMAT = 1
PART_NAME = re.compile(r"[0-9a-f]{32}\.parquet")


def new_part_name() -> str:
    """A name that nobody has used."""
    return f"{uuid4().hex}.parquet"


@dataclass(frozen=True, slots=True)
class Part:
    """A part file by name, with its size in bytes and its rows."""

    name: str
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """`data_version` is the hash of the rows; `record` what they were made from (see record.py)."""

    parts: tuple[Part, ...]
    data_version: str
    record: Mapping[str, Any]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def encode(self, table: str) -> bytes:
        """JSON, a line per field, for people too. Raises NotPlain, which names `table`."""
        return as_json(table, {"format": FORMAT, **asdict(self)})


def decode(content: bytes) -> Pointer:
    """Reads `Pointer.encode`. Raises ValueError for anything else, a file cut short included."""
    try:
        value = json.loads(content)
        if value["format"] != FORMAT:
            raise ValueError(f"has format {value['format']}, this version reads {FORMAT}")
        parts = tuple(Part(**part) for part in value["parts"])
        return Pointer(parts, value["data_version"], value["record"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no pointer: {error!r}") from error
