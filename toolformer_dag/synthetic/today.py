"""Write dated pages that mention today's date."""

import datetime
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, Worded, typed_question, worded
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart, date_templates, part_of_slot, word_list

WEEK_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
SLOTS = ("weekday", "month_day", "year", "full", "month")
"""The parts of a date that a text may ask for; `date_text` shows them."""
SLOT_WEIGHTS = (4, 3, 3, 2, 1)
"""How often each of SLOTS is drawn."""
FIRST_DAY = datetime.date(2003, 1, 1)
DAYS = 7670
"""Days that a page may have, from FIRST_DAY to the end of 2023."""
QUESTION_SHARE = 0.45
_SLOTS = 20
"""The days are hashed into so many slots, which are dealt to the parts of the world."""


def day_of(random: Random, part: WorldPart) -> datetime.date:
    """Draw a day from 2003 to 2023 that belongs to a part of the world."""
    while True:
        day = FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))
        if part_of_day(day) == part:
            return day


def part_of_day(day: datetime.date) -> WorldPart:
    """Return the part of the world that a day belongs to."""
    return part_of_slot(day.toordinal() * 13 // 7 % _SLOTS, _SLOTS)


def today(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about today's date on a page about some event, with a calendar call.

    As an example, "The current day of the week is" before the call, its result "Today is Sunday, May 3, 2009.", and
    " Sunday, dear readers." behind it. part: of the synthetic world; each of its three parts has days of its own.
    """
    day = day_of(random, part)
    [slot] = random.choices(SLOTS, SLOT_WEIGHTS)  # the part of the date that the text says
    written = _before_date(random, slot, wordings)
    answer = date_text(day, slot)
    ending = random.choice(word_list("tails", "calendar"))
    return Phenomenon(
        tool="calendar",
        before=written.text,
        after=f" {answer}{ending}",
        input="",
        result=today_is(day),
        answer=answer,
        wording=f"calendar/{slot}/{wordings}/{written.wording}",
        date=day,
    )


def _before_date(random: Random, slot: str, wordings: WordingSet) -> Worded:
    """Write a sentence or question up to today's date. `slot`: the part of the date that follows."""
    is_question = random.random() < QUESTION_SHARE
    event = random.choice(word_list("calendar", "events"))
    templates = date_templates(slot, wordings)
    written = worded(random, templates, {"event": event}, is_question=is_question)
    if is_question:
        return written._replace(text=typed_question(random, written.text))
    return written


def date_text(day: datetime.date, slot: str) -> str:
    """Return a part of a date in words, such as `Sunday` for the slot "weekday".

    `slot`: "weekday", "month" (`May`), "month_day" (`May 3`), "year" or "full" (`May 3, 2009`).
    """
    month = MONTHS[day.month - 1]
    month_day = f"{month} {day.day}"
    forms = {
        "weekday": WEEK_DAYS[day.weekday()],
        "month": month,
        "month_day": month_day,
        "year": str(day.year),
        "full": f"{month_day}, {day.year}",
    }
    return forms[slot]


def today_is(day: datetime.date) -> str:
    """Return the calendar's result on that day (paper, section 3)."""
    return f"Today is {date_text(day, 'weekday')}, {date_text(day, 'full')}."
