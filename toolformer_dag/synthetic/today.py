"""Dated pages that mention today's date."""

import datetime
from random import Random

from toolformer_dag.synthetic.names import PARTS, SHARES, WordingSet, WorldPart
from toolformer_dag.synthetic.sentences import Phenomenon, worded
from toolformer_dag.synthetic.wordings import calendar

FIRST_DAY, DAYS = datetime.date(2003, 1, 1), 7670  # up to the end of 2023
QUESTION_SHARE = 0.45
_SLOTS = 20


def day_of(random: Random, part: WorldPart) -> datetime.date:
    """A date of the part, 2003-2023."""
    while True:
        day = FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))
        if part_of_day(day) == part:
            return day


def part_of_day(day: datetime.date) -> WorldPart:
    """The part whose pages may be written on this day."""
    slot = day.toordinal() * 13 // 7 % _SLOTS
    borders = [round(sum(SHARES[: place + 1]) * _SLOTS) for place in range(len(PARTS))]
    return PARTS[sum(slot >= border for border in borders)]


def today(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """A mention of today's date, in the form that the words before it ask for."""
    day = day_of(random, part)
    slot = random.choices(calendar.SLOTS, calendar.SLOT_WEIGHTS)[0]
    is_question = random.random() < QUESTION_SHARE
    before, wording = _words(random, slot, wordings, is_question)
    answer = date_text(day, slot)
    return Phenomenon(
        tool="calendar",
        before=before + (" The answer is" if is_question else ""),
        after=f" {answer}{random.choice(calendar.TAILS)}",
        input="",
        result=today_is(day),
        answer=answer,
        wording=f"calendar/{slot}/{wordings}/{wording}",
        is_question=is_question,
        date=day,
    )


def _words(random: Random, slot: str, wordings: WordingSet, is_question: bool) -> tuple[str, str]:
    leads: tuple[str, ...]
    templates: tuple[str, ...]
    if wordings == "seen":
        leads = calendar.QUESTION_LEADS if is_question else calendar.LEADS
        templates = (calendar.QUESTIONS if is_question else calendar.STATEMENTS)[slot]
    else:
        leads = calendar.UNSEEN_QUESTION_LEADS if is_question else calendar.UNSEEN_LEADS
        templates = (calendar.UNSEEN_QUESTIONS if is_question else calendar.UNSEEN_STATEMENTS)[slot]
    before, wording = worded(random, leads, templates, {"event": random.choice(calendar.EVENTS)})
    return before, f"{'q' if is_question else 's'}{wording}"


def date_text(day: datetime.date, slot: str) -> str:
    """The part of the date that a slot wants, as it stands in `today_is`."""
    weekday, month = calendar.WEEK_DAYS[day.weekday()], calendar.MONTHS[day.month - 1]
    month_day = f"{month} {day.day}"
    forms = {
        "weekday": weekday,
        "month": month,
        "month_day": month_day,
        "year": str(day.year),
        "full": f"{month_day}, {day.year}",
    }
    return forms[slot]


def today_is(day: datetime.date) -> str:
    """What the calendar returns on that day (paper, section 3)."""
    return f"Today is {date_text(day, 'weekday')}, {date_text(day, 'full')}."
