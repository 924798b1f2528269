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
from toolformer_dag.texts.formats import FIELDS, MISSING, Layout, Unread, shown, values_at, whole_text

RAW = pl.Schema({"line": pl.Int64()} | {name: pl.String() for name in FIELDS})
"""What is read from a record; null where it holds nothing. `line`: line or row of the shard, from 1."""
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
"""A later day is no date of the page; fixed, so that the same shard gives the same rows on every clock."""
HOLDS_TEXT = r"[^\s\x1c-\x1f]"
"""A sign that is no white space as Python's `str.isspace` has it, which counts ASCII's four separators as such."""
YEAR = r"(?:199[0-9]|20[0-9]{2})(?:[-_/]|[0-9]{4})"
"""Every form of a date in a URL holds this; the others need no closer look."""
DAY = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})"
"""The day at the beginning of a date of ISO 8601."""
HOST = r"^[^:/?#]+://([^/?#]*)"
"""The host of a URL."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line or row that is no document, or a shard that is damaged as a whole."""

    line: int  # from 1; 0 for the whole shard
    reason: str  # short and stable, for counting
    detail: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard."""

    layout: Layout
    frame: pl.DataFrame
    """A row per record that was not refused, in the columns RAW or DOCUMENTS."""
    rejections: tuple[Rejection, ...] = ()
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Optional fields that held something else than text and count as null: how often, by a message that says so."""


Column = Sequence[Any] | pl.Series
"""The values of a field, one per record: of any type, or a series of text."""


class _WrongCell(NamedTuple):
    """A value that is no text."""

    row: int
    reason: str  # wrong_type or not_utf8
    content: str  # what it is, in words


def raw_batch(
    layout: Layout,
    lines: Sequence[int],
    columns: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Return records as raw columns. Refused: missing_field, wrong_type, not_utf8.

    lines: the line or row of each record.
    columns: by field, the values at each of its ways, of which the first that is not null counts.
    records: the records themselves where a field can be missing, which is another reason than null; none for tables.
    rejections: those of lines that hold no record; they come first in the result.
    """
    texts: dict[str, Column] = {"line": lines}
    refused: dict[int, Rejection] = {}  # by line; the first field at fault counts
    ignored: Counter[str] = Counter()
    for field in FIELDS:
        column = _first_of(columns[field], len(lines))
        may_be_null = field not in layout.required
        if _types(column) <= ({str, type(None)} if may_be_null else {str}):
            texts[field] = column
            continue
        texts[field], wrong_cells = _as_texts(field, column, layout)
        for cell in wrong_cells:
            message = f"{layout.paths(field)}: expected text, found {cell.content}"
            if not _is_refused(field, cell, layout):
                ignored[message] += 1
                continue
            line = lines[cell.row]
            missing = _missing_fields(layout, records[cell.row]) if records else ""
            if missing:
                refused.setdefault(line, Rejection(line, "missing_field", missing))
            else:
                refused.setdefault(line, Rejection(line, cell.reason, message))
    frame = pl.DataFrame(texts, schema=RAW)
    if refused:
        frame = frame.filter(~pl.col("line").is_in(list(refused)))
    return Batch(layout, frame, (*rejections, *refused.values()), ignored)


def records_batch(
    layout: Layout, lines: Sequence[int], records: Sequence[Mapping[str, Any]], rejections: Iterable[Rejection]
) -> Batch:
    """Return records that were parsed one by one as raw columns, as `raw_batch` does."""
    columns = {}
    for field, ways in layout.places.items():
        columns[field] = [values_at(records, way) for way in ways]
    return raw_batch(layout, lines, columns, records, rejections)


def _first_of(columns: Sequence[Column], rows: int) -> Column:
    """Return, for each of the rows, the first value in the columns that is neither null nor blocked (Unread).

    A row without one keeps the last Unread, else null.
    """
    if len(columns) == 1:
        return columns[0]
    values: Column = [None] * rows
    for column in columns:
        values = [_better_of(value, later) for value, later in zip(values, column, strict=True)]
    return values


def _better_of(value: Any, later: Any) -> Any:
    """Return a value, or the one of a later way where the first is null or blocked and the later is not null."""
    has_value = value is not None and not isinstance(value, Unread)
    return value if has_value or later is None else later


def _types(column: Column) -> set[type]:
    """Return the types of the values of a column."""
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return {type(value) for value in column}


def _as_texts(field: str, column: Column, layout: Layout) -> tuple[list[str | None], list[_WrongCell]]:
    """Return each value of a field as text, null where it is none, and the values that are none without being null.

    A null counts as wrong where the field is required.
    """
    texts: list[str | None] = []
    wrong_cells: list[_WrongCell] = []
    for row, value in enumerate(column):
        text = _as_text(field, value, is_strict=field in layout.strict)
        texts.append(text)
        is_optional_null = value is None and field not in layout.required
        if text is None and not is_optional_null:
            reason = "not_utf8" if isinstance(value, bytes) else "wrong_type"
            wrong_cells.append(_WrongCell(row, reason, _content_in_words(value)))
    return texts, wrong_cells


def _as_text(field: str, value: Any, *, is_strict: bool) -> str | None:
    """Return a value as text: bytes in UTF-8, and numbers of ids and of fields that need not be text; else None.

    A date is written as text whatever it is: what is no date is counted later, by `documents_of`.
    """
    if isinstance(value, bytes):
        try:
            return whole_text(value.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            return None
    if type(value) is str:
        return value
    if type(value) is int and (field == "id" or not is_strict):
        return str(value)
    if field == "date" and value is not None:
        return value.isoformat() if isinstance(value, date) else type(value).__name__
    return None


def _content_in_words(value: Any) -> str:
    """Say what a value is that is no text, for a message."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "bytes that are not UTF-8"
    if isinstance(value, Unread):
        return f"{value.kind} in the way to it"
    return type(value).__name__


def _is_refused(field: str, cell: _WrongCell, layout: Layout) -> bool:
    """Return whether a value that is no text makes its record refused; else it counts as null."""
    refusing_fields = layout.required if cell.reason == "not_utf8" else layout.strict
    return field in refusing_fields


def _missing_fields(layout: Layout, record: Mapping[str, Any]) -> str:
    """Say which required fields a record has not even as null, and which fields it has; "" where it has all."""
    missing = []
    for field in layout.required:
        values = [values_at([record], way, MISSING)[0] for way in layout.places[field]]
        if all(value is MISSING for value in values):
            missing.append(layout.paths(field))
    if not missing:
        return ""
    return f"{', '.join(missing)}; the record has {shown(record)}"


def documents_of(raw: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the documents of a shard's raw columns, in order. Refused: empty_text, duplicate_digest (within the shard).

    - digest: the record's id, or a hash of the text without one.
    - date: the day in the URL; where the layout has a field for dates, the record's own where it holds one (ISO 8601).
    - title, url, domain: empty where there is none. language: null.

    Memory: about 100 bytes per document of the shard, for its digest.
    """
    digests_so_far: set[str] = set()
    for batch in raw:
        frame = batch.frame
        has_text = frame["text"].str.contains(HOLDS_TEXT)
        without_text = frame.select("line", "id").filter(~has_text)
        refused = [Rejection(line, "empty_text", id or "") for line, id in without_text.rows()]
        if refused:
            frame = frame.filter(has_text)

        frame = frame.with_columns(_digests(frame).alias("digest"))
        is_repeated = _repeated(frame["digest"], digests_so_far)
        if is_repeated.any():
            repeated = frame.select("line", "digest").filter(is_repeated)
            refused += [Rejection(line, "duplicate_digest", digest) for line, digest in repeated.rows()]
            frame = frame.filter(~is_repeated)

        ignored = dict(batch.ignored)
        dates = url_dates(frame["url"])
        if batch.layout.places["date"]:
            own_dates = _own_dates(frame["date"])
            unread_dates = int((own_dates.is_null() & (frame["date"] != "")).sum())
            if unread_dates:
                expected = f"expected a date, YYYY-MM-DD until {LATEST_DATE}"
                ignored[f"{batch.layout.paths('date')}: {expected}"] = unread_dates
            dates = own_dates.zip_with(own_dates.is_not_null(), dates)

        documents = frame.with_columns(
            pl.col("url", "title").fill_null(""),
            pl.coalesce("domain", pl.col("url").str.extract(HOST), pl.lit("")).alias("domain"),
            dates.alias("date"),
        )
        rejections = sorted((*batch.rejections, *refused), key=lambda rejection: rejection.line)
        yield Batch(batch.layout, documents.select(DOCUMENTS.names()), tuple(rejections), ignored)


def _repeated(digests: pl.Series, digests_so_far: set[str]) -> pl.Series:
    """Return for each digest whether it came before, here or in `digests_so_far`; add them all to this set."""
    is_repeated = []
    for digest in digests.to_list():
        is_repeated.append(digest in digests_so_far)
        digests_so_far.add(digest)
    return pl.Series(is_repeated, dtype=pl.Boolean)


def _own_dates(texts: pl.Series) -> pl.Series:
    """Return the days that texts begin with, null where there is none, or a later one than LATEST_DATE."""
    day = pl.col("date").str.extract(DAY).str.to_date("%Y-%m-%d", strict=False)
    return texts.to_frame("date").select(pl.when(day <= LATEST_DATE).then(day)).to_series()


def url_dates(urls: pl.Series) -> pl.Series:
    """Return the date in each URL, as `date_from_url` does."""
    dates: list[date | None] = [None] * len(urls)
    rows = urls.str.contains(YEAR).fill_null(False).arg_true()  # of URLs that may have a date
    for row, url in zip(rows.to_list(), urls.gather(rows).to_list(), strict=True):
        dates[row] = date_from_url(url, LATEST_DATE)
    return pl.Series(dates, dtype=pl.Date)


def _digests(frame: pl.DataFrame) -> pl.Series:
    """Return the digest of each record: its id, or where that is null or empty a hash of its text.

    frame: the columns RAW, among them `id` and `text`.
    """
    ids = frame["id"]
    rows = (ids.is_null() | (ids == "")).arg_true()  # of records without an id
    if rows.is_empty():
        return ids
    hashes = [content_hash(text) for text in frame["text"].gather(rows).cast(pl.Binary).to_list()]
    if len(rows) == len(ids):
        return pl.Series(hashes, dtype=pl.String)
    return ids.scatter(rows, hashes)
