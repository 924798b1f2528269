"""Find the numbers of a text."""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

MAX_WHOLE_DIGITS = 15
"""The most digits before the point."""
MAX_DECIMALS = 12
"""The most digits after the point."""
UNIT_DIGITS = MAX_DECIMALS + 2  # a percent sign needs two more
UNIT = 10**UNIT_DIGITS
"""How many units of `Number.value` make 1: every number that is read is a whole number of units."""

# Digits, points and commas together, with a percent sign after them, as in `1,234.5%`. Neither a letter, a digit nor a
# mark comes before or after. Possessive (`*+`), so that no part of `10.5kg` matches. The lookbehinds follow the first
# character: a pattern that begins with a character set is found many times faster. A point right after a closing mark
# ends a sentence, and begins no number.
NUMBER_RUN = re.compile(r"[.0-9](?<![\w.,].)(?<![\"'”’»)\]}%]\.)[0-9]*+(?:[.,][0-9]++)*+(?!\w)%?")
# The part of a number before its point: plain, with a comma before every three digits, or as in India: 12,34,567.
WHOLE_PART = (
    rf"0|[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}}"
    r"|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4}"
    r"|[1-9][0-9]?(?:,[0-9]{2}){1,5},[0-9]{3}"
)
SINGLE_NUMBER = re.compile(rf"({WHOLE_PART}|(?=\.))(?:\.([0-9]{{1,{MAX_DECIMALS}}}))?(%?)")
"""A whole run that is one number, such as `1,234.5%`; the groups are whole part, decimals and percent sign."""
PART_OF_A_GROUPED_NUMBER = re.compile(",0[0-9]")
"""What shows that a run with commas is a number in a foreign form, and no list of numbers such as `1,2,3`."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""A token, for distances: a word, a number, or a punctuation mark."""
# An IBAN, three groups of four digits or more (a card, an account), or a telephone number after a `+`.
IDENTIFIER = re.compile(
    r"(?<![\w.,])"
    r"(?:[A-Z]{2} ?[0-9]{2}(?: [0-9A-Z]{4}){2,}(?: [0-9A-Z]{1,4})?|[0-9]{4}(?: [0-9]{4}){2,}(?: [0-9]{1,4})?)"
    r"(?![\w%]|[.,][0-9])|\+[0-9]{1,3}(?:[ -][0-9]{2,5}){2,}"
)


class Number(NamedTuple):
    """A number at characters `start` to `end` of the text; `value` is in units of 1 / UNIT, with `%` applied."""

    start: int
    end: int
    value: int


def numbers(text: str) -> list[Number]:
    """Find the numbers in a text, in order.

    These are numbers such as 7, 2017, 1,234.5, 12,34,567 (Indian), .5 and 11.4%, and each number of a list such as
    `1,2,3`. A number in such a list has the start and end of the whole list. Signs are not read, because in prose they
    are mostly dashes.
    """
    # Not covered: digits joined to letters (20th, 1990s, x86, 5kg), versions and addresses (1.2.3), account and
    # telephone numbers, whole numbers that begin with a zero (007), more than 15 digits before or 12 after the point.
    all_numbers: list[Number] = []

    for run in _iter_runs(text):  # a match of digits, points and commas together
        for piece in _split_run(run[0]):  # the whole run, or 1, 2 and 3 of the list `1,2,3`
            match = SINGLE_NUMBER.fullmatch(piece)
            if match:
                whole, decimals, percent = match.groups("")  # as written: "1,234", "5" and "%" of `1,234.5%`
                value = _parse_value(whole, decimals, percent)
                all_numbers.append(Number(run.start(), run.end(), value))

    return all_numbers


def _iter_runs(text: str) -> Iterator[re.Match[str]]:
    """Yield the runs of digits, points and commas of a text that are no part of an account or telephone number."""
    identifier_spans = [match.span() for match in IDENTIFIER.finditer(text)]
    for run in NUMBER_RUN.finditer(text):
        if not _is_within(run.start(), identifier_spans):
            yield run


def _is_within(offset: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a character offset lies in one of these sorted, disjoint spans."""
    spans_begun = bisect_right(spans, offset, key=itemgetter(0))  # spans that begin at or before the offset
    if spans_begun == 0:
        return False
    _, last_end = spans[spans_begun - 1]
    return offset < last_end


def _split_run(run: str) -> Sequence[str]:
    """Return the parts of a run that may be numbers: the run itself, or the items of a list such as `1,2,3`."""
    may_be_a_list = "," in run and "." not in run
    if may_be_a_list and not SINGLE_NUMBER.fullmatch(run) and not PART_OF_A_GROUPED_NUMBER.search(run):
        return run.split(",")
    return (run,)


def _parse_value(whole: str, decimals: str, percent: str) -> int:
    """Return the value of a number in units of 1 / UNIT, from its parts as written; each may be empty."""
    value = int(whole.replace(",", "") + decimals.ljust(UNIT_DIGITS, "0"))
    return value // 100 if percent else value
