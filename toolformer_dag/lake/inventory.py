"""What each file of a lake is, by the form of its name: the one walk that `clean` and `verify` share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from toolformer_dag.files import TEMPORARY, decode_file_name
from toolformer_dag.lake.local_outputs import LOCAL_OUTPUTS
from toolformer_dag.lake.manifest import FOLDER, SUFFIX
from toolformer_dag.lake.row_store import NAME
from toolformer_dag.lake.storage import ASIDE, Storage

Kind = Literal["unfinished", "manifest", "part", "rows", "content", "damaged"]
"""What a file is:

- `unfinished`: a file that a process was writing
- `manifest`: the manifest of a table
- `part`: a Parquet file of a part of a table
- `rows`: a file of a row store (computed rows)
- `content`: a file of a local output, by its hash
- `damaged`: any of these that was set aside
"""
FORMS: dict[Kind, re.Pattern[str]] = {
    "unfinished": re.compile(rf"(?:.*/)?{TEMPORARY.pattern}(?:/.*)?"),
    "manifest": re.compile(rf"{FOLDER}/(?P<owner>.+){re.escape(SUFFIX)}"),
    "part": re.compile(r"(?P<owner>.+)/files/(?P<part>[^/]+)/[0-9a-f]{32}\.parquet"),
    "rows": re.compile(rf"(?P<owner>.+/[0-9a-f]{{16}})/(?:identity\.json|\.merge\.lock|{NAME.pattern})"),
    "content": re.compile(rf"{LOCAL_OUTPUTS}/(?P<owner>.+)/[0-9a-f]{{16}}"),
}
"""The form of a file's name below the lake, by kind; the first that fits counts."""


@dataclass(frozen=True, slots=True)
class LakeFile:
    """A file of the lake.

    - `owner`: the table, row store or local output that it belongs to; empty for an unfinished file
    - `part`: of a file of a table's part, the name of that part; else empty
    - `changed`: when it was written, in seconds since 1970
    """

    path: Path
    kind: Kind
    owner: str
    part: str
    bytes: int
    changed: float


def inventory(storage: Storage, all_parts: bool = True) -> Iterator[LakeFile]:
    """List every file that the lake has written. Files that others have put into its folder are left out.

    Args:
        storage: The storage of the lake.
        all_parts: List every part of a table. Otherwise a folder lists only the files of one part.
    """
    for file in storage.files(all_parts):
        item = parse_lake_file(storage, file.path, size=file.bytes, changed=file.changed)
        if item is not None:
            yield item


def parse_lake_file(storage: Storage, path: Path, size: int = 0, changed: float = 0.0) -> LakeFile | None:
    """Tell from the name of a file what it is. Nothing is read.

    Args:
        storage: The storage of the lake.
        path: The path of the file.
        size: Its size in bytes, for the result.
        changed: When it was written, for the result.

    Returns:
        None if the lake has not written the file.
    """
    name = path.relative_to(storage.root).as_posix()
    matched = _match_form(name.removesuffix(ASIDE))
    if matched is None:
        return None

    was_set_aside = name.endswith(ASIDE)
    return LakeFile(
        path=path,
        kind="damaged" if was_set_aside else matched.kind,
        owner=matched.fields.get("owner", ""),
        part=decode_file_name(matched.fields.get("part", "")),
        bytes=size,
        changed=changed,
    )


class _MatchedForm(NamedTuple):
    """The kind of a file whose name has one of FORMS, and the named groups of that form: `owner`, `part`."""

    kind: Kind
    fields: dict[str, str]


def _match_form(name: str) -> _MatchedForm | None:
    """Find the first of FORMS that fits the name of a file below the lake."""
    for kind, form in FORMS.items():
        match = form.fullmatch(name)
        if match is not None:
            return _MatchedForm(kind, match.groupdict(default=""))
    return None
