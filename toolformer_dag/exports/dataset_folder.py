"""A data set in a folder: Parquet files, a card, and the record by which an export knows the folder as its own."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from toolformer_dag.computing.plan import Lane
from toolformer_dag.files import UserError, WriteError, locked, replace_folder, sealed, unsealed, write_whole
from toolformer_dag.identity import fingerprint, stream_hash
from toolformer_dag.lake.queries import sql_text
from toolformer_dag.markdown import table

RECORD, CARD, DATA = "export.json", "README.md", "data"
LAYOUT = 1
"""Raised when the same rows would be written as other files."""
GROUP_ROWS, FILE_ROWS = 1000, 20_000
HUB_OPTIONS = {"compression": "zstd", "write_page_index": True, "use_content_defined_chunking": True}
"""The hub shows such files page by page, and stores them again without what did not change."""


class ExportError(UserError):
    """An export that cannot be written. The message names the folder, the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a folder holds. `files`: path -> (bytes, hash); `rows`: split or table -> rows; `made_from`: the record."""

    files: Mapping[str, tuple[int, str]]
    rows: Mapping[str, int]
    made_from: Mapping[str, Any]

    @property
    def version(self) -> str:
        """Return the fingerprint of the content."""
        return fingerprint({path: hashed for path, (_, hashed) in self.files.items()})


class ParquetFiles:
    """The Parquet files `folder/NAME-00000.parquet` and on: 1,000 rows in a group, 20,000 in a file.

    How rows are spread over calls of `write` makes no difference to the files; memory holds a group.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self.rows = 0
        self._folder, self._name, self._schema = folder, name, schema
        self._waiting = pa.Table.from_batches([], schema)
        self._files = ExitStack()
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, rows: pa.Table) -> None:
        """Add rows."""
        self._waiting = pa.concat_tables([self._waiting, rows.cast(self._schema)])
        while self._waiting.num_rows >= GROUP_ROWS:
            self._write_group()

    def close(self) -> None:
        """Write what is left; without rows, one file says which columns there are."""
        if self._waiting.num_rows or not self.rows:
            self._write_group()
        self._files.close()

    def _write_group(self) -> None:
        if self.rows % FILE_ROWS == 0:
            self._files.close()
            path = self._folder / f"{self._name}-{self.rows // FILE_ROWS:05}.parquet"
            self._writer = self._files.enter_context(pq.ParquetWriter(path, self._schema, **HUB_OPTIONS))
        group, self._waiting = self._waiting[:GROUP_ROWS], self._waiting[GROUP_ROWS:]
        self._writer.write_table(group.combine_chunks())
        self.rows += group.num_rows


def write_splits(folder: Path, schema: pa.Schema, rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Write rows to `data/` by their column `split`; return split -> rows.

    A split without rows has no file: `load_dataset` cannot read an empty one.
    """
    files: dict[str, ParquetFiles] = {}
    remaining = iter(rows)
    while batch := list(islice(remaining, GROUP_ROWS)):
        for split in sorted({row["split"] for row in batch}):
            of_split = pa.Table.from_pylist([row for row in batch if row["split"] == split], schema)
            files.setdefault(split, ParquetFiles(folder / DATA, split, schema)).write(of_split)
    for written in files.values():
        written.close()
    return {split: files[split].rows for split in sorted(files, reverse=True)}


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give an empty folder to write to; where the block ends well it replaces `folder`, else nothing changed.

    Raises ExportError where `folder` is being written by another export. What it holds is lost: see `refuse_foreign`.
    """
    folder = folder.resolve()
    fresh = folder.with_name(f".{folder.name}.partial")
    lock = folder.with_name(f".{folder.name}.lock")
    with locked(lock, wait=False) as alone:
        if not alone:
            raise ExportError(f"{folder} is being written by another export; wait for it, or name another folder")
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir()
            yield fresh
            replace_folder(folder, fresh)
        except OSError as error:
            raise WriteError(folder, error) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
            lock.unlink(missing_ok=True)  # last: until then it guards both folders


def write_record(folder: Path, rows: Mapping[str, int], made_from: Mapping[str, Any]) -> Exported:
    """Write the record, the last file. It holds no time: equal inputs give equal bytes."""
    files = {name: (path.stat().st_size, stream_hash(path)) for name, path in _files(folder).items()}
    made = Exported(files, dict(rows), dict(made_from))
    content = {"layout": LAYOUT, "rows": made.rows, "files": made.files, "made_from": made.made_from}
    write_whole(folder / RECORD, sealed(str(folder), content))
    return made


def _files(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def read_exported(folder: Path) -> Exported | None:
    """Return what an export wrote into `folder`; None where there is no record, or not a whole one."""
    try:
        content = unsealed((folder / RECORD).read_bytes())
        if content["layout"] != LAYOUT:
            return None
        files = {path: (size, hashed) for path, (size, hashed) in content["files"].items()}
        return Exported(files, content["rows"], content["made_from"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_foreign(folder: Path) -> None:
    """Raise ExportError unless `folder` is absent, empty, or holds exactly what an export wrote."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    remedy = "name another folder, or move it away"
    if not folder.is_dir():
        raise ExportError(f"{folder} is a file; name a folder")
    exported = read_exported(folder)
    if exported is None:
        raise ExportError(f"{folder} is not empty, and no export wrote it; {remedy}")
    names = _files(folder)
    if foreign := sorted({*names} - {*exported.files, RECORD}):
        raise ExportError(f"{folder} holds {foreign[0]}, which no export wrote; {remedy}")
    if CARD in names and stream_hash(folder / CARD) != exported.files[CARD][1]:
        raise ExportError(f"{folder / CARD} was edited since it was exported; {remedy}")


SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"), (10**7, "1M<n<10M"))
CITATION = sql_text(__package__, "citation.md")
TOOL_TITLES = ("tool", "in the text", "tau_s", "k", "m", "tau_f")
"""Of `lane_cells`, and the threshold that was applied."""


def header(
    folder: Path,
    title: str,
    license: str,
    languages: Sequence[str],
    rows: int,
    configs: Sequence[Mapping[str, Any]],
    task: str | None,
) -> str:
    """Return the YAML header, which `load_dataset` and the hub read, for the data files in `folder`.

    `configs`: those without files are left out. Each is described by a hash of the data: the cache of `load_dataset`
    tells folders of one name apart by their configs alone, not by their files.
    """
    from huggingface_hub import DatasetCardData

    data_files = _files(folder / DATA)
    content = {"description": f"content {fingerprint({name: stream_hash(path) for name, path in data_files.items()})}"}
    data = DatasetCardData(
        pretty_name=title,
        license=license,
        language=list(languages) or None,
        size_categories=[next((name for limit, name in SIZES if rows < limit), "n>10M")],
        task_categories=[task] if task else None,
        tags=["toolformer", "tool-use"],
        configs=[{**config, **content} for config in configs] or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def columns_table(schema: pa.Schema) -> str:
    """Return a Markdown table of the columns with their comments, which also tell the fields of structs and lists."""
    rows = [(f"`{one.name}`", str(one.type).partition("<")[0], one.metadata[b"comment"].decode()) for one in schema]
    return table(("column", "type", "meaning"), rows)


def lane_cells(lane: Lane) -> tuple[object, ...]:
    """Return what every table of tools tells of a lane first."""
    return f"`{lane.key}`", lane.tool.name, lane.tau_s, lane.k, lane.m
