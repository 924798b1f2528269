"""The content of a file in 16 characters, read once as long as the file stays as it is."""

from functools import lru_cache
from hashlib import file_digest
from pathlib import Path


def file_hash(file: Path) -> str:
    """16 hexadecimal characters of SHA-256; read again where size or time of change differ. Raises OSError."""
    status = file.stat()
    return _hashed(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def _hashed(file: Path, size: int, modified: int) -> str:
    with file.open("rb") as stream:
        return file_digest(stream, "sha256").hexdigest()[:16]
