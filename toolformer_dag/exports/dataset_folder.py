"""Write a data set into a folder: Parquet files, a card, and a record of what was written."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from toolformer_dag.computing.plan import Lane
from toolformer_dag.files import UserError, WriteError, locked, replace_folder, seal_record, unseal_record, write_whole
from toolformer_dag.identity import fingerprint, stream_hash
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.markdown import table

RECORD = "export.json"
"""File of a data set: the record of what was written, by which an export recognizes its folder."""
CARD = "README.md"
"""File of a data set: its card."""
DATA = "data"
"""Folder of a data set with its Parquet files."""
LAYOUT = 1
"""Raise this when the same rows would be written as other files."""
GROUP_ROWS = 1000
"""Rows of a row group of a Parquet file."""
FILE_ROWS = 20_000
"""Rows of a Parquet file."""
HUB_OPTIONS = {"compression": "zstd", "write_page_index": True, "use_content_defined_chunking": True}
"""The hub shows such files page by page, and stores them again without what did not change."""


class ExportError(UserError):
    """An export that cannot be written. The message names the folder, the reason and the remedy."""


class ExportedFile(NamedTuple):
    """The size of a file in bytes, and the hash of its content."""

    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote into a folder.

    - `files`: path within the folder -> file, without the record
    - `rows`: split or table -> number of rows
    - `made_from`: the settings and inputs of the export
    """

    files: Mapping[str, ExportedFile]
    rows: Mapping[str, int]
    made_from: Mapping[str, Any]

    @property
    def version(self) -> str:
        """The fingerprint of the content."""
        return fingerprint({path: file.hash for path, file in self.files.items()})


class ParquetFiles:
    """Writes the Parquet files `folder/NAME-00000.parquet` and on: 1,000 rows in a group, 20,000 in a file.

    How rows are divided between calls of `write` makes no difference to the files. Rows wait in memory until they are a
    group; `close` writes the rest and has to be called.

    - `rows`: the number of written rows, without those that wait
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self.rows = 0
        self._folder = folder
        self._name = name
        self._schema = schema
        self._waiting = pa.Table.from_batches([], schema)
        self._open_file = ExitStack()  # closes the file of the last group
        self._writer: pq.ParquetWriter | None = None  # writes that file; None before the first group
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, rows: pa.Table) -> None:
        """Add rows."""
        self._waiting = pa.concat_tables([self._waiting, rows.cast(self._schema)])
        while self._waiting.num_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """Write the rows that wait; without any rows, write a file that has the columns only."""
        if self._waiting.num_rows or not self.rows:
            self._write_group()
        self._open_file.close()

    def _write_group(self) -> None:
        """Write GROUP_ROWS of the waiting rows as a row group, to the next file once FILE_ROWS are in the open one."""
        if self._writer is None or self.rows % FILE_ROWS == 0:
            self._writer = self._open_next_file()
        group = self._waiting[:GROUP_ROWS]
        self._waiting = self._waiting[GROUP_ROWS:]
        self._writer.write_table(group.combine_chunks())
        self.rows += group.num_rows

    def _open_next_file(self) -> pq.ParquetWriter:
        """Close the open file, and open the next: NAME-00000.parquet, NAME-00001.parquet."""
        self._open_file.close()
        path = self._folder / f"{self._name}-{self.rows // FILE_ROWS:05}.parquet"
        return self._open_file.enter_context(pq.ParquetWriter(path, self._schema, **HUB_OPTIONS))


def write_splits(folder: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Write rows to Parquet files in `folder/data`, with separate files for each value of their column `split`.

    A split without rows gets no file, because `load_dataset` cannot read an empty one.

    Returns:
        The number of rows per split, with `train` before `heldout`.
    """
    splits = _SplitFiles(folder / DATA, schema)
    for batch in _iter_batches(rows):
        for split, split_rows in _group_rows_by_split(batch).items():
            splits.write(split, split_rows)
    return splits.close()


class _SplitFiles:
    """The Parquet files of a data set's splits, such as `train` and `heldout`, in one folder."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._files: dict[str, ParquetFiles] = {}  # by split

    def write(self, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the files of a split."""
        if split not in self._files:
            self._files[split] = ParquetFiles(self._folder, split, self._schema)
        self._files[split].write(pa.Table.from_pylist(rows, self._schema))

    def close(self) -> dict[str, int]:
        """Write the rows that wait; return the rows per split, in descending order of names."""
        for files in self._files.values():
            files.close()
        return {split: self._files[split].rows for split in sorted(self._files, reverse=True)}


def _iter_batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in lists of GROUP_ROWS; the last may be shorter."""
    remaining = iter(rows)
    batch = list(islice(remaining, GROUP_ROWS))
    while batch:
        yield batch
        batch = list(islice(remaining, GROUP_ROWS))


def _group_rows_by_split(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows by their column `split`."""
    rows_of: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_of.setdefault(row["split"], []).append(row)
    return rows_of


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Provide an empty folder, which replaces another folder if the block ends without an error.

    Call `refuse_foreign` first, because the old content of `folder` is lost.

    Yields:
        The empty folder to write to.

    Raises:
        WriteError: A file cannot be written.
        ExportError: Another export is writing to `folder`.
    """
    folder = folder.resolve()
    lock = folder.with_name(f".{folder.name}.lock")

    with locked(lock, wait=False) as alone:
        if not alone:
            raise ExportError(f"{folder} is being written by another export; wait for it, or name another folder")
        with _create_partial_folder(folder, lock) as fresh:
            yield fresh


@contextmanager
def _create_partial_folder(folder: Path, lock: Path) -> Iterator[Path]:
    """Provide an empty folder, which replaces `folder` if the block ends without an error.

    The lock's file is removed in any case, and so is the new folder if it did not replace the old one.

    Yields:
        The empty folder to write to.

    Raises:
        WriteError: A file or folder cannot be written.
    """
    fresh = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # left by an export that was killed
        fresh.mkdir()
        yield fresh
        replace_folder(folder, fresh)
    except OSError as error:
        raise WriteError(folder, error) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        lock.unlink(missing_ok=True)  # last: until then it guards both folders


def write_record(folder: Path, rows: Mapping[str, int], made_from: Mapping[str, Any]) -> Exported:
    """Write the record of an export, which has to be its last file.

    The record holds no time, so that equal inputs give equal bytes.

    Args:
        rows: The number of rows per split, as in `Exported`.
        made_from: The settings and inputs of the export, as in `Exported`.

    Raises:
        WriteError: The file cannot be written.
    """
    exported = Exported(_hash_files(folder), dict(rows), dict(made_from))

    files = {path: [file.size, file.hash] for path, file in exported.files.items()}
    content = {"layout": LAYOUT, "rows": exported.rows, "files": files, "made_from": exported.made_from}
    write_whole(folder / RECORD, seal_record(str(folder), content))

    return exported


def _hash_files(folder: Path) -> dict[str, ExportedFile]:
    """Return size and hash of each file in a folder, by its path."""
    files = {}
    for name, path in _files(folder).items():
        files[name] = ExportedFile(path.stat().st_size, stream_hash(path))
    return files


def _files(folder: Path) -> dict[str, Path]:
    """Return all files below a folder, sorted: path within the folder -> path."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in files}


def read_exported(folder: Path) -> Exported | None:
    """Read the record of an exported folder.

    Returns:
        The record, or None if it is missing, damaged or has another layout.
    """
    try:
        content = unseal_record((folder / RECORD).read_bytes())
        if content["layout"] != LAYOUT:
            return None
        files = {path: ExportedFile(*file) for path, file in content["files"].items()}
        return Exported(files, content["rows"], content["made_from"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_foreign(folder: Path) -> None:
    """Check that an export into a folder would only overwrite files of an earlier export.

    The folder may be missing or empty. Otherwise it may only hold files that an export wrote, and its card
    (README) must not have been edited.

    Raises:
        ExportError: The folder holds something else, or is a file.
    """
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if not folder.exists() or is_empty:
        return

    if not folder.is_dir():
        raise ExportError(f"{folder} is a file; name a folder")

    reason = _find_foreign_content(folder)
    if reason:
        raise ExportError(f"{reason}; name another folder, or move it away")


def _find_foreign_content(folder: Path) -> str | None:
    """Look in a folder for content that no export wrote.

    Returns:
        A description of the content for the error message: the folder has no record of an export, holds a
        file that the record does not list, or its card (README) was edited. None if there is no such content.
    """
    exported = read_exported(folder)
    if exported is None:
        return f"{folder} is not empty, and no export wrote it"

    names = _files(folder).keys()
    foreign = sorted(names - exported.files.keys() - {RECORD})
    if foreign:
        return f"{folder} holds {foreign[0]}, which no export wrote"

    if CARD in names and _is_edited(folder / CARD, exported.files[CARD]):
        return f"{folder / CARD} was edited since it was exported"
    return None


def _is_edited(path: Path, exported: ExportedFile) -> bool:
    """Return whether a file is not as it was exported."""
    return stream_hash(path) != exported.hash


SIZES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
"""The hub's names for sizes of data sets, each after the number of rows that is too many for it."""
CITATION = read_sql_file(__package__, "citation.md")
"""How to cite the paper, for cards."""
TOOL_TITLES = ("tool", "in the text", "tau_s", "k", "m", "tau_f")
"""Headings of the columns of `build_lane_cells`, and of the threshold that was applied."""


def header(
    folder: Path,
    *,
    title: str,
    license: str,
    languages: Sequence[str],
    rows: int,
    configs: Sequence[Mapping[str, Any]],
    task: str | None,
) -> str:
    """Build the YAML header of a card, which `load_dataset` and the Hugging Face hub read.

    Args:
        folder: The folder of the data set, whose data files are written already.
        languages: Language codes such as "en".
        rows: The number of rows of all files.
        configs: The configurations that have files, in the form of `load_dataset`.
        task: The hub's name of the task, such as "text-generation".
    """
    from huggingface_hub import DatasetCardData

    data = DatasetCardData(
        pretty_name=title,
        license=license,
        language=list(languages) or None,
        size_categories=[_choose_size_category(rows)],
        task_categories=[task] if task else None,
        tags=["toolformer", "tool-use"],
        configs=_add_content_hash(folder, configs) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _add_content_hash(folder: Path, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the configs of a data set with a hash of its data as their description.

    The cache of `load_dataset` knows folders of one name apart by their configs alone, not by their files.
    """
    hashes = {name: stream_hash(path) for name, path in _files(folder / DATA).items()}
    description = f"content {fingerprint(hashes)}"
    return [{**config, "description": description} for config in configs]


def _choose_size_category(rows: int) -> str:
    """Return the hub's name for the size of a data set."""
    for limit, name in SIZES:
        if rows < limit:
            return name
    return "n>10M"


def format_columns_table(schema: pa.Schema) -> str:
    """Format a Markdown table of columns with their types and meanings.

    The meaning is the `comment` in the column's metadata, which every column must have. For a struct or list it
    also describes the fields.
    """
    rows = []
    for field in schema:
        type_name = str(field.type).partition("<")[0]
        rows.append((f"`{field.name}`", type_name, field.metadata[b"comment"].decode()))
    return table(("column", "type", "meaning"), rows)


def build_lane_cells(lane: Lane) -> tuple[object, ...]:
    """Return the first cells of a line about a lane (a tool with its settings): TOOL_TITLES without tau_f."""
    return f"`{lane.key}`", lane.tool.name, lane.tau_s, lane.k, lane.m
