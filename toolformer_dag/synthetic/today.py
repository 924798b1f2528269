"""Write dated pages that mention today's date."""

import datetime
from random import Random

from toolformer_dag.synthetic.sentences import Phenomenon, WordedText, fill_random_template, make_typed_question
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
DATE_PARTS = ("weekday", "month_day", "year", "full", "month")
"""The parts of a date that a text may ask for; `format_date_part` shows them."""
DATE_PART_WEIGHTS = (4, 3, 3, 2, 1)
"""How often each of DATE_PARTS is drawn."""
FIRST_DAY = datetime.date(2003, 1, 1)
DAY_COUNT = 7670
"""The number of days that a page may be dated, from FIRST_DAY to the end of 2023."""
QUESTION_SHARE = 0.45
_SLOT_COUNT = 20
"""The number of slots that the days are hashed into. Each slot belongs to a part of the world."""


def draw_day(random: Random, part: WorldPart) -> datetime.date:
    """Draw a day from 2003 to 2023 that belongs to a part of the synthetic world."""
    while True:
        day = FIRST_DAY + datetime.timedelta(days=random.randrange(DAY_COUNT))
        if get_part_of_day(day) == part:
            return day


def get_part_of_day(day: datetime.date) -> WorldPart:
    """Return the part of the synthetic world that a day belongs to."""
    slot = day.toordinal() * 13 // 7 % _SLOT_COUNT
    return get_part_of_slot(slot, _SLOT_COUNT)


def write_calendar_phenomenon(random: Random, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a sentence or question about today's date on a page about some event, with a calendar call.

    Args:
        random: The source of the draws.
        part: The part of the synthetic world that the date belongs to. Each part has days of its own.
        wording_set: "seen" or "unseen" templates.

    Example:
        The text "The current day of the week is", a call with the result "Today is Sunday, May 3, 2009.", and the
        text " Sunday, dear readers.".
    """
    day = draw_day(random, part)
    [date_part] = random.choices(DATE_PARTS, DATE_PART_WEIGHTS)
    text_before_date = _write_text_before_date(random, date_part, wording_set)
    answer = format_date_part(day, date_part)
    ending = random.choice(get_word_list("tails", "calendar"))

    return Phenomenon(
        tool="calendar",
        text_before_call=text_before_date.text,
        text_after_call=f" {answer}{ending}",
        input="",
        result=format_calendar_result(day),
        answer=answer,
        wording_name=f"calendar/{date_part}/{wording_set}/{text_before_date.wording_name}",
        page_date=day,
    )


def _write_text_before_date(random: Random, date_part: str, wording_set: WordingSet) -> WordedText:
    """Write a sentence or question up to the place where it tells today's date.

    Args:
        random: The source of the draws.
        date_part: The part of the date that follows, such as "weekday".
        wording_set: "seen" or "unseen" templates.
    """
    is_question = random.random() < QUESTION_SHARE
    event = random.choice(get_word_list("calendar", "events"))

    templates = get_date_templates(date_part, wording_set)
    written = fill_random_template(random, templates, {"event": event}, is_question=is_question)
    if not is_question:
        return written

    typed_question = make_typed_question(random, written.text)
    return WordedText(typed_question, written.wording_name)


def format_date_part(day: datetime.date, date_part: str) -> str:
    """Return a part of a date in words.

    Args:
        day: The date.
        date_part: "weekday" ("Sunday"), "month" ("May"), "month_day" ("May 3"), "year" ("2009") or "full"
            ("May 3, 2009").

    Raises:
        KeyError: There is no such part.
    """
    month = MONTHS[day.month - 1]
    month_day = f"{month} {day.day}"
    text_by_part = {
        "weekday": WEEK_DAYS[day.weekday()],
        "month": month,
        "month_day": month_day,
        "year": str(day.year),
        "full": f"{month_day}, {day.year}",
    }
    return text_by_part[date_part]


def format_calendar_result(day: datetime.date) -> str:
    """Return what the calendar tool returns on a day (paper, section 3), such as "Today is Sunday, May 3, 2009."."""
    weekday = format_date_part(day, "weekday")
    date = format_date_part(day, "full")
    return f"Today is {weekday}, {date}."
