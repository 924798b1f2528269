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

from toolformer_dag.evaluation.benchmark import Benchmark, BenchmarkQuestion, is_in_first_five_words
from toolformer_dag.evaluation.benchmark_files import format_question_answering_prompt
from toolformer_dag.synthetic.today import MONTHS, WEEK_DAYS


def compute_holidays(year: int) -> dict[str, date]:
    """Return the date of each holiday of a year in the United States, by name and in the order of the year.

    They are the days themselves. A day off that moves from a weekend to a Monday is not considered.
    """
    holidays = {
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
        del holidays["Juneteenth"]
    return holidays


def _compute_nth_weekday(year: int, month: int, weekday: int, n: int) -> date:
    """Return the date of the n-th `weekday` of a month, where n begins at 1 and Monday is the weekday 0."""
    first_of_month = date(year, month, 1)
    days_to_first_weekday = (weekday - first_of_month.weekday()) % 7
    return first_of_month + timedelta(days=days_to_first_weekday + 7 * (n - 1))


def _compute_last_weekday(year: int, month: int, weekday: int) -> date:
    """Return the date of the last `weekday` of a month other than December, a week before the next month's first."""
    first_of_next_month = _compute_nth_weekday(year, month + 1, weekday, 1)
    return first_of_next_month - timedelta(days=7)


DISTANCE_UNITS = ("days", "weeks", "months", "years")
"""Units of distances."""


def count_whole_units(earlier_date: date, later_date: date, unit: str) -> int:
    """Return the number of whole units between two dates: 2 weeks for 20 days.

    Args:
        earlier_date: The first date.
        later_date: The second date, which is the same or later.
        unit: One of DISTANCE_UNITS.
    """
    days = (later_date - earlier_date).days

    months = 12 * (later_date.year - earlier_date.year) + later_date.month - earlier_date.month
    is_last_month_incomplete = later_date.day < earlier_date.day
    if is_last_month_incomplete:
        months -= 1

    count_by_unit = {"days": days, "weeks": days // 7, "months": months, "years": months // 12}
    return count_by_unit[unit]


def subtract_units(day: date, count: int, unit: str) -> date:
    """Return the date that is `count` units before a day, where the unit is one of DISTANCE_UNITS."""
    if unit == "days":
        return day - timedelta(days=count)
    if unit == "weeks":
        return day - timedelta(weeks=count)

    month_count = 12 * count if unit == "years" else count
    return _subtract_months(day, month_count)


def _subtract_months(day: date, count: int) -> date:
    """Return the date that is `count` months before a day.

    It is the last day of that month if the month is too short: a month before 2023-03-31 is 2023-02-28.
    """
    months_since_year_0 = 12 * day.year + day.month - 1 - count
    year, month_index = divmod(months_since_year_0, 12)
    month = month_index + 1
    days_in_month = monthrange(year, month)[1]
    return date(year, month, min(day.day, days_in_month))


CURRENT_DATE_COUNT = 500
"""The number of current dates."""
FIRST_CURRENT_DATE = date(2013, 1, 1)
"""The first day that may be a current date."""
LAST_CURRENT_DATE = date(2022, 12, 31)
"""The last day that may be a current date."""
MAX_DISTANCE_DAYS = 1461
"""The most days between a current date and its past or future date."""
DAYS_BY_RELATIVE_WORDS = {
    "the day before yesterday": -2,
    "yesterday": -1,
    "today": 0,
    "tomorrow": 1,
    "the day after tomorrow": 2,
}
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


def build_dateset(seed: int = 0) -> Benchmark:
    """Generate the benchmark Dateset with 9,400 questions, which are always the same for a seed."""
    random = Random(seed)
    possible_day_count = (LAST_CURRENT_DATE - FIRST_CURRENT_DATE).days + 1
    day_numbers = random.sample(range(possible_day_count), CURRENT_DATE_COUNT)

    all_dates: list[Dates] = []
    for day_number in day_numbers:
        current_date = FIRST_CURRENT_DATE + timedelta(days=day_number)
        all_dates.append(_draw_dates(random, current_date))

    questions: list[BenchmarkQuestion] = []
    for template, question_count in TEMPLATES_WITH_SIZES:
        questions.extend(_draw_questions(random, all_dates, template, question_count))
    return Benchmark("Dateset", tuple(questions), is_in_first_five_words)


def _draw_dates(random: Random, current_date: date) -> Dates:
    """Draw a past and a future date for a current date."""
    days_back = random.randint(1, MAX_DISTANCE_DAYS)
    days_ahead = random.randint(1, MAX_DISTANCE_DAYS)
    return Dates(
        current=current_date,
        past=current_date - timedelta(days=days_back),
        future=current_date + timedelta(days=days_ahead),
    )


def _draw_questions(
    random: Random, all_dates: list[Dates], template: Template, question_count: int
) -> Iterator[BenchmarkQuestion]:
    """Draw questions of a template. All current dates get the same number of them, up to a difference of 1.

    Args:
        random: The random generator, which moves on.
        all_dates: All current dates, each with a past and a future date.
        template: Yields all variants of its question for some dates.
        question_count: The number of questions to draw, with no more per date than the template has variants.

    Yields:
        The questions, in random order of their dates.
    """
    count_per_date, remainder = divmod(question_count, len(all_dates))
    shuffled_dates = random.sample(all_dates, len(all_dates))

    for index, dates in enumerate(shuffled_dates):
        variants = list(template(dates))
        variant_count = count_per_date
        if index < remainder:
            variant_count += 1

        for variant in random.sample(variants, variant_count):
            yield _build_benchmark_question(variant, dates, template)


def _build_benchmark_question(variant: QuestionAndAnswers, dates: Dates, template: Template) -> BenchmarkQuestion:
    """Return a drawn question as the benchmark asks it. The calendar returns the current date of `dates`."""
    return BenchmarkQuestion(
        prompt=format_question_answering_prompt(variant.question),
        right_answers=variant.answers,
        target_tool_key="calendar",
        context=dates.current.isoformat(),
        wording=template.__name__.lstrip("_"),
    )


def _days_between(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `How many days ago was August 14, 2020?` and the same question for the future date."""
    days_back = (dates.current - dates.past).days
    past_question = f"How many days ago was {_format_date(dates.past)}?"
    yield QuestionAndAnswers(past_question, _list_number_forms(days_back))

    days_ahead = (dates.future - dates.current).days
    future_question = f"How many days are there until {_format_date(dates.future)}?"
    yield QuestionAndAnswers(future_question, _list_number_forms(days_ahead))


def _ago(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month was it 3 weeks ago?` and the like, for each unit of distance and each part of a date.

    The distance is the time from the past to the current date, rounded down to whole units. A unit is left out if not
    even one has passed.
    """
    for unit in DISTANCE_UNITS:
        unit_count = count_whole_units(dates.past, dates.current, unit)
        if unit_count == 0:
            continue

        distance = _format_distance(unit_count, unit)  # "3 weeks"
        asked_day = subtract_units(dates.current, unit_count, unit)
        for part in _list_date_parts(asked_day):
            yield QuestionAndAnswers(f"What {part.name} was it {distance} ago?", part.answers)


def _ahead(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month will it be in 3 days?` and the like, for the future date."""
    days_ahead = (dates.future - dates.current).days
    distance = _format_distance(days_ahead, "days")  # "3 days"
    for part in _list_date_parts(dates.future):
        yield QuestionAndAnswers(f"What {part.name} will it be in {distance}?", part.answers)


def _weekday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What day of the week was it on August 14, 2020?` and the same for the future date."""
    past_question = f"What day of the week was it on {_format_date(dates.past)}?"
    past_weekday = WEEK_DAYS[dates.past.weekday()]
    yield QuestionAndAnswers(past_question, (past_weekday,))

    future_question = f"What day of the week is it on {_format_date(dates.future)}?"
    future_weekday = WEEK_DAYS[dates.future.weekday()]
    yield QuestionAndAnswers(future_question, (future_weekday,))


def _relative(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month was it yesterday?` and the like, for all words of DAYS_BY_RELATIVE_WORDS."""
    for relative_words, days_from_today in DAYS_BY_RELATIVE_WORDS.items():
        verb = "was" if days_from_today < 0 else "is"
        asked_day = dates.current + timedelta(days=days_from_today)
        for part in _list_date_parts(asked_day):
            yield QuestionAndAnswers(f"What {part.name} {verb} it {relative_words}?", part.answers)


def _holiday(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `What month is Christmas this year?` and the like. The year is not asked for."""
    for holiday_name, holiday in compute_holidays(dates.current.year).items():
        verb = "was" if holiday < dates.current else "is"
        for part in _list_date_parts(holiday):
            if part.name != "year":
                yield QuestionAndAnswers(f"What {part.name} {verb} {holiday_name} this year?", part.answers)


def _holiday_distance(dates: Dates) -> Iterator[QuestionAndAnswers]:
    """Yield `How many weeks are there until Christmas this year?` and the like, for all DISTANCE_UNITS."""
    for holiday_name, holiday in compute_holidays(dates.current.year).items():
        verb_words = "ago was" if holiday < dates.current else "are there until"
        earlier_date, later_date = sorted((holiday, dates.current))
        for unit in DISTANCE_UNITS:
            unit_count = count_whole_units(earlier_date, later_date, unit)
            question = f"How many {unit} {verb_words} {holiday_name} this year?"
            yield QuestionAndAnswers(question, _list_number_forms(unit_count))


TEMPLATES_WITH_SIZES: tuple[tuple[Template, int], ...] = (
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


def _list_number_forms(count: int) -> tuple[str, ...]:
    """Return a number as text, plain and, if that differs, with commas: ("1461", "1,461") for 1461."""
    plain = str(count)
    with_commas = f"{count:,}"
    return (plain,) if with_commas == plain else (plain, with_commas)


def _get_ordinal_ending(number: int) -> str:
    """Return the ending of an ordinal number, such as "nd" for 2 and "th" for 12."""
    ends_with_teen = 10 <= number % 100 <= 20
    if ends_with_teen:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _format_distance(count: int, unit: str) -> str:
    """Return a distance in time as text: "3 weeks", or "1 week" with the unit in the singular."""
    if count == 1:
        return f"{count} {unit.removesuffix('s')}"
    return f"{count} {unit}"


def _format_date(day: date) -> str:
    """Return a date as in `August 14, 2020`."""
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"
