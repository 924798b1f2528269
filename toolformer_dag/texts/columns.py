"""Records -> raw columns, a column at a time -> documents: digests, duplicates, domains, and the date of the URL.

Raw columns are what a record holds in each field, as text (RAW_COLUMNS). Readers give them in a `Batch`;
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

from toolformer_dag.identity import compute_content_hash
from toolformer_dag.texts.document import find_date_in_url
from toolformer_dag.texts.formats import (
    DOCUMENT_FIELDS,
    MISSING,
    Layout,
    PathSteps,
    UnreachableValue,
    format_field_names,
    get_value_at_path,
    get_values_at_path,
    join_surrogate_pairs,
)

RAW_COLUMNS = pl.Schema({"line": pl.Int64()} | {name: pl.String() for name in DOCUMENT_FIELDS})
"""A record's fields as text; null where it has none. `line`: its line or row in the shard, from 1."""
DOCUMENT_COLUMNS = pl.Schema(
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
NON_BLANK_PATTERN = r"[^\s\x1c-\x1f]"
r"""Matches a text that is not blank, as Python's `str.isspace` counts white space: also \x1c to \x1f."""
YEAR_IN_URL_PATTERN = r"(?:199[0-9]|20[0-9]{2})(?:[-_/]|[0-9]{4})"
"""Matches a URL that may hold a date: a year and a separator or four digits. Other URLs are not looked at closer."""
ISO_DAY_PATTERN = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})"
"""Matches a date of ISO 8601, with its day as the group: 2020-01-02 of 2020-01-02T10:00:00Z."""
URL_HOST_PATTERN = r"^[^:/?#]+://([^/?#]*)"
"""Matches a URL, with its host as the group."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line or row that is no document, or a shard that is damaged as a whole."""

    line_number: int  # from 1; 0 for the whole shard
    reason: str  # short and stable, for counting
    detail: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard, and the lines between them that are refused."""

    layout: Layout  # where the records keep each field
    frame: pl.DataFrame
    """A row per record that was not refused, in RAW_COLUMNS or DOCUMENT_COLUMNS."""
    rejections: tuple[Rejection, ...] = ()
    ignored_value_counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Message about an optional field that held no text and counts as null -> number of records."""


Column = Sequence[Any] | pl.Series
"""The values of a field, one per record: of any type, or a series of text."""


def build_raw_batch(
    layout: Layout,
    line_numbers: Sequence[int],
    columns_by_field: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Turn records into a batch of raw columns (RAW_COLUMNS), and reject faulty records.

    A record is rejected as missing_field, wrong_type or not_utf8.

    Args:
        layout: Where the records keep each field.
        line_numbers: The line or row number of each record.
        columns_by_field: For each field, a column for each path at which it may be. The first value of a record that is
            not null is used.
        records: The records themselves, which show whether a field is missing or null. Empty for tables, where
            no field is missing.
        rejections: Lines that hold no record. They come first among the rejections of the batch.
    """
    checked_records = _CheckedRecords(layout, line_numbers, records)

    raw_columns: dict[str, Column] = {"line": line_numbers}
    for field in DOCUMENT_FIELDS:
        # This also collects rejections and ignored values in `checked_records`.
        raw_columns[field] = checked_records.read_field_texts(field, columns_by_field[field])

    frame = pl.DataFrame(raw_columns, schema=RAW_COLUMNS)
    if checked_records.rejections_by_line:
        rejected_lines = list(checked_records.rejections_by_line)
        is_rejected = pl.col("line").is_in(rejected_lines)
        frame = frame.filter(~is_rejected)

    all_rejections = (*rejections, *checked_records.rejections_by_line.values())
    return Batch(layout, frame, all_rejections, checked_records.ignored_value_counts)


class _CheckedRecords:
    """The records of a batch, whose fields are read as text one after another (`read_field_texts`).

    Attributes:
        rejections_by_line: The rejection of each faulty record by its line, for the first faulty field that was read.
        ignored_value_counts: The number of values that are not text and count as null, by a message about them.
    """

    def __init__(self, layout: Layout, line_numbers: Sequence[int], records: Sequence[Mapping[str, Any]]) -> None:
        self.rejections_by_line: dict[int, Rejection] = {}
        self.ignored_value_counts: Counter[str] = Counter()
        self._layout = layout
        self._line_numbers = line_numbers
        self._records = records  # empty for tables

    def read_field_texts(self, field: str, columns: Sequence[Column]) -> Column:
        """Read one field of all records as text.

        If a value is not text, or is null in a required field, its record is rejected (`rejections_by_line`), or the
        value is ignored (`ignored_value_counts`).

        Args:
            field: The name of the field.
            columns: For each path of the field, the values of all records.

        Returns:
            A text per record, or None for a record without text in this field.
        """
        column = _coalesce_columns(columns, len(self._line_numbers))

        valid_types = {str} if field in self._layout.required_fields else {str, type(None)}
        if _collect_value_types(column) <= valid_types:  # the usual case, which needs no loop
            return column

        is_strict = field in self._layout.strict_fields
        texts = [_convert_to_text(field, value, is_strict=is_strict) for value in column]
        for record_index, text in enumerate(texts):
            if text is None:  # a value that is not text, or null, which is left alone in an optional field
                self._reject_or_ignore_value(field, record_index, column[record_index])
        return texts

    def _reject_or_ignore_value(self, field: str, record_index: int, value: Any) -> None:
        """Note that a record has no text in a field.

        The record is rejected (`rejections_by_line`), or the value is ignored (`ignored_value_counts`) and later
        treated as null. Null in an optional field is not a fault.

        Args:
            field: The name of the field.
            record_index: The index of the record.
            value: What the record has in this field.
        """
        if value is None and field not in self._layout.required_fields:
            return

        reason = "not_utf8" if isinstance(value, bytes) else "wrong_type"
        message = f"{self._layout.format_paths(field)}: expected text, found {_describe_value_type(value)}"

        if _is_record_rejected(field, reason, self._layout):
            rejection = self._build_rejection(record_index, reason, message)
            self.rejections_by_line.setdefault(rejection.line_number, rejection)  # a record's first rejection counts
        else:
            self.ignored_value_counts[message] += 1

    def _build_rejection(self, record_index: int, reason: str, message: str) -> Rejection:
        """Build the rejection of a record.

        Args:
            record_index: The index of the record.
            reason: The reason if no field is missing. If one is, the reason is "missing_field".
            message: The message that belongs to `reason`.
        """
        line_number = self._line_numbers[record_index]

        if self._records:  # in tables, no field is missing
            missing_fields = _describe_missing_fields(self._layout, self._records[record_index])
            if missing_fields:
                return Rejection(line_number, "missing_field", missing_fields)

        return Rejection(line_number, reason, message)


def build_records_batch(
    layout: Layout, line_numbers: Sequence[int], records: Sequence[Mapping[str, Any]], rejections: Iterable[Rejection]
) -> Batch:
    """Turn records that were parsed from JSON into a batch of raw columns (RAW_COLUMNS), and reject faulty records.

    Args:
        layout: Where the records keep each field.
        line_numbers: The line number of each record.
        records: The parsed records.
        rejections: Lines that hold no record. They come first among the rejections of the batch.
    """
    columns_by_field = {}
    for field, paths in layout.paths_by_field.items():
        columns_by_field[field] = [get_values_at_path(records, path) for path in paths]
    return build_raw_batch(layout, line_numbers, columns_by_field, records, rejections)


def _coalesce_columns(columns: Sequence[Column], row_count: int) -> Column:
    """Choose for each row the first value in several columns: [1, 3] for the columns [1, None] and [2, 3].

    None and UnreachableValue are chosen only if the row has nothing else.

    Args:
        columns: The columns, each with a value per row.
        row_count: The number of rows.
    """
    if len(columns) == 1:
        return columns[0]

    chosen_values: Column = [None] * row_count
    for column in columns:
        pairs = zip(chosen_values, column, strict=True)
        chosen_values = [_coalesce_values(chosen_value, value) for chosen_value, value in pairs]
    return chosen_values


def _coalesce_values(value: Any, later_value: Any) -> Any:
    """Return the first of two values that can be used.

    None cannot be used, and neither can an UnreachableValue, which stands for a value at an impossible path. If neither
    of the two can be used, an UnreachableValue is preferred to None, because it says what is wrong with the record.
    """
    is_usable = value is not None and not isinstance(value, UnreachableValue)
    if is_usable or later_value is None:
        return value
    return later_value


def _collect_value_types(column: Column) -> set[type]:
    """Return the types of the values of a column. A polars series is always text, perhaps with nulls."""
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return {type(value) for value in column}


def _convert_to_text(field: str, value: Any, *, is_strict: bool) -> str | None:
    """Convert a value of a record to text, if it counts as text.

    Whole numbers count as text in the field `id`, and in fields that are not strict (see `Layout.strict_fields`).
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
    """Decode bytes as UTF-8, with half a surrogate pair replaced. Returns None if they are not UTF-8."""
    try:
        return join_surrogate_pairs(value.decode("utf-8", "surrogatepass"))
    except UnicodeDecodeError:
        return None


def _format_date(value: Any) -> str:
    """Return a date in ISO 8601, "2020-01-02". For any other value, return the name of its type, which is no date."""
    return value.isoformat() if isinstance(value, date) else type(value).__name__


def _describe_value_type(value: Any) -> str:
    """Describe a value that is not text, for a message: "null", "list" or "bytes that are not UTF-8"."""
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "bytes that are not UTF-8"
    if isinstance(value, UnreachableValue):
        return f"{value.type_name} in the way to it"
    return type(value).__name__


def _is_record_rejected(field: str, reason: str, layout: Layout) -> bool:
    """Check whether a record is rejected because of a faulty value in a field. Otherwise the value counts as null.

    Args:
        field: The field with the faulty value.
        reason: What is wrong with the value: "not_utf8" or "wrong_type".
        layout: Which fields are required, and which are strict.
    """
    if reason == "not_utf8":
        return field in layout.required_fields
    return field in layout.strict_fields


def _describe_missing_fields(layout: Layout, record: Mapping[str, Any]) -> str:
    """Describe which required fields a record does not have. A field that is null counts as present.

    Returns:
        A message such as "id or doc_id; the record has url and text", or "" if no field is missing.
    """
    missing_paths = []
    for field in layout.required_fields:
        if _has_no_path(record, layout.paths_by_field[field]):
            missing_paths.append(layout.format_paths(field))

    if not missing_paths:
        return ""
    return f"{', '.join(missing_paths)}; the record has {format_field_names(record)}"


def _has_no_path(record: Mapping[str, Any], paths: Sequence[PathSteps]) -> bool:
    """Check whether none of the paths leads to something in a record. Null counts as something."""
    return all(get_value_at_path(record, path, default=MISSING) is MISSING for path in paths)


def iter_document_batches(raw_batches: Iterable[Batch]) -> Iterator[Batch]:
    """Turn batches of raw columns into batches of documents (DOCUMENT_COLUMNS).

    A record with a blank text is rejected as empty_text. If several records of the shard have the same digest, all
    but the first are rejected as duplicate_digest. The columns are filled like this:

    - digest: the record's id, or a hash of its text if it has no id
    - date: the record's field `date` if it holds a date (ISO 8601), or else the date in its URL
    - title, url, domain: "" if the record has none (the domain is taken from the URL if possible)
    - language: null if the record has none

    About 100 bytes of memory are needed per document of the shard, because all digests are kept.
    """
    digests_so_far: set[str] = set()
    for batch in raw_batches:
        yield _build_document_batch(batch, digests_so_far)


def _build_document_batch(raw_batch: Batch, digests_so_far: set[str]) -> Batch:
    """Turn one batch of raw columns into documents. Blank texts and repeated digests are rejected.

    Args:
        raw_batch: The batch of raw columns.
        digests_so_far: The digests of earlier batches. Those of this batch are added to it.
    """
    records, blank_rejections = _reject_blank_texts(raw_batch.frame)
    records = records.with_columns(_compute_digests(records).alias("digest"))
    records, repeated_rejections = _reject_repeated_digests(records, digests_so_far)  # adds to `digests_so_far`

    has_date_field = bool(raw_batch.layout.paths_by_field["date"])
    record_dates = _parse_record_dates(records["date"]) if has_date_field else None
    documents = _build_documents(records, record_dates)

    rejections = _sort_rejections_by_line(raw_batch.rejections, blank_rejections, repeated_rejections)

    ignored = dict(raw_batch.ignored_value_counts)  # message about a value that counts as null -> number of values
    if record_dates is not None:
        ignored |= _count_unread_dates(records["date"], record_dates, raw_batch.layout)
    return Batch(raw_batch.layout, documents, rejections, ignored)


def _sort_rejections_by_line(*rejection_groups: Iterable[Rejection]) -> tuple[Rejection, ...]:
    """Join groups of rejections, and sort all rejections by their lines."""
    all_rejections = chain.from_iterable(rejection_groups)
    return tuple(sorted(all_rejections, key=lambda rejection: rejection.line_number))


class _AcceptedRecords(NamedTuple):
    """Records that passed a check, and a rejection for each of the others."""

    records: pl.DataFrame
    rejections: list[Rejection]


def _reject_blank_texts(records: pl.DataFrame) -> _AcceptedRecords:
    """Separate the records whose text is not blank from the others, which are rejected as empty_text."""
    has_text = records["text"].str.contains(NON_BLANK_PATTERN)
    if has_text.all():
        return _AcceptedRecords(records, rejections=[])

    without_text = records.select("line", "id").filter(~has_text)
    rejections = [Rejection(line, "empty_text", id or "") for line, id in without_text.rows()]
    return _AcceptedRecords(records.filter(has_text), rejections)


def _reject_repeated_digests(records: pl.DataFrame, digests_so_far: set[str]) -> _AcceptedRecords:
    """Separate the records whose digest is new from the others, which are rejected as duplicate_digest.

    Args:
        records: Records with a column `digest`.
        digests_so_far: The digests of earlier records of the shard. New ones are added to it.
    """
    is_repeated = _mark_repeated_digests(records["digest"], digests_so_far)
    if not is_repeated.any():
        return _AcceptedRecords(records, rejections=[])

    repeated = records.select("line", "digest").filter(is_repeated)
    rejections = [Rejection(line, "duplicate_digest", digest) for line, digest in repeated.rows()]
    return _AcceptedRecords(records.filter(~is_repeated), rejections)


def _build_documents(records: pl.DataFrame, record_dates: pl.Series | None) -> pl.DataFrame:
    """Build the columns of documents (DOCUMENT_COLUMNS).

    Domain and date come from the URL if the record does not have them.

    A missing url, title or domain becomes "".

    Args:
        records: The records that were accepted.
        record_dates: The dates in their field `date`, or None if they have no such field.
    """
    host = pl.col("url").str.extract(URL_HOST_PATTERN)
    domain = pl.coalesce("domain", host, pl.lit(""))  # the first that is not null
    dates = _choose_dates(records["url"], record_dates)  # a record's own date comes first

    documents = records.with_columns(
        pl.col("url", "title").fill_null(""),
        domain.alias("domain"),
        dates.alias("date"),
    )
    return documents.select(DOCUMENT_COLUMNS.names())


def _choose_dates(urls: pl.Series, record_dates: pl.Series | None) -> pl.Series:
    """Return the date of each record, or else the date in its URL, or null if there is neither.

    Args:
        urls: The URL of each record.
        record_dates: The date of each record, or None if no record has a date.
    """
    dates_in_url = find_dates_in_urls(urls)
    if record_dates is None:
        return dates_in_url
    return record_dates.zip_with(record_dates.is_not_null(), dates_in_url)


def _count_unread_dates(date_texts: pl.Series, record_dates: pl.Series, layout: Layout) -> dict[str, int]:
    """Count the records whose field `date` holds something that is not a date.

    Returns:
        The count by a message for people, or an empty dict if there are none:
        {"meta.day: expected a date, YYYY-MM-DD until 2026-12-31": 2}
    """
    is_unread = record_dates.is_null() & (date_texts != "")
    count = int(is_unread.sum())

    if not count:
        return {}
    return {f"{layout.format_paths('date')}: expected a date, YYYY-MM-DD until {LATEST_DATE}": count}


def _mark_repeated_digests(digests: pl.Series, digests_so_far: set[str]) -> pl.Series:
    """Check for each digest whether it occurred before.

    Args:
        digests: The digests.
        digests_so_far: The digests that occurred before these. All of `digests` are added to it.

    Returns:
        True or False for each digest.
    """
    is_repeated = []
    for digest in digests.to_list():
        is_repeated.append(digest in digests_so_far)
        digests_so_far.add(digest)
    return pl.Series(is_repeated, dtype=pl.Boolean)


def _parse_record_dates(date_texts: pl.Series) -> pl.Series:
    """Parse the date at the beginning of each text, such as "2020-01-02T10:00:00Z".

    Returns:
        The dates. Null for a text without a date, and for dates after LATEST_DATE.
    """
    day_texts = date_texts.str.extract(ISO_DAY_PATTERN)
    days = day_texts.str.to_date("%Y-%m-%d", strict=False)

    day = pl.col("day")
    day_or_null = pl.when(day <= LATEST_DATE).then(day)
    return days.to_frame("day").select(day_or_null).to_series()


def find_dates_in_urls(urls: pl.Series) -> pl.Series:
    """Find the date in each URL (see `find_date_in_url`).

    Returns:
        The dates. Null for a URL without a date.
    """
    dates: list[date | None] = [None] * len(urls)

    # Only URLs that may hold a date are looked at closely, because that is slow.
    rows_with_year = urls.str.contains(YEAR_IN_URL_PATTERN).fill_null(False).arg_true()
    urls_with_year = urls.gather(rows_with_year).to_list()

    for row, url in zip(rows_with_year.to_list(), urls_with_year, strict=True):
        dates[row] = find_date_in_url(url, LATEST_DATE)
    return pl.Series(dates, dtype=pl.Date)


def _compute_digests(records: pl.DataFrame) -> pl.Series:
    """Compute the digest of each record: its id, or a hash of its text if the id is null or ""."""
    ids = records["id"]
    has_no_id = ids.is_null() | (ids == "")
    rows_without_id = has_no_id.arg_true()  # their row numbers
    if rows_without_id.is_empty():
        return ids

    texts_without_id = records["text"].gather(rows_without_id)
    hashes = _compute_text_hashes(texts_without_id)
    if len(hashes) == len(ids):  # no record has an id; `scatter` cannot write into a column of nulls
        return hashes
    return ids.scatter(rows_without_id, hashes)  # the ids, with a hash in each row without one


def _compute_text_hashes(texts: pl.Series) -> pl.Series:
    """Return the hash of each text."""
    hashes = [compute_content_hash(text) for text in texts.cast(pl.Binary).to_list()]
    return pl.Series(hashes, dtype=pl.String)
