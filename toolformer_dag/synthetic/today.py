"""Write dated pages that mention today's date."""

import datetime
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, asked, worded
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart, date_templates, part_of_slot, word_list

WEEK_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
SLOTS, SLOT_WEIGHTS = ("weekday", "month_day", "year", "full", "month"), (4, 3, 3, 2, 1)
FIRST_DAY, DAYS = datetime.date(2003, 1, 1), 7670  # up to the end of 2023
QUESTION_SHARE = 0.45
_SLOTS = 20


def day_of(random: Random, part: WorldPart) -> datetime.date:
    """Draw a date of the part, 2003-2023."""
    while True:
        day = FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))
        if part_of_day(day) == part:
            return day


def part_of_day(day: datetime.date) -> WorldPart:
    """Return the part whose pages may have this date."""
    return part_of_slot(day.toordinal() * 13 // 7 % _SLOTS, _SLOTS)


def today(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Mention today's date, in the form that the words before it ask for."""
    day = day_of(random, part)
    slot = random.choices(SLOTS, SLOT_WEIGHTS)[0]
    is_question = random.random() < QUESTION_SHARE
    event = random.choice(word_list("calendar", "events"))
    before, wording = worded(random, date_templates(slot, wordings), {"event": event}, is_question=is_question)
    answer = date_text(day, slot)
    return Phenomenon(
        tool="calendar",
        before=asked(random, before) if is_question else before,
        after=f" {answer}{random.choice(word_list('tails', 'calendar'))}",
        input="",
        result=today_is(day),
        answer=answer,
        wording=f"calendar/{slot}/{wordings}/{wording}",
        date=day,
    )


def date_text(day: datetime.date, slot: str) -> str:
    """Return the part of the date that a slot asks for, worded as in `today_is`."""
    weekday, month = WEEK_DAYS[day.weekday()], MONTHS[day.month - 1]
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
    """Return the calendar's result on that day (paper, section 3)."""
    return f"Today is {date_text(day, 'weekday')}, {date_text(day, 'full')}."
