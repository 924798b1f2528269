"""The shards of the corpus: files that the settings name, those of a data set of the hub, or of the small web."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolformer_dag.files import FILES, damaged_beside, file_name, irregular, locked, sealed, unsealed, write_whole
from toolformer_dag.identity import file_hash, fingerprint, stream_hash
from toolformer_dag.lake.storage import ABSENT
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, expanded, printable, rooted
from toolformer_dag.synthetic.web import VERSION, write_shards
from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers.hub_datasets import HubSplit, hub_batches, resolve
from toolformer_dag.texts.shard_reader import ENDINGS, NAMED, PARQUET, shard_batches

log = logging.getLogger(__name__)

LONGEST_NAME = 240  # bytes; file systems take 255, and `.json.damaged` comes on top
SUFFIXES = (*NAMED, *ENDINGS, PARQUET)
"""What a shard's name leaves out of the file's."""
DATA = (PARQUET, *(ending + packed for ending in ENDINGS for packed in ("", *NAMED)))
"""How the names of documents end in a folder that is named as a whole."""
SIDE_FILE = re.compile(
    r".*\.(?:quality_signals|signals|minhash|duplicates)\.(?:json\.gz|parquet)|(?:dataset_infos?|state|stats)\.json"
)
"""What RedPajama-V2 publishes beside its documents, and what `datasets` and datatrove write beside theirs."""

PINS = "hub"
"""The folder of the lake that says at which commit each data set of the hub is kept."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of documents and the name under which its rows are kept."""

    name: str
    path: Path

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return printable(self.path)

    def stamp(self) -> dict[str, Any]:
        """Return size and time of change; nothing for a file that is not there."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def batches(self, choice: FormatChoice) -> Iterator[Batch]:
        """Read its documents; see `shard_batches`."""
        return shard_batches(self.path, choice)

    def facts(self) -> dict[str, Any]:
        """Return the hash of the file, with which `verify` notices a change that keeps size and time."""
        try:
            return {"content": stream_hash(self.path)}
        except OSError:  # reading says so, as a rejection
            return {}


@dataclass(frozen=True, slots=True)
class HubFile:
    """A data file of a data set of the hub, and the name under which its rows are kept."""

    name: str
    split: HubSplit
    number: int

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return f"{self.split.hub}, file {self.name}"

    def stamp(self) -> dict[str, Any]:
        """Return what determines its content; a local file by its own size and time of change."""
        of = {"configuration": self.split.configuration or "", "split": self.split.split}
        if self.split.local and self.split.named:
            return {**of, **ShardFile(self.name, Path(self.split.hub) / self.split.files[self.number]).stamp()}
        return {**of, "revision": self.split.revision}

    def batches(self, choice: FormatChoice) -> Iterator[Batch]:
        """Read its documents; see `hub_batches`."""
        return hub_batches(self.split, self.number, choice)

    def facts(self) -> dict[str, Any]:
        """Return the data set and its revision: a commit, or for a folder a hash of its files' content."""
        return {"hub": self.split.hub, "revision": self.split.revision}


Shard = ShardFile | HubFile


def shard_files(settings: Settings) -> list[ShardFile]:
    """Return the files of `corpus.shards`, or those of the small web, sorted by name.

    - A folder stands for the files of JSON lines and Parquet below it. Of folders and patterns, hidden files, names
      that begin with `_` and what is published beside documents (SIDE_FILE, Dolma's `attributes`) are left out.
    - A shard's name is its path below the folder that a pattern begins with, without its suffixes. Files that would
      share a name keep their suffixes and more of their path. Bytes that are not UTF-8 are written as `\\udcff`. A name
      that takes more than LONGEST_NAME bytes is shortened in its middle, with a hash of the whole.

    Raises SettingsError where a pattern matches nothing, or something named like data that is no regular file.
    """
    if not settings.corpus.shards:
        return small_web_files(settings)
    matches = [match for pattern in settings.corpus.shards for match in _matches(settings.root, pattern)]
    files = list({os.path.realpath(path): (folder, path) for folder, path in reversed(matches)}.values())
    return sorted(_named(files), key=lambda file: file.name)


def hub_files(settings: Settings) -> list[HubFile]:
    """Return the data files of the data set at `corpus.hub`, each a shard, sorted by name.

    A data set of the hub is kept at the commit that it was on when it was first used; the lake remembers which. Raises
    HubError where it cannot be reached, or has no such configuration or split.
    """
    corpus = settings.corpus
    assert corpus.hub is not None
    folder = settings.root / expanded(Path(corpus.hub))
    local = folder.is_dir()
    split = resolve(str(folder), corpus.configuration, corpus.split, None) if local else _pinned(settings)
    names = [_stem(name) for name in split.files]
    unique = names if len(set(names)) == len(names) else split.files
    files = [HubFile(_short(name), split, number) for number, name in enumerate(unique)]
    return sorted(files, key=lambda file: file.name)


def _pinned(settings: Settings) -> HubSplit:
    """Return the split as the lake remembers it; on first use ask the hub and remember."""
    corpus = settings.corpus
    asked = {
        "hub": corpus.hub,
        "configuration": corpus.configuration,
        "split": corpus.split,
        "revision": corpus.revision,
    }
    storage = Lake.of(settings.paths).storage
    file, version = storage.root / PINS / f"{fingerprint(asked)}.json", ABSENT
    try:
        content, version = storage.read(file)
        pinned = unsealed(content)
        return HubSplit(**{**pinned["resolved"], "files": tuple(pinned["resolved"]["files"])})
    except FileNotFoundError:  # the first use
        pass
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "%s is damaged (%s): %s is resolved anew, and may be another commit than before; corpus.revision fixes one",
            storage.shown(file),
            error,
            corpus.hub,
        )
    split = resolve(str(corpus.hub), corpus.configuration, corpus.split, corpus.revision)
    storage.replace(file, sealed("corpus.hub", {"asked": asked, "resolved": asdict(split)}), version)
    return split


def small_web_files(settings: Settings) -> list[ShardFile]:
    """Return the small web's files, whether written yet or not; their folder names what they are made of."""
    web = settings.corpus.small_web
    folder = settings.paths.local / "small_web" / f"v{VERSION}_seed-{web.seed}_{web.documents}-in-{web.shards}"
    return [ShardFile(f"small_web_{i:04}", folder / f"en_head_{i:04}.json.gz") for i in range(web.shards)]


WEB_RECORD = "small_web.json"


def write_small_web(settings: Settings) -> None:
    """Write the small web's files where one of them is missing or damaged; one of several processes does it."""
    files = small_web_files(settings)
    folder, web = files[0].path.parent, settings.corpus.small_web
    with locked(folder.with_name(f".{folder.name}.lock")):
        if damaged_beside(folder / WEB_RECORD, again=True):
            written = write_shards(folder, web.shards, web.documents, web.seed)
            hashes = {FILES: {file.name: file_hash(file) for file in written}}
            write_whole(folder / WEB_RECORD, sealed(str(folder), hashes))
            for file in written if isinstance(settings.paths.lake, str) else ():
                os.utime(file, (0, 0))  # machines that share the lake see the same shards


def _matches(root: Path, pattern: str) -> list[tuple[Path, Path]]:
    """Return (folder that names count from, file) of a pattern. Raises SettingsError where there is none."""
    whole = Path(rooted(pattern, root))
    if os.path.lexists(whole) and not whole.is_dir():
        return [(whole.parent, _regular(whole))]
    if whole.parent == whole:
        raise SettingsError(f"corpus.shards: {pattern!r} is the root folder; name the folder of the corpus")
    fixed = _fixed(whole)
    files = [(fixed, _regular(path)) for path in _below(fixed, whole) if _is_data(path, fixed)]
    if not files:
        empty = f"is a folder without JSON lines or Parquet; write {pattern}/* for files of other names"
        reason = empty if whole.is_dir() else f"matches no file under {root}; name existing shards"
        raise SettingsError(f"corpus.shards: {pattern!r} {reason}")
    return files


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _below(fixed: Path, whole: Path) -> Iterator[Path]:
    """Yield what a pattern matches below the folder `fixed`; of a folder alone, what is named like documents."""
    if fixed == whole:  # with the parts in a folder that is named as a file, as Spark writes them
        return (path for path in whole.rglob("*") if path.name.lower().endswith(DATA) and not _is_own_folder(path))
    below = str(whole.relative_to(fixed))
    matching = fixed.glob(f"{below}/*" if below.endswith("**") else below)
    return (path for path in matching if path.name.lower().endswith(DATA) or not path.is_dir())


def _regular(path: Path) -> Path:
    """Return a path that may be opened. Raises SettingsError for a folder, a pipe or a device, which may never end."""
    if kind := irregular(path):
        raise SettingsError(
            f"corpus.shards: {printable(path)} is a {kind}, and only regular files are shards; move it away or write a "
            "pattern that leaves it out"
        )
    return path


def _fixed(pattern: Path) -> Path:
    """Return the folders before the first wildcard; brackets in the name of a folder that is there are none."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[1:]:
        if any(sign in part for sign in "*?[") and not (fixed / part).is_dir():
            break
        fixed = fixed / part
    return fixed


def _is_data(path: Path, fixed: Path) -> bool:
    """Return whether a file below `fixed` may hold documents; Dolma keeps attributes of them in a folder beside."""
    below = path.relative_to(fixed)
    if any(part.startswith((".", "_")) for part in below.parts) or SIDE_FILE.fullmatch(path.name):
        return False
    folders = (fixed / folder for folder in below.parents)
    return not any(one.name == "attributes" and one != fixed and (one.parent / "documents").is_dir() for one in folders)


def _named(paths: list[tuple[Path, Path]]) -> list[ShardFile]:
    stems = [_stem(printable(path.relative_to(folder))) for folder, path in paths]
    counts = Counter(stems)
    shared = [path for stem, (_, path) in zip(stems, paths, strict=True) if counts[stem] > 1]
    common = Path(os.path.commonpath([path.parent for path in shared])) if shared else Path()
    return [
        ShardFile(_short(stem if counts[stem] == 1 else printable(path.relative_to(common))), path)
        for stem, (_, path) in zip(stems, paths, strict=True)
    ]


def _stem(name: str) -> str:
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def _short(name: str) -> str:
    mark, kept, short = f"~{fingerprint(printable(name))}~", len(name), name
    while len(file_name(printable(short)).encode()) > LONGEST_NAME:
        kept -= 1
        short = f"{name[: kept // 3]}{mark}{name[-(kept - kept // 3) :]}"
    return short
