"""Read records from files, folders and data sets of the hub; what is no record is named and passed over."""

import codecs
import gzip
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import polars as pl
import zstandard

from toolformer_dag.files import UserError
from toolformer_dag.settings.setting_types import expanded

ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet")
LONG = re.compile(rb"\d{19}")
"""Numbers that orjson may round."""
OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": zstandard.open}


class BadRecord(NamedTuple):
    """Why a line holds no record."""

    reason: str
    detail: str


def records(source: str) -> Iterator[tuple[str, int, Any]]:
    """Yield the name of the file or split, the line or row from 1, and the record or a BadRecord, of each.

    `source`: a file (JSON lines, JSON, Parquet; .gz and .zst too), a folder of these, or a data set of the hub. Raises
    UserError where there is none.
    """
    files = _files(source)
    if files is None:
        yield from _of_hub(source)
    elif not files:
        raise UserError(f"{source}: no file ends in {', '.join(ENDINGS)}; name a file of conversations")
    for name, file in (files or {}).items():
        numbered = enumerate(_of_file(file), 1)
        yield from ((name, number, record) for number, record in numbered if record is not None)


def stamp(source: str) -> dict[str, Any]:
    """Return what tells that a source changed: of each file size and time, of a data set its name."""
    stats = {name: file.stat() for name, file in (_files(source) or {}).items()}
    return {"source": Path(source).name, "files": {name: [one.st_size, one.st_mtime_ns] for name, one in stats.items()}}


def _files(source: str) -> dict[str, Path] | None:
    """Return the files of a source by name; None for a data set of the hub."""
    path = expanded(Path(source))
    if not path.is_dir():
        return {path.name: path} if path.exists() else None
    return {str(one.relative_to(path)): one for one in sorted(path.rglob("*")) if _is_read(one)}


def _is_read(file: Path) -> bool:
    return file.is_file() and any(suffix in ENDINGS for suffix in file.suffixes[-2:]) and file.name[0] != "."


def _of_file(file: Path) -> Iterable[Any]:
    """Return what stands in each line or row, or in a list in JSON; None for a blank line."""
    try:
        if file.suffix == ".parquet":
            return map(_plain, pl.read_parquet(file, glob=False).iter_rows(named=True))
        with OPENERS.get(file.suffix, open)(file, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError, zstandard.ZstdError, pl.exceptions.PolarsError) as error:
        return [BadRecord("unreadable_file", str(error))]
    content = content.removeprefix(codecs.BOM_UTF8)
    whole = _parsed(content)
    if isinstance(whole, BadRecord):
        return map(_parsed, content.splitlines())
    return whole if isinstance(whole, list) else [whole]


def _parsed(line: bytes) -> Any:
    """Return what a line holds; None for a blank one."""
    if not line.strip():
        return None
    try:
        found = orjson.loads(line)
        if LONG.search(line):
            found = json.loads(line)
    except ValueError as error:
        return BadRecord("not_json", str(error))
    return BadRecord("unknown_form", "null") if found is None else found


def _of_hub(name: str) -> Iterator[tuple[str, int, Any]]:
    from datasets import load_dataset

    try:
        found = load_dataset(name)
    except Exception as error:  # the hub's client raises many kinds
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{name}: no such file, and no data set of the hub ({reason}); name either") from error
    for split, rows in found.items():
        yield from ((str(split), number, _plain(row)) for number, row in enumerate(rows, 1))


def _plain(row: Mapping[str, Any]) -> Any:
    """Return a row of a table as JSON has it."""
    return orjson.loads(orjson.dumps(row, default=str))
