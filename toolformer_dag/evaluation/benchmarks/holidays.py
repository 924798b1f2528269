"""The federal holidays of the United States (5 U.S.C. 6103)."""

from datetime import date, timedelta

MONDAY, THURSDAY = 0, 3
JUNETEENTH_SINCE = 2021


def holidays(year: int) -> dict[str, date]:
    """Name -> day on which it falls that year (not the day on which it is observed), in the order of the year."""
    days = {
        "New Year's Day": date(year, 1, 1),
        "Martin Luther King Jr. Day": _nth(year, 1, MONDAY, 3),
        "Washington's Birthday": _nth(year, 2, MONDAY, 3),
        "Memorial Day": _nth(year, 6, MONDAY, 0),
        "Juneteenth": date(year, 6, 19),
        "Independence Day": date(year, 7, 4),
        "Labor Day": _nth(year, 9, MONDAY, 1),
        "Columbus Day": _nth(year, 10, MONDAY, 2),
        "Veterans Day": date(year, 11, 11),
        "Thanksgiving": _nth(year, 11, THURSDAY, 4),
        "Christmas": date(year, 12, 25),
    }
    return {name: day for name, day in days.items() if name != "Juneteenth" or year >= JUNETEENTH_SINCE}


def _nth(year: int, month: int, weekday: int, n: int) -> date:
    """The n-th such weekday of the month; the 0-th is the last one before the month."""
    first = date(year, month, 1)
    return first + timedelta(days=(weekday - first.weekday()) % 7 + 7 * (n - 1))
