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
    FILES_FIELD,
    encode_file_name,
    find_irregular_kind,
    hold_file_lock,
    list_damaged_files,
    seal_record,
    write_file_atomically,
)
from toolformer_dag.identity import compute_file_content_hash, file_hash, fingerprint
from toolformer_dag.lake.storage import Storage
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.corpus_settings import CorpusSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.setting_types import SettingsError, expand_home, to_absolute_pattern, to_printable
from toolformer_dag.synthetic.web import WEB_VERSION, write_shards
from toolformer_dag.texts.columns import Batch
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.readers.hub_datasets import HubSplit, iter_hub_batches, resolve_hub_split
from toolformer_dag.texts.shard_reader import (
    COMPRESSION_BY_ENDING,
    CONTAINER_ENDINGS,
    PARQUET_ENDING,
    add_compression_endings,
    iter_shard_batches,
)

log = logging.getLogger(__name__)

MAX_NAME_BYTES = 240
"""The largest number of bytes in a shard's name. File systems allow 255, and `.json.damaged` may be appended."""
FILE_SUFFIXES = (*COMPRESSION_BY_ENDING, *CONTAINER_ENDINGS, PARQUET_ENDING)
"""The endings of a file's name that are left out of the name of the shard."""
DOCUMENT_FILE_ENDINGS = (PARQUET_ENDING, *add_compression_endings(CONTAINER_ENDINGS))
"""How the names of files with documents end, if a whole folder is named as the corpus."""
SIDE_FILE_PATTERN = re.compile(
    r".*\.(?:quality_signals|signals|minhash|duplicates)\.(?:json\.gz|parquet)|(?:dataset_infos?|state|stats)\.json"
)
"""Matches the files without documents that RedPajama-V2, `datasets` and datatrove put beside those with documents."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of documents, as a shard of the corpus.

    Attributes:
        name: The name of the shard. The part with its rows has this name in every table.
        path: Where the file lies.
    """

    name: str
    path: Path

    @property
    def location(self) -> str:
        """Where it lies, for messages."""
        return to_printable(self.path)

    def read_stamp(self) -> dict[str, Any]:
        """Return the size and modification time of the file, which differ after a change. Empty if it is missing."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}

    def iter_batches(self, format_choice: FormatChoice) -> Iterator[Batch]:
        """Yield its documents in batches, as `iter_shard_batches` does.

        Args:
            format_choice: How the documents are stored in the file.
        """
        return iter_shard_batches(self.path, format_choice)

    def build_record_fields(self) -> dict[str, Any]:
        """Return the fields that the record of the shard contains in addition: a hash of the content of the file.

        With it, the command `verify` notices a change that keeps size and time. Empty if the file cannot be read.
        """
        try:
            return {"content": compute_file_content_hash(self.path)}
        except OSError:  # reported as a rejection when the documents are read
            return {}


@dataclass(frozen=True, slots=True)
class HubFile:
    """A data file of a data set on the Hugging Face hub or in a local folder, as a shard of the corpus.

    Attributes:
        name: The name of the shard.
        hub_split: The split of the data set, such as "train", at a commit.
        file_index: Which of the files of the split it is, counted from 0.
    """

    name: str
    hub_split: HubSplit
    file_index: int

    @property
    def location(self) -> str:
        """Where it lies, for messages."""
        return f"{self.hub_split.hub}, file {self.name}"

    def read_stamp(self) -> dict[str, Any]:
        """Return values that differ after the file has changed, so that its tables are then made again.

        Returns:
            The configuration and split (the names of the part of the data set that is read), and its revision. For a
            file in a local folder, its size and modification time instead of the revision.
        """
        split = self.hub_split
        names = {"configuration": split.configuration or "", "split": split.split}

        # A data set in a local folder (`local`) whose shards are files (`named`), not entries of an archive.
        is_local_file = split.local and split.named
        if not is_local_file:
            return {**names, "revision": split.revision}

        path = Path(split.hub) / split.files[self.file_index]
        local_file = ShardFile(self.name, path)
        return {**names, **local_file.read_stamp()}

    def iter_batches(self, format_choice: FormatChoice) -> Iterator[Batch]:
        """Yield its documents in batches, as `iter_hub_batches` does.

        Args:
            format_choice: How the documents are stored in the file.
        """
        return iter_hub_batches(self.hub_split, self.file_index, format_choice)

    def build_record_fields(self) -> dict[str, Any]:
        """Return the fields that the record of the shard contains in addition: the data set and its revision.

        The revision is a commit or, for a local folder, a hash of the content of its files.
        """
        return {"hub": self.hub_split.hub, "revision": self.hub_split.revision}


Shard = ShardFile | HubFile


class _Match(NamedTuple):
    """A file that a pattern in `corpus.shards` matches.

    Attributes:
        folder: The beginning of the pattern without wildcards. The name of the shard is the path below it.
        path: The file.
    """

    folder: Path
    path: Path

    @property
    def stem(self) -> str:
        """The path below the folder without suffixes, such as "en/head_0000"."""
        return _strip_file_suffixes(to_printable(self.path.relative_to(self.folder)))


def list_shard_files(settings: Settings) -> list[ShardFile]:
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
    for file_index, shard_name in enumerate(shard_names):
        file = HubFile(name=shorten_shard_name(shard_name), hub_split=split, file_index=file_index)
        files.append(file)
    return sorted(files, key=lambda file: file.name)


def _choose_shard_names(file_names: Sequence[str]) -> Sequence[str]:
    """Return the names of files without suffixes, or with suffixes if two of them would have the same name."""
    names_without_suffixes = [_strip_file_suffixes(file) for file in file_names]
    are_distinct = len(set(names_without_suffixes)) == len(names_without_suffixes)
    return names_without_suffixes if are_distinct else file_names


def _resolve_corpus_split(settings: Settings) -> HubSplit:
    """List the data files of the data set in `corpus.hub`: a local folder, or a data set of the Hugging Face hub.

    Raises:
        HubError: The data set cannot be reached, or does not have the configuration or split of the settings.
    """
    corpus = settings.corpus
    assert corpus.hub is not None

    folder = settings.root / expand_home(Path(corpus.hub))
    if folder.is_dir():
        return resolve_hub_split(str(folder), corpus.configuration, corpus.split, revision=None)
    return _read_or_pin_split(corpus, Lake.from_settings(settings.paths).storage)


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
        parse_content=lambda content: parse_split(content["resolved"]),
        remedy="; corpus.revision fixes one",
    )
    if pin.remembered_value is not None:
        return pin.remembered_value

    # The first use, or the pin is damaged.
    split = resolve_hub_split(hub_name, corpus.configuration, corpus.split, corpus.revision)
    pin_content = {"asked": request, "resolved": asdict(split)}
    new_pin = seal_record("corpus.hub", pin_content)
    storage.replace(pin_path, new_pin, pin.file_version)
    return split


def _build_split_request(corpus: CorpusSettings) -> dict[str, str | None]:
    """Return the settings that name a split of a data set on the Hugging Face hub."""
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
    folder_name = f"v{WEB_VERSION}_seed-{web.seed}_{web.documents}-in-{web.shards}"
    folder = settings.paths.local_folder / "small_web" / folder_name

    files = []
    for number in range(web.shards):
        shard_name = f"small_web_{number:04}"
        files.append(ShardFile(shard_name, folder / f"en_head_{number:04}.json.gz"))
    return files


WEB_RECORD_NAME = "small_web.json"
"""The file beside the small web's files that has their hashes."""


def write_small_web(settings: Settings) -> None:
    """Write the files of the small web, a synthetic corpus, unless all of them are there and undamaged.

    If several processes call this at once, one writes and the others wait.
    """
    first_file = list_small_web_files(settings)[0]
    folder = first_file.path.parent

    lock_file = folder.with_name(f".{folder.name}.lock")
    with hold_file_lock(lock_file):
        # The files are read again even if they were found undamaged before.
        damaged_files = list_damaged_files(folder / WEB_RECORD_NAME, force_read=True)
        if damaged_files:
            _write_web_files(settings, folder)


def _write_web_files(settings: Settings, folder: Path) -> None:
    """Write the small web's files and the record of their hashes into a folder."""
    web = settings.corpus.small_web
    files = write_shards(folder, web.shards, web.documents, web.seed)

    hash_by_name = {file.name: file_hash(file) for file in files}
    record = seal_record(str(folder), {FILES_FIELD: hash_by_name})
    write_file_atomically(folder / WEB_RECORD_NAME, record)

    # Several machines may share a lake in an object store. Each writes these files for itself, and the records in the
    # lake have to fit the times of all of them.
    is_in_object_store = isinstance(settings.paths.lake, str)
    if is_in_object_store:
        _reset_modification_times(files)


def _reset_modification_times(files: Sequence[Path]) -> None:
    """Give files the same fixed modification time on every machine.

    Machines that share a lake have copies of their own, and compare the times of these with the records in the lake.
    """
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
        return [_Match(folder=path.parent, path=_require_regular_file(path))]

    is_root_folder = path.parent == path
    if is_root_folder:
        raise SettingsError(f"corpus.shards: {pattern!r} is the root folder; name the folder of the corpus")

    folder = _find_folder_before_wildcards(path)
    matches = _list_matches_below(folder, path)
    if not matches:
        raise _build_no_match_error(pattern, path, root)
    return matches


def _build_no_match_error(pattern: str, path: Path, root: Path) -> SettingsError:
    """Build the error for a pattern that matches no file.

    Args:
        pattern: The pattern as the user has written it.
        path: The pattern as an absolute path.
        root: The folder to which a relative pattern refers.
    """
    if path.is_dir():
        reason = f"is a folder without JSON lines or Parquet; write {pattern}/* for files of other names"
    else:
        reason = f"matches no file under {root}; name existing shards"
    return SettingsError(f"corpus.shards: {pattern!r} {reason}")


def _list_matches_below(folder: Path, pattern: Path) -> list[_Match]:
    """List the files of documents that a pattern matches.

    Args:
        folder: The beginning of the pattern up to the first wildcard, such as `/web`.
        pattern: A path with wildcards, such as `/web/*/en*.json`, or the folder itself.

    Raises:
        SettingsError: The pattern matches something that is not a regular file.
    """
    matches = []
    for file in _iter_files_below(folder, pattern):
        if _may_hold_documents(file, folder):
            matches.append(_Match(folder, _require_regular_file(file)))
    return matches


def _iter_files_below(folder: Path, pattern: Path) -> Iterator[Path]:
    """Find the files below a folder that a pattern matches.

    Args:
        folder: The beginning of the pattern up to the first wildcard, such as `/web`.
        pattern: A path with wildcards, such as `/web/*/en*.json`. A pattern without wildcards equals `folder`, and
            stands for all files in it and its subfolders that are named like files of documents.

    Yields:
        The files. A folder whose name ends like that of a file, such as `en.json`, is yielded too if a wildcard matches
        it, so that the caller reports the mistake.
    """
    is_whole_folder = pattern == folder
    if is_whole_folder:
        yield from _iter_document_files(folder)
        return

    wildcards = str(pattern.relative_to(folder))
    if wildcards.endswith("**"):
        wildcards = f"{wildcards}/*"  # a final `**` would match only folders

    for path in folder.glob(wildcards):
        if _has_document_ending(path) or not path.is_dir():
            yield path


def _iter_document_files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder that is named like a file of documents, except folders.

    Spark writes folders that are named like a file: `corpus.parquet/part-0.parquet`.
    """
    for path in folder.rglob("*"):
        if _has_document_ending(path) and not _is_folder(path):  # a link to a folder is refused later, by name
            yield path


def _has_document_ending(path: Path) -> bool:
    """Return whether a file or folder is named like a file of documents, in upper or lower case."""
    return path.name.lower().endswith(DOCUMENT_FILE_ENDINGS)


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _require_regular_file(path: Path) -> Path:
    """Check that a path is a regular file, and return it.

    Raises:
        SettingsError: It is a folder, or a pipe or device, which may never end.
    """
    kind = find_irregular_kind(path)
    if kind:
        raise SettingsError(
            f"corpus.shards: {to_printable(path)} is a {kind}, and only regular files are shards; move it away or "
            "write a pattern that leaves it out"
        )
    return path


def _find_folder_before_wildcards(pattern: Path) -> Path:
    """Return the beginning of an absolute pattern, up to the first wildcard: `/web/*/en.json` -> `/web`.

    A folder that exists under this very name, such as `/web/[en]`, does not count as a wildcard.
    """
    folder = Path(pattern.anchor)
    for part in pattern.parts[1:]:
        path = folder / part
        has_wildcard_character = any(character in part for character in "*?[")
        if has_wildcard_character and not path.is_dir():
            break
        folder = path
    return folder


def _may_hold_documents(path: Path, folder: Path) -> bool:
    """Return whether a file below a folder may contain documents of the corpus.

    It may not if it is hidden, if data sets publish files of this name beside their documents, or if it is in one of
    the folders named `attributes` of the data set Dolma.
    """
    relative_path = path.relative_to(folder)

    is_hidden = any(part.startswith((".", "_")) for part in relative_path.parts)
    if is_hidden or SIDE_FILE_PATTERN.fullmatch(path.name):
        return False

    parent_folders = [folder / parent for parent in relative_path.parents]
    subfolders = [parent_folder for parent_folder in parent_folders if parent_folder != folder]
    return not any(_is_attributes_folder(subfolder) for subfolder in subfolders)


def _is_attributes_folder(folder: Path) -> bool:
    """Return whether a folder is called `attributes` and lies beside a folder `documents`."""
    return folder.name == "attributes" and (folder.parent / "documents").is_dir()


def _name_shards(matches: list[_Match]) -> list[ShardFile]:
    """Name a shard for each file by its path below the folder of the pattern, without suffixes, as in "en/head_0000".

    Files that would have the same name are named by longer paths with suffixes instead.
    """
    count_by_name = Counter(match.stem for match in matches)

    shards = []
    ambiguous_paths = []
    for match in matches:
        if count_by_name[match.stem] == 1:
            shards.append(ShardFile(shorten_shard_name(match.stem), match.path))
        else:
            ambiguous_paths.append(match.path)
    return shards + _name_by_path(ambiguous_paths)


def _name_by_path(paths: Sequence[Path]) -> list[ShardFile]:
    """Name a shard for each file by its path, with suffixes, below the deepest folder that contains all the files."""
    if not paths:
        return []

    common_folder = os.path.commonpath([path.parent for path in paths])

    shards = []
    for path in paths:
        relative_path = path.relative_to(common_folder)
        shard_name = shorten_shard_name(to_printable(relative_path))
        shards.append(ShardFile(shard_name, path))
    return shards


def _strip_file_suffixes(name: str) -> str:
    """Return a file's name without the endings that say its format: `en/head.json.gz` -> `en/head`."""
    for suffix in FILE_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def shorten_shard_name(name: str) -> str:
    """Shorten a name so that its file name takes at most MAX_NAME_BYTES bytes. A short name stays as it is.

    The middle of a longer name is replaced by a hash of the whole name.
    """
    short_name = name
    kept_character_count = len(name)
    while _count_file_name_bytes(short_name) > MAX_NAME_BYTES:
        kept_character_count -= 1
        short_name = _shorten_middle(name, kept_character_count)
    return short_name


def _count_file_name_bytes(name: str) -> int:
    """Count the bytes in the file name of a shard, in which special characters are encoded."""
    return len(encode_file_name(to_printable(name)).encode())


def _shorten_middle(name: str, kept_character_count: int) -> str:
    """Replace the middle of a name by a hash of the name. A third of the kept characters is from its beginning."""
    first_count = kept_character_count // 3
    last_count = kept_character_count - first_count
    return f"{name[:first_count]}~{fingerprint(to_printable(name))}~{name[-last_count:]}"
