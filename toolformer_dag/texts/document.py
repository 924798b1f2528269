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


MONTH_ABBREVIATIONS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# Parts of the patterns below.
MONTH_NAME_PATTERN = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    "|nov(?:ember)?|dec(?:ember)?"
)
YEAR_PATTERN = "(?P<year>199[0-9]|20[0-9]{2})"
MONTH_PATTERN = f"(?P<month>[0-9]{{1,2}}|{MONTH_NAME_PATTERN})"
DAY_PATTERN = "(?P<day>[0-9]{1,2})"

# The lookbehinds for the text before the year come after it: a pattern that begins with a digit is ten times faster.
DATE_FOLDERS_PATTERN = re.compile(
    f"/{YEAR_PATTERN}(?:/|-(?=[0-9]{{2}}/)){MONTH_PATTERN}/{DAY_PATTERN}(?=[/?;&]|\\.[a-z]|$)"
)
"""The first form of `find_date_in_url`: `/2017/03/09/`."""
SEPARATED_DATE_PATTERN = re.compile(
    f"{YEAR_PATTERN}(?<![0-9].{{4}})(?P<between>[-_]){MONTH_PATTERN}(?P=between){DAY_PATTERN}(?![0-9])"
)
"""The second form: `2017-03-09`."""
COMPACT_DATE_PATTERN = re.compile(
    f"{YEAR_PATTERN}(?<![^/_.-].{{4}})(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?![^/_.?-])"
)
"""The third form: `20170309`."""
MONTH_DAY_FOLDER_PATTERN = re.compile(f"/{YEAR_PATTERN}/(?P<month>[0-9]{{2}})(?P<day>[0-9]{{2}})(?=/)")
"""The fourth form: `/2017/0309/`."""
YEAR_MONTH_FOLDERS_PATTERN = re.compile(f"/{YEAR_PATTERN}/{MONTH_PATTERN}(?=/)")
"""Matches folders with a year and a month, which may contradict a date: `/2015/01/`."""
YEAR_FOLDER_PATTERN = re.compile(f"/{YEAR_PATTERN}(?=/)")
"""Matches a folder with a year, which may contradict a date: `/2015/`."""


def find_date_in_url(url: str, latest_date: date) -> date | None:
    """Find the day in a URL.

    The first form that matches decides:

    1. folders: `/2017/03/09/`, `/2017/mar/9/`, `/2017/03/09.html`, `/2017-03/09/`
    2. `2017-03-09`, `2017_3_9`, `2017-mar-9`
    3. `20170309` between `/`, `-`, `_` or `.`
    4. `/2017/0309/`

    A date is ignored if the folders contradict it, as in `/2015/01/minutes-2014-12-16/`.

    Returns:
        The day. None if there is none, if it is impossible, before 1990 or later than `latest_date`.
    """
    # Not covered: year and month alone, a day before a title (`/2017/03/10-tips/`), day first, dots, timestamps.
    path = _parse_path_and_query(url)
    match = _find_first_date_match(path)
    if match is None:
        return None

    day = _parse_matched_date(match)
    if day is None or day > latest_date:
        return None

    is_of_folders = match.re is DATE_FOLDERS_PATTERN
    if _is_contradicted_by_folders(day, path, is_date_in_folders=is_of_folders):
        return None

    return day


def _find_first_date_match(path: str) -> re.Match[str] | None:
    """Find a date in a path, in the first of the four forms that matches. Returns None if none matches."""
    return (
        DATE_FOLDERS_PATTERN.search(path)
        or SEPARATED_DATE_PATTERN.search(path)
        or COMPACT_DATE_PATTERN.search(path)
        or MONTH_DAY_FOLDER_PATTERN.search(path)
    )


def _parse_path_and_query(url: str) -> str:
    """Extract the path and the query of a URL in lower case: "/a/b?c=1" for "https://host.org/A/b?c=1#d"."""
    without_fragment, _, _ = url.lower().partition("#")
    _, _, without_scheme = without_fragment.partition("://")
    _, _, path = (without_scheme or without_fragment).partition("/")
    return f"/{path}"


def _is_contradicted_by_folders(day: date, path: str, *, is_date_in_folders: bool) -> bool:
    """Check whether folders of a path name another year or month than the date in it.

    - `/2015/01/minutes-2014-12-16/`: yes, another year and month
    - `/2015/minutes-2014-12-16/`: yes, another year
    - `/2016/2015/12/03/`: no, because a year alone does not count if the date itself is made of folders

    Args:
        day: The date that was found in the path.
        path: The path.
        is_date_in_folders: Whether the date itself is made of folders, as in `/2015/12/03/`.
    """
    month_folders = YEAR_MONTH_FOLDERS_PATTERN.search(path)
    if month_folders is not None and _parse_year_and_month(month_folders) != (day.year, day.month):
        return True

    if is_date_in_folders:
        return False

    folder_years = [int(match["year"]) for match in YEAR_FOLDER_PATTERN.finditer(path)]
    return any(year != day.year for year in folder_years)


def _parse_matched_date(date_match: re.Match[str]) -> date | None:
    """Return the date that a pattern matched, or None if there is no such day, such as February 30."""
    year, month = _parse_year_and_month(date_match)
    try:
        return date(year, month, int(date_match["day"]))
    except ValueError:
        return None


def _parse_year_and_month(date_match: re.Match[str]) -> tuple[int, int]:
    """Return the year and the month that a pattern matched: (2017, 3) for "2017" and "03" or "mar"."""
    year = int(date_match["year"])
    month = date_match["month"]
    if month.isdecimal():  # it may be 13
        return year, int(month)
    return year, MONTH_ABBREVIATIONS.index(month[:3]) + 1
