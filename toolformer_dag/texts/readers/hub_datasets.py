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
    """A data set that cannot be found, reached or understood. The message names it, the reason and the remedy."""


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


def resolve(hub: str, configuration: str | None, split: str, revision: str | None) -> HubSplit:
    """Find a split of a data set at its present revision, and list its data files.

    No code of the data set is run.

    Args:
        hub: The data set's id on the hub, which is read with the token that `huggingface_hub` has stored, or a folder.
        configuration: The configuration of the data set, if it has several.
        split: The name of the split.
        revision: A branch, tag or commit on the hub, or None for the main branch. It is not used for a folder.

    Raises:
        HubError: The data set cannot be read, or has no such configuration or split.
    """
    is_local = Path(hub).is_dir()
    commit = None if is_local else _fetch_commit(hub, revision)

    opened = _open_split(hub, configuration, split, commit)
    urls = opened.list_file_urls(split)
    paths = [_parse_path_in_dataset(url, hub, is_local=is_local) for url in urls]

    shard_count = opened.stream.num_shards
    shards_are_files = len(paths) == shard_count  # an archive may hold several shards
    shard_names = paths if shards_are_files else _build_shard_names(split, shard_count)

    fixed_revision = commit or _compute_files_hash(urls, paths)  # the hash for a folder, which has no commits

    return HubSplit(
        hub=hub,
        configuration=configuration,
        split=split,
        revision=fixed_revision,
        local=is_local,
        named=shards_are_files,
        files=tuple(shard_names),
    )


def _build_shard_names(split: str, count: int) -> list[str]:
    """Return names for shards that are not files: ["train-00000-of-00002", "train-00001-of-00002"]."""
    return [f"{split}-{number:05}-of-{count:05}" for number in range(count)]


def _compute_files_hash(urls: list[str], paths: list[str]) -> str:
    """Return a hash of the data files of a local folder. urls: their addresses; paths: their paths in the folder."""
    hashes = [file_hash(Path(_without_chain(url))) for url in urls]
    return fingerprint(dict(zip(paths, hashes, strict=True)))


def resolve_splits(hub: str) -> list[HubSplit]:
    """Find all splits of a data set of the hub, at the present commit of its main branch.

    Raises:
        HubError: The data set cannot be read.
    """
    from datasets import get_dataset_split_names
    from datasets.exceptions import DatasetsError

    commit = _fetch_commit(hub, None)
    try:
        names = get_dataset_split_names(hub, revision=commit)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise HubError(
            f"{hub} cannot be opened ({_get_first_line(error)}); name a data set with one configuration"
        ) from error

    return [resolve(hub, None, str(name), commit) for name in names]


def iter_hub_rows(split: HubSplit) -> Iterator[Any]:
    """Yield the rows of a split as JSON has them, data file by data file. Raises ShardFault, ShardError."""
    for number in range(len(split.files)):
        for table in guard_from_library_errors(_iter_tables(split, number)):
            yield from iter_table_rows(table)


def iter_hub_batches(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    """Read the documents of a data file in batches, with the rejections of each batch.

    Args:
        number: The number of the file in the split, from 0.
        choice: What the settings say about the format.

    Raises:
        ShardFault: `datasets` cannot read the file (unreadable_data). One malformed JSON line is enough for this.
        ShardError: The hub cannot be reached.
    """
    return guard_from_library_errors(iter_document_batches(_iter_raw_batches(split, number, choice)))


def _iter_raw_batches(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    """Yield the rows of a data file as batches of columns. Raises ShardFault empty_shard; see also `_iter_tables`."""
    records: TableRecords | None = None
    for table in _iter_tables(split, number):
        if records is None:
            records = TableRecords(table.schema, choice, [table])
        yield records.batch(table)
    if records is None:
        raise ShardFault("empty_shard", "the data file has no rows")


def _iter_tables(split: HubSplit, number: int) -> Iterator[pa.Table]:
    """Read a data file of a split as Arrow tables.

    Args:
        number: The number of the file in the split, from 0.

    Raises:
        ShardFault: The content cannot be parsed (unreadable_data).
        ShardError: The file or the hub cannot be reached.
    """
    from datasets.exceptions import DatasetsError

    try:
        yield from _iter_arrow_tables(split, number)
    except (DatasetsError, pa.ArrowException, ValueError, TypeError, KeyError, EOFError) as error:
        message = " ".join(str(error).split())
        remedy = "download the data set and name its files in corpus.shards"
        raise ShardFault("unreadable_data", f"datasets: {message}; {remedy}") from error
    except OSError as error:
        raise ShardError(f"{split.hub} cannot be read ({error}); try again, or correct corpus.hub") from error


def _iter_arrow_tables(split: HubSplit, number: int) -> Iterator[pa.Table]:
    """Yield the rows of a data file as Arrow tables; errors of `datasets` are raised unchanged."""
    revision = None if split.local else split.revision
    stream = _open_split(split.hub, split.configuration, split.split, revision).stream
    data_file = stream.shard(num_shards=stream.num_shards, index=number)
    yield from data_file.with_format("arrow").iter(batch_size=ROWS_PER_TABLE)


class _OpenedSplit(NamedTuple):
    """A split as the library `datasets` opens it."""

    builder: Any  # datasets.DatasetBuilder
    stream: Any  # datasets.IterableDataset

    def list_file_urls(self, split: str) -> list[str]:
        """Return the addresses of the data files of a split."""
        urls_by_split = self.builder.config.data_files or {}
        return [str(url) for url in urls_by_split.get(split, ())]


def _open_split(hub: str, configuration: str | None, split: str, revision: str | None) -> _OpenedSplit:
    """Open a split of a data set.

    Raises:
        HubError: The data set cannot be opened, or has no such split.
    """
    from datasets.exceptions import DatasetsError

    builder = _load_builder(hub, configuration, revision)

    try:
        stream = builder.as_streaming_dataset(split=split)
    except (DatasetsError, ValueError, OSError) as error:
        splits = ", ".join(str(name) for name in builder.config.data_files or ())
        raise HubError(f"corpus.split: {hub} has no split {split!r}; it has {splits or 'none'}") from error

    return _OpenedSplit(builder, stream)


def _load_builder(hub: str, configuration: str | None, revision: str | None) -> Any:
    """Load the datasets.DatasetBuilder of a data set.

    Raises:
        HubError: The data set cannot be opened.
    """
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset_builder(hub, name=configuration, revision=revision)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} cannot be opened ({_get_first_line(error)}); correct corpus.hub, corpus.configuration "
            "or corpus.revision, or log in with `hf auth login`"
        ) from error


def _fetch_commit(hub: str, revision: str | None) -> str:
    """Ask the hub for the commit of a revision of a data set, or of its main branch.

    Raises:
        HubError: The hub does not answer, or has no such data set or revision.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(hub, revision=revision).sha)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} is no folder, and the hub does not give it ({_get_first_line(error)}); correct "
            "corpus.hub or corpus.revision, log in with `hf auth login`, or try again with a connection"
        ) from error


def _parse_path_in_dataset(url: str, hub: str, *, is_local: bool) -> str:
    """Extract the path of a data file within its data set: "data/a.gz" for hf://datasets/org/name@commit/data/a.gz.

    Args:
        url: The address of the file, as `datasets` names it.
        hub: The data set's id on the hub, or its folder.
        is_local: Whether the data set is a folder.
    """
    address = _without_chain(url)  # "/data/a.gz" of "gzip://a::/data/a.gz"
    if is_local:
        folder = Path(hub).resolve()
        return Path(address).resolve().relative_to(folder).as_posix()

    _, _, commit_and_path = address.partition("@")
    _, _, path = commit_and_path.partition("/")
    return path or address  # an address of another form, without "@", stays whole


def _without_chain(url: str) -> str:
    """Return the address of a data file without how to unpack it: "/data/a.gz" for "gzip://a::/data/a.gz"."""
    _, _, address = url.partition("::")
    return address or url


def _get_first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0]
