"""Data sets of the Hugging Face Hub, or of a folder -> documents: each of their data files is a shard.

The library `datasets` streams them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.texts.columns import Batch, iter_document_batches
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.guarded_batches import guard_from_library_errors
from toolformer_dag.texts.readers.arrow_tables import TableRecords, iter_table_rows
from toolformer_dag.texts.shard_faults import ShardError, ShardFault

ROWS_PER_TABLE = 1000
"""Rows per batch."""


class HubError(ShardError):
    """A data set cannot be found, reached or understood. The message names it, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set, such as "train", at a fixed revision."""

    hub: str
    """The data set's id on the hub, or the path of a local folder."""
    configuration: str | None
    split: str
    revision: str
    """The commit on the hub; for a folder, a hash of its data files."""
    local: bool
    """Whether the data set is a local folder."""
    named: bool
    """Whether `files` are paths. Data sets whose shards are not files, such as those in archives, have none."""
    files: tuple[str, ...]
    """The shards of the split: the paths of its files, "data/a.parquet", or "train-00000-of-00002" if not `named`."""


def resolve_hub_split(
    dataset_id_or_folder: str, configuration: str | None, split_name: str, revision: str | None
) -> HubSplit:
    """Find a split of a data set at its present revision, and list its data files.

    No code of the data set is run.

    Args:
        dataset_id_or_folder: The data set's id on the hub, or a local folder. The hub is read with the token that
            `huggingface_hub` has stored.
        configuration: The configuration of the data set, if it has several.
        split_name: The name of the split.
        revision: A branch, tag or commit on the hub, or None for the main branch. It is not used for a folder.

    Raises:
        HubError: The data set cannot be read, or has no such configuration or split.
    """
    is_local = Path(dataset_id_or_folder).is_dir()
    commit = None if is_local else _fetch_commit(dataset_id_or_folder, revision)

    opened_split = _open_split(dataset_id_or_folder, configuration, split_name, commit)
    urls = opened_split.list_file_urls(split_name)
    paths = [_parse_path_in_dataset(url, dataset_id_or_folder, is_local=is_local) for url in urls]

    shard_count = opened_split.stream.num_shards
    shards_are_files = len(paths) == shard_count  # an archive may hold several shards
    shard_names = paths if shards_are_files else _build_shard_names(split_name, shard_count)

    return HubSplit(
        hub=dataset_id_or_folder,
        configuration=configuration,
        split=split_name,
        revision=commit or _hash_data_files(urls, paths),  # a folder has no commit
        local=is_local,
        named=shards_are_files,
        files=tuple(shard_names),
    )


def _build_shard_names(split_name: str, shard_count: int) -> list[str]:
    """Build names for shards that are not files: ["train-00000-of-00002", "train-00001-of-00002"]."""
    return [f"{split_name}-{number:05}-of-{shard_count:05}" for number in range(shard_count)]


def _hash_data_files(urls: list[str], paths: list[str]) -> str:
    """Compute a hash of the data files of a local folder, which changes when one of them does.

    Args:
        urls: The addresses of the files, as `datasets` names them.
        paths: Their paths in the folder, in the same order.
    """
    file_hashes = [file_hash(Path(_without_unpacking_prefix(url))) for url in urls]
    hashes_by_path = dict(zip(paths, file_hashes, strict=True))
    return fingerprint(hashes_by_path)


def resolve_hub_splits(dataset_id: str) -> list[HubSplit]:
    """Find all splits of a data set of the hub, at the present commit of its main branch.

    Raises:
        HubError: The data set cannot be read.
    """
    from datasets import get_dataset_split_names
    from datasets.exceptions import DatasetsError

    commit = _fetch_commit(dataset_id, revision=None)
    try:
        split_names = get_dataset_split_names(dataset_id, revision=commit)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        reason = _get_first_error_line(error)
        raise HubError(f"{dataset_id} cannot be opened ({reason}); name a data set with one configuration") from error

    return [resolve_hub_split(dataset_id, None, str(split_name), commit) for split_name in split_names]


def iter_hub_rows(hub_split: HubSplit) -> Iterator[Any]:
    """Yield the rows of a split as dicts with values of JSON, one data file after another.

    Raises:
        ShardFault: A data file cannot be parsed (unreadable_data).
        ShardError: A data file or the hub cannot be reached.
    """
    for file_index in range(len(hub_split.files)):
        tables = guard_from_library_errors(_iter_tables(hub_split, file_index))
        for table in tables:
            yield from iter_table_rows(table)


def iter_hub_batches(hub_split: HubSplit, file_index: int, format_choice: FormatChoice) -> Iterator[Batch]:
    """Read the documents of a data file in batches, with the rejections of each batch.

    Args:
        hub_split: The split of the data set.
        file_index: The index of the file in the split, from 0.
        format_choice: What the settings say about the format.

    Raises:
        ShardFault: `datasets` cannot read the file (unreadable_data). One malformed JSON line is enough for this.
        ShardError: The hub cannot be reached.
    """
    raw_batches = _iter_raw_batches(hub_split, file_index, format_choice)
    document_batches = iter_document_batches(raw_batches)
    return guard_from_library_errors(document_batches)


def _iter_raw_batches(hub_split: HubSplit, file_index: int, format_choice: FormatChoice) -> Iterator[Batch]:
    """Yield the rows of a data file as batches of raw columns.

    Args:
        hub_split: The split of the data set.
        file_index: The index of the file in the split, from 0.
        format_choice: What the settings say about the format.

    Raises:
        ShardFault: The file has no rows (empty_shard), cannot be parsed (unreadable_data), or its rows do not fit
            the format (see `TableRecords`).
        ShardError: The file or the hub cannot be reached.
    """
    records: TableRecords | None = None  # built from the first table

    for table in _iter_tables(hub_split, file_index):
        if records is None:
            records = TableRecords(table.schema, format_choice, first_tables=[table])
        yield records.read_batch(table)

    if records is None:
        raise ShardFault("empty_shard", "the data file has no rows")


def _iter_tables(hub_split: HubSplit, file_index: int) -> Iterator[pa.Table]:
    """Read a data file of a split as Arrow tables.

    Args:
        hub_split: The split of the data set.
        file_index: The index of the file in the split, from 0.

    Raises:
        ShardFault: The content cannot be parsed (unreadable_data).
        ShardError: The file or the hub cannot be reached.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield from _iter_arrow_tables(hub_split, file_index)
    except (DatasetsError, pa.ArrowException, ValueError, TypeError, KeyError, EOFError) as error:
        message = " ".join(str(error).split())
        remedy = "download the data set and name its files in corpus.shards"
        raise ShardFault("unreadable_data", f"datasets: {message}; {remedy}") from error
    except OSError as error:
        raise ShardError(f"{hub_split.hub} cannot be read ({error}); try again, or correct corpus.hub") from error


def _iter_arrow_tables(hub_split: HubSplit, file_index: int) -> Iterator[pa.Table]:
    """Yield the rows of a data file as Arrow tables. Errors of the library `datasets` are raised unchanged."""
    revision = None if hub_split.local else hub_split.revision
    opened_split = _open_split(hub_split.hub, hub_split.configuration, hub_split.split, revision)

    stream = opened_split.stream
    data_file = stream.shard(num_shards=stream.num_shards, index=file_index)
    yield from data_file.with_format("arrow").iter(batch_size=ROWS_PER_TABLE)


class _OpenedSplit(NamedTuple):
    """A split as the library `datasets` opens it."""

    builder: Any  # datasets.DatasetBuilder
    stream: Any  # datasets.IterableDataset

    def list_file_urls(self, split_name: str) -> list[str]:
        """List the addresses of the data files of a split. A data set that is not made of files has none."""
        urls_by_split = self.builder.config.data_files or {}
        return [str(url) for url in urls_by_split.get(split_name, ())]


def _open_split(
    dataset_id_or_folder: str, configuration: str | None, split_name: str, revision: str | None
) -> _OpenedSplit:
    """Open a split of a data set.

    Raises:
        HubError: The data set cannot be opened, or has no such split.
    """
    from datasets.exceptions import DatasetsError

    builder = _load_dataset_builder(dataset_id_or_folder, configuration, revision)

    try:
        stream = builder.as_streaming_dataset(split=split_name)
    except (DatasetsError, ValueError, OSError) as error:
        known_names = [str(name) for name in builder.config.data_files or ()]
        known_splits = ", ".join(known_names) or "none"
        raise HubError(
            f"corpus.split: {dataset_id_or_folder} has no split {split_name!r}; it has {known_splits}"
        ) from error

    return _OpenedSplit(builder, stream)


def _load_dataset_builder(dataset_id_or_folder: str, configuration: str | None, revision: str | None) -> Any:
    """Load the datasets.DatasetBuilder of a data set.

    Raises:
        HubError: The data set cannot be opened.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset_builder(dataset_id_or_folder, name=configuration, revision=revision)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        reason = _get_first_error_line(error)
        raise HubError(
            f"corpus.hub: {dataset_id_or_folder} cannot be opened ({reason}); correct corpus.hub, corpus.configuration "
            "or corpus.revision, or log in with `hf auth login`"
        ) from error


def _fetch_commit(dataset_id: str, revision: str | None) -> str:
    """Ask the hub for the commit of a revision of a data set, or of its main branch.

    Raises:
        HubError: The hub does not answer, or has no such data set or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(dataset_id, revision=revision).sha)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = _get_first_error_line(error)
        raise HubError(
            f"corpus.hub: {dataset_id} is no folder, and the hub does not give it ({reason}); correct corpus.hub or "
            "corpus.revision, log in with `hf auth login`, or try again with a connection"
        ) from error


def _parse_path_in_dataset(url: str, dataset_id_or_folder: str, *, is_local: bool) -> str:
    """Extract the path of a data file within its data set: "data/a.gz" for hf://datasets/org/name@commit/data/a.gz.

    Args:
        url: The address of the file, as `datasets` names it.
        dataset_id_or_folder: The data set's id on the hub, or its folder.
        is_local: Whether the data set is a folder.
    """
    address = _without_unpacking_prefix(url)  # "/data/a.gz" of "gzip://a::/data/a.gz"
    if is_local:
        folder = Path(dataset_id_or_folder).resolve()
        return Path(address).resolve().relative_to(folder).as_posix()

    _, _, commit_and_path = address.partition("@")
    _, _, path = commit_and_path.partition("/")
    return path or address  # an address without "@" stays whole


def _without_unpacking_prefix(url: str) -> str:
    """Remove the part of a data file's address that says how it is unpacked: "gzip://a::/data/a.gz" -> "/data/a.gz"."""
    _, _, address = url.partition("::")
    return address or url


def _get_first_error_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    message = str(error) or repr(error)
    return message.strip().splitlines()[0]
