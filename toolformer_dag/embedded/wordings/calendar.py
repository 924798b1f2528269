"""Sentences of dated pages; the words before the place say in which form today's date must follow."""

from toolformer_dag.embedded.wordings.word_list import spaced

WEEK_DAYS = spaced("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = spaced("January February March April May June July August September October November December")
EVENTS = spaced("concert meeting fair market show match sale lecture dinner parade festival exhibition")
SLOTS = ("weekday", "month_day", "year", "full", "month")
SLOT_WEIGHTS = (3, 3, 3, 2, 1)

LEADS = ("", "", "Dear readers, ", "News from the {event}! ", "Good morning from our town. ", "The doors are open. ")
STATEMENTS = {
    "weekday": (
        "the current day of the week is",
        "we write this on a rainy",
        "the {event} is always held on this day of the week,",
        "a week from now it will again be",
        "exactly seven days ago it was also a",
        "after a long night it is already",
        "the {event} takes place on a",
        "in the office it is a quiet",
        "the week has reached",
        "our shop closes early because it is",
        "those who came to the {event} had chosen a",
    ),
    "month_day": (
        "today's month and day are",
        "every year the {event} falls on this very date,",
        "in exactly one year it will again be",
        "exactly one year ago it was also",
        "the leaf of the wall calendar for this morning shows",
        "without the year, the date is",
        "our yearly {event} is held on",
        "the birthday of our {event} is always",
        "year after year we light the candles on",
    ),
    "year": (
        "it is now the year",
        "the {event} of this year, the year",
        "the current year is",
        "we are living in the year",
        "all prices are those of the year",
        "the {event} is the first in the year",
        "copyright by the editors, in the year",
        "the best {event} of the year",
    ),
    "full": (
        "the full date of today is",
        "this report was published on the full date of",
        "the date of this letter, with the year, is",
        "written and signed, with month, day and year:",
        "last updated, with the full date:",
        "this page about the {event} was printed, complete with the year, on",
        "the complete date on the ticket for the {event} is",
    ),
    "month": (
        "the current month is",
        "the {event} takes place in this month of",
        "the month that we are in is",
        "the {event} fills the whole month of",
        "nobody expected such weather in the month of",
    ),
}
QUESTION_LEADS = ("", "", "A reader of the {event} pages asks: ", "I have lost track. ", "The children want to know: ")
QUESTIONS = {
    "weekday": (
        "What day of the week is it today?",
        "Which day of the week is it?",
        "What weekday do we have today?",
        "On which day of the week is the {event} taking place today?",
        "What day of the week was it exactly one week ago?",
        "What day of the week will it be in a week?",
    ),
    "month_day": (
        "What month and day is it today?",
        "Which day of which month is it?",
        "What is the date today, without the year?",
        "On which day and in which month is the {event} held today?",
        "What month and day was it exactly one year ago?",
    ),
    "year": (
        "What year is it?",
        "Which year do we have now?",
        "What is the current year?",
        "In which year does this {event} take place?",
    ),
    "full": (
        "What is the full date of today?",
        "What is today's date, with the year?",
        "What is the complete date, with month, day and year?",
        "What is the full date of the {event} today?",
    ),
    "month": (
        "What month is it?",
        "Which month do we have?",
        "What is the current month?",
        "In which month are we now?",
    ),
}

UNSEEN_LEADS = ("", "A short note for those who come to the {event}: ", "by the way, ")
UNSEEN_STATEMENTS = {
    "weekday": (
        "look around and you can tell that the day of this week is a",
        "if the week had only one day, it would for us be this",
        "seven days make a week, and the one we woke up to is",
    ),
    "month_day": (
        "torn from the calendar, and then forgotten, was the month and day of",
        "whoever has a birthday right now writes down the month and day as",
        "the {event} has its fixed place in the calendar, always on",
    ),
    "year": (
        "people who read this later will ask in what year it was, and we say:",
        "between the last year and the next stands the year",
    ),
    "full": (
        "the stamp on the envelope gives month, day and year, namely",
        "so that nobody forgets when we met, with the year, it was on",
    ),
    "month": ("twelve months has the year, and the one outside the window is",),
}
UNSEEN_QUESTION_LEADS = ("Before the {event} begins, tell us. ", "My watch has stopped! ")
UNSEEN_QUESTIONS = {
    "weekday": (
        "If somebody wakes up now, into which weekday?",
        "The newspaper of today has which day of the week on it?",
    ),
    "month_day": (
        "Can you give me the month and the day that we write?",
        "Which month and day would be on a ticket now?",
    ),
    "year": ("The year that we write is which one?", "By the way, do you know the year?"),
    "full": ("How do you write today with the month, the day and the year?",),
    "month": ("The month that we have is which one?",),
}
TAILS = (".", ".", ", dear readers.", ", and the sun is shining.", ", as you can see.")
