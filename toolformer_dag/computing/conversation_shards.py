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
from toolformer_dag.computing.shards import shorten_shard_name
from toolformer_dag.files import UserError, find_irregular_kind, seal_record
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.storage import Storage
from toolformer_dag.settings.setting_types import expand_home, to_printable
from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.readers.hub_datasets import HubError, HubSplit, iter_hub_rows, resolve_hub_splits
from toolformer_dag.texts.record_files import RECORD_ENDINGS, NumberedRecord, iter_file_records
from toolformer_dag.texts.shard_reader import COMPRESSION_BY_ENDING

log = logging.getLogger(__name__)

SMALL_FILE_BYTES = 1 << 20
"""A file of fewer bytes is small, and may share a shard with other files of its folder."""
MAX_UNGROUPED_FILES = 64
"""How many small files of one folder get a shard each. If there are more, they are put into groups."""
COMPRESSION_RATIO = 8
"""How many bytes of content a byte of a compressed file is assumed to hold."""
MAX_GROUP_FILES = 512
"""The largest number of files in a group."""
MAX_GROUP_BYTES = 1 << 26
"""The largest size of a group of several files: 64 MB."""

Records = Iterator[NumberedRecord | Rejection]
"""The records of a file. Where something is not a record, a Rejection says why."""


class Source(NamedTuple):
    """A file, or a split of a data set, with its records.

    Attributes:
        name: The name that people see, such as `inner/traces.jsonl`.
        records: The records. Iterating over them may raise ShardFault or ShardError.
    """

    name: str
    records: Records


@dataclass(frozen=True, slots=True)
class ConversationFile:
    """A file of conversations.

    Attributes:
        name: The name that people see: its path below the folder that the user has named, or the name of the file.
        path: Where it lies.
        folder: The folder that the user has named, or the folder in which the file lies.
    """

    name: str
    path: Path
    folder: Path

    def read_stamp(self) -> dict[str, Any]:
        """Return the size and modification time of the file, which differ after a change. Empty if it is missing."""
        try:
            status = self.path.stat()
        except OSError:
            return {}
        return {"bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


@dataclass(frozen=True, slots=True)
class FileShard:
    """A shard that consists of one file."""

    name: str
    file: ConversationFile

    @property
    def location(self) -> str:
        """Where it lies, for messages."""
        return to_printable(self.file.path)

    def read_stamp(self) -> dict[str, Any]:
        """Return the size and modification time of the file, which differ after it has changed."""
        return self.file.read_stamp()

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return False

    def iter_sources(self) -> Iterator[Source]:
        """Yield the file with its records."""
        yield Source(self.file.name, iter_file_records(self.file.path))


@dataclass(frozen=True, slots=True)
class GroupShard:
    """A shard that consists of small files of a folder, sorted by name."""

    name: str
    member_files: tuple[ConversationFile, ...]

    @property
    def location(self) -> str:
        """Where they lie, for messages."""
        return f"{len(self.member_files)} files of {to_printable(self.member_files[0].folder)}"

    def read_stamp(self) -> dict[str, Any]:
        """Return the size and time of each file by name, which differ after a file was changed, added or removed."""
        return {"files": {file.name: file.read_stamp() for file in self.member_files}}

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return True

    def iter_sources(self) -> Iterator[Source]:
        """Yield the files with their records."""
        for file in self.member_files:
            yield Source(file.name, iter_file_records(file.path))


@dataclass(frozen=True, slots=True)
class HubShard:
    """A shard that is a split of a data set on the Hugging Face hub, at a commit."""

    name: str
    hub_split: HubSplit

    @property
    def location(self) -> str:
        """Where it lies, for messages."""
        return f"{self.hub_split.hub}, split {self.hub_split.split}"

    def read_stamp(self) -> dict[str, Any]:
        """Return the commit of the data set."""
        return {"revision": self.hub_split.revision}

    @property
    def is_group(self) -> bool:
        """Whether it has several files."""
        return False

    def iter_sources(self) -> Iterator[Source]:
        """Yield the split with its rows."""
        rows = iter_hub_rows(self.hub_split)
        numbered_records = (NumberedRecord(number, row) for number, row in enumerate(rows, start=1))
        yield Source(self.hub_split.split, numbered_records)


ConversationShard = FileShard | GroupShard | HubShard


def collect_conversation_shards(sources: Sequence[str], storage: Storage) -> dict[str, ConversationShard]:
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

    shards += _iter_file_shards(_give_distinct_names(files))
    return {shard.name: shard for shard in shards}


def _list_files_at(path: Path, source: str) -> list[ConversationFile]:
    """List the files with conversations below a folder, or the single file that a path names.

    Args:
        path: A folder or file that exists.
        source: How the user has written it, for error messages.

    Raises:
        UserError: The folder has no such file, or the path is a pipe or device.
    """
    if path.is_dir():
        return _list_files_below(path, source)
    return [_require_regular_file(path)]


def _require_regular_file(path: Path) -> ConversationFile:
    """Return a file that the user has named as a ConversationFile.

    Raises:
        UserError: It is a pipe or a device, which may never end.
    """
    kind = find_irregular_kind(path)
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
    if not has_record_ending or _is_hidden(path.relative_to(folder)):
        return False
    return path.is_file()


def _is_hidden(path: Path) -> bool:
    """Return whether a file, or a folder in its relative path, is hidden: its name begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def _give_distinct_names(files: Iterable[ConversationFile]) -> list[ConversationFile]:
    """Sort files by their path, drop repetitions of a file, and give each its own name.

    If several files have the same name, the first keeps it, and the others are named by their whole path.
    """
    files_by_path = sorted(_map_path_to_file(files).items())

    taken_names: set[str] = set()
    renamed_files = []
    for path, file in files_by_path:
        is_taken = file.name in taken_names
        taken_names.add(file.name)

        distinct_name = to_printable(path if is_taken else file.name)
        renamed_files.append(ConversationFile(distinct_name, path, folder=file.folder.absolute()))
    return renamed_files


def _map_path_to_file(files: Iterable[ConversationFile]) -> dict[Path, ConversationFile]:
    """Return the files by their absolute path. If a file occurs twice, the first occurrence is kept."""
    file_by_path: dict[Path, ConversationFile] = {}
    for file in files:
        file_by_path.setdefault(file.path.absolute(), file)
    return file_by_path


def _iter_file_shards(files: Sequence[ConversationFile]) -> Iterator[FileShard | GroupShard]:
    """Arrange files into shards: small files in groups if their folder has many of them, each other file alone."""
    grouped_files: set[ConversationFile] = set()
    for folder, small_files in _group_small_files_by_folder(files).items():
        if len(small_files) > MAX_UNGROUPED_FILES:
            grouped_files.update(small_files)
            hashed_files = _hash_file_names(small_files)
            yield from _iter_groups(folder, hashed_files, hash_prefix="")

    for file in files:
        if file not in grouped_files:
            yield _build_file_shard(file)


def _build_file_shard(file: ConversationFile) -> FileShard:
    """Make a file a shard.

    The name of the shard ends in a hash of the path, so that files of the same name in different folders differ.
    """
    shard_name = f"{file.name}~{_hash_path(file.path)}"
    return FileShard(shorten_shard_name(shard_name), file)


def _group_small_files_by_folder(files: Iterable[ConversationFile]) -> dict[Path, list[ConversationFile]]:
    """Select the files that are smaller than SMALL_FILE_BYTES when uncompressed, and group them by folder."""
    small_files_by_folder: dict[Path, list[ConversationFile]] = {}
    for file in files:
        if _estimate_unpacked_bytes(file) < SMALL_FILE_BYTES:
            small_files_by_folder.setdefault(file.folder, []).append(file)
    return small_files_by_folder


def _estimate_unpacked_bytes(file: ConversationFile) -> int:
    """Estimate how many bytes the content of a file takes when uncompressed. Return 0 for a missing file."""
    stored_bytes: int = file.read_stamp().get("bytes", 0)
    is_compressed = file.path.suffix in COMPRESSION_BY_ENDING
    return stored_bytes * COMPRESSION_RATIO if is_compressed else stored_bytes


def _hash_path(path: Path) -> str:
    """Return a hash of an absolute path, as eight hexadecimal digits."""
    return fingerprint(to_printable(path.absolute()))[:8]


class _HashedFile(NamedTuple):
    """A file with the hash of its name, as hexadecimal digits."""

    name_hash: str
    file: ConversationFile


def _hash_file_names(files: Iterable[ConversationFile]) -> list[_HashedFile]:
    """Return each file with the hash of its name."""
    return [_HashedFile(fingerprint(file.name), file) for file in files]


def _iter_groups(folder: Path, hashed_files: Sequence[_HashedFile], hash_prefix: str) -> Iterator[GroupShard]:
    """Arrange the small files of a folder into groups, by the first bits of a hash of their names.

    If there are too many files for one group, they are split by the next bit of their hashes, and so on. A file that is
    added or removed therefore changes few groups, mostly its own.

    Args:
        folder: The folder.
        hashed_files: Files whose hashes begin with the same bits.
        hash_prefix: These bits, such as "01". Empty at first.
    """
    if _can_form_one_group(hashed_files):
        files = [hashed_file.file for hashed_file in hashed_files]
        yield _build_group(folder, files, hash_prefix)
        return

    # This ends, at the latest with single files, because different names have different hashes.
    next_bit = len(hash_prefix)
    for bit in "01":
        half = [hashed_file for hashed_file in hashed_files if _get_bit(hashed_file.name_hash, next_bit) == bit]
        if half:
            yield from _iter_groups(folder, half, hash_prefix + bit)


def _build_group(folder: Path, files: Iterable[ConversationFile], hash_prefix: str) -> GroupShard:
    """Make files of a folder a shard.

    Args:
        folder: The folder.
        files: The files.
        hash_prefix: The first bits that the hashes of their names share, such as "01". It becomes part of the shard's
            name, so that no two groups of the folder have the same name.
    """
    shard_name = f"{to_printable(folder.name)}~{_hash_path(folder)}~{hash_prefix or 'all'}"
    sorted_files = sorted(files, key=lambda file: file.name)
    return GroupShard(shorten_shard_name(shard_name), tuple(sorted_files))


def _can_form_one_group(hashed_files: Sequence[_HashedFile]) -> bool:
    """Return whether files are few and small enough for one group. A single file always is."""
    if len(hashed_files) == 1:
        return True

    total_bytes = sum(_estimate_unpacked_bytes(hashed_file.file) for hashed_file in hashed_files)
    return len(hashed_files) <= MAX_GROUP_FILES and total_bytes <= MAX_GROUP_BYTES


def _get_bit(hex_hash: str, bit_index: int) -> str:
    """Return one bit, "0" or "1", of a hash in hexadecimal digits. The first bit has the number 0."""
    digit = int(hex_hash[bit_index // 4], 16)
    bits = f"{digit:04b}"  # four bits for each digit
    return bits[bit_index % 4]


HUB_ID_PATTERN = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*)?")
"""The id of a data set on the Hugging Face hub, such as "owner/name"."""


def _list_hub_shards(source: str, storage: Storage) -> list[HubShard]:
    """List the splits (such as "train") of a data set on the Hugging Face hub. Each is a shard.

    Args:
        source: The id of the data set, as the user has written it.
        storage: The storage of the lake. It remembers which commit of the data set is used.

    Raises:
        UserError: There is no such data set, or the source looks like a file that does not exist.
    """
    has_record_ending = source.lower().endswith(RECORD_ENDINGS)
    may_be_data_set = HUB_ID_PATTERN.fullmatch(source) and not has_record_ending
    if not may_be_data_set:
        raise UserError(f"{source}: there is no such file or folder; correct the path")

    try:
        splits = _read_or_pin_splits(source, storage)
    except HubError as error:
        raise UserError(f"{source}: no such file, and no data set of the hub ({error}); name either") from error
    return [HubShard(f"{source}~{split.split}", split) for split in splits]


def _read_or_pin_splits(dataset_name: str, storage: Storage) -> list[HubSplit]:
    """List the splits of a data set on the Hugging Face hub, always at the commit that was found at the first use.

    The commit and the splits are remembered in a file of the lake, which is called a pin.

    Raises:
        HubError: The data set cannot be reached.
        Overtaken: The lake is in an object store, and another run has just written the pin.
    """
    pin_path = build_pin_path(storage, {"conversations": dataset_name})
    pin = read_pin(
        storage,
        pin_path,
        dataset_name,
        parse_content=lambda content: [parse_split(fields) for fields in content["splits"]],
    )
    if pin.remembered_value is not None:
        return pin.remembered_value

    # The first use, or the pin is damaged.
    splits = resolve_hub_splits(dataset_name)
    pin_content = {"splits": [asdict(split) for split in splits]}
    new_pin = seal_record(dataset_name, pin_content)
    storage.replace(pin_path, new_pin, pin.file_version)
    return splits
