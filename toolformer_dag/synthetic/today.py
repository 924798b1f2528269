"""Write dated pages that mention today's date."""

import datetime
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, Worded, fill_template, type_question
from toolformer_dag.synthetic.wordings import WordingSet, WorldPart, get_date_templates, get_part_of_slot, get_word_list

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
"""The parts of a date that a text may ask for; `format_date_part` shows them."""
SLOT_WEIGHTS = (4, 3, 3, 2, 1)
"""How often each of SLOTS is drawn."""
FIRST_DAY = datetime.date(2003, 1, 1)
DAYS = 7670
"""Days that a page may have, from FIRST_DAY to the end of 2023."""
QUESTION_SHARE = 0.45
_SLOTS = 20
"""The days are hashed into so many slots, which are dealt to the parts of the world."""


def draw_day(random: Random, part: WorldPart) -> datetime.date:
    """Draw a day from 2003 to 2023 that belongs to a part of the world."""
    while True:
        day = FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))
        if get_part_of_day(day) == part:
            return day


def get_part_of_day(day: datetime.date) -> WorldPart:
    """Return the part of the world that a day belongs to."""
    return get_part_of_slot(day.toordinal() * 13 // 7 % _SLOTS, _SLOTS)


def today(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question about today's date on a page about some event, with a calendar call.

    As an example, "The current day of the week is" before the call, its result "Today is Sunday, May 3, 2009.", and
    " Sunday, dear readers." behind it. part: of the synthetic world; each of its three parts has days of its own.
    """
    day = draw_day(random, part)
    [slot] = random.choices(SLOTS, SLOT_WEIGHTS)  # the part of the date that the text says
    written = _write_text_before_date(random, slot, wordings)
    answer = format_date_part(day, slot)
    ending = random.choice(get_word_list("tails", "calendar"))
    return Phenomenon(
        tool="calendar",
        before=written.text,
        after=f" {answer}{ending}",
        input="",
        result=format_calendar_result(day),
        answer=answer,
        wording=f"calendar/{slot}/{wordings}/{written.wording}",
        date=day,
    )


def _write_text_before_date(random: Random, slot: str, wordings: WordingSet) -> Worded:
    """Write a sentence or question up to today's date. `slot`: the part of the date that follows."""
    is_question = random.random() < QUESTION_SHARE
    event = random.choice(get_word_list("calendar", "events"))
    templates = get_date_templates(slot, wordings)
    written = fill_template(random, templates, {"event": event}, is_question=is_question)
    if is_question:
        return written._replace(text=type_question(random, written.text))
    return written


def format_date_part(day: datetime.date, slot: str) -> str:
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


def format_calendar_result(day: datetime.date) -> str:
    """Return the calendar's result on that day (paper, section 3)."""
    return f"Today is {format_date_part(day, 'weekday')}, {format_date_part(day, 'full')}."
