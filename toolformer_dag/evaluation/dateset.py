"""Generate Dateset: questions that need the current date (appendix D, Table 11).

Choices where the paper gives no details:

- Current dates lie in 2013 to 2022; past and future dates are 1 to 1,461 days away.
- All current dates get the same number of a template's variants, up to a difference of 1, drawn without replacement.
- Distances are in whole units. "ago" counts from the current date and skips units with a distance of 0.
- There are 500 current dates, as in the text. All variants over 200 dates would also give the sizes of Table 11.
"""

from calendar import MONDAY, THURSDAY, monthrange
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from random import Random

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words
from toolformer_dag.evaluation.benchmark_files import question_answering
from toolformer_dag.synthetic.today import MONTHS, WEEK_DAYS


def holidays(year: int) -> dict[str, date]:
    """Return the holidays of a year in order, by name; the day itself, not the day of observance."""
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
    return {name: day for name, day in days.items() if name != "Juneteenth" or year >= 2021}


def _nth(year: int, month: int, weekday: int, n: int) -> date:
    """Return the n-th such weekday of the month; n = 0 is the last before the month."""
    first = date(year, month, 1)
    return first + timedelta(days=(weekday - first.weekday()) % 7 + 7 * (n - 1))


UNITS = ("days", "weeks", "months", "years")


def whole_units(early: date, late: date, unit: str) -> int:
    """Count the whole units from `early` to `late`, which must not be before `early`."""
    days = (late - early).days
    months = 12 * (late.year - early.year) + late.month - early.month - (late.day < early.day)
    return {"days": days, "weeks": days // 7, "months": months, "years": months // 12}[unit]


def back(day: date, count: int, unit: str) -> date:
    """Return the date `count` units before `day`; a day that its month lacks becomes the month's last."""
    if unit in ("days", "weeks"):
        return day - timedelta(days=count * (7 if unit == "weeks" else 1))
    months = 12 * day.year + day.month - 1 - count * (12 if unit == "years" else 1)
    year, month = divmod(months, 12)
    return date(year, month + 1, min(day.day, monthrange(year, month + 1)[1]))


DATES = 500
FIRST, LAST = date(2013, 1, 1), date(2022, 12, 31)
RELATIVE = {"the day before yesterday": -2, "yesterday": -1, "today": 0, "tomorrow": 1, "the day after tomorrow": 2}


@dataclass(frozen=True, slots=True)
class Dates:
    """A current date with a past and a future date."""

    current: date
    past: date
    future: date


QuestionAndAnswers = tuple[str, tuple[str, ...]]
"""A question and its right answers."""


def dateset(seed: int = 0) -> Benchmark:
    """Generate the 9,400 questions, deterministically by seed."""
    random = Random(seed)
    days = random.sample(range((LAST - FIRST).days + 1), DATES)
    dates = [_dates(random, FIRST + timedelta(days=day)) for day in days]
    questions = tuple(
        BenchmarkQuestion(
            question_answering(question), answers, "calendar", current.isoformat(), template.__name__.lstrip("_")
        )
        for template, size in TEMPLATES
        for current, (question, answers) in _drawn(random, dates, template, size)
    )
    return Benchmark("Dateset", questions, in_first_five_words)


def _dates(random: Random, current: date) -> Dates:
    past, future = (timedelta(days=random.randint(1, 1461)) for _ in range(2))
    return Dates(current, current - past, current + future)


def _drawn(
    random: Random, dates: list[Dates], template: Callable[[Dates], Iterator[QuestionAndAnswers]], size: int
) -> Iterator[tuple[date, QuestionAndAnswers]]:
    each, more = divmod(size, len(dates))
    for place, chosen in enumerate(random.sample(dates, len(dates))):
        for question in random.sample(list(template(chosen)), each + (place < more)):
            yield chosen.current, question


def _days_between(dates: Dates) -> Iterator[QuestionAndAnswers]:
    yield f"How many days ago was {_text(dates.past)}?", _number((dates.current - dates.past).days)
    yield f"How many days are there until {_text(dates.future)}?", _number((dates.future - dates.current).days)


def _ago(dates: Dates) -> Iterator[QuestionAndAnswers]:
    for unit in UNITS:
        if count := whole_units(dates.past, dates.current, unit):
            for part, answers in _parts(back(dates.current, count, unit)):
                yield f"What {part} was it {_count(count, unit)} ago?", answers


def _ahead(dates: Dates) -> Iterator[QuestionAndAnswers]:
    for part, answers in _parts(dates.future):
        yield f"What {part} will it be in {_count((dates.future - dates.current).days, 'days')}?", answers


def _weekday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    yield f"What day of the week was it on {_text(dates.past)}?", (WEEK_DAYS[dates.past.weekday()],)
    yield f"What day of the week is it on {_text(dates.future)}?", (WEEK_DAYS[dates.future.weekday()],)


def _relative(dates: Dates) -> Iterator[QuestionAndAnswers]:
    for words, days in RELATIVE.items():
        for part, answers in _parts(dates.current + timedelta(days=days)):
            yield f"What {part} {'was' if days < 0 else 'is'} it {words}?", answers


def _holiday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    for name, day in holidays(dates.current.year).items():
        for part, answers in _parts(day)[:3]:
            yield f"What {part} {'was' if day < dates.current else 'is'} {name} this year?", answers


def _holiday_distance(dates: Dates) -> Iterator[QuestionAndAnswers]:
    for name, day in holidays(dates.current.year).items():
        asked = "ago was" if day < dates.current else "are there until"
        early, late = sorted((day, dates.current))
        for unit in UNITS:
            yield f"How many {unit} {asked} {name} this year?", _number(whole_units(early, late, unit))


TEMPLATES: tuple[tuple[Callable[[Dates], Iterator[QuestionAndAnswers]], int], ...] = (
    (_days_between, 400),
    (_ago, 800),
    (_ahead, 800),
    (_weekday, 400),
    (_relative, 4000),
    (_holiday, 1800),
    (_holiday_distance, 1200),
)


def _parts(day: date) -> list[tuple[str, tuple[str, ...]]]:
    return [
        ("day of the week", (WEEK_DAYS[day.weekday()],)),
        ("day of the month", (str(day.day), f"{day.day}{_ordinal(day.day)}")),
        ("month", (MONTHS[day.month - 1],)),
        ("year", (str(day.year),)),
    ]


def _number(count: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys((str(count), f"{count:,}")))


def _ordinal(number: int) -> str:
    return "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _count(count: int, unit: str) -> str:
    return f"{count} {unit if count != 1 else unit.removesuffix('s')}"


def _text(day: date) -> str:
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"
