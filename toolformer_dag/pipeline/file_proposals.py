"""file_proposals: place the calls of a lane's files (from another model, a log, an annotator) in its texts.

A row of a file names a document, a character in it and the input of a call, and may hold the call's result.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    BY_SHARD,
    CALL_KEY,
    TEXT_KEY,
    ByPart,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.placing import COLUMNS, placed_at_tokens, placing
from toolformer_dag.texts.compression import HEAD_BYTES, kind_in_words
from toolformer_dag.texts.readers.json_lines import other_shape
from toolformer_dag.texts.segments import text_digest

MOST_CHARACTERS = 2**62
"""A larger `char_offset` is a mistake: arithmetic with it could overflow."""


class FileCall(NamedTuple):
    """A row of a file of calls. It names its document by `digest` or by `document_name`; the other is None."""

    source: str  # the name of the file
    digest: str | None
    document_name: str | None  # the hash of the document's text, or its id
    char_offset: int  # the character of the document before which the call stands
    input: str
    result: str | None
    p_api: float | None


FILE_CALLS = pl.Schema(
    {
        "source": pl.String(),
        "digest": pl.String(),
        "document_name": pl.String(),
        "char_offset": pl.Int64(),
        "input": pl.String(),
        "result": pl.String(),
        "p_api": pl.Float32(),
    }
)
"""A frame of FileCall."""


def identity(lane: Lane) -> dict[str, str]:
    """Return a hash of the content of the lane's files, as `{"files": hash}`; empty without files.

    Raises UserError if a file cannot be read.
    """
    hashes = {}
    for name, path in lane.sources.files.items():
        try:
            hashes[name] = file_hash(path)
        except OSError as error:
            raise _unreadable(lane, path, error) from error
    return {"files": fingerprint(hashes)} if hashes else {}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the texts; a change makes the table out of date."""
    return {**placing(plan, lane), **identity(lane), "characters": lane.limits.max_result_characters}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Place the calls of a lane's files in its texts: return a row per call and text, over all shards.

    Rejected: bad_row (no JSON, or a field is missing or of another type), no_such_text (no text of the lane holds the
    character), inside_a_token (no token of the model begins there), and the reasons of `parse_call`. The first two
    belong to no shard and are counted for the first.

    part: always WHOLE. The table has a single part, since a file does not say in which shard its documents are.

    Raises UserError if a file cannot be read.
    """
    plan = output.plan
    records = _read(output.lane)
    calls = [call for call in records if call is not None]
    placed = _placed_in_shards(worker, output, calls)
    rejected = placed.rejected
    first_shard = min(plan.shards, default="")
    rejected[first_shard, "bad_row"] += len(records) - len(calls)
    rejected[first_shard, "no_such_text"] += len(calls) - len(placed.numbers)
    return PartRows([placed.rows], rejected, facts={BY_SHARD: _fingerprints(plan, placed.rows, rejected)})


class _PlacedCalls(NamedTuple):
    """Calls of files, each before the token at which it stands."""

    rows: pl.DataFrame
    rejected: Rejected
    numbers: set[int]  # the indices of the calls that are inside some text


def _placed_in_shards(worker: Worker, output: TableOutput, calls: Sequence[FileCall]) -> _PlacedCalls:
    """Find the text and the token of each call in each shard."""
    numbered = pl.DataFrame(calls, schema=FILE_CALLS, orient="row").with_row_index("number")
    table = _with_digests(output.plan, numbered)
    frames = [output.stage.schema.to_frame()]
    rejected: Rejected = Counter()
    numbers: set[int] = set()
    for shard in output.plan.shards:
        calls_of_shard = _in_texts(output.plan, output.lane, shard, table)
        placed = placed_at_tokens(worker, output, calls_of_shard)
        frames.append(placed.rows)
        rejected.update(placed.rejected)
        numbers.update(calls_of_shard["number"])
    return _PlacedCalls(pl.concat(frames), rejected, numbers)


def _fingerprints(plan: Plan, table: pl.DataFrame, rejected: Rejected) -> dict[str, str]:
    """Return for each shard a hash of its rows and rejections.

    The table has one part for all shards; by these hashes a changed file only makes the shards out of date whose calls
    changed.
    """
    rows_of = table.partition_by("shard", as_dict=True)
    rejections_of = _rejections_by_shard(rejected)
    fingerprints = {}
    for shard in plan.shards:
        rows_of_shard = rows_of.get((shard,), table.clear()).rows()
        fingerprints[shard] = fingerprint([rows_of_shard, rejections_of.get(shard, [])])
    return fingerprints


def _rejections_by_shard(rejected: Rejected) -> dict[str, list[tuple[tuple[str, str], int]]]:
    """Group rejections by shard, sorted: shard -> [((shard, reason), count), ...]."""
    rejections_of = defaultdict(list)
    for (shard, reason), count in sorted(rejected.items()):
        rejections_of[shard].append(((shard, reason), count))
    return rejections_of


def _read(lane: Lane) -> list[FileCall | None]:
    """Return all rows of the lane's files in their order, as calls; None for a row that is no call.

    Raises UserError if a file cannot be read.
    """
    calls: list[FileCall | None] = []
    for name, path in lane.sources.files.items():
        try:
            calls += [_file_call(name, record) for record in _records(path)]
        except pl.exceptions.PolarsError as error:
            kind = kind_in_words(path.read_bytes()[:HEAD_BYTES])
            raise _unreadable(lane, path, kind or error) from error
        except (OSError, ValueError) as error:
            raise _unreadable(lane, path, error) from error
    return calls


def _unreadable(lane: Lane, path: Path, error: object) -> UserError:
    """Return the error for a file of calls that cannot be read."""
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _records(path: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file, or the objects of a file of JSON lines; None for a line without an object.

    Raises ValueError if no line holds an object and the first line looks like another format (one JSON array).
    """
    if path.suffix == ".parquet":
        yield from pl.read_parquet(path).iter_rows(named=True)
        return
    lines = [line.strip() for line in path.read_bytes().splitlines() if line.strip()]
    records = [_json_object(line) for line in lines]
    if all(record is None for record in records):
        other_format = other_shape(lines[0] if lines else b"")
        if other_format:
            raise ValueError(other_format)
    yield from records


def _json_object(line: bytes) -> object:
    """Return the object that a line holds; None if it holds another value, or no JSON."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _file_call(source: str, record: object) -> FileCall | None:
    """Read a row of a file as a call; None if a field is missing or of another type.

    source: the name of the file.
    record: {"digest" or "text" or "id": ..., "char_offset": 12, "input": "94 + 23"}, and optionally `result`, `p_api`.
    """
    if not isinstance(record, dict) or not _has_valid_fields(record):
        return None
    digest = record.get("digest") or None
    document_name = None if digest else _document_name(record.get("text"), record.get("id"))
    if not isinstance(digest or document_name, str):
        return None
    return FileCall(
        source=source,
        digest=digest,
        document_name=document_name,
        char_offset=record["char_offset"],
        input=record["input"],
        result=record.get("result"),
        p_api=record.get("p_api"),
    )


def _has_valid_fields(record: Mapping[str, Any]) -> bool:
    """Return whether a row has a possible character offset, an input, and values of the right types."""
    char_offset = record.get("char_offset")
    if type(char_offset) is not int or not 0 <= char_offset < MOST_CHARACTERS:  # True is no number here
        return False
    has_input = isinstance(record.get("input"), str)
    has_result_type = isinstance(record.get("result"), str | None)
    has_probability_type = isinstance(record.get("p_api"), int | float | None)
    return has_input and has_result_type and has_probability_type


def _document_name(text: Any, identifier: Any) -> Any:
    """Return the hash of a document's text, else its id as `raw_shards` stores it: a number becomes text."""
    if isinstance(text, str):
        return text_digest(text)
    return str(identifier) if isinstance(identifier, int) else identifier


def _with_digests(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Return calls (FILE_CALLS, number) with the digest of their document, without `document_name`.

    A call whose name several documents have is there for each of them; a call whose name none has keeps a null digest.
    """
    named = calls.filter(pl.col("document_name").is_not_null()).drop("digest")
    calls = calls.drop("document_name")
    if named.is_empty():
        return calls
    matches = [calls.clear()]  # without rows: gives the columns if no name matches
    for shard in plan.shards:
        for documents in raw_shards.documents(plan, shard):
            matches.append(_documents_by_name(documents).join(named, on="document_name").select(calls.columns))
    matched = pl.concat(matches).unique(("number", "digest"))
    unmatched = calls.join(matched, on="number", how="anti")
    return pl.concat([unmatched, matched])


def _documents_by_name(documents: pl.DataFrame) -> pl.DataFrame:
    """Return (digest, document_name): a document's names are the hash of its text, its digest (an id) and its URL."""
    text_hashes = pl.Series([text_digest(text) for text in documents["text"]], dtype=pl.String)
    names_of_documents = [text_hashes, documents["digest"], documents["url"]]
    return pl.concat([documents.select("digest", document_name=names) for names in names_of_documents])


def _in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls whose character is inside a text of the shard, with that text, in the order of the files.

    calls: FILE_CALLS and `number`. The result has the columns UNPLACED and `number`; a call in two overlapping texts
    has two rows.
    """
    texts = plan.lane_table(lane, "heuristic_subset").read(shard)
    joined = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    text_end = pl.col("offset") + pl.col("text").str.len_chars()
    is_inside = pl.col("char_offset").is_between("offset", text_end, closed="left")
    return joined.filter(is_inside).sort("number").with_columns(words=pl.lit(None, pl.String))


def given_results(output: TableOutput) -> pl.DataFrame:
    """Return the results that the lane's files of calls hold: (input, context, result), the first of equal calls.

    output: any table of the lane. There are no rows without files. The frame is cached until the table changes.
    """
    if not output.lane.sources.files:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.lane_table("file_proposals")
    return table.remembered("given results", partial(_results, table))


def _results(table: Table) -> pl.DataFrame:
    """Read the results for `given_results`."""
    has_result = pl.col("result").str.len_chars() > 0
    calls = table.scan([WHOLE]).filter(has_result).select("input", "context", "result")
    return calls.unique(("input", "context"), keep="first", maintain_order=True).collect()


STAGE = Stage(
    name="file_proposals",
    description="Calls of the lane's files at their places in its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    sharded=False,
    make=ByPart(rows),
)
