"""What each file of a lake is, by the form of its name: the one walk that `clean` and `verify` share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from toolformer_dag.files import TEMPORARY_NAME_PATTERN, decode_file_name
from toolformer_dag.lake.local_outputs import LOCAL_OUTPUTS_FOLDER
from toolformer_dag.lake.manifest import MANIFEST_SUFFIX, MANIFESTS_FOLDER
from toolformer_dag.lake.row_store import ROW_FILE_NAME_PATTERN
from toolformer_dag.lake.storage import DAMAGED_SUFFIX, Storage

FileKind = Literal["unfinished", "manifest", "part", "rows", "content", "damaged"]
"""What a file is:

- `unfinished`: a file that a process was writing
- `manifest`: the manifest of a table
- `part`: a Parquet file of a part of a table
- `rows`: a file of a row store (computed rows)
- `content`: a file of a local output, by its hash
- `damaged`: any of these that was set aside
"""
NAME_PATTERNS_BY_KIND: dict[FileKind, re.Pattern[str]] = {
    "unfinished": re.compile(rf"(?:.*/)?{TEMPORARY_NAME_PATTERN.pattern}(?:/.*)?"),
    "manifest": re.compile(rf"{MANIFESTS_FOLDER}/(?P<owner>.+){re.escape(MANIFEST_SUFFIX)}"),
    "part": re.compile(r"(?P<owner>.+)/files/(?P<part>[^/]+)/[0-9a-f]{32}\.parquet"),
    "rows": re.compile(
        rf"(?P<owner>.+/[0-9a-f]{{16}})/(?:identity\.json|\.merge\.lock|{ROW_FILE_NAME_PATTERN.pattern})"
    ),
    "content": re.compile(rf"{LOCAL_OUTPUTS_FOLDER}/(?P<owner>.+)/[0-9a-f]{{16}}"),
}
"""The form of a file's name below the lake, by kind; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A file of the lake.

    Attributes:
        path: The path of the file. For an object, the path of its copy on this machine.
        kind: What the file is.
        owner_name: The table, row store or local output that it belongs to. "" for an unfinished file.
        part_name: The name of the part, for a file of a part of a table. "" for other files.
        size_bytes: Its size in bytes.
        modified_timestamp: When it was written, in seconds since 1970.
    """

    path: Path
    kind: FileKind
    owner_name: str
    part_name: str
    size_bytes: int
    modified_timestamp: float


def iter_lake_files(storage: Storage, include_all_parts: bool = True) -> Iterator[LakeFile]:
    """List every file that the lake has written. Files that others have put into its folder are left out.

    Args:
        storage: The storage of the lake.
        include_all_parts: List every part of a table. Otherwise only the files of one part are listed of each table in
            a folder, which is enough to find the names of all tables. An object store lists all files anyway.
    """
    for stored_file in storage.iter_files(include_all_parts):
        lake_file = parse_lake_file(
            storage,
            stored_file.path,
            size_bytes=stored_file.size_bytes,
            modified_timestamp=stored_file.modified_timestamp,
        )
        if lake_file is not None:
            yield lake_file


def parse_lake_file(
    storage: Storage, path: Path, size_bytes: int = 0, modified_timestamp: float = 0.0
) -> LakeFile | None:
    """Find out what a file of the lake is, by the form of its name. Nothing is read.

    Args:
        storage: The storage of the lake.
        path: The path of the file.
        size_bytes: Its size in bytes, for the result.
        modified_timestamp: When it was written, for the result.

    Returns:
        The file with its kind, or None if the lake has not written it.
    """
    relative_path = path.relative_to(storage.root).as_posix()
    matched_name = _match_name_pattern(relative_path.removesuffix(DAMAGED_SUFFIX))
    if matched_name is None:
        return None

    was_set_aside = relative_path.endswith(DAMAGED_SUFFIX)
    return LakeFile(
        path=path,
        kind="damaged" if was_set_aside else matched_name.kind,
        owner_name=matched_name.named_groups.get("owner", ""),
        part_name=decode_file_name(matched_name.named_groups.get("part", "")),
        size_bytes=size_bytes,
        modified_timestamp=modified_timestamp,
    )


class _MatchedName(NamedTuple):
    """The result of matching the name of a file with NAME_PATTERNS_BY_KIND.

    Attributes:
        kind: The kind of the file.
        named_groups: The named groups of the pattern: "owner" and "part", where the pattern has them.
    """

    kind: FileKind
    named_groups: dict[str, str]


def _match_name_pattern(relative_path: str) -> _MatchedName | None:
    """Find the first of NAME_PATTERNS_BY_KIND that fits the path of a file below the lake, or None if none does."""
    for kind, name_pattern in NAME_PATTERNS_BY_KIND.items():
        match = name_pattern.fullmatch(relative_path)
        if match is not None:
            return _MatchedName(kind, match.groupdict(default=""))
    return None
