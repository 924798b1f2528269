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
from toolformer_dag.files import (
    UserError,
    WriteError,
    hold_file_lock,
    replace_folder,
    seal_record,
    unseal_record,
    write_file_atomically,
)
from toolformer_dag.identity import compute_file_content_hash, fingerprint
from toolformer_dag.lake.queries import read_sql_file
from toolformer_dag.markdown import format_markdown_table

RECORD_FILE_NAME = "export.json"
"""File of a data set: the record of what was written, by which an export recognizes its folder."""
CARD_FILE_NAME = "README.md"
"""File of a data set: its card."""
DATA_FOLDER_NAME = "data"
"""Folder of a data set with its Parquet files."""
LAYOUT_VERSION = 1
"""Raise this when the same rows would be written as other files."""
ROWS_PER_GROUP = 1000
"""Rows of a row group of a Parquet file."""
ROWS_PER_FILE = 20_000
"""Rows of a Parquet file."""
PARQUET_OPTIONS = {"compression": "zstd", "write_page_index": True, "use_content_defined_chunking": True}
"""The hub shows such files page by page, and stores them again without what did not change."""


class ExportError(UserError):
    """An export that cannot be written. The message names the folder, the reason and the remedy."""


class ExportedFile(NamedTuple):
    """The size of a file in bytes, and the hash of its content."""

    byte_count: int
    content_hash: str


@dataclass(frozen=True, slots=True)
class ExportRecord:
    """A record of what an export wrote into a folder.

    Attributes:
        file_by_path: The exported files by their path within the folder. The record itself is not among them.
        row_counts: The number of rows by split or table.
        made_from: The settings and inputs of the export.
    """

    file_by_path: Mapping[str, ExportedFile]
    row_counts: Mapping[str, int]
    made_from: Mapping[str, Any]

    @property
    def content_fingerprint(self) -> str:
        """The fingerprint of the content of all files."""
        hash_by_path = {path: file.content_hash for path, file in self.file_by_path.items()}
        return fingerprint(hash_by_path)


class ParquetFiles:
    """Writes rows to the Parquet files PREFIX-00000.parquet, PREFIX-00001.parquet and so on in a folder.

    A row group has 1,000 rows, and a file 20,000. Rows wait in memory until there are enough for a group, and `close`
    writes the last ones. How rows are divided between calls of `write_rows` makes no difference to the files.

    Attributes:
        written_row_count: The number of written rows, without those that wait.
    """

    def __init__(self, folder: Path, file_prefix: str, schema: pa.Schema) -> None:
        self.written_row_count = 0
        self._folder = folder
        self._file_prefix = file_prefix
        self._schema = schema
        self._waiting_rows = pa.Table.from_batches([], schema)
        self._open_file_stack = ExitStack()  # closes the open file
        self._writer: pq.ParquetWriter | None = None  # writes to the open file, None before the first group
        folder.mkdir(parents=True, exist_ok=True)

    def write_rows(self, rows: pa.Table) -> None:
        """Add rows, and write all row groups that are complete.

        Args:
            rows: The rows, in any division. Their columns are cast to those of the schema.
        """
        self._waiting_rows = pa.concat_tables([self._waiting_rows, rows.cast(self._schema)])
        while self._waiting_rows.num_rows >= ROWS_PER_GROUP:
            self._write_row_group()

    def close(self) -> None:
        """Write the rows that wait, and close the last file. If there were no rows at all, write an empty file."""
        has_no_file = not self.written_row_count
        if self._waiting_rows.num_rows or has_no_file:
            self._write_row_group()
        self._open_file_stack.close()

    def _write_row_group(self) -> None:
        """Write up to ROWS_PER_GROUP of the waiting rows as a row group.

        It goes to the open file, or to a new one if the open file has ROWS_PER_FILE rows.
        """
        # The count meets every multiple of ROWS_PER_FILE, which is a multiple of ROWS_PER_GROUP, because only the very
        # last group is smaller.
        is_file_full = self.written_row_count % ROWS_PER_FILE == 0
        if self._writer is None or is_file_full:
            self._writer = self._open_next_file()  # closes the full file

        row_group = self._waiting_rows[:ROWS_PER_GROUP]
        self._waiting_rows = self._waiting_rows[ROWS_PER_GROUP:]

        self._writer.write_table(row_group.combine_chunks())
        self.written_row_count += row_group.num_rows

    def _open_next_file(self) -> pq.ParquetWriter:
        """Close the open file, open the next one, and return its writer."""
        self._open_file_stack.close()

        file_number = self.written_row_count // ROWS_PER_FILE
        path = self._folder / f"{self._file_prefix}-{file_number:05}.parquet"
        writer = pq.ParquetWriter(path, self._schema, **PARQUET_OPTIONS)
        return self._open_file_stack.enter_context(writer)


def write_split_files(folder: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Write rows to Parquet files in `folder/data`, with separate files for each value of their column `split`.

    A split without rows gets no file, because `load_dataset` cannot read an empty one.

    Args:
        folder: The folder of the data set.
        schema: The columns.
        rows: The rows by column. Only ROWS_PER_GROUP of them are read ahead.

    Returns:
        The number of rows per split, with `train` before `heldout`.
    """
    split_files = _SplitFiles(folder / DATA_FOLDER_NAME, schema)
    for batch in _iter_row_batches(rows):
        for split, split_rows in _group_rows_by_split(batch).items():
            split_files.write_rows(split, split_rows)
    return split_files.close()


class _SplitFiles:
    """The Parquet files of a data set's splits, such as `train` and `heldout`, in one folder."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._files_by_split: dict[str, ParquetFiles] = {}

    def write_rows(self, split: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, dicts of values by column, to the files of a split."""
        if split not in self._files_by_split:
            self._files_by_split[split] = ParquetFiles(self._folder, split, self._schema)
        self._files_by_split[split].write_rows(pa.Table.from_pylist(rows, self._schema))

    def close(self) -> dict[str, int]:
        """Write the rows that wait, and close all files.

        Returns:
            The number of rows per split, in descending order of the names: {"train": 1200, "heldout": 30}.
        """
        for files in self._files_by_split.values():
            files.close()

        split_names = sorted(self._files_by_split, reverse=True)
        return {split: self._files_by_split[split].written_row_count for split in split_names}


def _iter_row_batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the rows in lists of ROWS_PER_GROUP rows. The last list may be shorter."""
    remaining_rows = iter(rows)
    batch = list(islice(remaining_rows, ROWS_PER_GROUP))
    while batch:
        yield batch
        batch = list(islice(remaining_rows, ROWS_PER_GROUP))


def _group_rows_by_split(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Group rows by their column `split`: {"train": [...], "heldout": [...]}."""
    rows_by_split: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        rows_by_split.setdefault(row["split"], []).append(row)
    return rows_by_split


@contextmanager
def open_replacement_folder(folder: Path) -> Iterator[Path]:
    """Provide an empty folder, which replaces another folder if the block ends without an error.

    Call `refuse_foreign_content` first, because the old content of `folder` is lost.

    Yields:
        The empty folder to write to.

    Raises:
        WriteError: A file cannot be written.
        ExportError: Another export is writing to `folder`.
    """
    folder = folder.resolve()
    lock_path = folder.with_name(f".{folder.name}.lock")

    with hold_file_lock(lock_path, wait=False) as has_lock:
        if not has_lock:
            raise ExportError(f"{folder} is being written by another export; wait for it, or name another folder")
        with _open_partial_folder(folder, lock_path) as new_folder:
            yield new_folder


@contextmanager
def _open_partial_folder(folder: Path, lock_path: Path) -> Iterator[Path]:
    """Provide an empty folder, which replaces `folder` if the block ends without an error.

    The lock's file is removed in any case, and so is the new folder if it did not replace the old one.

    Yields:
        The empty folder to write to.

    Raises:
        WriteError: A file or folder cannot be written.
    """
    new_folder = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(new_folder, ignore_errors=True)  # left by an export that was killed
        new_folder.mkdir()
        yield new_folder
        replace_folder(folder, new_folder)
    except OSError as error:
        raise WriteError(folder, error) from error
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)
        lock_path.unlink(missing_ok=True)  # last: until then it guards both folders


def write_export_record(folder: Path, row_counts: Mapping[str, int], made_from: Mapping[str, Any]) -> ExportRecord:
    """Write the record of an export, which has to be its last file.

    The record holds no time, so that equal inputs give equal bytes.

    Args:
        folder: The folder of the export.
        row_counts: The number of rows per split or table.
        made_from: The settings and inputs of the export.

    Returns:
        The record.

    Raises:
        WriteError: The file cannot be written.
    """
    record = ExportRecord(_hash_files(folder), dict(row_counts), dict(made_from))

    files = {path: [file.byte_count, file.content_hash] for path, file in record.file_by_path.items()}
    content = {"layout": LAYOUT_VERSION, "rows": record.row_counts, "files": files, "made_from": record.made_from}
    write_file_atomically(folder / RECORD_FILE_NAME, seal_record(str(folder), content))

    return record


def _hash_files(folder: Path) -> dict[str, ExportedFile]:
    """Return the size and the content hash of each file below a folder, by its path within the folder."""
    exported_files = {}
    for relative_path, path in _list_files_by_relative_path(folder).items():
        byte_count = path.stat().st_size
        exported_files[relative_path] = ExportedFile(byte_count, compute_file_content_hash(path))
    return exported_files


def _list_files_by_relative_path(folder: Path) -> dict[str, Path]:
    """Return the paths of all files below a folder, sorted, by their paths within the folder."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in paths}


def read_export_record(folder: Path) -> ExportRecord | None:
    """Read the record of an exported folder.

    Returns:
        The record, or None if it is missing, damaged or has another layout.
    """
    try:
        content = unseal_record((folder / RECORD_FILE_NAME).read_bytes())
        if content["layout"] != LAYOUT_VERSION:
            return None
        files = {path: ExportedFile(*file) for path, file in content["files"].items()}
        return ExportRecord(files, content["rows"], content["made_from"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_foreign_content(folder: Path) -> None:
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
    record = read_export_record(folder)
    if record is None:
        return f"{folder} is not empty, and no export wrote it"

    file_names = _list_files_by_relative_path(folder).keys()
    foreign_names = sorted(file_names - record.file_by_path.keys() - {RECORD_FILE_NAME})
    if foreign_names:
        return f"{folder} holds {foreign_names[0]}, which no export wrote"

    if CARD_FILE_NAME not in file_names:
        return None

    card_path = folder / CARD_FILE_NAME
    if compute_file_content_hash(card_path) != record.file_by_path[CARD_FILE_NAME].content_hash:
        return f"{card_path} was edited since it was exported"
    return None


SIZE_CATEGORIES = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
"""The hub's names for sizes of data sets, each after the number of rows that is too many for it."""
CITATION = read_sql_file(__package__, "citation.md")
"""How to cite the paper, for cards."""
TOOL_COLUMN_TITLES = ("tool", "in the text", "tau_s", "k", "m", "tau_f")
"""Headings of the columns of `build_lane_cells`, and of the threshold that was applied."""


def build_yaml_header(
    folder: Path,
    *,
    title: str,
    license: str,
    languages: Sequence[str],
    row_count: int,
    configs: Sequence[Mapping[str, Any]],
    task_category: str | None,
) -> str:
    """Build the YAML header of a card, which `load_dataset` and the Hugging Face hub read.

    Args:
        folder: The folder of the data set, whose data files are written already.
        title: The name of the data set.
        license: Its license, as the hub names it.
        languages: Language codes such as "en".
        row_count: The number of rows of all files.
        configs: The configurations that have files, in the form of `load_dataset`.
        task_category: The hub's name of the task, such as "text-generation". None for a data set without one.
    """
    from huggingface_hub import DatasetCardData

    data = DatasetCardData(
        pretty_name=title,
        license=license,
        language=list(languages) or None,
        size_categories=[_choose_size_category(row_count)],
        task_categories=[task_category] if task_category else None,
        tags=["toolformer", "tool-use"],
        configs=_add_content_hash(folder, configs) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _add_content_hash(folder: Path, configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the configurations of a data set, with a hash of its data files as their description.

    `load_dataset` caches data sets by the name of their folder and their configurations, not by their files. Without
    the hash, it would not notice that the files changed.
    """
    paths_by_name = _list_files_by_relative_path(folder / DATA_FOLDER_NAME)
    hashes_by_name = {name: compute_file_content_hash(path) for name, path in paths_by_name.items()}
    description = f"content {fingerprint(hashes_by_name)}"
    return [{**config, "description": description} for config in configs]


def _choose_size_category(row_count: int) -> str:
    """Return the hub's name for the size of a data set, such as "1K<n<10K" for 5,000 rows."""
    for limit, name in SIZE_CATEGORIES:
        if row_count < limit:
            return name
    return "n>10M"


def format_columns_table(schema: pa.Schema) -> str:
    """Format a Markdown table of columns with their types and meanings.

    The meaning is the `comment` in the column's metadata, which every column must have. For a struct or list it
    also describes the fields.
    """
    rows = []
    for field in schema:
        type_name, _, _ = str(field.type).partition("<")  # "struct" of "struct<offset: int64>"
        meaning = field.metadata[b"comment"].decode()
        rows.append((f"`{field.name}`", type_name, meaning))
    return format_markdown_table(("column", "type", "meaning"), rows)


def build_lane_cells(lane: Lane) -> tuple[object, ...]:
    """Return the first cells of a table line about a lane (a tool with its settings).

    They are the columns TOOL_COLUMN_TITLES, without the last one, tau_f.
    """
    return f"`{lane.key}`", lane.tool.name, lane.tau_s, lane.k, lane.m
