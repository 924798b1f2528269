"""Records -> raw columns, a column at a time -> documents: digests, duplicates, domains, and the date of the URL."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

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
LATEST_DATE = date(2026, 12, 31)
"""A later day is no date of the page; fixed, so that the same shard gives the same rows on every clock."""
HOLDS_TEXT = r"[^\s\x1c-\x1f]"
"""As Python's `str.isspace`, which counts the four separators of ASCII as white space."""
YEAR = r"(?:199[0-9]|20[0-9]{2})(?:[-_/]|[0-9]{4})"
"""Every form of a date in a URL holds this; the others need no closer look."""
DAY = r"^([0-9]{4}-[0-9]{2}-[0-9]{2})"
HOST = r"^[^:/?#]+://([^/?#]*)"


@dataclass(frozen=True, slots=True)
class Rejection:
    """A line or row that is no document, or a damaged shard as a whole. `line` counts from 1 and is 0 for the whole.

    `reason` is short and stable.
    """

    line: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of a shard and its layout: a frame, of RAW columns or of DOCUMENTS, and what was refused.

    `ignored`: optional fields that held something else than text and count as null, in words, and how often.
    """

    layout: Layout
    frame: pl.DataFrame
    rejections: tuple[Rejection, ...] = ()
    ignored: Mapping[str, int] = dataclasses.field(default_factory=dict)


Column = Sequence[Any] | pl.Series
"""Any values, or a series of text."""


def raw_batch(
    layout: Layout,
    lines: Sequence[int],
    columns: Mapping[str, Sequence[Column]],
    records: Sequence[Mapping[str, Any]] = (),
    rejections: Iterable[Rejection] = (),
) -> Batch:
    """Return records as raw columns. Refused: missing_field, wrong_type, not_utf8.

    `columns`: by field the values at each of its ways, of which the first that is not null counts. `records`: where a
    field can be missing; null in a table is null. `rejections`: those of lines that hold no record.
    """
    refused: dict[int, Rejection] = {}
    ignored: Counter[str] = Counter()
    texts: dict[str, Column] = {"line": lines}
    for field in FIELDS:
        column = _first_of(columns[field], len(lines))
        plain = {str} if field in layout.required else {str, type(None)}
        texts[field], faults = (column, []) if _kinds(column) <= plain else _texts(field, column, layout)
        for at, reason, kind in faults:
            wrong = f"{layout.paths(field)}: expected text, found {kind}"
            if field not in (layout.required if reason == "not_utf8" else layout.strict):
                ignored[wrong] += 1
            else:
                lacking = _lacking(layout, records[at]) if records else ""
                fault = ("missing_field", lacking) if lacking else (reason, wrong)
                refused.setdefault(lines[at], Rejection(lines[at], *fault))
    frame = pl.DataFrame(texts, schema=RAW)
    kept = frame.filter(~pl.col("line").is_in(list(refused))) if refused else frame
    return Batch(layout, kept, (*rejections, *refused.values()), ignored)


def records_batch(
    layout: Layout, lines: Sequence[int], records: Sequence[Mapping[str, Any]], rejections: Iterable[Rejection]
) -> Batch:
    """Return records that were parsed one by one as raw columns, as `raw_batch` does."""
    columns = {field: [values_at(records, way) for way in ways] for field, ways in layout.places.items()}
    return raw_batch(layout, lines, columns, records, rejections)


def _first_of(columns: Sequence[Column], rows: int) -> Column:
    if len(columns) == 1:
        return columns[0]
    values: Column = [None] * rows
    for column in columns:
        values = [
            value if later is None or not (value is None or isinstance(value, Unread)) else later
            for value, later in zip(values, column, strict=True)
        ]
    return values


def _kinds(column: Column) -> set[type]:
    if isinstance(column, pl.Series):
        return {str, type(None)} if column.has_nulls() else {str}
    return set(map(type, column))


def _texts(field: str, column: Column, layout: Layout) -> tuple[list[str | None], list[tuple[int, str, str]]]:
    """Return each cell as text, null where it is none; and where, why not and what was found instead."""
    texts: list[str | None] = []
    faults: list[tuple[int, str, str]] = []
    for at, value in enumerate(column):
        text = _text(field, value, field in layout.strict)
        texts.append(text)
        if text is None and (value is not None or field in layout.required):
            bad = isinstance(value, bytes)
            of_type = f"{value.kind} in the way to it" if isinstance(value, Unread) else type(value).__name__
            kind = "null" if value is None else "bytes that are not UTF-8" if bad else of_type
            faults.append((at, "not_utf8" if bad else "wrong_type", kind))
    return texts, faults


def _text(field: str, value: Any, strict: bool) -> str | None:
    if isinstance(value, bytes):
        try:
            return whole_text(value.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            return None
    if type(value) is str or (type(value) is int and (field == "id" or not strict)):
        return str(value)
    if field == "date" and value is not None:  # what is no date is no fault, and `documents_of` counts it
        return value.isoformat() if isinstance(value, date) else type(value).__name__
    return None


def _lacking(layout: Layout, record: Mapping[str, Any]) -> str:
    """Say which required fields a record has not even as null, and which it has; "" where it has all."""
    missing = [
        field
        for field in layout.required
        if all(values_at([record], way, MISSING)[0] is MISSING for way in layout.places[field])
    ]
    return f"{', '.join(map(layout.paths, missing))}; the record has {shown(record)}" if missing else ""


def documents_of(raw: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the documents of a shard's raw columns, in order. Refused: empty_text, duplicate_digest (within the shard).

    The digest is the record's id, or a hash of the text without one. The date is the URL's; where the layout has an own
    date, the record's where it holds one (ISO 8601). Title, URL and domain are empty where there is none, the language
    null. Memory: about 100 bytes per document of the shard, for its digest.
    """
    seen: set[str] = set()
    for batch in raw:
        frame = batch.frame
        empty = ~frame["text"].str.contains(HOLDS_TEXT)
        lines = frame.filter(empty).select("line", "id").rows()
        refused = [Rejection(line, "empty_text", id or "") for line, id in lines]
        if refused:
            frame = frame.filter(~empty)
        frame = frame.with_columns(_digests(frame).alias("digest"))
        twice = list(_twice(frame["digest"].to_list(), seen))
        if any(twice):
            repeated = pl.Series(twice, dtype=pl.Boolean)
            lines = frame.filter(repeated).select("line", "digest").rows()
            refused += [Rejection(line, "duplicate_digest", digest) for line, digest in lines]
            frame = frame.filter(~repeated)
        dates, undated = _dates(frame, own_date=bool(batch.layout.places["date"]))
        documents = frame.with_columns(
            pl.col("url", "title").fill_null(""),
            pl.coalesce("domain", pl.col("url").str.extract(HOST), pl.lit("")).alias("domain"),
            dates.alias("date"),
        )
        rejections = sorted((*batch.rejections, *refused), key=lambda one: one.line)
        asked = f"{batch.layout.paths('date')}: expected a date, YYYY-MM-DD until {LATEST_DATE}"
        counts = {asked: undated} if undated else {}
        yield Batch(batch.layout, documents.select(DOCUMENTS.names()), tuple(rejections), {**batch.ignored, **counts})


def _twice(digests: Iterable[str], seen: set[str]) -> Iterator[bool]:
    for digest in digests:
        yield digest in seen
        seen.add(digest)


def _dates(frame: pl.DataFrame, *, own_date: bool) -> tuple[pl.Series, int]:
    """Return the dates, and how many of the records' own are written in a form that is not read."""
    of_urls = url_dates(frame["url"])
    if not own_date:
        return of_urls, 0
    day = pl.col("date").str.extract(DAY).str.to_date("%Y-%m-%d", strict=False)
    own = frame.select(pl.when(day <= LATEST_DATE).then(day)).to_series()
    unread = int((own.is_null() & (frame["date"] != "")).sum())
    return frame.select(pl.coalesce(own, of_urls)).to_series(), unread


def url_dates(urls: pl.Series) -> pl.Series:
    """Return the date in each URL, as `date_from_url` does."""
    dates: list[date | None] = [None] * len(urls)
    candidates = urls.str.contains(YEAR).fill_null(False).arg_true()
    for place, url in zip(candidates.to_list(), urls.gather(candidates).to_list(), strict=True):
        dates[place] = date_from_url(url, LATEST_DATE)
    return pl.Series(dates, dtype=pl.Date)


def _digests(frame: pl.DataFrame) -> pl.Series:
    ids = frame["id"]
    lacking = (ids.is_null() | (ids == "")).arg_true()
    if lacking.is_empty():
        return ids
    hashes = [content_hash(text) for text in frame["text"].gather(lacking).cast(pl.Binary).to_list()]
    return ids.scatter(lacking, hashes) if len(lacking) < len(ids) else pl.Series(hashes, dtype=pl.String)
