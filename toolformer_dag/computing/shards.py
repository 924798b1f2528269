"""The shards of the corpus: files that the settings name, those of a data set of the hub, or of the small web."""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolformer_dag.computing.hub_pins import build_pin_path, parse_split, read_pin
from toolformer_dag.files import (
    FILES,
    file_name,
    irregular,
    list_damaged_beside,
    locked,
    seal_record,
    write_whole,
)
from toolformer_dag.identity import file_hash, fingerprint, stream_hash
from toolformer_dag.lake.storage import Storage
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.corpus_settings import CorpusSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, expand_home, to_absolute_pattern, to_printable
from toolformer_dag.synthetic.web import VERSION, write_shards
from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers.hub_datasets import HubSplit, iter_hub_batches, resolve
from toolformer_dag.texts.shard_reader import (
    COMPRESSION_BY_ENDING,
    ENDINGS,
    PARQUET,
    iter_shard_batches,
    with_compressions,
)

log = logging.getLogger(__name__)

LONGEST_NAME = 240
"""Bytes of a shard's name at most; file systems take 255, and `.json.damaged` comes on top."""
SUFFIXES = (*COMPRESSION_BY_ENDING, *ENDINGS, PARQUET)
"""What a shard's name leaves out of the file's."""
DATA = (PARQUET, *with_compressions(ENDINGS))
"""How the names of documents end in a folder that is named as a whole."""
SIDE_FILE = re.compile(
    r".*\.(?:quality_signals|signals|minhash|duplicates)\.(?:json\.gz|parquet)|(?:dataset_infos?|state|stats)\.json"
)
"""What RedPajama-V2 publishes beside its documents, and what `datasets` and datatrove write beside theirs."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of documents, and the name of the shard: the part of every table that has its rows."""

    name: str
    path: Path

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return to_printable(self.path)

    def stamp(self) -> dict[str, Any]:
        """Return the size and the time of change of the file, by which changes are noticed; empty for a missing one."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def batches(self, choice: FormatChoice) -> Iterator[Batch]:
        """Read its documents; see `iter_shard_batches`."""
        return iter_shard_batches(self.path, choice)

    def facts(self) -> dict[str, Any]:
        """Return the hash of the file, with which `verify` notices a change that keeps size and time."""
        try:
            return {"content": stream_hash(self.path)}
        except OSError:  # reading says so, as a rejection
            return {}


@dataclass(frozen=True, slots=True)
class HubFile:
    """A data file of a data set of the hub, as a shard.

    - `name`: of the shard
    - `split`: the data set's configuration and split, at a commit
    - `number`: which of the split's files it is
    """

    name: str
    split: HubSplit
    number: int

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return f"{self.split.hub}, file {self.name}"

    def stamp(self) -> dict[str, Any]:
        """Return what tells that its content changed: size and time of a local file, else the data set's revision."""
        names = {"configuration": self.split.configuration or "", "split": self.split.split}
        is_local_file = self.split.local and self.split.named
        if not is_local_file:
            return {**names, "revision": self.split.revision}
        path = Path(self.split.hub) / self.split.files[self.number]
        return {**names, **ShardFile(self.name, path).stamp()}

    def batches(self, choice: FormatChoice) -> Iterator[Batch]:
        """Read its documents; see `iter_hub_batches`."""
        return iter_hub_batches(self.split, self.number, choice)

    def facts(self) -> dict[str, Any]:
        """Return the data set and its revision: a commit, or for a folder a hash of its files' content."""
        return {"hub": self.split.hub, "revision": self.split.revision}


Shard = ShardFile | HubFile


class _Match(NamedTuple):
    """A file that `corpus.shards` matches, and the folder from which its name counts."""

    folder: Path
    path: Path

    @property
    def stem(self) -> str:
        """The path below the folder without suffixes, such as "en/head_0000"."""
        return _strip_suffixes(to_printable(self.path.relative_to(self.folder)))


def shard_files(settings: Settings) -> list[ShardFile]:
    """List the files of the corpus, which the patterns in `corpus.shards` match. Each file is a shard.

    A pattern is a file, a path with wildcards, or a folder. A folder stands for the JSON lines and Parquet files in it
    and its subfolders. Hidden files are left out, and files that data sets publish beside their documents.

    Returns:
        The files, sorted by the name of the shard. That is the path below the folder of the pattern without suffixes,
        such as "en/head_0000". If two files would have the same name, a longer path with suffixes is used. Without
        patterns, the files of the small web, a synthetic corpus.

    Raises:
        SettingsError: A pattern matches no file, or something that is not a regular file.
    """
    if not settings.corpus.shards:
        return list_small_web_files(settings)

    matches: list[_Match] = []
    for pattern in settings.corpus.shards:
        matches += _list_matches(settings.root, pattern)

    distinct_matches = _drop_repeated_files(matches)  # a file that two patterns match is named by the first
    return sorted(_name_shards(distinct_matches), key=lambda shard: shard.name)


def _drop_repeated_files(matches: Sequence[_Match]) -> list[_Match]:
    """Keep only the first match of each file. A link to a file counts as the same file."""
    match_by_real_path: dict[str, _Match] = {}
    for match in reversed(matches):  # so that the first match is set last
        match_by_real_path[os.path.realpath(match.path)] = match
    return list(match_by_real_path.values())


def list_hub_files(settings: Settings) -> list[HubFile]:
    """List the data files of the data set named in `corpus.hub`, sorted by name. Each file is a shard.

    Raises:
        HubError: The data set cannot be reached, or does not have the configuration or split of the settings.
    """
    split = _resolve_corpus_split(settings)
    shard_names = _choose_shard_names(split.files)

    files = []
    for number, shard_name in enumerate(shard_names):
        files.append(HubFile(name=shorten_name(shard_name), split=split, number=number))
    return sorted(files, key=lambda file: file.name)


def _choose_shard_names(files: Sequence[str]) -> Sequence[str]:
    """Return the names of files without suffixes, or with suffixes if two of them would have the same name."""
    names_without_suffixes = [_strip_suffixes(file) for file in files]
    are_unique = len(set(names_without_suffixes)) == len(names_without_suffixes)
    return names_without_suffixes if are_unique else files


def _resolve_corpus_split(settings: Settings) -> HubSplit:
    """List the data files of the data set in `corpus.hub`: a local folder, or a data set of the Hugging Face hub.

    Raises:
        HubError: The data set cannot be reached, or does not have the configuration or split of the settings.
    """
    corpus = settings.corpus
    assert corpus.hub is not None

    folder = settings.root / expand_home(Path(corpus.hub))
    if folder.is_dir():
        return resolve(str(folder), corpus.configuration, corpus.split, revision=None)
    return _read_or_pin_split(corpus, Lake.of(settings.paths).storage)


def _read_or_pin_split(corpus: CorpusSettings, storage: Storage) -> HubSplit:
    """List the data files of a data set on the Hugging Face hub, always at the commit that was found at the first use.

    The commit and the list are remembered in a file of the lake, which is called a pin.

    Raises:
        HubError: The data set cannot be reached, or does not have the configuration or split of the settings.
        Overtaken: The lake is in an object store, and another run has just written the pin.
    """
    hub_name = str(corpus.hub)
    request = _build_split_request(corpus)
    pin_path = build_pin_path(storage, request)

    pin = read_pin(
        storage,
        pin_path,
        hub_name,
        parse=lambda content: parse_split(content["resolved"]),
        remedy="; corpus.revision fixes one",
    )
    if pin.remembered is not None:
        return pin.remembered

    # The first use, or the pin is damaged.
    split = resolve(hub_name, corpus.configuration, corpus.split, corpus.revision)
    new_pin = seal_record("corpus.hub", {"asked": request, "resolved": asdict(split)})
    storage.replace(pin_path, new_pin, pin.version)
    return split


def _build_split_request(corpus: CorpusSettings) -> dict[str, str | None]:
    """Return the settings that name a split of a data set of the hub."""
    return {
        "hub": corpus.hub,
        "configuration": corpus.configuration,
        "split": corpus.split,
        "revision": corpus.revision,
    }


def list_small_web_files(settings: Settings) -> list[ShardFile]:
    """List the files of the small web, a synthetic corpus, even if they are not written yet.

    The name of their folder contains everything that determines them, so other settings lead to other files.
    """
    web = settings.corpus.small_web
    folder_name = f"v{VERSION}_seed-{web.seed}_{web.documents}-in-{web.shards}"
    folder = settings.paths.local / "small_web" / folder_name

    files = []
    for number in range(web.shards):
        shard_name = f"small_web_{number:04}"
        files.append(ShardFile(shard_name, folder / f"en_head_{number:04}.json.gz"))
    return files


WEB_RECORD = "small_web.json"
"""The file beside the small web's files that has their hashes."""


def write_small_web(settings: Settings) -> None:
    """Write the files of the small web, a synthetic corpus, unless all of them are there and undamaged.

    If several processes call this at once, one writes and the others wait.
    """
    folder = list_small_web_files(settings)[0].path.parent
    lock_file = folder.with_name(f".{folder.name}.lock")
    with locked(lock_file):
        damaged_files = list_damaged_beside(folder / WEB_RECORD, again=True)  # again: check files checked before, too
        if damaged_files:
            _write_web_files(settings, folder)


def _write_web_files(settings: Settings, folder: Path) -> None:
    """Write the small web's files and the record of their hashes into a folder."""
    web = settings.corpus.small_web
    files = write_shards(folder, web.shards, web.documents, web.seed)
    hashes = {file.name: file_hash(file) for file in files}
    write_whole(folder / WEB_RECORD, seal_record(str(folder), {FILES: hashes}))
    is_in_object_store = isinstance(settings.paths.lake, str)
    if is_in_object_store:
        _clear_times(files)


def _clear_times(files: Sequence[Path]) -> None:
    """Give files one fixed time of change: machines that share the lake compare the times of their own copies."""
    for file in files:
        os.utime(file, (0, 0))


def _list_matches(root: Path, pattern: str) -> list[_Match]:
    """List the files that a pattern of the setting `corpus.shards` matches.

    Args:
        root: The folder to which a relative pattern refers.
        pattern: A file, a folder, or a path with wildcards.

    Raises:
        SettingsError: The pattern matches no file, or something that is not a regular file.
    """
    path = Path(to_absolute_pattern(pattern, root))

    # A broken link counts as a file, so that the error about it appears when it is read.
    is_file = os.path.lexists(path) and not path.is_dir()
    if is_file:
        return [_Match(folder=path.parent, path=_require_regular(path))]

    is_root_folder = path.parent == path
    if is_root_folder:
        raise SettingsError(f"corpus.shards: {pattern!r} is the root folder; name the folder of the corpus")

    folder = _find_folder_before_wildcards(path)
    matches = _list_matches_below(folder, path)
    if not matches:
        raise _build_no_match_error(pattern, path, root)
    return matches


def _build_no_match_error(pattern: str, path: Path, root: Path) -> SettingsError:
    """Return the error for a pattern that matches nothing. path: the pattern below `root`."""
    if path.is_dir():
        reason = f"is a folder without JSON lines or Parquet; write {pattern}/* for files of other names"
    else:
        reason = f"matches no file under {root}; name existing shards"
    return SettingsError(f"corpus.shards: {pattern!r} {reason}")


def _list_matches_below(folder: Path, pattern: Path) -> list[_Match]:
    """Return the files of documents that a pattern matches. folder: the part of the pattern before wildcards."""
    matches = []
    for file in _iter_files_below(folder, pattern):
        if _may_hold_documents(file, folder):
            matches.append(_Match(folder, _require_regular(file)))
    return matches


def _iter_files_below(folder: Path, pattern: Path) -> Iterator[Path]:
    """Find the files below a folder that a pattern matches.

    Args:
        folder: The beginning of the pattern up to the first wildcard, such as `/web`.
        pattern: A path with wildcards, such as `/web/*/en*.json`. Without wildcards, the folder itself, which stands
            for all files in it that are named like files of documents.

    Yields:
        The files. A folder is left out, unless a wildcard matches it and it is named like a file of documents. The
        caller then reports it as an error.
    """
    is_whole_folder = pattern == folder
    if is_whole_folder:
        yield from _iter_data_files(folder)
        return

    wildcards = str(pattern.relative_to(folder))
    if wildcards.endswith("**"):
        wildcards = f"{wildcards}/*"  # a final `**` would match only folders

    for path in folder.glob(wildcards):
        if _is_named_as_data(path) or not path.is_dir():
            yield path


def _iter_data_files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder that is named like a file of documents (DATA), except folders.

    Spark writes folders that are named as a file: `corpus.parquet/part-0.parquet`.
    """
    for path in folder.rglob("*"):
        if _is_named_as_data(path) and not _is_folder(path):  # a link to a folder is refused later, by name
            yield path


def _is_named_as_data(path: Path) -> bool:
    """Return whether a file or folder is named like a file of documents, in upper or lower case."""
    return path.name.lower().endswith(DATA)


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder and no link to one."""
    return path.is_dir() and not path.is_symlink()


def _require_regular(path: Path) -> Path:
    """Check that a path is a regular file, and return it.

    Raises:
        SettingsError: It is a folder, or a pipe or device, which may never end.
    """
    kind = irregular(path)
    if kind:
        raise SettingsError(
            f"corpus.shards: {to_printable(path)} is a {kind}, and only regular files are shards; move it away or "
            "write a pattern that leaves it out"
        )
    return path


def _find_folder_before_wildcards(pattern: Path) -> Path:
    """Return the beginning of a pattern, up to the first folder or file with a wildcard: `/web/*/en.json` -> `/web`.

    A folder that exists under this very name, such as `/web/[en]`, does not count as a wildcard.
    """
    folder = Path(pattern.anchor)
    for part in pattern.parts[1:]:
        has_wildcard_character = any(character in part for character in "*?[")
        if has_wildcard_character and not (folder / part).is_dir():
            break
        folder = folder / part
    return folder


def _may_hold_documents(path: Path, folder: Path) -> bool:
    """Return whether a file below a folder may contain documents of the corpus.

    The answer is False for hidden files, for files that data sets publish beside their documents (SIDE_FILE), and for
    files in the folders named `attributes` of the data set Dolma.
    """
    relative_path = path.relative_to(folder)

    is_hidden = any(part.startswith((".", "_")) for part in relative_path.parts)
    if is_hidden or SIDE_FILE.fullmatch(path.name):
        return False

    subfolders = [folder / parent for parent in relative_path.parents if folder / parent != folder]
    return not any(_is_attributes_folder(subfolder) for subfolder in subfolders)


def _is_attributes_folder(folder: Path) -> bool:
    """Return whether a folder is called `attributes` and lies beside a folder `documents`."""
    return folder.name == "attributes" and (folder.parent / "documents").is_dir()


def _name_shards(matches: list[_Match]) -> list[ShardFile]:
    """Name a shard for each file by its path below the folder of the pattern, without suffixes, as in "en/head_0000".

    Files that would have the same name are named by longer paths with suffixes instead.
    """
    name_counts = Counter(match.stem for match in matches)
    shards = [ShardFile(shorten_name(match.stem), match.path) for match in matches if name_counts[match.stem] == 1]

    ambiguous_paths = [match.path for match in matches if name_counts[match.stem] > 1]
    return shards + _name_by_path(ambiguous_paths)


def _name_by_path(paths: Sequence[Path]) -> list[ShardFile]:
    """Name a shard for each file by its path, with suffixes, below the deepest folder that contains all the files."""
    if not paths:
        return []

    common_folder = os.path.commonpath([path.parent for path in paths])

    shards = []
    for path in paths:
        relative_path = path.relative_to(common_folder)
        shard_name = shorten_name(to_printable(relative_path))
        shards.append(ShardFile(shard_name, path))
    return shards


def _strip_suffixes(name: str) -> str:
    """Return a file's name without SUFFIXES: `en/head.json.gz` -> `en/head`."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def shorten_name(name: str) -> str:
    """Shorten a name so that its file name takes at most LONGEST_NAME bytes. A short name stays as it is.

    The middle of a longer name is replaced by a hash of the whole name.
    """
    short_name = name
    kept_characters = len(name)
    while _count_name_bytes(short_name) > LONGEST_NAME:
        kept_characters -= 1
        short_name = _shorten_middle(name, kept_characters)
    return short_name


def _count_name_bytes(name: str) -> int:
    """Return how many bytes the name of a shard's file takes."""
    return len(file_name(to_printable(name)).encode())


def _shorten_middle(name: str, kept_characters: int) -> str:
    """Replace the middle of a name by a hash of the name. A third of the kept characters is from its beginning."""
    first_count = kept_characters // 3
    last_count = kept_characters - first_count
    return f"{name[:first_count]}~{fingerprint(to_printable(name))}~{name[-last_count:]}"
