"""Read shards that are data files of a data set of the Hugging Face Hub, or of a folder, streamed by `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.texts.columns import Batch, documents_of
from toolformer_dag.texts.compression import ShardFault
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_reader import ShardError, guarded
from toolformer_dag.texts.tables import TableRecords

ROWS = 1000
"""Rows per batch."""


class HubError(ShardError):
    """A data set that cannot be found, reached or understood. The message names it, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class HubSplit:
    """A split of a data set at a fixed revision. `files`: its data files by their path in the data set.

    `revision`: the commit, or of a `local` folder the fingerprint of its data files. `named`: whether `files` are
    paths; the shards of other data sets, such as archives, only have numbers.
    """

    hub: str
    configuration: str | None
    split: str
    revision: str
    local: bool
    named: bool
    files: tuple[str, ...]


def resolve(hub: str, configuration: str | None, split: str, revision: str | None) -> HubSplit:
    """Ask the hub (with the user's own token, which `huggingface_hub` reads), or look at a local folder.

    Without a `revision` it is that of the main branch now. No code of a data set is run. Raises HubError.
    """
    local = Path(hub).is_dir()
    commit = None if local else _commit(hub, revision)
    builder, stream = _opened(hub, configuration, split, commit)
    urls = [str(url) for url in (builder.config.data_files or {}).get(split, ())]
    named = len(urls) == stream.num_shards
    if named:
        files = tuple(_path(url, hub, local) for url in urls)
    else:
        files = tuple(f"{split}-{number:05}-of-{stream.num_shards:05}" for number in range(stream.num_shards))
    if commit is None:
        paths = {_path(url, hub, local): file_hash(Path(url.partition("::")[2] or url)) for url in urls}
        commit = fingerprint(paths)
    return HubSplit(hub, configuration, split, commit, local, named, files)


def hub_batches(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    """Yield documents of a data file and what was refused, as `shard_batches` does; rows are numbered within the file.

    Raises ShardFault for data that `datasets` cannot read (unreadable_data), which stops no other data file, and
    ShardError where the hub cannot be reached. One malformed JSON line makes its whole data file unreadable, and so
    does a field that the first data file lacks, or that is null there.
    """
    return guarded(documents_of(_raw(split, number, choice)))


def _raw(split: HubSplit, number: int, choice: FormatChoice) -> Iterator[Batch]:
    records: TableRecords | None = None
    for table in _tables(split, number):
        records = records or TableRecords(table.schema, choice, [table])
        yield records.batch(table)
    if records is None:
        raise ShardFault("empty_shard", "the data file has no rows")


def _tables(split: HubSplit, number: int) -> Iterator[pa.Table]:
    from datasets.exceptions import DatasetsError

    try:
        _, stream = _opened(split.hub, split.configuration, split.split, None if split.local else split.revision)
        part = stream.shard(num_shards=stream.num_shards, index=number).with_format("arrow")
        yield from part.iter(batch_size=ROWS)
    except (DatasetsError, pa.ArrowException, ValueError, TypeError, KeyError, EOFError) as error:
        remedy = "download the data set and name its files in corpus.shards"
        raise ShardFault("unreadable_data", f"datasets: {' '.join(str(error).split())}; {remedy}") from error
    except OSError as error:
        raise ShardError(f"{split.hub} cannot be read ({error}); try again, or correct corpus.hub") from error


def _opened(hub: str, configuration: str | None, split: str, revision: str | None) -> tuple[Any, Any]:
    """Return the builder of a data set and the stream of a split. Raises HubError."""
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        builder = load_dataset_builder(hub, name=configuration, revision=revision)
    except (DatasetsError, ValueError, OSError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} cannot be opened ({_first_line(error)}); correct corpus.hub, corpus.configuration or "
            "corpus.revision, or log in with `hf auth login`"
        ) from error
    try:
        return builder, builder.as_streaming_dataset(split=split)
    except (DatasetsError, ValueError, OSError) as error:
        known = ", ".join(map(str, builder.config.data_files or ())) or "none"
        raise HubError(f"corpus.split: {hub} has no split {split!r}; it has {known}") from error


def _commit(hub: str, revision: str | None) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return str(HfApi().dataset_info(hub, revision=revision).sha)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise HubError(
            f"corpus.hub: {hub} is no folder, and the hub does not give it ({_first_line(error)}); correct corpus.hub "
            "or corpus.revision, log in with `hf auth login`, or try again with a connection"
        ) from error


def _path(url: str, hub: str, local: bool) -> str:
    """Return the path of a data file within its data set."""
    plain = url.partition("::")[2] or url
    if local:
        return Path(plain).resolve().relative_to(Path(hub).resolve()).as_posix()
    _, _, path = plain.partition("@")
    return path.partition("/")[2] or plain


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0]
