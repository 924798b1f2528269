"""A web document as every stage sees it."""

from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Document:
    """One CCNet record. `(shard, digest)` is its key; `date` is the day in its URL, None where the URL holds none."""

    shard: str
    digest: str
    url: str
    domain: str
    title: str
    date: date | None
    language: str
    text: str
