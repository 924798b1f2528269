"""A web document, and the date in its URL."""

import re
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Document:
    """A web page with the key `(shard, digest)`; `date` is the day in its URL, None without a date.

    `url`, `domain` and `title` are empty where the corpus has none, `language` is None.
    """

    shard: str
    digest: str
    url: str
    domain: str
    title: str
    date: date | None
    language: str | None
    text: str


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
NAMED = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
YEAR = "(?P<year>199[0-9]|20[0-9]{2})"
MONTH = f"(?P<month>[0-9]{{1,2}}|{NAMED})"
DAY = "(?P<day>[0-9]{1,2})"

# The lookbehinds for the text before the year come after it: a pattern that begins with a digit is ten times faster.
FOLDERS = re.compile(f"/{YEAR}(?:/|-(?=[0-9]{{2}}/)){MONTH}/{DAY}(?=[/?;&]|\\.[a-z]|$)")
SPELLED = re.compile(f"{YEAR}(?<![0-9].{{4}})(?P<between>[-_]){MONTH}(?P=between){DAY}(?![0-9])")
COMPACT = re.compile(f"{YEAR}(?<![^/_.-].{{4}})(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?![^/_.?-])")
MONTH_DAY = re.compile(f"/{YEAR}/(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?=/)")
YEAR_AND_MONTH = re.compile(f"/{YEAR}/{MONTH}(?=/)")
YEAR_FOLDER = re.compile(f"/{YEAR}(?=/)")


def date_from_url(url: str, latest: date) -> date | None:
    """Return the day in a URL; None where it is absent, impossible or later than `latest`.

    The first form that matches decides:

    1. folders: `/2017/03/09/`, `/2017/mar/9/`, `/2017/03/09.html`, `/2017-03/09/`
    2. `2017-03-09`, `2017_3_9`, `2017-mar-9`
    3. `20170309` between `/`, `-`, `_` or `.`
    4. `/2017/0309/`

    A date in a slug is ignored where the folders name another year or month (`/2015/01/minutes-2014-12-16/`,
    `/2015/minutes-2014-12-16/`). Years before 1990 are ignored. Not covered: year and month alone, a day followed by a
    slug (`/2017/03/10-tips/`), day first, dots as separators, timestamps, the host, the fragment.
    """
    address = url.partition("#")[0].lower()
    path = "/" + (address.partition("://")[2] or address).partition("/")[2]
    match = FOLDERS.search(path) or SPELLED.search(path) or COMPACT.search(path) or MONTH_DAY.search(path)
    day = _day(match) if match else None
    if match is None or day is None or day > latest:
        return None
    return None if _contradicted(day, path, in_slug=match.re is not FOLDERS) else day


def _contradicted(day: date, path: str, *, in_slug: bool) -> bool:
    """Return whether the folders name another month; a year alone contradicts slugs, not `/2016/2015/12/03/`."""
    months = YEAR_AND_MONTH.search(path)
    if months is not None and _year_and_month(months) != (day.year, day.month):
        return True
    return in_slug and any(int(folder["year"]) != day.year for folder in YEAR_FOLDER.finditer(path))


def _day(match: re.Match[str]) -> date | None:
    try:
        return date(*_year_and_month(match), int(match["day"]))
    except ValueError:  # such as February 30
        return None


def _year_and_month(match: re.Match[str]) -> tuple[int, int]:
    month = match["month"]
    return int(match["year"]), int(month) if month.isdecimal() else MONTHS.index(month[:3]) + 1
