"""Days, weeks, months and years between two dates, and back."""

from calendar import monthrange
from datetime import date, timedelta

UNITS = ("days", "weeks", "months", "years")


def whole_units(early: date, late: date, unit: str) -> int:
    """How many whole units pass from `early` to `late` (not before it)."""
    days = (late - early).days
    months = 12 * (late.year - early.year) + late.month - early.month - (late.day < early.day)
    return {"days": days, "weeks": days // 7, "months": months, "years": months // 12}[unit]


def back(day: date, count: int, unit: str) -> date:
    """The date `count` units before `day`; a day that its month lacks becomes the month's last."""
    if unit in ("days", "weeks"):
        return day - timedelta(days=count * (7 if unit == "weeks" else 1))
    months = 12 * day.year + day.month - 1 - count * (12 if unit == "years" else 1)
    year, month = divmod(months, 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))
