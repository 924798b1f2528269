"""The shards of recorded conversations: files, groups of small files, and splits of data sets of the hub.

A shard is what a part of every table of recorded conversations is made of. Its name tells its files apart from those of
other commands over the same lake, so that two commands which judge different files write different parts.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from toolformer_dag.computing.hub_pins import build_pin_path, parse_split, read_pin
from toolformer_dag.computing.shards import shorten_name
from toolformer_dag.files import UserError, irregular, seal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.storage import Storage
from toolformer_dag.settings.setting_types import expand_home, to_printable
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.readers.hub_datasets import HubError, HubSplit, iter_hub_rows, resolve_splits
from toolformer_dag.texts.record_files import RECORD_ENDINGS, NumberedRecord, file_records
from toolformer_dag.texts.shard_reader import COMPRESSION_BY_ENDING

log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20
"""A file of fewer bytes is small: it may share a shard with others of its folder."""
MANY_FILES = 64
"""Small files of one folder that share no shard yet; where there are more, they are put into groups."""
PACKED = 8
"""How many bytes a byte of a compressed file is taken to hold."""
GROUP_FILES = 512
"""The most files of a group."""
GROUP_BYTES = 1 << 26
"""About the most bytes of a group, 64 MB."""

Records = Iterator[NumberedRecord | Rejection]
"""The records of a file, and in place of what is none, why."""


class Source(NamedTuple):
    """A file or split by the name that people see, such as `inner/traces.jsonl`, and its records.

    Iterating over the records raises ShardFault and ShardError.
    """

    name: str
    records: Records


@dataclass(frozen=True, slots=True)
class ConversationFile:
    """A file of conversations.

    - `name`: what people see: its path below the folder that they named, or the name of the file
    - `path`: where it lies
    - `folder`: the folder that they named, or that the file lies in
    """

    name: str
    path: Path
    folder: Path

    def stamp(self) -> dict[str, Any]:
        """Return size and time of change; nothing for a file that is not there."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


@dataclass(frozen=True, slots=True)
class FileShard:
    """A file that makes a shard of its own."""

    name: str
    file: ConversationFile

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return to_printable(self.file.path)

    def stamp(self) -> dict[str, Any]:
        """Return what tells that the file changed."""
        return self.file.stamp()

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return False

    def files(self) -> Iterator[Source]:
        """Yield the file with its records."""
        yield Source(self.file.name, file_records(self.file.path))


@dataclass(frozen=True, slots=True)
class GroupShard:
    """Small files of a folder that make a shard together, sorted by name."""

    name: str
    members: tuple[ConversationFile, ...]

    @property
    def place(self) -> str:
        """Where they lie, for messages."""
        return f"{len(self.members)} files of {to_printable(self.members[0].folder)}"

    def stamp(self) -> dict[str, Any]:
        """Return what tells that one of the files changed, came or went."""
        return {"files": {file.name: file.stamp() for file in self.members}}

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return True

    def files(self) -> Iterator[Source]:
        """Yield the files with their records."""
        for file in self.members:
            yield Source(file.name, file_records(file.path))


@dataclass(frozen=True, slots=True)
class HubShard:
    """A split of a data set of the hub, at a commit."""

    name: str
    split: HubSplit

    @property
    def place(self) -> str:
        """Where it lies, for messages."""
        return f"{self.split.hub}, split {self.split.split}"

    def stamp(self) -> dict[str, Any]:
        """Return the commit."""
        return {"revision": self.split.revision}

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return False

    def files(self) -> Iterator[Source]:
        """Yield the split with its rows."""
        numbered = (NumberedRecord(number, row) for number, row in enumerate(iter_hub_rows(self.split), 1))
        yield Source(self.split.split, numbered)


ConversationShard = FileShard | GroupShard | HubShard


def conversation_shards(sources: Sequence[str], storage: Storage) -> dict[str, ConversationShard]:
    """List the shards of recorded conversations by name.

    A shard is a file, a group of small files, or a split of a data set.

    Args:
        sources: Files (JSON lines, JSON or Parquet, also compressed as .gz or .zst), folders with such files, or names
            of data sets on the Hugging Face hub. Hidden files in the folders are left out.
        storage: The storage of the lake. It remembers which commit of a data set is used.

    Raises:
        UserError: A source is none of these, or a folder has no such file.
    """
    files: list[ConversationFile] = []
    shards: list[ConversationShard] = []

    distinct_sources = dict.fromkeys(sources)
    for source in distinct_sources:
        path = expand_home(Path(source))
        if os.path.lexists(path):
            files += _list_files_at(path, source)
        else:
            shards += _list_hub_shards(source, storage)

    shards += _iter_file_shards(_with_distinct_names(files))
    return {shard.name: shard for shard in shards}


def _list_files_at(path: Path, source: str) -> list[ConversationFile]:
    """Return the files with conversations below a folder, or the file that a path names. Raises UserError."""
    return _list_files_below(path, source) if path.is_dir() else [_require_regular_file(path)]


def _require_regular_file(path: Path) -> ConversationFile:
    """Return a file that the user has named.

    Raises:
        UserError: It is a pipe or a device, which may never end.
    """
    kind = irregular(path)
    if kind is not None:
        raise UserError(f"{to_printable(path)} is a {kind}, and only regular files are read; name a file or a folder")
    return ConversationFile(path.name, path, path.parent)


def _list_files_below(folder: Path, source: str) -> list[ConversationFile]:
    """List the files in a folder and its subfolders that may contain conversations.

    Args:
        folder: The folder.
        source: How the user has written it, for the error message.

    Raises:
        UserError: There is no such file.
    """
    paths = [path for path in folder.rglob("*") if _may_hold_conversations(path, folder)]
    if not paths:
        raise UserError(f"{source}: no file ends in {', '.join(RECORD_ENDINGS)}; name a file of conversations")
    return [ConversationFile(str(path.relative_to(folder)), path, folder) for path in paths]


def _may_hold_conversations(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder is a file of JSON lines, JSON or Parquet that is not hidden."""
    has_record_ending = path.name.lower().endswith(RECORD_ENDINGS)
    return has_record_ending and not _is_hidden(path.relative_to(folder)) and path.is_file()


def _is_hidden(path: Path) -> bool:
    """Return whether a file, or a folder of its relative path, is hidden."""
    return any(part.startswith(".") for part in path.parts)


def _with_distinct_names(files: Iterable[ConversationFile]) -> list[ConversationFile]:
    """Sort files by their path, drop repetitions of a file, and give each its own name.

    If several files have the same name, the first keeps it, and the others are named by their whole path.
    """
    taken_names: set[str] = set()
    renamed_files = []
    for path, file in sorted(_map_path_to_file(files).items()):
        is_taken = file.name in taken_names
        name = to_printable(path if is_taken else file.name)
        taken_names.add(file.name)

        renamed_file = ConversationFile(name=name, path=path, folder=file.folder.absolute())
        renamed_files.append(renamed_file)
    return renamed_files


def _map_path_to_file(files: Iterable[ConversationFile]) -> dict[Path, ConversationFile]:
    """Return the first of the files with each absolute path."""
    by_path: dict[Path, ConversationFile] = {}
    for file in files:
        by_path.setdefault(file.path.absolute(), file)
    return by_path


def _iter_file_shards(files: Sequence[ConversationFile]) -> Iterator[FileShard | GroupShard]:
    """Arrange files into shards: small files in groups if their folder has many of them, each other file alone."""
    grouped_files: set[ConversationFile] = set()
    for folder, small_files in _group_small_files_by_folder(files).items():
        if len(small_files) > MANY_FILES:
            grouped_files.update(small_files)
            yield from _iter_groups(folder, _with_hashes(small_files), prefix="")

    for file in files:
        if file not in grouped_files:
            yield _build_file_shard(file)


def _build_file_shard(file: ConversationFile) -> FileShard:
    """Return a shard of one file; the hash of its path tells apart files of one name in different folders."""
    return FileShard(shorten_name(f"{file.name}~{_hash_path(file.path)}"), file)


def _group_small_files_by_folder(files: Iterable[ConversationFile]) -> dict[Path, list[ConversationFile]]:
    """Select the files that are smaller than SMALL_BYTES when uncompressed, and group them by folder."""
    small_files_by_folder: dict[Path, list[ConversationFile]] = {}
    for file in files:
        if _estimate_unpacked_bytes(file) < SMALL_BYTES:
            small_files_by_folder.setdefault(file.folder, []).append(file)
    return small_files_by_folder


def _estimate_unpacked_bytes(file: ConversationFile) -> int:
    """Return about how many bytes the records of a file take; 0 for a file that is not there."""
    stored_bytes: int = file.stamp().get("bytes", 0)
    return stored_bytes * PACKED if file.path.suffix in COMPRESSION_BY_ENDING else stored_bytes


def _hash_path(path: Path) -> str:
    """Return a hash of an absolute path, as eight hexadecimal digits."""
    return fingerprint(to_printable(path.absolute()))[:8]


class _HashedFile(NamedTuple):
    """A file with the hash of its name, in hexadecimal digits."""

    hash: str
    file: ConversationFile


def _with_hashes(files: Iterable[ConversationFile]) -> list[_HashedFile]:
    """Return each file with the hash of its name."""
    return [_HashedFile(fingerprint(file.name), file) for file in files]


def _iter_groups(folder: Path, files: Sequence[_HashedFile], prefix: str) -> Iterator[GroupShard]:
    """Arrange the small files of a folder into groups, by the first bits of a hash of their names.

    If there are too many files for one group, they are split by the next bit of their hashes, and so on. A file that is
    added or removed therefore changes few groups, mostly its own.

    Args:
        folder: The folder.
        files: Files whose hashes begin with the same bits.
        prefix: These bits, such as "01"; at first none.
    """
    if _fit_in_one_group(files):
        yield _build_group(folder, [hashed_file.file for hashed_file in files], prefix)
        return

    # This ends, at the latest with single files, because different names have different hashes.
    next_bit = len(prefix)
    for bit in "01":
        half = [hashed_file for hashed_file in files if _get_bit(hashed_file.hash, next_bit) == bit]
        if half:
            yield from _iter_groups(folder, half, prefix + bit)


def _build_group(folder: Path, files: Iterable[ConversationFile], prefix: str) -> GroupShard:
    """Make files of a folder a shard. Its name contains `prefix`, the first bits that the hashes of the files share."""
    shard_name = f"{to_printable(folder.name)}~{_hash_path(folder)}~{prefix or 'all'}"
    sorted_files = sorted(files, key=lambda file: file.name)
    return GroupShard(shorten_name(shard_name), tuple(sorted_files))


def _fit_in_one_group(files: Sequence[_HashedFile]) -> bool:
    """Return whether files are few and small enough for one group. A single file always is."""
    total_bytes = sum(_estimate_unpacked_bytes(hashed_file.file) for hashed_file in files)
    is_within_limits = len(files) <= GROUP_FILES and total_bytes <= GROUP_BYTES
    return len(files) == 1 or is_within_limits


def _get_bit(hash: str, number: int) -> str:
    """Return one bit, "0" or "1", of a hash in hexadecimal digits. The first bit has the number 0."""
    digit = int(hash[number // 4], 16)
    bits = f"{digit:04b}"  # four bits for each digit
    return bits[number % 4]


HUB_ID = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
"""The id of a data set of the hub."""


def _list_hub_shards(source: str, storage: Storage) -> list[HubShard]:
    """List the splits (such as "train") of a data set on the Hugging Face hub. Each is a shard.

    Raises:
        UserError: There is no such data set, or the source looks like a file that does not exist.
    """
    may_be_data_set = HUB_ID.fullmatch(source) and not source.lower().endswith(RECORD_ENDINGS)
    if not may_be_data_set:
        raise UserError(f"{source}: there is no such file or folder; correct the path")

    try:
        splits = _read_or_pin_splits(source, storage)
    except HubError as error:
        raise UserError(f"{source}: no such file, and no data set of the hub ({error}); name either") from error
    return [HubShard(f"{source}~{split.split}", split) for split in splits]


def _read_or_pin_splits(hub: str, storage: Storage) -> list[HubSplit]:
    """List the splits of a data set on the Hugging Face hub, always at the commit that was found at the first use.

    The commit and the splits are remembered in a file of the lake, which is called a pin.

    Raises:
        HubError: The data set cannot be reached.
        Overtaken: The lake is in an object store, and another run has just written the pin.
    """
    pin_path = build_pin_path(storage, {"conversations": hub})
    pin = read_pin(storage, pin_path, hub, parse=lambda content: [parse_split(fields) for fields in content["splits"]])
    if pin.remembered is not None:
        return pin.remembered

    # The first use, or the pin is damaged.
    splits = resolve_splits(hub)
    new_pin = seal_record(hub, {"splits": [asdict(split) for split in splits]})
    storage.replace(pin_path, new_pin, pin.version)
    return splits
