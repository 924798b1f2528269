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
    BY_SHARD_FIELD,
    CALL_KEY,
    TEXT_KEY,
    ByPart,
    PartRows,
    RejectionCounts,
    Stage,
    TableOutput,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.table import WHOLE_TABLE_PART, Table
from toolformer_dag.pipeline import raw_shards
from toolformer_dag.pipeline.placing import PROPOSAL_COLUMNS, collect_placing_settings, place_calls_at_tokens
from toolformer_dag.texts.compression import HEAD_BYTES, describe_unreadable_file
from toolformer_dag.texts.readers.json_lines import describe_other_file_format
from toolformer_dag.texts.segments import compute_text_digest

CHAR_OFFSET_LIMIT = 2**62
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


FILE_CALL_SCHEMA = pl.Schema(
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


def compute_files_identity(lane: Lane) -> dict[str, str]:
    """Hash the files of calls that the settings name for a lane (a tool with its settings), to notice when they change.

    Returns:
        One hash for all files, such as {"files": "1f0c..."}. {} for a lane without such files.

    Raises:
        UserError: A file cannot be read.
    """
    hash_by_file_name = {}
    for name, path in lane.call_sources.file_paths_by_name.items():
        try:
            hash_by_file_name[name] = file_hash(path)
        except OSError as error:
            raise _build_unreadable_error(lane, path, error) from error

    return {"files": fingerprint(hash_by_file_name)} if hash_by_file_name else {}


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return the settings on which the rows depend, apart from the texts. A change makes the table out of date."""
    return {
        **collect_placing_settings(plan, lane),
        **compute_files_identity(lane),
        "characters": lane.limits.max_result_characters,
    }


def rows(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Read the calls that users give in files, and find where they stand in the texts of a lane (a tool with settings).

    Args:
        part: Always WHOLE_TABLE_PART, because a file does not say in which shard a document is.

    Returns:
        A row per call and text in which it stands, over all shards.

    Raises:
        UserError: A file cannot be read.
    """
    file_rows = _read_call_files(output.lane)
    placed_calls = _place_calls_in_shards(worker, output, file_rows.calls)

    rejection_counts = Counter(placed_calls.rejected)
    rejection_counts.update(_count_rejections_without_shard(output.plan, file_rows, placed_calls))

    # A hash per shard: when a file changes, later tables are made again only for the shards whose calls changed.
    fingerprint_by_shard = _compute_fingerprint_by_shard(output.plan, placed_calls.rows, rejection_counts)
    return PartRows([placed_calls.rows], rejection_counts, record_fields={BY_SHARD_FIELD: fingerprint_by_shard})


def _count_rejections_without_shard(
    plan: Plan, file_rows: "_FileRows", placed_calls: "_PlacedCalls"
) -> RejectionCounts:
    """Return how many rows of the files are no call, and how many calls are in no text of the lane.

    Since they belong to no shard, they count for the first one.
    """
    first_shard = min(plan.shards_by_name, default="")
    calls_outside_texts = len(file_rows.calls) - len(placed_calls.call_numbers)
    return Counter(
        {
            (first_shard, "bad_row"): file_rows.bad_row_count,
            (first_shard, "no_such_text"): calls_outside_texts,
        }
    )


class _PlacedCalls(NamedTuple):
    """Calls of files, each before the token at which it stands.

    Attributes:
        rows: The calls, in the columns PROPOSAL_COLUMNS.
        rejected: How many calls were rejected, by (shard, reason).
        call_numbers: The indices of the calls that are inside some text, whether rejected or not.
    """

    rows: pl.DataFrame
    rejected: RejectionCounts
    call_numbers: set[int]


def _place_calls_in_shards(worker: Worker, output: TableOutput, file_calls: Sequence[FileCall]) -> _PlacedCalls:
    """Find the text and the token of each call, in every shard of the corpus."""
    calls = pl.DataFrame(file_calls, schema=FILE_CALL_SCHEMA, orient="row")
    numbered_calls = calls.with_row_index("number")
    calls_with_digests = _with_document_digests(output.plan, numbered_calls)

    placed_calls_of_shards = [
        _place_calls_in_shard(worker, output, shard, calls_with_digests) for shard in output.plan.shards_by_name
    ]
    return _merge_placed_calls(placed_calls_of_shards, output.stage.schema)


def _merge_placed_calls(placed_calls_of_shards: Sequence[_PlacedCalls], row_schema: pl.Schema) -> _PlacedCalls:
    """Merge the placed calls of several shards.

    Args:
        row_schema: The columns of the rows, for the case that there are no shards.
    """
    frames = [row_schema.to_frame()]
    rejection_counts: RejectionCounts = Counter()
    call_numbers: set[int] = set()

    for placed_calls in placed_calls_of_shards:
        frames.append(placed_calls.rows)
        rejection_counts.update(placed_calls.rejected)
        call_numbers.update(placed_calls.call_numbers)

    return _PlacedCalls(pl.concat(frames), rejection_counts, call_numbers)


def _place_calls_in_shard(worker: Worker, output: TableOutput, shard: str, calls: pl.DataFrame) -> _PlacedCalls:
    """Find the text and the token of each call whose document is in a shard.

    Args:
        calls: The calls of all shards, in the columns FILE_CALL_SCHEMA and `number`, their index in the files.
    """
    calls_in_texts = _select_calls_in_texts(output.plan, output.lane, shard, calls)
    proposed_calls = place_calls_at_tokens(worker, output, calls_in_texts)
    return _PlacedCalls(proposed_calls.rows, proposed_calls.rejected, call_numbers=set(calls_in_texts["number"]))


def _compute_fingerprint_by_shard(plan: Plan, placed_rows: pl.DataFrame, rejected: RejectionCounts) -> dict[str, str]:
    """Return for each shard a hash of its rows and rejections.

    Through these hashes, a changed file makes only those shards out of date whose calls changed.
    """
    rows_by_shard = placed_rows.partition_by("shard", as_dict=True)
    rejections_by_shard = _group_rejections_by_shard(rejected)

    fingerprint_by_shard = {}
    for shard in plan.shards_by_name:
        rows_of_shard = rows_by_shard.get((shard,), placed_rows.clear()).rows()
        rejections_of_shard = rejections_by_shard.get(shard, [])
        fingerprint_by_shard[shard] = fingerprint([rows_of_shard, rejections_of_shard])
    return fingerprint_by_shard


def _group_rejections_by_shard(rejected: RejectionCounts) -> dict[str, list[tuple[tuple[str, str], int]]]:
    """Group rejections by shard, sorted: shard -> [((shard, reason), count), ...]."""
    rejections_by_shard = defaultdict(list)
    for (shard, reason), count in sorted(rejected.items()):
        rejections_by_shard[shard].append(((shard, reason), count))
    return rejections_by_shard


class _FileRows(NamedTuple):
    """The rows of a lane's files of calls.

    Attributes:
        calls: The calls, in the order of the files.
        bad_row_count: How many rows are no call.
    """

    calls: list[FileCall]
    bad_row_count: int


def _read_call_files(lane: Lane) -> _FileRows:
    """Read the calls of the lane's files, and count the rows that are no call.

    Raises:
        UserError: A file cannot be read.
    """
    calls = []
    bad_row_count = 0

    for source_name, path in lane.call_sources.file_paths_by_name.items():
        for call in _read_calls_of_file(lane, source_name, path):
            if call is None:
                bad_row_count += 1
            else:
                calls.append(call)

    return _FileRows(calls, bad_row_count)


def _read_calls_of_file(lane: Lane, source_name: str, path: Path) -> list[FileCall | None]:
    """Read each row of a file as a call.

    Args:
        source_name: The name by which the calls say which file proposed them.

    Returns:
        A call per row, None for a row that is no call.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        return [_parse_file_call(source_name, record) for record in _read_file_records(path)]
    except pl.exceptions.PolarsError as error:
        # The first bytes may say more than polars: which kind of file it is.
        file_kind = describe_unreadable_file(path.read_bytes()[:HEAD_BYTES])
        raise _build_unreadable_error(lane, path, file_kind or error) from error
    except (OSError, ValueError) as error:
        raise _build_unreadable_error(lane, path, error) from error


def _build_unreadable_error(lane: Lane, path: Path, error: object) -> UserError:
    """Return the error for a file of calls that cannot be read."""
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _read_file_records(path: Path) -> Iterable[object]:
    """Return the rows of a Parquet file, or the objects of a file of JSON lines.

    Returns:
        A mapping per row. A line that holds no JSON object gives None, and blank lines are skipped.

    Raises:
        ValueError: The file should be JSON lines and has another format.
        pl.exceptions.PolarsError: The file should be Parquet and is not.
        OSError: The file cannot be opened.
    """
    if path.suffix == ".parquet":
        return pl.read_parquet(path).iter_rows(named=True)

    lines = [line.strip() for line in path.read_bytes().splitlines()]
    return _parse_json_objects([line for line in lines if line])


def _parse_json_objects(lines: Sequence[bytes]) -> list[object]:
    """Return the object of each line, None for a line without an object.

    Raises:
        ValueError: No line holds an object, and the first looks like another format, such as a JSON array.
    """
    records = [_parse_json_object(line) for line in lines]

    has_no_object = all(record is None for record in records)
    if lines and has_no_object:
        other_format = describe_other_file_format(lines[0])
        if other_format:
            raise ValueError(other_format)

    return records


def _parse_json_object(line: bytes) -> object:
    """Return the object that a line holds. None if it holds another value, or no JSON."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


class _DocumentReference(NamedTuple):
    """How a row of a file names its document: by one of two fields. The other is None.

    Attributes:
        digest: The digest that the corpus has for the document.
        document_name: The hash of the document's text, or its id.
    """

    digest: str | None
    document_name: str | None


def _parse_file_call(source_name: str, record: object) -> FileCall | None:
    """Read a row of a file as a call.

    Args:
        source_name: The name of the file.
        record: The row, such as {"id": "page-7", "char_offset": 12, "input": "94 + 23"}. It names its document by
            `digest`, `text` or `id`, and may have the fields `result` and `p_api` (the probability that a call begins
            there).

    Returns:
        The call. None if a field is missing or has another type.
    """
    if not isinstance(record, dict) or not _has_valid_fields(record):
        return None

    document = _parse_document_reference(record)
    if document is None:
        return None

    return FileCall(
        source=source_name,
        digest=document.digest,
        document_name=document.document_name,
        char_offset=record["char_offset"],
        input=record["input"],
        result=record.get("result"),
        p_api=record.get("p_api"),
    )


def _parse_document_reference(record: Mapping[str, Any]) -> _DocumentReference | None:
    """Return how a row names its document. None if it does not, or by a value that is no string.

    The field `digest` comes first; a row without it names its document by `text` or `id`.
    """
    digest = record.get("digest")
    if digest:
        is_valid_digest = isinstance(digest, str)
        return _DocumentReference(digest=digest, document_name=None) if is_valid_digest else None

    document_name = _choose_document_name(record.get("text"), record.get("id"))
    if not isinstance(document_name, str):
        return None
    return _DocumentReference(digest=None, document_name=document_name)


def _has_valid_fields(record: Mapping[str, Any]) -> bool:
    """Return whether a row has a possible character offset, an input, and values of the right types."""
    char_offset = record.get("char_offset")
    # `isinstance` would take True for a number.
    if type(char_offset) is not int:
        return False
    if not 0 <= char_offset < CHAR_OFFSET_LIMIT:
        return False

    has_input = isinstance(record.get("input"), str)
    has_result_type = isinstance(record.get("result"), str | None)
    has_probability_type = isinstance(record.get("p_api"), int | float | None)
    return has_input and has_result_type and has_probability_type


def _choose_document_name(text: Any, document_id: Any) -> Any:
    """Return the hash of a document's text. Without a text, return its id as raw_shards stores it.

    Args:
        text: The document's text, or any other value that a row has instead.
        document_id: The document's id. A number becomes text; a value of another type is returned as it is.
    """
    if isinstance(text, str):
        return compute_text_digest(text)
    return str(document_id) if isinstance(document_id, int) else document_id


def _with_document_digests(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Fill the column `digest`, the id of a document, of calls that name their document by `document_name` instead.

    Args:
        calls: The calls, in the columns FILE_CALL_SCHEMA and `number`, their index in the files.

    Returns:
        The calls without the column `document_name`. A call has a row for each document of that name. If there is none,
        it has one row, and its digest stays null.
    """
    calls_with_name = calls.filter(pl.col("document_name").is_not_null())
    calls_without_name_column = calls.drop("document_name")
    if calls_with_name.is_empty():
        return calls_without_name_column

    matched_calls = _match_calls_by_document_name(plan, calls_with_name, columns=calls_without_name_column.columns)
    # They have a digest, or name no document of the corpus.
    unmatched_calls = calls_without_name_column.join(matched_calls, on="number", how="anti")
    return pl.concat([unmatched_calls, matched_calls])


def _match_calls_by_document_name(plan: Plan, calls: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame:
    """Look up the documents that calls name, in all shards of the corpus.

    Args:
        calls: Calls with a `document_name`.
        columns: The columns to return.

    Returns:
        A row per call and document of that name, with the document's `digest`. A document in several shards counts
        once. Calls that name no document of the corpus have no row.
    """
    calls_without_digest = calls.drop("digest")  # the join adds the document's
    matched_frames = [calls.select(columns).clear()]  # without rows: gives the columns if no name matches

    for shard in plan.shards_by_name:
        for documents in raw_shards.iter_documents(plan, shard):
            document_names = _list_document_names(documents)
            matched_calls = document_names.join(calls_without_digest, on="document_name")
            matched_frames.append(matched_calls.select(columns))

    return pl.concat(matched_frames).unique(("number", "digest"))


def _list_document_names(documents: pl.DataFrame) -> pl.DataFrame:
    """Return the names of documents, in the columns digest and document_name.

    Each document has three rows: its names are the hash of its text, its digest (an id) and its URL.
    """
    text_hashes = pl.Series([compute_text_digest(text) for text in documents["text"]], dtype=pl.String)
    name_series = [text_hashes, documents["digest"], documents["url"]]
    return pl.concat([documents.select("digest", document_name=names) for names in name_series])


def _select_calls_in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """Find the text in which each call of the files stands, and return the calls that stand in a text of the shard.

    A call says only at which character of a document it stands (`char_offset`). A text is a part of a document.

    Args:
        lane: The lane (a tool with its settings) whose texts are read.
        calls: The calls, in the columns of FILE_CALL_SCHEMA without `document_name`, and `number`.

    Returns:
        A row per call and text, in the order of the files, with the columns UNPLACED_CALL_SCHEMA and `number`. Texts
        may overlap, so that a call stands in two of them.
    """
    texts = plan.get_lane_table(lane, "heuristic_subset").read_part(shard)
    texts_with_calls = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    calls_in_texts = texts_with_calls.filter(_is_inside_text()).sort("number")
    # `words` are what a rule saw in the text after the call. Only calls that a rule proposed have any.
    return calls_in_texts.with_columns(words=pl.lit(None, pl.String))


def _is_inside_text() -> pl.Expr:
    """Return an expression: whether a call's `char_offset` is inside the text of its row (`offset`, `text`)."""
    text_end = pl.col("offset") + pl.col("text").str.len_chars()
    return pl.col("char_offset").is_between("offset", text_end, closed="left")


def read_results_in_files(output: TableOutput) -> pl.DataFrame:
    """Return the results that users give in files of calls, so that the tool need not run these calls.

    Args:
        output: Any table of the lane (a tool with its settings) whose files are meant.

    Returns:
        The columns input, context and result, with the first result of equal calls. The frame is cached until the
        table file_proposals, which holds the calls of the files, changes.
    """
    if not output.lane.call_sources.file_paths_by_name:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.get_lane_table("file_proposals")
    return table.get_or_compute_answer("given results", partial(_read_file_results, table))


def _read_file_results(proposals_table: Table) -> pl.DataFrame:
    """Return the results in the table file_proposals (input, context, result), the first of equal calls."""
    has_result = pl.col("result").str.len_chars() > 0
    calls = proposals_table.scan_parts([WHOLE_TABLE_PART])
    results = calls.filter(has_result).select("input", "context", "result")
    return results.unique(("input", "context"), keep="first", maintain_order=True).collect()


STAGE = Stage(
    name="file_proposals",
    description="Calls of the lane's files at their places in its texts.",
    columns=PROPOSAL_COLUMNS,
    key_columns=CALL_KEY,
    collect_settings=settings,
    reads=("heuristic_subset",),
    is_sharded=False,
    row_maker=ByPart(rows),
)
