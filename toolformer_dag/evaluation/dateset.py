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
from typing import NamedTuple

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, in_first_five_words
from toolformer_dag.evaluation.benchmark_files import question_answering
from toolformer_dag.synthetic.today import MONTHS, WEEK_DAYS


def compute_holidays(year: int) -> dict[str, date]:
    """Return the holidays of a year, name -> date, in the order of the year; not the days of observance."""
    days = {
        "New Year's Day": date(year, 1, 1),
        "Martin Luther King Jr. Day": _compute_nth_weekday(year, 1, MONDAY, 3),
        "Washington's Birthday": _compute_nth_weekday(year, 2, MONDAY, 3),
        "Memorial Day": _compute_last_weekday(year, 5, MONDAY),
        "Juneteenth": date(year, 6, 19),
        "Independence Day": date(year, 7, 4),
        "Labor Day": _compute_nth_weekday(year, 9, MONDAY, 1),
        "Columbus Day": _compute_nth_weekday(year, 10, MONDAY, 2),
        "Veterans Day": date(year, 11, 11),
        "Thanksgiving": _compute_nth_weekday(year, 11, THURSDAY, 4),
        "Christmas": date(year, 12, 25),
    }
    if year < 2021:  # it became a holiday then
        del days["Juneteenth"]
    return days


def _compute_nth_weekday(year: int, month: int, weekday: int, n: int) -> date:
    """Return the n-th `weekday` of a month, from 1."""
    first_of_month = date(year, month, 1)
    days_to_weekday = (weekday - first_of_month.weekday()) % 7
    return first_of_month + timedelta(days=days_to_weekday + 7 * (n - 1))


def _compute_last_weekday(year: int, month: int, weekday: int) -> date:
    """Return the last `weekday` of a month other than December."""
    return _compute_nth_weekday(year, month + 1, weekday, 1) - timedelta(days=7)


UNITS = ("days", "weeks", "months", "years")
"""Units of distances."""


def count_whole_units(early: date, late: date, unit: str) -> int:
    """Return the number of whole units from `early` to `late`, which must not be before. unit: one of UNITS."""
    days = (late - early).days
    months = 12 * (late.year - early.year) + late.month - early.month
    if late.day < early.day:
        months -= 1  # the last month is not whole
    counts = {"days": days, "weeks": days // 7, "months": months, "years": months // 12}
    return counts[unit]


def subtract_units(day: date, count: int, unit: str) -> date:
    """Return the date `count` units before `day`. unit: one of UNITS."""
    if unit == "days":
        return day - timedelta(days=count)
    if unit == "weeks":
        return day - timedelta(weeks=count)
    return _subtract_months(day, 12 * count if unit == "years" else count)


def _subtract_months(day: date, count: int) -> date:
    """Return the date `count` months before `day`, at the latest the month's last: 2023-03-31 -> 2023-02-28."""
    months_since_year_0 = 12 * day.year + day.month - 1 - count
    year, month_index = divmod(months_since_year_0, 12)
    month = month_index + 1
    days_in_month = monthrange(year, month)[1]
    return date(year, month, min(day.day, days_in_month))


DATES = 500
"""The number of current dates."""
FIRST = date(2013, 1, 1)
"""The first day that may be a current date."""
LAST = date(2022, 12, 31)
"""The last day that may be a current date."""
MOST_DAYS = 1461
"""The most days between a current date and its past or future date."""
RELATIVE = {"the day before yesterday": -2, "yesterday": -1, "today": 0, "tomorrow": 1, "the day after tomorrow": 2}
"""Words for a day -> its distance from the current date in days."""


@dataclass(frozen=True, slots=True)
class Dates:
    """A current date with a past and a future date."""

    current: date
    past: date
    future: date


class QuestionAndAnswers(NamedTuple):
    """A question and its right answers."""

    question: str
    answers: tuple[str, ...]


Template = Callable[[Dates], Iterator[QuestionAndAnswers]]
"""Yields all variants of a question for some dates."""


def dateset(seed: int = 0) -> Benchmark:
    """Return a benchmark of 9,400 generated questions, always the same for a seed."""
    random = Random(seed)
    days = random.sample(range((LAST - FIRST).days + 1), DATES)
    dates = [_draw_dates(random, FIRST + timedelta(days=day)) for day in days]
    questions: list[BenchmarkQuestion] = []
    for template, size in TEMPLATES:
        questions.extend(_draw_questions(random, dates, template, size))
    return Benchmark("Dateset", tuple(questions), in_first_five_words)


def _draw_dates(random: Random, current: date) -> Dates:
    """Draw a past and a future date for a current date."""
    days_back = random.randint(1, MOST_DAYS)
    days_ahead = random.randint(1, MOST_DAYS)
    return Dates(
        current=current,
        past=current - timedelta(days=days_back),
        future=current + timedelta(days=days_ahead),
    )


def _draw_questions(random: Random, dates: list[Dates], template: Template, size: int) -> Iterator[BenchmarkQuestion]:
    """Draw `size` questions of a template; each of the dates gives equally many, up to a difference of 1."""
    per_date, remainder = divmod(size, len(dates))
    shuffled = random.sample(dates, len(dates))
    for index, dates_of_question in enumerate(shuffled):
        variants = list(template(dates_of_question))
        count = per_date + 1 if index < remainder else per_date
        for variant in random.sample(variants, count):
            yield _build_question(variant, dates_of_question, template)


def _build_question(variant: QuestionAndAnswers, dates: Dates, template: Template) -> BenchmarkQuestion:
    """Return a drawn question as the benchmark asks it; the calendar returns its current date."""
    return BenchmarkQuestion(
        prompt=question_answering(variant.question),
        answers=variant.answers,
        tool="calendar",
        context=dates.current.isoformat(),
        wording=template.__name__.lstrip("_"),
    )


def _days_between(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `How many days ago was August 14, 2020?` and the same question for the future date."""
    days_back = (dates.current - dates.past).days
    days_ahead = (dates.future - dates.current).days
    yield QuestionAndAnswers(f"How many days ago was {_format_date(dates.past)}?", _format_number(days_back))
    yield QuestionAndAnswers(f"How many days are there until {_format_date(dates.future)}?", _format_number(days_ahead))


def _ago(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month was it 3 weeks ago?` and the like, for the whole units since the past date."""
    for unit in UNITS:
        count = count_whole_units(dates.past, dates.current, unit)
        if count == 0:
            continue
        for part in _list_date_parts(subtract_units(dates.current, count, unit)):
            yield QuestionAndAnswers(f"What {part.name} was it {_format_count(count, unit)} ago?", part.answers)


def _ahead(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month will it be in 3 days?` and the like, for the future date."""
    days = _format_count((dates.future - dates.current).days, "days")
    for part in _list_date_parts(dates.future):
        yield QuestionAndAnswers(f"What {part.name} will it be in {days}?", part.answers)


def _weekday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What day of the week was it on August 14, 2020?` and the same for the future date."""
    past_weekday = WEEK_DAYS[dates.past.weekday()]
    future_weekday = WEEK_DAYS[dates.future.weekday()]
    yield QuestionAndAnswers(f"What day of the week was it on {_format_date(dates.past)}?", (past_weekday,))
    yield QuestionAndAnswers(f"What day of the week is it on {_format_date(dates.future)}?", (future_weekday,))


def _relative(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month was it yesterday?` and the like, for RELATIVE."""
    for words, days in RELATIVE.items():
        verb = "was" if days < 0 else "is"
        for part in _list_date_parts(dates.current + timedelta(days=days)):
            yield QuestionAndAnswers(f"What {part.name} {verb} it {words}?", part.answers)


def _holiday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month is Christmas this year?` and the like; nobody asks for the year."""
    for name, day in compute_holidays(dates.current.year).items():
        verb = "was" if day < dates.current else "is"
        for part in _list_date_parts(day):
            if part.name != "year":
                yield QuestionAndAnswers(f"What {part.name} {verb} {name} this year?", part.answers)


def _holiday_distance(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `How many weeks are there until Christmas this year?` and the like, for all UNITS."""
    for name, day in compute_holidays(dates.current.year).items():
        words = "ago was" if day < dates.current else "are there until"
        early, late = sorted((day, dates.current))
        for unit in UNITS:
            count = count_whole_units(early, late, unit)
            yield QuestionAndAnswers(f"How many {unit} {words} {name} this year?", _format_number(count))


TEMPLATES: tuple[tuple[Template, int], ...] = (
    (_days_between, 400),
    (_ago, 800),
    (_ahead, 800),
    (_weekday, 400),
    (_relative, 4000),
    (_holiday, 1800),
    (_holiday_distance, 1200),
)
"""The templates with their numbers of questions, as in Table 11."""


class DatePart(NamedTuple):
    """A part of a date that can be asked for, and the right answers."""

    name: str
    answers: tuple[str, ...]


def _list_date_parts(day: date) -> list[DatePart]:
    """Return the parts of a date that can be asked for, such as "month" with the answer "August"."""
    return [
        DatePart("day of the week", (WEEK_DAYS[day.weekday()],)),
        DatePart("day of the month", (str(day.day), f"{day.day}{_get_ordinal_ending(day.day)}")),
        DatePart("month", (MONTHS[day.month - 1],)),
        DatePart("year", (str(day.year),)),
    ]


def _format_number(count: int) -> tuple[str, ...]:
    """Return a number as text, plain and, if that differs, with commas: 1461 -> ("1461", "1,461")."""
    return tuple(dict.fromkeys((str(count), f"{count:,}")))


def _get_ordinal_ending(number: int) -> str:
    """Return the ending of an ordinal, such as `th`."""
    if 10 <= number % 100 <= 20:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _format_count(count: int, unit: str) -> str:
    """Return `3 weeks` or `1 week`."""
    return f"{count} {unit if count != 1 else unit.removesuffix('s')}"


def _format_date(day: date) -> str:
    """Return a date as in `August 14, 2020`."""
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"
