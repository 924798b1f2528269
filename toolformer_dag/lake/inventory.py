"""What each file of a lake is, by the form of its name: the one walk that `clean` and `verify` share."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolformer_dag.files import TEMPORARY, plain_name
from toolformer_dag.lake.local_outputs import LOCAL_OUTPUTS
from toolformer_dag.lake.manifest import FOLDER, SUFFIX
from toolformer_dag.lake.row_store import NAME
from toolformer_dag.lake.storage import ASIDE, Storage

Kind = Literal["unfinished", "manifest", "part", "rows", "content", "damaged"]
"""`content`: a file of a local output; `damaged`: was set aside."""
FORMS: dict[Kind, re.Pattern[str]] = {
    "unfinished": re.compile(rf"(?:.*/)?{TEMPORARY.pattern}(?:/.*)?"),
    "manifest": re.compile(rf"{FOLDER}/(?P<owner>.+){re.escape(SUFFIX)}"),
    "part": re.compile(r"(?P<owner>.+)/files/(?P<part>[^/]+)/[0-9a-f]{32}\.parquet"),
    "rows": re.compile(rf"(?P<owner>.+/[0-9a-f]{{16}})/(?:identity\.json|\.merge\.lock|{NAME.pattern})"),
    "content": re.compile(rf"{LOCAL_OUTPUTS}/(?P<owner>.+)/[0-9a-f]{{16}}"),
}
"""The first that fits counts."""


@dataclass(frozen=True, slots=True)
class Item:
    """A file of the lake. `owner`: the table, row store or local output that it belongs to; `part`: of a table."""

    path: Path
    kind: Kind
    owner: str
    part: str
    bytes: int
    changed: float


def inventory(storage: Storage, all_parts: bool = True) -> Iterator[Item]:
    """Yield every file of the lake, see `Storage.files`; what others put into its folder is left out."""
    for file in storage.files(all_parts):
        if item := item_of(storage, file.path, file.bytes, file.changed):
            yield item


def item_of(storage: Storage, path: Path, size: int = 0, changed: float = 0.0) -> Item | None:
    """Return what a file is; None for one that the lake did not write."""
    name = path.relative_to(storage.root).as_posix()
    for kind, form in FORMS.items():
        if match := form.fullmatch(name.removesuffix(ASIDE)):
            fields = match.groupdict("")
            shown: Kind = "damaged" if name.endswith(ASIDE) else kind
            return Item(path, shown, fields.get("owner", ""), plain_name(fields.get("part", "")), size, changed)
    return None
