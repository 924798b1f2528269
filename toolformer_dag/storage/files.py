"""Files that are there completely or not at all."""

import os
import re
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote
from uuid import uuid4

from upath import UPath

from toolformer_dag.storage.errors import WriteError

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{32}(?:\.\w+)*")
"""The name of an unfinished file; `clean` removes those that a killed process left."""


def write_whole(path: UPath, content: bytes) -> None:
    """Replaces `path` by `content`: a reader sees the old file or the new one, after a power loss too.

    On a local disk: temporary file, fsync, rename, fsync of the folder. Elsewhere one `open("wb")`, which object stores
    publish on close. Raises WriteError, and then leaves no temporary file behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if disk := local(path):
            _replace(disk, content)
        else:
            path.write_bytes(content)
    except OSError as error:
        raise WriteError(path, error) from error


def local(path: UPath) -> Path | None:
    """The same path where it is one of this machine's file system, else None."""
    return Path(path.path) if path.protocol in ("", "file", "local") else None


def _replace(path: Path, content: bytes) -> None:
    temporary = beside(path)
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(FileNotFoundError):
            temporary.unlink()
        raise
    sync(path.parent)


def beside(path: Path, suffix: str = "") -> Path:
    """A new path in the same folder, for a file that is not finished."""
    return path.with_name(f".tmp-{uuid4().hex}{suffix}")


def replace_whole(fresh: Path, path: Path) -> None:
    """Renames the finished file `fresh` to `path`, on the disk before and after."""
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(name: str) -> str:
    """Any name as a file name that stays readable; `plain_name` reads it back. No name hides, climbs or nests.

    Letters of any script stay as they are: quoted they take three times the bytes, of which a file name has 255.
    """
    quoted = "".join(char if char > "~" and char.isprintable() else quote(char, safe=" ,+=@") for char in name)
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def plain_name(file: str) -> str:
    """The name that `file_name` was given."""
    return unquote(file)
