"""Records -> raw columns, a column at a time -> documents: digests, duplicates, domains, and the date of the URL.

Raw columns are what a record holds in each field, as text (RAW). Readers give them in a `Batch`;
`iter_document_batches` makes documents of them.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.identity import content_hash
from toolformer_dag.texts.document import find_date_in_url
from toolformer_dag.texts.formats import (
    FIELDS,
    MISSING,
    Layout,
    Steps,
    Unread,
    format_names,
    get_values_at,
    value_at,
    whole_text,
)

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


def build_raw_batch(
    layout: Layout,
    lines: Sequence[int],
    columns: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Turn records into a batch of raw columns (RAW), and reject faulty records.

    A record is rejected as missing_field, wrong_type or not_utf8.

    Args:
        layout: Where the records keep each field.
        lines: The line or row number of each record.
        columns: For each field, a column for each path at which it may be. The first value of a record that is
            not null is used.
        records: The records themselves, which show whether a field is missing or null. Empty for tables, where
            no field is missing.
        rejections: Lines that hold no record. They come first among the rejections of the batch.
    """
    checked = _CheckedRecords(layout, lines, records)
    texts: dict[str, Column] = {"line": lines}
    for field in FIELDS:
        texts[field] = checked.texts(field, columns[field])  # adds to `checked.refused` and `checked.ignored`

    frame = pl.DataFrame(texts, schema=RAW)
    if checked.refused:
        is_refused = pl.col("line").is_in(list(checked.refused))
        frame = frame.filter(~is_refused)

    all_rejections = (*rejections, *checked.refused.values())
    return Batch(layout, frame, all_rejections, checked.ignored)


class _CheckedRecords:
    """The records of a batch, whose fields are read as text one after another (`texts`).

    - refused: line of a record -> its rejection, for the first faulty field that was read
    - ignored: message -> number of values that are no text and count as null
    """

    def __init__(self, layout: Layout, lines: Sequence[int], records: Sequence[Mapping[str, Any]]) -> None:
        self.refused: dict[int, Rejection] = {}
        self.ignored: Counter[str] = Counter()
        self._layout = layout
        self._lines = lines
        self._records = records  # empty for tables

    def texts(self, field: str, columns: Sequence[Column]) -> Column:
        """Read one field of all records as text.

        A value that is not text, or null in a required field, adds its record to `refused`, or is counted in `ignored`.

        Args:
            field: The name of the field.
            columns: For each path of the field, the values of all records.

        Returns:
            A text per record, or None for a record without text in this field.
        """
        column = _coalesce_columns(columns, len(self._lines))

        valid_types = {str} if field in self._layout.required else {str, type(None)}
        if _collect_value_types(column) <= valid_types:  # the usual case, which needs no loop
            return column

        is_strict = field in self._layout.strict
        texts = [_to_text(field, value, is_strict=is_strict) for value in column]
        for row, text in enumerate(texts):
            if text is None:  # null, or a value that is no text
                self._refuse_or_ignore(field, row, column[row])
        return texts

    def _refuse_or_ignore(self, field: str, row: int, value: Any) -> None:
        """Note that a record has no text in a field.

        The record is added to `refused`, or the value is counted in `ignored` and later treated as null.
        Null in an optional field is not a fault.

        Args:
            field: The name of the field.
            row: The index of the record.
            value: What the record has in this field.
        """
        if value is None and field not in self._layout.required:
            return

        reason = "not_utf8" if isinstance(value, bytes) else "wrong_type"
        message = f"{self._layout.paths(field)}: expected text, found {_describe_content(value)}"

        if _is_refused(field, reason, self._layout):
            rejection = self._build_rejection(row, reason, message)
            self.refused.setdefault(rejection.line, rejection)  # a record's first rejection counts
        else:
            self.ignored[message] += 1

    def _build_rejection(self, row: int, reason: str, message: str) -> Rejection:
        """Return the rejection of a record: missing_field if it lacks a required field, else the given reason."""
        line = self._lines[row]
        missing = _describe_missing_fields(self._layout, self._records[row]) if self._records else ""
        if missing:
            return Rejection(line, "missing_field", missing)
        return Rejection(line, reason, message)


def build_records_batch(
    layout: Layout, lines: Sequence[int], records: Sequence[Mapping[str, Any]], rejections: Iterable[Rejection]
) -> Batch:
    """Return records that were parsed from JSON as a batch of raw columns (RAW); see `build_raw_batch`."""
    columns = {}
    for field, paths in layout.steps.items():
        columns[field] = [get_values_at(records, path) for path in paths]
    return build_raw_batch(layout, lines, columns, records, rejections)


def _coalesce_columns(columns: Sequence[Column], row_count: int) -> Column:
    """Choose for each row the first value in several columns: [1, 3] for the columns [1, None] and [2, 3].

    None and Unread (a value that cannot be reached) are chosen only if the row has nothing else.
    """
    if len(columns) == 1:
        return columns[0]

    values: Column = [None] * row_count
    for column in columns:
        values = [_coalesce_values(value, later) for value, later in zip(values, column, strict=True)]
    return values


def _coalesce_values(value: Any, later: Any) -> Any:
    """Return `value`, but `later` if `value` is None or Unread and `later` is not None."""
    if value is None or isinstance(value, Unread):
        return value if later is None else later
    return value


def _collect_value_types(column: Column) -> set[type]:
    """Return the types of the values of a column."""
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return {type(value) for value in column}


def _to_text(field: str, value: Any, *, is_strict: bool) -> str | None:
    """Convert a value of a record to text, if it counts as text.

    Whole numbers count as text in the field `id`, and in fields that are not strict (see `Layout.strict`).
    In the field `date` values of other types count as well, except null.

    Returns:
        The text, or None for any other value.
    """
    if type(value) is str:
        return value
    if isinstance(value, bytes):
        return _decode_utf8(value)
    if type(value) is int and (field == "id" or not is_strict):
        return str(value)
    if field == "date" and value is not None:
        return _format_date(value)
    return None


def _decode_utf8(value: bytes) -> str | None:
    """Return bytes in UTF-8 as text; None for other bytes."""
    try:
        return whole_text(value.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None


def _format_date(value: Any) -> str:
    """Return a date in ISO 8601; for any other value the name of its type, which counts as no date later."""
    return value.isoformat() if isinstance(value, date) else type(value).__name__


def _describe_content(value: Any) -> str:
    """Describe a value that is not text, for a message: "null", "list" or "bytes that are not UTF-8"."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "bytes that are not UTF-8"
    if isinstance(value, Unread):
        return f"{value.kind} in the way to it"
    return type(value).__name__


def _is_refused(field: str, reason: str, layout: Layout) -> bool:
    """Return whether a record is refused for a faulty value in a field; otherwise the value counts as null."""
    refusing_fields = layout.required if reason == "not_utf8" else layout.strict
    return field in refusing_fields


def _describe_missing_fields(layout: Layout, record: Mapping[str, Any]) -> str:
    """Describe which required fields a record does not have. A field that is null counts as present.

    Returns:
        A message such as "id or doc_id; the record has url and text", or "" if no field is missing.
    """
    missing = [layout.paths(field) for field in layout.required if _has_no_path(record, layout.steps[field])]
    if not missing:
        return ""
    return f"{', '.join(missing)}; the record has {format_names(record)}"


def _has_no_path(record: Mapping[str, Any], paths: Sequence[Steps]) -> bool:
    """Return whether none of the paths is in a record."""
    return all(value_at(record, path, absent=MISSING) is MISSING for path in paths)


def iter_document_batches(raw: Iterable[Batch]) -> Iterator[Batch]:
    """Turn batches of raw columns into batches of documents (DOCUMENTS).

    A record with a blank text is rejected as empty_text. If several records of the shard have the same digest, all
    but the first are rejected as duplicate_digest. The columns are filled like this:

    - digest: the record's id, or a hash of its text if it has no id
    - date: the record's field `date` if it holds a date (ISO 8601), or else the date in its URL
    - title, url, domain: "" if the record has none (the domain is taken from the URL if possible)
    - language: null if the record has none

    About 100 bytes of memory are needed per document of the shard, because all digests are kept.
    """
    digests_so_far: set[str] = set()
    for batch in raw:
        yield _build_documents_batch(batch, digests_so_far)


def _build_documents_batch(raw: Batch, digests_so_far: set[str]) -> Batch:
    """Turn one batch of raw columns into documents. Blank texts and repeated digests are rejected.

    Args:
        raw: The batch of raw columns.
        digests_so_far: The digests of earlier batches. Those of this batch are added to it.
    """
    records, blank_rejections = _reject_blank_texts(raw.frame)
    records = records.with_columns(_compute_digests(records).alias("digest"))
    records, repeated_rejections = _reject_repeated_digests(records, digests_so_far)  # adds to `digests_so_far`

    has_date_field = bool(raw.layout.steps["date"])
    record_dates = _parse_record_dates(records["date"]) if has_date_field else None
    documents = _build_documents(records, record_dates)

    rejections = _sort_by_line(raw.rejections, blank_rejections, repeated_rejections)

    ignored = dict(raw.ignored)  # message about a value that counts as null -> number of values
    if record_dates is not None:
        ignored |= _count_unread_dates(records["date"], record_dates, raw.layout)
    return Batch(raw.layout, documents, rejections, ignored)


def _sort_by_line(*rejections: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Return all rejections in the order of their lines."""
    all_rejections = chain.from_iterable(rejections)
    return tuple(sorted(all_rejections, key=lambda rejection: rejection.line))


class _Accepted(NamedTuple):
    """Records that passed a check, and a rejection for each of the others."""

    records: pl.DataFrame
    rejections: list[Rejection]


def _reject_blank_texts(records: pl.DataFrame) -> _Accepted:
    """Separate the records whose text is not blank from the others, which are rejected as empty_text."""
    has_text = records["text"].str.contains(HOLDS_TEXT)
    if has_text.all():
        return _Accepted(records, rejections=[])

    without_text = records.select("line", "id").filter(~has_text)
    rejections = [Rejection(line, "empty_text", id or "") for line, id in without_text.rows()]
    return _Accepted(records.filter(has_text), rejections)


def _reject_repeated_digests(records: pl.DataFrame, digests_so_far: set[str]) -> _Accepted:
    """Separate the records whose digest is new from the others, which are rejected as duplicate_digest.

    Args:
        records: Records with a column `digest`.
        digests_so_far: The digests of earlier records of the shard. New ones are added to it.
    """
    is_repeated = _mark_repeated_digests(records["digest"], digests_so_far)
    if not is_repeated.any():
        return _Accepted(records, rejections=[])

    repeated = records.select("line", "digest").filter(is_repeated)
    rejections = [Rejection(line, "duplicate_digest", digest) for line, digest in repeated.rows()]
    return _Accepted(records.filter(~is_repeated), rejections)


def _build_documents(records: pl.DataFrame, record_dates: pl.Series | None) -> pl.DataFrame:
    """Build the columns DOCUMENTS. Domain and date come from the URL if the record does not have them.

    A missing url, title or domain becomes "".

    Args:
        records: The records that were accepted.
        record_dates: The dates in their field `date`, or None if they have no such field.
    """
    host = pl.col("url").str.extract(HOST)
    domain = pl.coalesce("domain", host, pl.lit(""))  # the first that is not null
    dates = _choose_dates(records["url"], record_dates)  # a record's own date comes first

    documents = records.with_columns(
        pl.col("url", "title").fill_null(""),
        domain.alias("domain"),
        dates.alias("date"),
    )
    return documents.select(DOCUMENTS.names())


def _choose_dates(urls: pl.Series, record_dates: pl.Series | None) -> pl.Series:
    """Return the date of each record, or else the date in its URL; null where it has neither."""
    dates_in_url = find_dates_in_urls(urls)
    if record_dates is None:
        return dates_in_url
    return record_dates.zip_with(record_dates.is_not_null(), dates_in_url)


def _count_unread_dates(texts: pl.Series, record_dates: pl.Series, layout: Layout) -> dict[str, int]:
    """Count the records whose field `date` holds something that is not a date.

    Returns:
        The count by a message for people, or an empty dict if there are none:
        {"meta.day: expected a date, YYYY-MM-DD until 2026-12-31": 2}
    """
    is_unread = record_dates.is_null() & (texts != "")
    count = int(is_unread.sum())

    if not count:
        return {}
    return {f"{layout.paths('date')}: expected a date, YYYY-MM-DD until {LATEST_DATE}": count}


def _mark_repeated_digests(digests: pl.Series, digests_so_far: set[str]) -> pl.Series:
    """Return for each digest whether it came before, in `digests` or in `digests_so_far`. Adds all to this set."""
    is_repeated = []
    for digest in digests.to_list():
        is_repeated.append(digest in digests_so_far)
        digests_so_far.add(digest)
    return pl.Series(is_repeated, dtype=pl.Boolean)


def _parse_record_dates(texts: pl.Series) -> pl.Series:
    """Return the date at the beginning of each text; null without one, and for dates after LATEST_DATE."""
    days = texts.str.extract(DAY).str.to_date("%Y-%m-%d", strict=False)
    day = pl.col("day")
    in_time = pl.when(day <= LATEST_DATE).then(day)
    return days.to_frame("day").select(in_time).to_series()


def find_dates_in_urls(urls: pl.Series) -> pl.Series:
    """Find the date in each URL (see `find_date_in_url`), or null if it holds none."""
    dates: list[date | None] = [None] * len(urls)

    rows_with_year = urls.str.contains(YEAR).fill_null(False).arg_true()
    urls_with_year = urls.gather(rows_with_year).to_list()

    for row, url in zip(rows_with_year.to_list(), urls_with_year, strict=True):
        dates[row] = find_date_in_url(url, LATEST_DATE)
    return pl.Series(dates, dtype=pl.Date)


def _compute_digests(frame: pl.DataFrame) -> pl.Series:
    """Compute the digest of each record: its id, or a hash of its text if the id is null or ""."""
    ids = frame["id"]
    has_no_id = ids.is_null() | (ids == "")
    rows_without_id = has_no_id.arg_true()  # their row numbers
    if rows_without_id.is_empty():
        return ids

    texts_without_id = frame["text"].gather(rows_without_id)
    hashes = _compute_text_hashes(texts_without_id)
    if len(hashes) == len(ids):  # no record has an id; `scatter` cannot write into a column of nulls
        return hashes
    return ids.scatter(rows_without_id, hashes)  # the ids, with a hash in each row without one


def _compute_text_hashes(texts: pl.Series) -> pl.Series:
    """Return the hash of each text."""
    hashes = [content_hash(text) for text in texts.cast(pl.Binary).to_list()]
    return pl.Series(hashes, dtype=pl.String)
