"""Records -> raw columns, a column at a time -> documents: digests, duplicates, domains, and the date of the URL.

Raw columns are what a record holds in each field, as text (RAW). Readers give them in a `Batch`; `documents_of` makes
documents of them.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.identity import content_hash
from toolformer_dag.texts.document import date_from_url
from toolformer_dag.texts.formats import FIELDS, MISSING, Layout, Unread, shown, value_at, values_at, whole_text

RAW = pl.Schema({"line": pl.Int64()} | {name: pl.String() for name in FIELDS})
"""A record's fields as text; null where it has none. `line`: its line or row in the shard, from 1."""
DOCUMENTS = pl.Schema(
    {
        "digest": pl.String(),
        "url": pl.String(),
        "domain": pl.String(),
        "title": pl.String(),
        "date": pl.Date(),
        "language": pl.String(),
        "text": pl.String(),
    }
)
"""The columns of documents."""
LATEST_DATE = date(2026, 12, 31)
"""A later date is not used. It is fixed, so that the same shard gives the same rows whenever it is read."""
HOLDS_TEXT = r"[^\s\x1c-\x1f]"
r"""Matches a text that is not blank, as Python's `str.isspace` counts white space: also \x1c to \x1f."""
YEAR = r"(?:199[0-9]|20[0-9]{2})(?:[-_/]|[0-9]{4})"
"""Matches a URL that may hold a date: a year and a separator or four digits. Other URLs are not looked at closer."""
DAY = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})"
"""Matches a date of ISO 8601, with its day as the group: 2020-01-02 of 2020-01-02T10:00:00Z."""
HOST = r"^[^:/?#]+://([^/?#]*)"
"""Matches a URL, with its host as the group."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line or row that is no document, or a shard that is damaged as a whole."""

    line: int  # from 1; 0 for the whole shard
    reason: str  # short and stable, for counting
    detail: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard, and the lines between them that are refused."""

    layout: Layout  # where the records keep each field
    frame: pl.DataFrame
    """A row per record that was not refused, in the columns RAW or DOCUMENTS."""
    rejections: tuple[Rejection, ...] = ()
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Message about an optional field that held no text and counts as null -> number of records."""


Column = Sequence[Any] | pl.Series
"""The values of a field, one per record: of any type, or a series of text."""


class _WrongCell(NamedTuple):
    """A value of a column that is no text."""

    row: int  # its index in the column
    reason: str  # wrong_type or not_utf8
    message: str  # "metadata.url: expected text, found list"


def raw_batch(
    layout: Layout,
    lines: Sequence[int],
    columns: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Return records as a batch of raw columns (RAW), without the refused: missing_field, wrong_type, not_utf8.

    lines: the line or row of each record.
    columns: field -> a column for each path at which the field may stand; the first value that is not null counts.
    records: the records themselves, to tell a missing field from null. Empty for tables, where no field is missing.
    rejections: lines that hold no record; they come first in the batch's rejections.
    """
    texts: dict[str, Column] = {"line": lines}
    refused: dict[int, Rejection] = {}  # by line, for the first faulty field
    ignored: Counter[str] = Counter()
    for field in FIELDS:
        column = _first_of(columns[field], len(lines))
        texts[field], wrong_cells = _as_texts(field, column, layout)
        for cell in wrong_cells:
            if _is_refused(field, cell, layout):
                line = lines[cell.row]
                record = records[cell.row] if records else None
                refused.setdefault(line, _cell_rejection(line, cell, layout, record))
            else:
                ignored[cell.message] += 1
    frame = pl.DataFrame(texts, schema=RAW)
    if refused:
        frame = frame.filter(~pl.col("line").is_in(list(refused)))
    return Batch(layout, frame, (*rejections, *refused.values()), ignored)


def _cell_rejection(line: int, cell: _WrongCell, layout: Layout, record: Mapping[str, Any] | None) -> Rejection:
    """Return the rejection of a record for a wrong value; missing_field where the record has no such field at all.

    record: None for a row of a table, where no field is missing.
    """
    missing = "" if record is None else _missing_fields(layout, record)
    if missing:
        return Rejection(line, "missing_field", missing)
    return Rejection(line, cell.reason, cell.message)


def records_batch(
    layout: Layout, lines: Sequence[int], records: Sequence[Mapping[str, Any]], rejections: Iterable[Rejection]
) -> Batch:
    """Return records that were parsed from JSON as a batch of raw columns, see `raw_batch`."""
    columns = {}
    for field, paths in layout.steps.items():
        columns[field] = [values_at(records, path) for path in paths]
    return raw_batch(layout, lines, columns, records, rejections)


def _first_of(columns: Sequence[Column], row_count: int) -> Column:
    """Return for each row its first value in the columns: [1, 3] for the columns [1, None] and [2, 3].

    Neither None nor Unread (a value that cannot be reached) counts as a value. A row without a value gets its last
    Unread, else None. A single column comes back as it is.
    """
    if len(columns) == 1:
        return columns[0]
    values: Column = [None] * row_count
    for column in columns:
        values = [_first_value(value, later) for value, later in zip(values, column, strict=True)]
    return values


def _first_value(value: Any, later: Any) -> Any:
    """Return `value`, but `later` if `value` is None or Unread and `later` is not None."""
    if value is None or isinstance(value, Unread):
        return value if later is None else later
    return value


def _types(column: Column) -> set[type]:
    """Return the types of the values of a column."""
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return {type(value) for value in column}


def _as_texts(field: str, column: Column, layout: Layout) -> tuple[Column, list[_WrongCell]]:
    """Return a field's values as texts, None where a value is no text; and the cells with a wrong value.

    A value is wrong if it is neither text nor null, or if it is null and the field is required. For the column
    ["a", [5]], ["a", None] and the cell of row 1.
    """
    valid_types = {str} if field in layout.required else {str, type(None)}
    if _types(column) <= valid_types:  # the usual case, which needs no loop
        return column, []
    texts = [_as_text(field, value, is_strict=field in layout.strict) for value in column]
    wrong_cells: list[_WrongCell] = []
    for row, value in enumerate(column):
        is_optional_null = value is None and field not in layout.required
        if texts[row] is None and not is_optional_null:
            wrong_cells.append(_wrong_cell(row, value, layout.paths(field)))
    return texts, wrong_cells


def _wrong_cell(row: int, value: Any, paths: str) -> _WrongCell:
    """Return the cell of a value that is no text. paths: where the field stands in a record, for the message."""
    reason = "not_utf8" if isinstance(value, bytes) else "wrong_type"
    return _WrongCell(row, reason, f"{paths}: expected text, found {_content_in_words(value)}")


def _as_text(field: str, value: Any, *, is_strict: bool) -> str | None:
    """Return a value as text; None where it is no text.

    Bytes in UTF-8 are text. A whole number is text in an id, and in a field that is not strict: "5" for 5. A field is
    strict if it must be text (`Layout.strict`). In the field `date` every value is text, see `_date_text`.
    """
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return _decoded(value)
    if type(value) is int and (field == "id" or not is_strict):
        return str(value)
    if field == "date" and value is not None:
        return _date_text(value)
    return None


def _decoded(value: bytes) -> str | None:
    """Return bytes in UTF-8 as text; None for other bytes."""
    try:
        return whole_text(value.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None


def _date_text(value: Any) -> str:
    """Return a date in ISO 8601; for any other value the name of its type, which `documents_of` counts as no date."""
    return value.isoformat() if isinstance(value, date) else type(value).__name__


def _content_in_words(value: Any) -> str:
    """Return what a value that is no text is, for a message: "null", "list", "bytes that are not UTF-8"."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "bytes that are not UTF-8"
    if isinstance(value, Unread):
        return f"{value.kind} in the way to it"
    return type(value).__name__


def _is_refused(field: str, cell: _WrongCell, layout: Layout) -> bool:
    """Return whether a record is refused for a wrong value in a field; else the value counts as null."""
    refusing_fields = layout.required if cell.reason == "not_utf8" else layout.strict
    return field in refusing_fields


def _missing_fields(layout: Layout, record: Mapping[str, Any]) -> str:
    """Return a message with the required fields that a record lacks: "id or doc_id; the record has url and text".

    A field is missing if none of its paths is in the record; null is there. Returns "" if no field is missing.
    """
    missing = []
    for field in layout.required:
        values = [value_at(record, path, absent=MISSING) for path in layout.steps[field]]
        if all(value is MISSING for value in values):
            missing.append(layout.paths(field))
    if not missing:
        return ""
    return f"{', '.join(missing)}; the record has {shown(record)}"


def documents_of(raw: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of a shard with documents (DOCUMENTS) in place of raw columns.

    Refused: empty_text, and duplicate_digest for all but the first document of a digest in the shard.

    - digest: the record's id, or a hash of its text if it has no id.
    - date: the record's field `date` if it holds a date (ISO 8601), else the date in the URL.
    - title, url, domain: "" if the record has none. language: null.

    Memory: about 100 bytes per document of the shard, for its digest.
    """
    digests_so_far: set[str] = set()
    for batch in raw:
        with_text, without_text = _split_by_text(batch.frame)
        with_digest = with_text.with_columns(_digests(with_text).alias("digest"))
        unique, repetitions = _split_by_repetition(with_digest, digests_so_far)
        dates, ignored = _dates(unique, batch)
        documents = unique.with_columns(
            pl.col("url", "title").fill_null(""),
            pl.coalesce("domain", pl.col("url").str.extract(HOST), pl.lit("")).alias("domain"),
            dates.alias("date"),
        )
        rejections = [*batch.rejections, *without_text, *repetitions]
        rejections.sort(key=lambda rejection: rejection.line)
        yield Batch(batch.layout, documents.select(DOCUMENTS.names()), tuple(rejections), ignored)


def _split_by_text(records: pl.DataFrame) -> tuple[pl.DataFrame, list[Rejection]]:
    """Return the records that hold a text, and a rejection empty_text for each of the others."""
    has_text = records["text"].str.contains(HOLDS_TEXT)
    if has_text.all():
        return records, []
    without_text = records.select("line", "id").filter(~has_text)
    rejections = [Rejection(line, "empty_text", id or "") for line, id in without_text.rows()]
    return records.filter(has_text), rejections


def _split_by_repetition(records: pl.DataFrame, digests_so_far: set[str]) -> tuple[pl.DataFrame, list[Rejection]]:
    """Return the records whose digest is new, and a rejection duplicate_digest for each of the others.

    digests_so_far: the digests of the shard's earlier records; those of `records` are added.
    """
    is_repeated = _repeated(records["digest"], digests_so_far)
    if not is_repeated.any():
        return records, []
    repeated = records.select("line", "digest").filter(is_repeated)
    rejections = [Rejection(line, "duplicate_digest", digest) for line, digest in repeated.rows()]
    return records.filter(~is_repeated), rejections


def _dates(records: pl.DataFrame, batch: Batch) -> tuple[pl.Series, Mapping[str, int]]:
    """Return the date of each record, null where it has none; and `batch.ignored` with the dates that are not read.

    The record's own date comes before that in its URL.
    """
    dates_in_url = url_dates(records["url"])
    if not batch.layout.steps["date"]:
        return dates_in_url, batch.ignored
    record_dates = _record_dates(records["date"])
    ignored = dict(batch.ignored)
    unread_dates = int((record_dates.is_null() & (records["date"] != "")).sum())
    if unread_dates:
        expected = f"expected a date, YYYY-MM-DD until {LATEST_DATE}"
        ignored[f"{batch.layout.paths('date')}: {expected}"] = unread_dates
    return record_dates.zip_with(record_dates.is_not_null(), dates_in_url), ignored


def _repeated(digests: pl.Series, digests_so_far: set[str]) -> pl.Series:
    """Return for each digest whether it came before, in `digests` or in `digests_so_far`. Adds all to this set."""
    is_repeated = []
    for digest in digests.to_list():
        is_repeated.append(digest in digests_so_far)
        digests_so_far.add(digest)
    return pl.Series(is_repeated, dtype=pl.Boolean)


def _record_dates(texts: pl.Series) -> pl.Series:
    """Return the date at the beginning of each text; null where there is none, or a later one than LATEST_DATE."""
    day = pl.col("date").str.extract(DAY).str.to_date("%Y-%m-%d", strict=False)
    return texts.to_frame("date").select(pl.when(day <= LATEST_DATE).then(day)).to_series()


def url_dates(urls: pl.Series) -> pl.Series:
    """Return the date in each URL (`date_from_url`), null where there is none."""
    dates: list[date | None] = [None] * len(urls)
    rows_with_year = urls.str.contains(YEAR).fill_null(False).arg_true()
    for row, url in zip(rows_with_year.to_list(), urls.gather(rows_with_year).to_list(), strict=True):
        dates[row] = date_from_url(url, LATEST_DATE)
    return pl.Series(dates, dtype=pl.Date)


def _digests(frame: pl.DataFrame) -> pl.Series:
    """Return the digest of each record: its id, or a hash of its text where the id is null or "".

    frame: records in the columns RAW; `id` and `text` are read.
    """
    ids = frame["id"]
    rows_without_id = (ids.is_null() | (ids == "")).arg_true()
    if rows_without_id.is_empty():
        return ids
    texts = frame["text"].gather(rows_without_id).cast(pl.Binary)
    hashes = [content_hash(text) for text in texts.to_list()]
    has_no_ids = len(hashes) == len(ids)
    if has_no_ids:  # as in many corpora; `scatter` wants text to write into
        return pl.Series(hashes, dtype=pl.String)
    return ids.scatter(rows_without_id, hashes)
