"""file_proposals: place the calls of a lane's files (from another model, a log, an annotator) in its texts.

A row of a file names a document, a character in it and the input of a call, and may hold the call's result.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
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
from toolformer_dag.pipeline.placing import PROPOSAL_COLUMNS, place_at_tokens, placing_settings
from toolformer_dag.texts.compression import HEAD_BYTES, describe_kind
from toolformer_dag.texts.readers.json_lines import describe_other_shape
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
            raise _build_unreadable_error(lane, path, error) from error
    return {"files": fingerprint(hashes)} if hashes else {}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the texts; a change makes the table out of date."""
    return {**placing_settings(plan, lane), **identity(lane), "characters": lane.limits.max_result_characters}


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Place the calls that stand in a lane's files in its texts; return a row per call and text, over all shards.

    part: always WHOLE: a file does not say in which shard a document is. Raises UserError if a file cannot be read.
    """
    file_rows = _read_files(output.lane)
    placed = _place_in_shards(worker, output, file_rows.calls)
    rejected = Counter(placed.rejected)
    rejected.update(_count_without_shard(output.plan, file_rows, placed))  # rows that are no call or in no text
    # A hash per shard: when a file changes, later tables are made again only for the shards whose calls changed.
    facts = {BY_SHARD: _compute_fingerprints(output.plan, placed.rows, rejected)}
    return PartRows([placed.rows], rejected, facts=facts)


def _count_without_shard(plan: Plan, file_rows: "_FileRows", placed: "_PlacedCalls") -> Rejected:
    """Count the rows that are no call or are in no text of the lane; having no shard, they count for the first one."""
    first_shard = min(plan.shards, default="")
    return Counter(
        {
            (first_shard, "bad_row"): file_rows.bad_count,
            (first_shard, "no_such_text"): len(file_rows.calls) - len(placed.numbers),
        }
    )


class _PlacedCalls(NamedTuple):
    """Calls of files, each before the token at which it stands."""

    rows: pl.DataFrame  # PROPOSAL_COLUMNS
    rejected: Rejected
    numbers: set[int]  # the indices of the calls that are inside some text


def _place_in_shards(worker: Worker, output: TableOutput, calls: Sequence[FileCall]) -> _PlacedCalls:
    """Find the text and the token of each call in each shard."""
    numbered = pl.DataFrame(calls, schema=FILE_CALLS, orient="row").with_row_index("number")
    with_digests = _with_digests(output.plan, numbered)
    placed_of_shards = [_place_in_shard(worker, output, shard, with_digests) for shard in output.plan.shards]
    return _merge_placed_calls(placed_of_shards, output.stage.schema)


def _merge_placed_calls(placed_of_shards: Sequence[_PlacedCalls], schema: pl.Schema) -> _PlacedCalls:
    """Merge the placed calls of several shards; without shards there are no rows of `schema`."""
    frames = [schema.to_frame()]
    rejected: Rejected = Counter()
    numbers: set[int] = set()
    for placed in placed_of_shards:
        frames.append(placed.rows)
        rejected.update(placed.rejected)
        numbers.update(placed.numbers)
    return _PlacedCalls(pl.concat(frames), rejected, numbers)


def _place_in_shard(worker: Worker, output: TableOutput, shard: str, calls: pl.DataFrame) -> _PlacedCalls:
    """Find the text and the token of each call (FILE_CALLS, number) whose document is in a shard."""
    calls_in_texts = _select_calls_in_texts(output.plan, output.lane, shard, calls)
    placed = place_at_tokens(worker, output, calls_in_texts)
    return _PlacedCalls(placed.rows, placed.rejected, numbers=set(calls_in_texts["number"]))


def _compute_fingerprints(plan: Plan, table: pl.DataFrame, rejected: Rejected) -> dict[str, str]:
    """Return for each shard a hash of its rows and rejections.

    By them, a changed file makes only the shards out of date whose calls changed.
    """
    rows_of = table.partition_by("shard", as_dict=True)
    rejections_of = _group_rejections_by_shard(rejected)
    fingerprints = {}
    for shard in plan.shards:
        rows_of_shard = rows_of.get((shard,), table.clear()).rows()
        fingerprints[shard] = fingerprint([rows_of_shard, rejections_of.get(shard, [])])
    return fingerprints


def _group_rejections_by_shard(rejected: Rejected) -> dict[str, list[tuple[tuple[str, str], int]]]:
    """Group rejections by shard, sorted: shard -> [((shard, reason), count), ...]."""
    rejections_of = defaultdict(list)
    for (shard, reason), count in sorted(rejected.items()):
        rejections_of[shard].append(((shard, reason), count))
    return rejections_of


class _FileRows(NamedTuple):
    """The rows of a lane's files."""

    calls: list[FileCall]  # in the order of the files
    bad_count: int  # rows that are no call


def _read_files(lane: Lane) -> _FileRows:
    """Return the calls of the lane's files. Raises UserError if a file cannot be read."""
    calls = []
    bad_count = 0
    for name, path in lane.sources.files.items():
        for call in _read_calls_of_file(lane, name, path):
            if call is None:
                bad_count += 1
            else:
                calls.append(call)
    return _FileRows(calls, bad_count)


def _read_calls_of_file(lane: Lane, name: str, path: Path) -> list[FileCall | None]:
    """Return each row of a file as a call; None for a row that is no call. Raises UserError if it cannot be read."""
    try:
        return [_parse_file_call(name, record) for record in _read_records(path)]
    except pl.exceptions.PolarsError as error:
        kind = describe_kind(path.read_bytes()[:HEAD_BYTES])
        raise _build_unreadable_error(lane, path, kind or error) from error
    except (OSError, ValueError) as error:
        raise _build_unreadable_error(lane, path, error) from error


def _build_unreadable_error(lane: Lane, path: Path, error: object) -> UserError:
    """Return the error for a file of calls that cannot be read."""
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _read_records(path: Path) -> Iterable[object]:
    """Return the rows of a Parquet file, or the objects of a file of JSON lines; None for a line without an object.

    Raises ValueError if the file has another format.
    """
    if path.suffix == ".parquet":
        return pl.read_parquet(path).iter_rows(named=True)
    lines = [line.strip() for line in path.read_bytes().splitlines()]
    return _parse_json_objects([line for line in lines if line])


def _parse_json_objects(lines: Sequence[bytes]) -> list[object]:
    """Return the object of each line; None for a line without an object.

    Raises ValueError if there is none at all and the lines look like another format, such as a JSON array.
    """
    records = [_parse_json_object(line) for line in lines]
    if lines and all(record is None for record in records):
        other_format = describe_other_shape(lines[0])
        if other_format:
            raise ValueError(other_format)
    return records


def _parse_json_object(line: bytes) -> object:
    """Return the object that a line holds; None if it holds another value, or no JSON."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


class _DocumentReference(NamedTuple):
    """How a row of a file names its document: by one of the two, the other is None."""

    digest: str | None
    name: str | None  # the hash of its text, or its id


def _parse_file_call(source: str, record: object) -> FileCall | None:
    """Read a row of a file as a call; None if a field is missing or of another type.

    record: {"digest" or "text" or "id": ..., "char_offset": 12, "input": "94 + 23"}, and optionally `result`, `p_api`.
    """
    if not isinstance(record, dict) or not _has_valid_fields(record):
        return None
    document = _parse_document_reference(record)
    if document is None:
        return None
    return FileCall(
        source=source,
        digest=document.digest,
        document_name=document.name,
        char_offset=record["char_offset"],
        input=record["input"],
        result=record.get("result"),
        p_api=record.get("p_api"),
    )


def _parse_document_reference(record: Mapping[str, Any]) -> _DocumentReference | None:
    """Return how a row names its document; None if it does not, or not by a text."""
    digest = record.get("digest")
    if digest:
        return _DocumentReference(digest=digest, name=None) if isinstance(digest, str) else None
    name = _choose_document_name(record.get("text"), record.get("id"))
    return _DocumentReference(digest=None, name=name) if isinstance(name, str) else None


def _has_valid_fields(record: Mapping[str, Any]) -> bool:
    """Return whether a row has a possible character offset, an input, and values of the right types."""
    char_offset = record.get("char_offset")
    if type(char_offset) is not int or not 0 <= char_offset < MOST_CHARACTERS:  # True is no number here
        return False
    has_input = isinstance(record.get("input"), str)
    has_result_type = isinstance(record.get("result"), str | None)
    has_probability_type = isinstance(record.get("p_api"), int | float | None)
    return has_input and has_result_type and has_probability_type


def _choose_document_name(text: Any, identifier: Any) -> Any:
    """Return the hash of a document's text, else its id as `raw_shards` stores it: a number becomes text."""
    if isinstance(text, str):
        return text_digest(text)
    return str(identifier) if isinstance(identifier, int) else identifier


def _with_digests(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Fill the column `digest`, the id of a document, of calls that name their document by `document_name` instead.

    A call gets a row for each document of that name; its digest stays null if there is none. Returned without the
    column `document_name`.

    calls: FILE_CALLS (digest, document_name, ...) and `number`, the index of the call in the files.
    """
    named = calls.filter(pl.col("document_name").is_not_null())
    calls = calls.drop("document_name")
    if named.is_empty():
        return calls
    matched = _match_by_name(plan, named, columns=calls.columns)
    others = calls.join(matched, on="number", how="anti")  # they have a digest, or name no document of the corpus
    return pl.concat([others, matched])


def _match_by_name(plan: Plan, calls: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Return `columns` of calls with the digest of each document that has the call's `document_name`."""
    without_digest = calls.drop("digest")
    matches = [calls.select(columns).clear()]  # without rows: gives the columns if no name matches
    for shard in plan.shards:
        for documents in raw_shards.documents(plan, shard):
            matched = _list_document_names(documents).join(without_digest, on="document_name")
            matches.append(matched.select(columns))
    return pl.concat(matches).unique(("number", "digest"))


def _list_document_names(documents: pl.DataFrame) -> pl.DataFrame:
    """Return (digest, document_name): a document's names are the hash of its text, its digest (an id) and its URL."""
    text_hashes = pl.Series([text_digest(text) for text in documents["text"]], dtype=pl.String)
    names_of_documents = [text_hashes, documents["digest"], documents["url"]]
    return pl.concat([documents.select("digest", document_name=names) for names in names_of_documents])


def _select_calls_in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls whose character is inside a text of the shard, with that text, in the order of the files.

    calls: FILE_CALLS and `number`. A call in two overlapping texts has two rows: UNPLACED_CALLS and `number`.
    """
    texts = plan.lane_table(lane, "heuristic_subset").read(shard)
    texts_with_calls = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    calls_in_texts = texts_with_calls.filter(_is_inside_text()).sort("number")
    return calls_in_texts.with_columns(words=pl.lit(None, pl.String))


def _is_inside_text() -> pl.Expr:
    """Return whether the character of a call (`char_offset`) is inside the text of its row (`offset`, `text`)."""
    text_end = pl.col("offset") + pl.col("text").str.len_chars()
    return pl.col("char_offset").is_between("offset", text_end, closed="left")


def read_results_in_files(output: TableOutput) -> pl.DataFrame:
    """Return the results that the lane's files of calls hold: (input, context, result), the first of equal calls.

    output: any table of the lane. The frame is cached until the table changes.
    """
    if not output.lane.sources.files:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.lane_table("file_proposals")
    return table.remembered("given results", partial(_read_results, table))


def _read_results(table: Table) -> pl.DataFrame:
    """Read the results for `read_results_in_files`."""
    has_result = pl.col("result").str.len_chars() > 0
    calls = table.scan([WHOLE]).filter(has_result).select("input", "context", "result")
    return calls.unique(("input", "context"), keep="first", maintain_order=True).collect()


STAGE = Stage(
    name="file_proposals",
    description="Calls of the lane's files at their places in its texts.",
    columns=PROPOSAL_COLUMNS,
    key=CALL_KEY,
    settings=settings,
    reads=("heuristic_subset",),
    sharded=False,
    make=ByPart(rows),
)
