"""file_proposals: calls that a lane's files name (another model, a log, an annotator), at their places in its texts.

A row of a file names a document, a character in it and the input of a call. It may bring the call's result.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
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

    Raises UserError for a file that cannot be read.
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

    A lane is a tool with its settings, a shard a file of documents, and a text a piece of a document that was selected
    for the tool. A row of a file names a document, a character of it and the input of a call. A call before a word may
    stand before or after the white space in front of it.

    part: always WHOLE. The table has a single part, since a file does not say in which shard its documents are.

    Rejected: bad_row (no JSON, a field is missing or of another type), no_such_text (no text of the lane holds the
    place), inside_a_token (no token of the model begins there), and those of `parse_call`. The first two belong to no
    shard and are counted for the first.

    Memory: the files and a shard's texts. Raises UserError for a file that cannot be read.
    """
    plan = output.plan
    first_shard = min(plan.shards, default="")
    records = _read(output.lane)
    file_calls = [call for call in records if call is not None]
    rejected: Rejected = Counter({(first_shard, "bad_row"): len(records) - len(file_calls)})

    numbered = pl.DataFrame(file_calls, schema=FILE_CALLS, orient="row").with_row_index("number")
    calls = _with_digests(plan, numbered)
    frames = [output.stage.schema.to_frame()]
    placed_numbers: set[int] = set()  # the numbers of the calls whose place is in some text
    for shard in plan.shards:
        calls_of_shard = _in_texts(plan, output.lane, shard, calls)
        placed_numbers.update(calls_of_shard["number"])
        placed = placed_at_tokens(worker, output, calls_of_shard)
        frames.append(placed.rows)
        rejected.update(placed.rejected)
    rejected[first_shard, "no_such_text"] += len(file_calls) - len(placed_numbers)

    table = pl.concat(frames)
    return PartRows([table], rejected, facts={BY_SHARD: _fingerprints(plan, table, rejected)})


def _fingerprints(plan: Plan, table: pl.DataFrame, rejected: Rejected) -> dict[str, str]:
    """Return for each shard a hash of its rows and rejections.

    The table has one part for all shards; by these hashes a changed file makes only those shards out of date in which
    its calls changed.
    """
    rows_of = table.partition_by("shard", as_dict=True)
    rejections_of = defaultdict(list)
    for (shard, reason), count in sorted(rejected.items()):
        rejections_of[shard].append(((shard, reason), count))
    fingerprints = {}
    for shard in plan.shards:
        rows_of_shard = rows_of.get((shard,), table.clear()).rows()
        fingerprints[shard] = fingerprint([rows_of_shard, rejections_of.get(shard, [])])
    return fingerprints


def _read(lane: Lane) -> list[FileCall | None]:
    """Read all rows of the lane's files in their order, as calls; None for a row that is no call.

    Raises UserError for a file that cannot be read.
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
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _records(path: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file, or the objects of a file of JSON lines; None for a line without an object.

    Raises ValueError where no line holds an object and the first line looks like another format (one JSON array).
    """
    if path.suffix == ".parquet":
        yield from pl.read_parquet(path).iter_rows(named=True)
        return
    stripped = [line.strip() for line in path.read_bytes().splitlines()]
    lines = [line for line in stripped if line]
    records = [_json_object(line) for line in lines]
    if all(record is None for record in records):
        other_format = other_shape(lines[0] if lines else b"")
        if other_format:
            raise ValueError(other_format)
    yield from records


def _json_object(line: bytes) -> object:
    """Return the object that a line holds; None where it holds another value, or no JSON."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _file_call(source: str, record: object) -> FileCall | None:
    """Read a row of a file as a call; None where a field is missing or of another type.

    source: the name of the file. record: {"digest" or "text" or "id": ..., "char_offset": 12, "input": "94 + 23"}, and
    `result` and `p_api` where they are known.
    """
    if not isinstance(record, dict):
        return None
    digest = record.get("digest") or None
    document_name = None if digest else _document_name(record.get("text"), record.get("id"))
    char_offset = record.get("char_offset")
    input = record.get("input")
    result = record.get("result")
    p_api = record.get("p_api")
    if type(char_offset) is not int or not 0 <= char_offset < MOST_CHARACTERS:  # True is no number here
        return None
    if not isinstance(digest or document_name, str) or not isinstance(input, str):
        return None
    if not isinstance(result, str | None) or not isinstance(p_api, int | float | None):
        return None
    return FileCall(source, digest, document_name, char_offset, input, result, p_api)


def _document_name(text: Any, identifier: Any) -> Any:
    """Return the hash of a document's text, else its id as `raw_shards` holds it, where numbers are text."""
    if isinstance(text, str):
        return text_digest(text)
    return str(identifier) if isinstance(identifier, int) else identifier


def _with_digests(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Return calls (FILE_CALLS, number) with the digest of the document that each names, without `document_name`.

    A name is compared with the hash of a document's text, its digest (which is its id) and its URL (the id of a plain
    record). A call whose name several documents have is there for each of them; one whose name none has stays without a
    digest.
    """
    named = calls.filter(pl.col("document_name").is_not_null()).drop("digest")
    calls = calls.drop("document_name")
    if named.is_empty():
        return calls
    matches = [calls.clear()]  # without rows: gives the columns where no name matches
    for shard in plan.shards:
        for documents in raw_shards.documents(plan, shard):
            text_hashes = pl.Series([text_digest(text) for text in documents["text"]], dtype=pl.String)
            for names in (text_hashes, documents["digest"], documents["url"]):
                document_names = documents.select("digest", document_name=names)
                matches.append(document_names.join(named, on="document_name").select(calls.columns))
    matched = pl.concat(matches).unique(("number", "digest"))
    unmatched = calls.join(matched, on="number", how="anti")
    return pl.concat([unmatched, matched])


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
    """Return the results that stand in a lane's files of calls: (input, context, result), of equal calls the first.

    output: any table of the lane. No row where the lane has no files. The frame is kept until the table changes.
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
