"""Dateset: Table 11's sizes, and answers recomputed from the questions' own words."""

import re
from collections import Counter
from datetime import date, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.evaluation.benchmark import BenchmarkQuestion
from toolformer_dag.evaluation.dateset import build_dateset, compute_holidays, count_whole_units, subtract_units

ALL = build_dateset().questions
DAYS = {"the day before yesterday": -2, "yesterday": -1, "today": 0, "tomorrow": 1, "the day after tomorrow": 2}


def test_sizes_of_table_11() -> None:
    sizes = Counter(question.wording for question in ALL)
    assert sizes == Counter(
        days_between=400, ago=800, ahead=800, weekday=400, relative=4000, holiday=1800, holiday_distance=1200
    )
    assert len({question.context for question in ALL}) == 500
    assert len({(question.prompt, question.context) for question in ALL}) == len(ALL)


def test_the_seed_decides() -> None:
    assert build_dateset(3).questions == build_dateset(3).questions != ALL


def asked_day(question: BenchmarkQuestion) -> date | None:
    """The day that is asked about, from the question's own words; None where those are not of that kind."""
    current = date.fromisoformat(question.context)
    if match := re.search(r"(?:in|it) (\d+) (day|week)s?(?: ago)?\?", question.prompt):
        days = int(match[1]) * (7 if match[2] == "week" else 1)
        return current + timedelta(days=-days if "ago" in question.prompt else days)
    if match := re.search(r" it (the day .*|yesterday|today|tomorrow)\?", question.prompt):
        return current + timedelta(days=DAYS[match[1]])
    if match := re.search(r" it on (.*)\?", question.prompt):
        return datetime.strptime(match[1], "%B %d, %Y").date()
    return None


def test_answers_follow_from_the_questions() -> None:
    formats = {"day of the week": "%A", "day of the month": "%-d", "month": "%B", "year": "%Y"}
    checked = 0
    for question in ALL:
        day = asked_day(question)
        part = re.search(r"What (day of the week|day of the month|month|year) ", question.prompt)
        if day and part:
            assert question.right_answers[0] == day.strftime(formats[part[1]]), question
            checked += 1
    assert checked > 5000


def test_distances_follow_from_the_questions() -> None:
    for question in ALL:
        current = date.fromisoformat(question.context)
        if match := re.search(r"How many days (?:ago was|are there until) (\w+ \d+, \d+)\?", question.prompt):
            day = datetime.strptime(match[1], "%B %d, %Y").date()
            assert question.right_answers[0] == str(abs((day - current).days))
            assert ("ago" in question.prompt) == (day < current)
            assert abs((day - current).days) <= 1461


def test_the_papers_example() -> None:
    """Appendix D: "How many days ago was August 14, 2020?", asked on November 20, 2020."""
    assert count_whole_units(date(2020, 8, 14), date(2020, 11, 20), "days") == 98


@pytest.mark.parametrize(
    ("name", "day"),
    [
        ("Martin Luther King Jr. Day", date(2020, 1, 20)),
        ("Washington's Birthday", date(2020, 2, 17)),
        ("Memorial Day", date(2020, 5, 25)),
        ("Labor Day", date(2020, 9, 7)),
        ("Columbus Day", date(2020, 10, 12)),
        ("Thanksgiving", date(2020, 11, 26)),
        ("Christmas", date(2020, 12, 25)),
    ],
)
def test_federal_holidays_of_2020(name: str, day: date) -> None:
    assert compute_holidays(2020)[name] == day
    assert "Juneteenth" not in compute_holidays(2020) and "Juneteenth" in compute_holidays(2021)


@given(st.dates(date(2000, 1, 1), date(2030, 1, 1)), st.integers(0, 2000), st.sampled_from(["days", "weeks", "months"]))
def test_going_back_as_many_units_as_there_are_stays_within_one(late: date, days: int, unit: str) -> None:
    early = late - timedelta(days=days)
    count = count_whole_units(early, late, unit)
    assert subtract_units(late, count + 1, unit) < early or (
        unit == "months" and subtract_units(late, count + 1, unit) == early
    )
    assert early <= subtract_units(late, count, unit)
