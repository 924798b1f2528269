"""The identity of values and files: same meaning, same fingerprint; any change, another one.

Settings, model identities, prompts, SQL text, constants of the method and tool versions enter a fingerprint; device,
batch size, paths and the thresholds of later stages do not. A type that is not named here is refused, because a default
(repr, pickle) would let an address or an order slip in.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from functools import lru_cache
from hashlib import blake2b, file_digest, sha256
from pathlib import Path
from typing import Any, NamedTuple

from platformdirs import user_cache_path
from pydantic import BaseModel
from xxhash import xxh3_128, xxh3_128_hexdigest

SCALARS: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "",
    bool: str,
    int: str,
    float: float.hex,
    str: str,
    bytes: bytes.hex,
    date: date.isoformat,
    datetime: datetime.isoformat,
}


def fingerprint(value: object) -> str:
    """Return 16 hexadecimal characters.

    Known: None, bool, int, float, str, bytes, date, datetime, list and tuple (alike), set and frozenset (alike),
    mappings (order of keys irrelevant), frozen dataclasses and pydantic models (the class name counts). Subclasses of
    the plain types (enums, numpy scalars) are not known. Raises TypeError for any other type, at any depth.
    """
    return blake2b(_encode(value), digest_size=8).hexdigest()


def _encode(value: object) -> bytes:
    """An injective encoding (tag, length, body), so that no value reads like another or like two."""
    if type(value) is str:  # most values, of which a table of 10,000 parts has 50,000
        content = value.encode("utf-8", "surrogatepass")
        return b"str %d %b" % (len(content), content)
    tag, body = _tag_and_body(value)
    return f"{tag} {len(body)} ".encode() + body


def _tag_and_body(value: object) -> tuple[str, bytes]:
    if scalar := SCALARS.get(type(value)):
        return type(value).__name__, scalar(value).encode("utf-8", "surrogatepass")
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return "sequence", b"".join(map(_encode, value))
    if isinstance(value, set | frozenset):
        return "set", b"".join(sorted(map(_encode, value)))
    if isinstance(value, Mapping):
        return "mapping", b"".join(sorted(_encode(key) + _encode(item) for key, item in value.items()))
    return f"object {type(value).__qualname__}", _encode(_fields(value))


def _fields(value: object) -> dict[str, object]:
    if isinstance(value, BaseModel):
        return dict(value)
    kind: Any = type(value)
    if is_dataclass(value) and not isinstance(value, type) and kind.__dataclass_params__.frozen:
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(
        f"no fingerprint for {type(value).__module__}.{type(value).__qualname__}: "
        "turn it into plain values, a frozen dataclass or a pydantic model first"
    )


def content_hash(content: bytes) -> str:
    """Return 32 hexadecimal characters of XXH3, which notices damage at gigabytes per second, and no forgery."""
    return xxh3_128_hexdigest(content)


LARGE = 2**20
"""Bytes from which on a file's hashes are remembered across processes."""
BLOCK = 2**20


class Hashes(NamedTuple):
    """What a file's content was when it was read. `sha`: 16 hexadecimal characters; `content`: as `content_hash`."""

    sha: str
    content: str


def file_hash(file: Path, again: bool = False) -> str:
    """Return 16 hexadecimal characters of SHA-256, which tell whether what was made from a file is stale.

    Read again where size, inode or times differ from when it was hashed, or with `again`: only that tells whether the
    file is whole, since a disk may give other bits under the same times. It costs a read at the speed of XXH3: SHA-256
    is computed anew only where that differs. Raises OSError.

    Hashes of files of a megabyte and more are remembered in the user's cache folder, so that loading the definitions
    does not read gigabytes of weights again.
    """
    known = remembered_hashes(file)
    return known.sha if not again or stream_hash(file) == known.content else _read(file).sha


def remembered_hashes(file: Path) -> Hashes:
    """Return the hashes of a file as they were when it last had this size, inode and these times. Raises OSError."""
    status = file.stat()
    return _hashed(file.absolute(), _stamp(status)) if settled(status) else _read(file)


TICK = 20_000_000
"""Nanoseconds in which a file system's clock surely goes on: two writes within a tick leave the same times."""


def settled(status: os.stat_result) -> bool:
    """Return whether a file's times tell it from what a later write would make of it."""
    return abs(time.time_ns() - status.st_ctime_ns) > TICK


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@lru_cache(maxsize=4096)
def _hashed(file: Path, stamp: tuple[int, ...]) -> Hashes:
    if stamp[0] < LARGE:
        return _read(file)
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        note = json.loads(_remembered(file).read_text("utf-8"))
        remembered = Hashes(note["hash"], note["content"])
        if note["seal"] == fingerprint([*stamp, *remembered]):
            return remembered
    hashes = _read(file)
    remember(file, hashes, stamp)
    return hashes


def remember(file: Path, hashes: Hashes, stamp: tuple[int, ...] | None = None) -> None:
    """Remember the hashes of a file with this stamp, or as it is now, across processes. Raises OSError."""
    stamp = stamp or _stamp(file.stat())
    entry = {"file": str(file), "stamp": stamp, "hash": hashes.sha, "content": hashes.content}
    remembered = _remembered(file.absolute())
    with suppress(OSError):  # a cache that cannot be written costs time, nothing else
        remembered.parent.mkdir(parents=True, exist_ok=True)
        fresh = remembered.with_suffix(f".{os.getpid()}")
        fresh.write_text(json.dumps({**entry, "seal": fingerprint([*stamp, *hashes])}), "utf-8")
        fresh.replace(remembered)


def cache_folder() -> Path:
    """Return $TOOLFORMER_CACHE, else toolformer-dag in the user's cache."""
    return Path(os.environ.get("TOOLFORMER_CACHE") or user_cache_path("toolformer-dag")).expanduser()


def _remembered(file: Path) -> Path:
    """Where the hashes of a file are kept."""
    name = blake2b(os.fsencode(file), digest_size=16).hexdigest()
    return cache_folder() / "hashes" / f"{name}.json"


def _read(file: Path) -> Hashes:
    sha, content = sha256(), xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            sha.update(block)
            content.update(block)
    return Hashes(sha.hexdigest()[:16], content.hexdigest())


def stream_hash(file: Path) -> str:
    """Return `content_hash` of a file that need not fit into memory. Raises OSError."""
    with file.open("rb") as stream:
        return file_digest(stream, xxh3_128).hexdigest()
