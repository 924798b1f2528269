"""A web document, and the date in its URL."""

import re
from dataclasses import dataclass
from datetime import date


@dataclass(frozen=True, slots=True)
class Document:
    """A web page with the key `(shard, digest)`."""

    shard: str
    digest: str  # the record's id, or a hash of the text
    url: str  # empty where the corpus has none
    domain: str  # empty where the corpus has none
    title: str  # empty where the corpus has none
    date: date | None  # the day in the URL
    language: str | None
    text: str


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# Parts of the patterns below.
NAMED = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
YEAR = "(?P<year>199[0-9]|20[0-9]{2})"
MONTH = f"(?P<month>[0-9]{{1,2}}|{NAMED})"
DAY = "(?P<day>[0-9]{1,2})"

# The lookbehinds for the text before the year come after it: a pattern that begins with a digit is ten times faster.
FOLDERS = re.compile(f"/{YEAR}(?:/|-(?=[0-9]{{2}}/)){MONTH}/{DAY}(?=[/?;&]|\\.[a-z]|$)")
"""The first form of `find_date_in_url`: `/2017/03/09/`."""
SPELLED = re.compile(f"{YEAR}(?<![0-9].{{4}})(?P<between>[-_]){MONTH}(?P=between){DAY}(?![0-9])")
"""The second form: `2017-03-09`."""
COMPACT = re.compile(f"{YEAR}(?<![^/_.-].{{4}})(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?![^/_.?-])")
"""The third form: `20170309`."""
MONTH_DAY = re.compile(f"/{YEAR}/(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?=/)")
"""The fourth form: `/2017/0309/`."""
YEAR_AND_MONTH = re.compile(f"/{YEAR}/{MONTH}(?=/)")
"""Matches folders with a year and a month, which may contradict a date: `/2015/01/`."""
YEAR_FOLDER = re.compile(f"/{YEAR}(?=/)")
"""Matches a folder with a year, which may contradict a date: `/2015/`."""


def find_date_in_url(url: str, latest: date) -> date | None:
    """Find the day in a URL.

    The first form that matches decides:

    1. folders: `/2017/03/09/`, `/2017/mar/9/`, `/2017/03/09.html`, `/2017-03/09/`
    2. `2017-03-09`, `2017_3_9`, `2017-mar-9`
    3. `20170309` between `/`, `-`, `_` or `.`
    4. `/2017/0309/`

    A date is ignored if the folders contradict it, as in `/2015/01/minutes-2014-12-16/`.

    Returns:
        The day. None if there is none, if it is impossible, before 1990 or later than `latest`.
    """
    # Not covered: year and month alone, a day before a title (`/2017/03/10-tips/`), day first, dots, timestamps.
    path = _parse_path(url)
    match = _find_first_date(path)
    if match is None:
        return None

    day = _parse_day(match)
    if day is None or day > latest:
        return None

    is_of_folders = match.re is FOLDERS
    if _is_contradicted(day, path, is_of_folders=is_of_folders):
        return None

    return day


def _find_first_date(path: str) -> re.Match[str] | None:
    """Return the match of the first form of a date that a path has."""
    return FOLDERS.search(path) or SPELLED.search(path) or COMPACT.search(path) or MONTH_DAY.search(path)


def _parse_path(url: str) -> str:
    """Return the path and the query of a URL in lower case: "/a/b?c=1" for "https://host.org/A/b?c=1#d"."""
    without_fragment, _, _ = url.lower().partition("#")
    _, _, without_scheme = without_fragment.partition("://")
    _, _, path = (without_scheme or without_fragment).partition("/")
    return f"/{path}"


def _is_contradicted(day: date, path: str, *, is_of_folders: bool) -> bool:
    """Check whether folders of a path name another year or month than the date in it.

    - `/2015/01/minutes-2014-12-16/`: yes, another year and month
    - `/2015/minutes-2014-12-16/`: yes, another year
    - `/2016/2015/12/03/`: no, because a year alone does not count if the date itself is made of folders
    """
    month_folders = YEAR_AND_MONTH.search(path)
    if month_folders is not None and _parse_year_and_month(month_folders) != (day.year, day.month):
        return True

    if is_of_folders:
        return False

    years_of_folders = [int(folder["year"]) for folder in YEAR_FOLDER.finditer(path)]
    return any(year != day.year for year in years_of_folders)


def _parse_day(match: re.Match[str]) -> date | None:
    """Return the date that a pattern matched; None if there is no such day, such as February 30."""
    year, month = _parse_year_and_month(match)
    try:
        return date(year, month, int(match["day"]))
    except ValueError:
        return None


def _parse_year_and_month(match: re.Match[str]) -> tuple[int, int]:
    """Return the year and the month that a pattern matched: (2017, 3) for "2017" and "03" or "mar"."""
    year = int(match["year"])
    month = match["month"]
    if month.isdecimal():  # it may be 13
        return year, int(month)
    return year, MONTHS.index(month[:3]) + 1
