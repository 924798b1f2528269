"""The content hash of a passages source, remembered so that a large file is hashed once."""

import functools
import hashlib
import logging
import os
from pathlib import Path

import orjson

from toolformer_dag.tools.retrieval.source import EMBEDDED, PassageError, passages_digest, read_passages

_log = logging.getLogger(__name__)


def cache_root() -> Path:
    """Indexes and remembered hashes: `$TOOLFORMER_CACHE`, else toolformer-dag in the user's cache folder."""
    if named := os.environ.get("TOOLFORMER_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "toolformer-dag"


def source_digest(source: str) -> str:
    """Content hash of the passages of `source`; the same passages in another file have the same.

    A file is read again only when its size or time changed. Raises PassageError.
    """
    return _embedded_digest() if source == EMBEDDED else _file_digest(Path(source).absolute())


@functools.cache
def _embedded_digest() -> str:
    return passages_digest(read_passages(EMBEDDED))


def _file_digest(file: Path) -> str:
    try:
        state = file.stat()
    except OSError as error:
        raise PassageError(f"{file}: {error.strerror}. Name a file of passages or `{EMBEDDED}`.") from error
    note = cache_root() / "passages" / f"{hashlib.sha256(bytes(file)).hexdigest()[:32]}.json"
    seen = {"size": state.st_size, "mtime_ns": state.st_mtime_ns}
    if (noted := _noted(note)) and noted.items() >= seen.items():
        return str(noted["digest"])
    digest = passages_digest(read_passages(str(file)))
    try:
        _write(note, {**seen, "digest": digest})
    except OSError as error:  # the note only saves time
        _log.warning("%s: cannot be written (%s); %s is hashed again next time", note, error.strerror, file)
    return digest


def _noted(note: Path) -> dict[str, object]:
    """An unreadable note counts as absent: the file is then hashed again."""
    try:
        noted: dict[str, object] = orjson.loads(note.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return noted


def _write(note: Path, value: dict[str, object]) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    beside = note.with_suffix(f".{os.getpid()}")
    beside.write_bytes(orjson.dumps(value))
    beside.replace(note)
