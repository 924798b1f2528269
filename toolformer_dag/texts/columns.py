"""Raw columns of records -> documents: digests, duplicates, domains, and the date of the URL."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date

import polars as pl

from toolformer_dag.identity import content_hash
from toolformer_dag.texts.document import date_from_url

RAW = pl.Schema(
    {"line": pl.Int64()} | {name: pl.String() for name in ("text", "id", "url", "title", "domain", "language", "date")}
)
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
    """Consecutive records: a frame, of RAW columns or of DOCUMENTS, and what was refused.

    `ignored`: optional fields that held something else than text and count as null, in words.
    """

    frame: pl.DataFrame
    rejections: tuple[Rejection, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass
class DocumentsOfShard:
    """Turns raw columns into documents; knows the digests of the shard so far, at about 100 bytes each."""

    own_date: bool
    _seen: set[str] = field(default_factory=set)

    def of(self, raw: Batch) -> Batch:
        """Return documents in order. Refused: empty_text, duplicate_digest (within the shard).

        The digest is the record's id, or a hash of the text without one. The date is the URL's; with `own_date` the
        record's where it holds one (ISO 8601). Title, URL and domain are empty where there is none, the language null.
        """
        frame = raw.frame
        empty = ~frame["text"].str.contains(HOLDS_TEXT)
        refused = [
            Rejection(line, "empty_text", id or "") for line, id in frame.filter(empty).select("line", "id").rows()
        ]
        if refused:
            frame = frame.filter(~empty)
        digests = _digests(frame)
        twice = list(self._twice(digests))
        if any(twice):
            repeated = pl.Series(twice, dtype=pl.Boolean)
            lines = frame["line"].filter(repeated)
            refused += [
                Rejection(line, "duplicate_digest", one)
                for line, one in zip(lines, digests.filter(repeated), strict=True)
            ]
            frame, digests = frame.filter(~repeated), digests.filter(~repeated)
        found = frame.with_columns(
            digests.alias("digest"),
            pl.col("url", "title").fill_null(""),
            pl.coalesce("domain", pl.col("url").str.extract(HOST), pl.lit("")).alias("domain"),
            self._dates(frame),
        )
        rejections = sorted((*raw.rejections, *refused), key=lambda one: one.line)
        return Batch(found.select(DOCUMENTS.names()), tuple(rejections), raw.ignored)

    def _twice(self, digests: pl.Series) -> Iterator[bool]:
        for digest in digests.to_list():
            yield digest in self._seen
            self._seen.add(digest)

    def _dates(self, frame: pl.DataFrame) -> pl.Series:
        found = url_dates(frame["url"])
        if self.own_date:
            own = frame["date"].str.extract(DAY).str.to_date("%Y-%m-%d", strict=False)
            found = frame.select(pl.coalesce(pl.when(own <= LATEST_DATE).then(own), found)).to_series()
        return found.alias("date")


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
