"""Addresses of made pages, with their date or without one."""

import datetime
import re
from random import Random

from toolformer_dag.embedded.wordings.calendar import MONTHS

DOMAINS = tuple(
    f"{first}{second}.example"
    for first in ("daily", "old", "green", "river", "market", "hill", "sunny", "north")
    for second in ("gazette", "blog", "letters", "notes", "times", "club")
)
SECTIONS = ("news", "blog", "posts", "archive", "stories")
_NO_WORD = re.compile(r"[^a-z]+")


def dated_url(random: Random, title: str, day: datetime.date) -> str:
    """A URL that gives away the day, in one of the forms that real pages use."""
    slug, month = _slug(title), MONTHS[day.month - 1][:3].lower()
    path = random.choice(
        (
            f"{day:%Y/%m/%d}/{slug}",
            f"{random.choice(SECTIONS)}/{day:%Y/%m/%d}/{slug}.html",
            f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}-{slug}",
            f"{random.choice(SECTIONS)}/{day:%Y-%m-%d}/{slug}",
            f"{day.year}/{month}/{day.day:02}/{slug}",
            f"{random.choice(SECTIONS)}/{day:%Y%m%d}/{slug}/",
        )
    )
    return f"https://{random.choice(DOMAINS)}/{path}"


def undated_url(random: Random, title: str) -> str:
    """A URL without a date; some hold numbers that are none."""
    slug = _slug(title)
    path = random.choice((slug, f"{random.choice(SECTIONS)}/{slug}.html", f"page?id={random.randint(10, 999)}"))
    return f"https://{random.choice(DOMAINS)}/{path}"


def _slug(title: str) -> str:
    return _NO_WORD.sub("-", title.lower()).strip("-")
