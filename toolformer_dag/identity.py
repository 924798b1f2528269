"""The identity of values and files: the same meaning has the same fingerprint, and any change another one.

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

SCALAR_ENCODERS: dict[type, Callable[[Any], str]] = {
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

    Known are plain values (None, bool, int, float, str, bytes, date, datetime), lists, tuples, sets, mappings, frozen
    dataclasses and pydantic models. Enums, numpy scalars and named tuples are not. Types and names of classes count,
    but a list and a tuple of the same items are equal, and the order of a mapping's keys does not matter.

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
    # Most values are texts: a table of 10,000 parts has 50,000. They take this shorter way to the same bytes.
    if type(value) is str:
        content = value.encode("utf-8", "surrogatepass")
        return b"str %d %b" % (len(content), content)

    type_name, content = _encode_type_and_content(value)
    return f"{type_name} {len(content)} ".encode() + content


def _encode_type_and_content(value: object) -> tuple[str, bytes]:
    """Return the name of a value's type, and its content as bytes.

    The content of a value with parts is the encodings of its parts, one after the other.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.

    Example:
        3 gives ("int", b"3").
        [3, 4] gives ("sequence", b"int 1 3int 1 4").
    """
    encode_scalar = SCALAR_ENCODERS.get(type(value))
    if encode_scalar is None:
        return _encode_type_and_parts(value)

    text = encode_scalar(value)
    return type(value).__name__, text.encode("utf-8", "surrogatepass")


def _encode_type_and_parts(value: object) -> tuple[str, bytes]:
    """Return the kind of a value that has parts, and the encodings of its parts.

    The parts of a pydantic model or a frozen dataclass are its fields. Parts without an order, as in a set,
    are sorted.

    Raises:
        TypeError: The value, or something inside it, is of an unknown type.

    Example:
        [3, 4] gives ("sequence", b"int 1 3int 1 4").
    """
    # Named tuples are unknown types, so subclasses of list and tuple are left out.
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return "sequence", b"".join(map(_encode_value, value))
    if isinstance(value, set | frozenset):
        return "set", b"".join(sorted(map(_encode_value, value)))
    if isinstance(value, Mapping):
        return "mapping", _encode_mapping(value)
    return f"object {type(value).__qualname__}", _encode_value(_collect_fields(value))


def _encode_mapping(value: Mapping[Any, object]) -> bytes:
    """Return the encodings of a mapping's pairs, sorted, so that the order of keys does not matter.

    Raises:
        TypeError: A key or a value is of an unknown type.
    """
    pairs = [_encode_value(key) + _encode_value(item) for key, item in value.items()]
    return b"".join(sorted(pairs))


def _collect_fields(value: object) -> dict[str, object]:
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
    """Return whether a class is a frozen dataclass.

    Args:
        kind: The class. For `type`, the class of a class, the answer is no.
    """
    # Python keeps the parameters of the decorator in the class.
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def compute_content_hash(content: bytes) -> str:
    """Return the XXH3 hash of bytes, as 32 hexadecimal characters.

    It notices accidental damage at gigabytes per second. It does not notice forgery, because other bytes with the
    same hash can be made on purpose.
    """
    return xxh3_128_hexdigest(content)


REMEMBERED_MIN_BYTES = 2**20
"""The size in bytes from which a file's hashes are remembered across processes."""
READ_BLOCK_BYTES = 2**20
"""How many bytes of a file are read at a time."""


class Hashes(NamedTuple):
    """The two hashes of a file's content.

    Attributes:
        sha256_prefix: The first 16 hexadecimal characters of its SHA-256 hash.
        content_hash: Its XXH3 hash, as `compute_content_hash` returns it, which is faster to compute.
    """

    sha256_prefix: str
    content_hash: str


class Stamp(NamedTuple):
    """What the file system says about a file without reading it.

    Another write to the file gives another stamp (but see `has_settled_times`). Damage on the disk does not.

    Attributes:
        size_bytes: Its size.
        modified_ns: When its content was modified, in nanoseconds since 1970.
        changed_ns: When the file was changed in any way, in nanoseconds since 1970. Nobody can set this time.
        inode: Its number in the file system.
    """

    size_bytes: int
    modified_ns: int
    changed_ns: int
    inode: int


def file_hash(file: Path, force_read: bool = False) -> str:
    """Return the SHA-256 hash of a file, cut to 16 hexadecimal characters.

    It is used in the fingerprint of what is made from the file. Hashes of large files are remembered, also
    by later processes.

    Args:
        file: The file.
        force_read: Read the file even if its size, inode and times have not changed, to notice damage on the disk.

    Raises:
        OSError: The file cannot be read.
    """
    remembered = read_remembered_hashes(file)  # reads the file only if they are not remembered
    if not force_read:
        return remembered.sha256_prefix

    # Compare the other hash (XXH3), which is faster to compute. It only differs if the content has changed.
    if compute_file_content_hash(file) == remembered.content_hash:
        return remembered.sha256_prefix
    return _read_hashes(file).sha256_prefix  # the content has changed under the same size, inode and times


def read_remembered_hashes(file: Path) -> Hashes:
    """Return the hashes of a file, reading it only if they are not remembered.

    They are remembered from the last time it was read with the same size, inode and times. A file is always
    read if it changed so recently that its times cannot be trusted (see `has_settled_times`).

    Raises:
        OSError: The file cannot be read.
    """
    status = file.stat()
    if not has_settled_times(status):
        return _read_hashes(file)
    return _read_hashes_under_stamp(file.absolute(), _build_stamp(status))


CLOCK_TICK_NS = 20_000_000
"""Nanoseconds after which a file system's clock has surely moved on. Two writes within a tick may get equal times."""


def has_settled_times(status: os.stat_result) -> bool:
    """Return whether a file last changed more than a clock tick ago, so that any later write will change its times."""
    return abs(time.time_ns() - status.st_ctime_ns) > CLOCK_TICK_NS


def _build_stamp(status: os.stat_result) -> Stamp:
    """Return the stamp of a file from its `stat`."""
    return Stamp(
        size_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
        inode=status.st_ino,
    )


@lru_cache(maxsize=4096)
def _read_hashes_under_stamp(file: Path, stamp: Stamp) -> Hashes:
    """Return the hashes of a file, from the cache on disk if it has them under the same stamp.

    Only hashes of large files are in that cache. This process remembers the hashes of the last 4096.

    Args:
        file: The file, as an absolute path.
        stamp: Its size, inode and times as they are now.

    Raises:
        OSError: The file cannot be read.
    """
    if stamp.size_bytes < REMEMBERED_MIN_BYTES:
        return _read_hashes(file)

    cached_hashes = _read_cached_hashes(file, stamp)
    if cached_hashes is not None:
        return cached_hashes

    hashes = _read_hashes(file)
    _write_cache_entry(file, hashes, stamp)
    return hashes


def _read_cached_hashes(file: Path, stamp: Stamp) -> Hashes | None:
    """Look up the hashes of a file in the cache on disk.

    Args:
        file: The file, as an absolute path.
        stamp: Its size, inode and times as they are now.

    Returns:
        The hashes, or None if there is no undamaged entry for this file with this stamp.
    """
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        entry = json.loads(_get_cache_entry_path(file).read_text("utf-8"))
        hashes = Hashes(sha256_prefix=entry["hash"], content_hash=entry["content"])

        # The seal only fits if the entry is undamaged and was written under the same stamp.
        if entry["seal"] == _compute_seal(stamp, hashes):
            return hashes
    return None


def remember_hashes(file: Path, hashes: Hashes) -> None:
    """Note, also for other processes, that a file as it is now has these hashes.

    Raises:
        OSError: There is no such file.
    """
    _write_cache_entry(file, hashes, _build_stamp(file.stat()))


def _write_cache_entry(file: Path, hashes: Hashes, stamp: Stamp) -> None:
    """Write the hashes of a file to the cache on disk. It does not matter if the cache cannot be written.

    Args:
        file: The file.
        hashes: The hashes of its content.
        stamp: Its size, inode and times, under which the hashes hold.
    """
    entry = {
        "file": str(file),
        "stamp": stamp,
        "hash": hashes.sha256_prefix,
        "content": hashes.content_hash,
        "seal": _compute_seal(stamp, hashes),
    }

    entry_path = _get_cache_entry_path(file.absolute())
    with suppress(OSError):
        _replace_text(entry_path, json.dumps(entry))


def _replace_text(path: Path, text: str) -> None:
    """Replace the text of a file as a whole, creating the file and its folder if they are missing.

    Raises:
        OSError: The file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may write the same file, so each writes a temporary file of its own.
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _compute_seal(stamp: Stamp, hashes: Hashes) -> str:
    """Return the seal of a cache entry: a fingerprint of the stamp and the hashes, by which damage is noticed."""
    return fingerprint([*stamp, *hashes])


def get_cache_folder() -> Path:
    """Return the folder for what is computed once per machine.

    It is $TOOLFORMER_CACHE, or if that is not set, a folder in the user's cache folder.
    """
    return Path(os.environ.get("TOOLFORMER_CACHE") or user_cache_path("toolformer-dag")).expanduser()


def _get_cache_entry_path(file: Path) -> Path:
    """Return where the cache keeps the hashes of a file.

    Args:
        file: The file, as an absolute path. The entry is named by a hash of this path.
    """
    path_hash = blake2b(os.fsencode(file), digest_size=16).hexdigest()
    return get_cache_folder() / "hashes" / f"{path_hash}.json"


def _read_hashes(file: Path) -> Hashes:
    """Read a file block by block, and compute both of its hashes.

    Raises:
        OSError: The file cannot be read.
    """
    sha = sha256()
    xxh3 = xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while block := stream.read(READ_BLOCK_BYTES):
            sha.update(block)
            xxh3.update(block)
    return Hashes(sha256_prefix=sha.hexdigest()[:16], content_hash=xxh3.hexdigest())


def compute_file_content_hash(file: Path) -> str:
    """Return the XXH3 hash of a file, which is the `compute_content_hash` of its content.

    The file is read in pieces, so it need not fit into memory.

    Raises:
        OSError: The file cannot be read.
    """
    with file.open("rb") as stream:
        return file_digest(stream, xxh3_128).hexdigest()
