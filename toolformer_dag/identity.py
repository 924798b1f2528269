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
"""How a value without parts is written, by its exact type: floats with all their bits."""


def fingerprint(value: object) -> str:
    """Compute the fingerprint of a value: its BLAKE2b hash, as 16 hexadecimal characters.

    Known types are None, bool, int, float, str, bytes, date and datetime, lists and tuples, sets and frozen
    sets, mappings, frozen dataclasses and pydantic models. A list and a tuple with the same items count as
    equal, and so do a set and a frozen set. The order of a mapping's keys does not matter. The name of a
    class does. Subclasses of the plain types (enums, numpy scalars, named tuples) are not known.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.

    Example:
        fingerprint([1]) == fingerprint((1,))
        fingerprint(1) != fingerprint(1.0) != fingerprint("1")
    """
    return blake2b(_encode_value(value), digest_size=8).hexdigest()


def _encode_value(value: object) -> bytes:
    """Encode a value as its type, the length of its content, and its content.

    The length makes sure that no value reads like another one.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.

    Example:
        "Rome" gives b"str 4 Rome".
    """
    # Most values are texts: a table of 10,000 parts has 50,000. They take the short way, to the same bytes.
    if type(value) is str:
        content = value.encode("utf-8", "surrogatepass")
        return b"str %d %b" % (len(content), content)

    tag, body = _encode_tag_and_body(value)
    return f"{tag} {len(body)} ".encode() + body


def _encode_tag_and_body(value: object) -> tuple[str, bytes]:
    """Return the name of a value's type, and its content as bytes.

    The content of a value with parts is the encodings of its parts, one after the other.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.

    Example:
        3 gives ("int", b"3").
        [3, 4] gives ("sequence", b"int 1 3int 1 4").
    """
    write_scalar = SCALARS.get(type(value))
    if write_scalar is None:
        return _encode_tag_and_parts(value)
    text = write_scalar(value)
    return type(value).__name__, text.encode("utf-8", "surrogatepass")


def _encode_tag_and_parts(value: object) -> tuple[str, bytes]:
    """Return the kind of a value that has parts, and the encodings of its parts.

    The parts of a pydantic model or a frozen dataclass are its fields. Parts without an order, as in a set,
    are sorted.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.
    """
    if isinstance(value, list | tuple) and type(value) in (list, tuple):  # named tuples are unknown types
        return "sequence", b"".join(map(_encode_value, value))
    if isinstance(value, set | frozenset):
        return "set", b"".join(sorted(map(_encode_value, value)))
    if isinstance(value, Mapping):
        return "mapping", _encode_mapping(value)
    return f"object {type(value).__qualname__}", _encode_value(_fields(value))


def _encode_mapping(value: Mapping[Any, object]) -> bytes:
    """Return the encodings of a mapping's pairs, sorted, so that the order of keys does not matter."""
    pairs = [_encode_value(key) + _encode_value(item) for key, item in value.items()]
    return b"".join(sorted(pairs))


def _fields(value: object) -> dict[str, object]:
    """Return the fields of a pydantic model or a frozen dataclass by name.

    Raises:
        TypeError: The value is something else.
    """
    if isinstance(value, BaseModel):
        return dict(value)
    if is_dataclass(value) and _is_frozen(type(value)):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    raise TypeError(
        f"no fingerprint for {type(value).__module__}.{type(value).__qualname__}: "
        "turn it into plain values, a frozen dataclass or a pydantic model first"
    )


def _is_frozen(kind: Any) -> bool:
    """Return whether a class is a frozen dataclass; False for `type`, whose instances are classes."""
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def content_hash(content: bytes) -> str:
    """Return the XXH3 hash of bytes, as 32 hexadecimal characters.

    It notices damage at gigabytes per second, but no forgery: who wants to can make other bytes with the same hash.
    """
    return xxh3_128_hexdigest(content)


LARGE = 2**20
"""Bytes from which on a file's hashes are remembered across processes."""
BLOCK = 2**20
"""Bytes that are read of a file at a time."""


class Hashes(NamedTuple):
    """The two hashes of a file's content, taken in one reading."""

    sha: str  # SHA-256, its first 16 hexadecimal characters
    content: str  # XXH3, as `content_hash` returns it


class Stamp(NamedTuple):
    """What the file system says of an unread file. Another write gives another stamp (but see `is_settled`)."""

    size: int  # bytes
    modified: int  # nanoseconds since 1970
    changed: int  # nanoseconds since 1970; nobody can set this time
    inode: int


def file_hash(file: Path, again: bool = False) -> str:
    """Return the SHA-256 hash of a file, cut to 16 hexadecimal characters.

    It is used in the fingerprint of what is made from the file. Hashes of large files are remembered, also
    by later processes.

    Args:
        file: The file.
        again: Read the file even if its size, inode and times have not changed, to notice damage on the disk.

    Raises:
        OSError: The file cannot be read.
    """
    remembered = read_remembered_hashes(file)

    # Compare the other hash (XXH3), which is faster to compute. It only differs if the content has changed.
    if again and stream_hash(file) != remembered.content:
        return _read_hashes(file).sha
    return remembered.sha


def read_remembered_hashes(file: Path) -> Hashes:
    """Return the hashes of a file, reading it only if they are not remembered.

    They are remembered from the last time it was read with the same size, inode and times. A file is always
    read if it changed so recently that its times cannot be trusted (`is_settled`).

    Raises:
        OSError: The file cannot be read.
    """
    status = file.stat()
    if not is_settled(status):
        return _read_hashes(file)
    return _read_hashes_under_stamp(file.absolute(), _build_stamp(status))


TICK = 20_000_000
"""Nanoseconds in which a file system's clock surely goes on: two writes within a tick may leave the same times."""


def is_settled(status: os.stat_result) -> bool:
    """Return whether a file's times are older than a tick, so that any later write will change them."""
    return abs(time.time_ns() - status.st_ctime_ns) > TICK


def _build_stamp(status: os.stat_result) -> Stamp:
    """Return the stamp of a file from its `stat`."""
    return Stamp(
        size=status.st_size,
        modified=status.st_mtime_ns,
        changed=status.st_ctime_ns,
        inode=status.st_ino,
    )


@lru_cache(maxsize=4096)
def _read_hashes_under_stamp(file: Path, stamp: Stamp) -> Hashes:
    """Return the hashes of a file, from the cache on disk if its stamp is still the same.

    Only hashes of large files are in that cache. Other files are read.

    Args:
        file: The file.
        stamp: Its size, inode and times as they are now.
    """
    if stamp.size < LARGE:
        return _read_hashes(file)

    cached = _read_cached_hashes(file, stamp)
    if cached is not None:
        return cached

    hashes = _read_hashes(file)
    _write_entry(file, hashes, stamp)
    return hashes


def _read_cached_hashes(file: Path, stamp: Stamp) -> Hashes | None:
    """Look up the hashes of a file in the cache on disk.

    Returns:
        The hashes, or None if there is no undamaged entry for this file with this stamp.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        entry = json.loads(_get_cache_entry_path(file).read_text("utf-8"))
        hashes = Hashes(sha=entry["hash"], content=entry["content"])
        if entry["seal"] == _compute_seal(stamp, hashes):
            return hashes
    return None


def remember(file: Path, hashes: Hashes) -> None:
    """Note across processes that a file, as it is now, has these hashes. Raises OSError where it is not there."""
    _write_entry(file, hashes, _build_stamp(file.stat()))


def _write_entry(file: Path, hashes: Hashes, stamp: Stamp) -> None:
    """Remember the hashes of a file in the cache on disk.

    It does not matter if the cache cannot be written.

    Args:
        file: The file.
        hashes: The hashes of its content.
        stamp: Its size, inode and times, under which the hashes hold.
    """
    entry = {
        "file": str(file),
        "stamp": stamp,
        "hash": hashes.sha,
        "content": hashes.content,
        "seal": _compute_seal(stamp, hashes),
    }

    target = _get_cache_entry_path(file.absolute())
    with suppress(OSError):
        _replace_text(target, json.dumps(entry))


def _replace_text(target: Path, text: str) -> None:
    """Replace a file as a whole; its folder is made where it is missing. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(target)


def _compute_seal(stamp: Stamp, hashes: Hashes) -> str:
    """Return what a whole entry of the cache holds as its seal: it binds the hashes to the stamp."""
    return fingerprint([*stamp, *hashes])


def cache_folder() -> Path:
    """Return the folder of what is computed once per machine: $TOOLFORMER_CACHE, else below the user's cache folder."""
    return Path(os.environ.get("TOOLFORMER_CACHE") or user_cache_path("toolformer-dag")).expanduser()


def _get_cache_entry_path(file: Path) -> Path:
    """Return where the cache keeps the hashes of a file, which has an absolute path; the name is a hash of the path."""
    name = blake2b(os.fsencode(file), digest_size=16).hexdigest()
    return cache_folder() / "hashes" / f"{name}.json"


def _read_hashes(file: Path) -> Hashes:
    """Read a file block by block, and compute both of its hashes.

    Raises:
        OSError: The file cannot be read.
    """
    sha = sha256()
    xxh3 = xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(BLOCK):
            sha.update(block)
            xxh3.update(block)
    return Hashes(sha=sha.hexdigest()[:16], content=xxh3.hexdigest())


def stream_hash(file: Path) -> str:
    """Return the `content_hash` of a file, read in pieces: it need not fit into memory. Raises OSError."""
    with file.open("rb") as stream:
        return file_digest(stream, xxh3_128).hexdigest()
