"""Sentences of dated pages; the words before the place say in which form today's date must follow."""

from toolformer_dag.embedded.wordings.word_list import spaced

WEEK_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = spaced("January February March April May June July August September October November December")
EVENTS = spaced("concert meeting fair market show match sale lecture dinner parade")
SLOTS = ("weekday", "month_day", "year", "full", "month")
SLOT_WEIGHTS = (3, 3, 3, 2, 1)
STATEMENTS = {
    "weekday": (
        "The current day of the week is",
        "We write this on a rainy",
        "The {event} is always held on this day of the week,",
        "A week from now it will again be",
    ),
    "month_day": (
        "Today's month and day are",
        "Every year the {event} falls on this very day,",
        "In exactly one year it will again be",
    ),
    "year": ("It is now the year", "The {event} of this year, the year", "The current year is"),
    "full": ("The full date of today is", "This report was published on the date of", "Date of this letter:"),
    "month": ("The current month is", "The {event} takes place this month,"),
}
QUESTIONS = {
    "weekday": ("What day of the week is it today?", "Which day of the week is it?"),
    "month_day": ("What month and day is it today?", "Which day of which month is it?"),
    "year": ("What year is it?", "Which year do we have now?"),
    "full": ("What is the full date of today?", "What is today's date, with the year?"),
    "month": ("What month is it?", "Which month do we have?"),
}
UNSEEN_STATEMENTS = {
    "weekday": (
        "Look at the clock and the calendar, dear readers of the {event} pages: once again the week has come to",
    ),
    "month_day": ("The leaf torn from the wall calendar this morning, before the {event}, shows",),
    "year": ("People who read this will ask when it was written, and we say the year",),
    "full": ("Signed by hand after the {event}, with day, month and year:",),
    "month": ("The name of the month in which we hold the {event} is",),
}
UNSEEN_QUESTIONS = {
    "weekday": ("If I wake up now, which week day do I see?",),
    "month_day": ("Tell me the month and the day that we have, please?",),
    "year": ("Do you know what the year is?",),
    "full": ("How would you write day, month and year of today?",),
    "month": ("Do you know what the month is?",),
}
TAILS = (".", ".", ", dear readers.", ", and the sun is shining.")
