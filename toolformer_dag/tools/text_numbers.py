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
UNITS_PER_ONE = 10**UNIT_DIGITS
"""How many units of `Number.value` make 1: every number that is read is a whole number of units."""

# Digits, points and commas together, with a percent sign after them, as in `1,234.5%`. Neither a letter, a digit nor a
# mark comes before or after. Possessive (`*+`), so that no part of `10.5kg` matches. The lookbehinds follow the first
# character: a pattern that begins with a character set is found many times faster. A point right after a closing mark
# ends a sentence, and begins no number.
NUMBER_RUN_PATTERN = re.compile(r"[.0-9](?<![\w.,].)(?<![\"'”’»)\]}%]\.)[0-9]*+(?:[.,][0-9]++)*+(?!\w)%?")
# The part of a number before its point: plain, with a comma before every three digits, or as in India: 12,34,567.
WHOLE_PART_REGEX = (
    rf"0|[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}}"
    r"|[1-9][0-9]{0,2}(?:,[0-9]{3}){1,4}"
    r"|[1-9][0-9]?(?:,[0-9]{2}){1,5},[0-9]{3}"
)
SINGLE_NUMBER_PATTERN = re.compile(rf"({WHOLE_PART_REGEX}|(?=\.))(?:\.([0-9]{{1,{MAX_DECIMALS}}}))?(%?)")
"""A whole run that is one number, such as `1,234.5%`; the groups are whole part, decimals and percent sign."""
GROUPED_NUMBER_PATTERN = re.compile(",0[0-9]")
"""What shows that a run with commas is a number in a foreign form, and no list of numbers such as `1,2,3`."""
TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]")
"""A token, for distances: a word, a number, or a punctuation mark."""
# An IBAN, three groups of four digits or more (a card, an account), or a telephone number after a `+`.
IDENTIFIER_PATTERN = re.compile(
    r"(?<![\w.,])"
    r"(?:[A-Z]{2} ?[0-9]{2}(?: [0-9A-Z]{4}){2,}(?: [0-9A-Z]{1,4})?|[0-9]{4}(?: [0-9]{4}){2,}(?: [0-9]{1,4})?)"
    r"(?![\w%]|[.,][0-9])|\+[0-9]{1,3}(?:[ -][0-9]{2,5}){2,}"
)


class Number(NamedTuple):
    """A number in a text.

    Attributes:
        start: The index of its first character.
        end: The index after its last character.
        value_in_units: Its value in units of 1 / UNITS_PER_ONE, as a whole number. A percent sign is applied.
    """

    start: int
    end: int
    value_in_units: int


def find_numbers(text: str) -> list[Number]:
    """Find the numbers in a text, in order.

    These are numbers such as 7, 2017, 1,234.5, 12,34,567 (Indian), .5 and 11.4%, and each number of a list such as
    `1,2,3`. A number in such a list has the start and end of the whole list. Signs are not read, because in prose they
    are mostly dashes.
    """
    # Not covered: digits joined to letters (20th, 1990s, x86, 5kg), versions and addresses (1.2.3), account and
    # telephone numbers, whole numbers that begin with a zero (007), more than 15 digits before or 12 after the point.
    all_numbers: list[Number] = []

    for run_match in _iter_number_runs(text):  # digits, points and commas together
        for piece in _split_number_run(run_match[0]):  # the whole run, or 1, 2 and 3 of the list `1,2,3`
            match = SINGLE_NUMBER_PATTERN.fullmatch(piece)
            if match is None:
                continue

            # The groups are the parts as written: "1,234", "5" and "%" of `1,234.5%`.
            whole_digits, decimal_digits, percent_sign = match.groups("")
            value = _parse_value(whole_digits, decimal_digits, percent_sign)
            all_numbers.append(Number(run_match.start(), run_match.end(), value))

    return all_numbers


def _iter_number_runs(text: str) -> Iterator[re.Match[str]]:
    """Find the runs of digits, points and commas in a text, such as `1,234.5%`.

    Yields:
        The matches, in order, without those that are part of an account or telephone number.
    """
    identifier_spans = [match.span() for match in IDENTIFIER_PATTERN.finditer(text)]
    for run_match in NUMBER_RUN_PATTERN.finditer(text):
        if not _is_within_spans(run_match.start(), identifier_spans):
            yield run_match


def _is_within_spans(offset: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a character offset lies in one of some spans.

    Args:
        offset: The offset.
        spans: The start and the end (which is not included) of each span. They are sorted and do not overlap.
    """
    begun_count = bisect_right(spans, offset, key=itemgetter(0))  # spans that begin at or before the offset
    if begun_count == 0:
        return False

    _, last_end = spans[begun_count - 1]
    return offset < last_end


def _split_number_run(number_run: str) -> Sequence[str]:
    """Return the parts of a run that may be numbers: the items of a list such as `1,2,3`, or else the run itself."""
    may_be_list = "," in number_run and "." not in number_run
    if not may_be_list:
        return [number_run]

    is_single_number = SINGLE_NUMBER_PATTERN.fullmatch(number_run)  # such as `1,234`
    is_foreign_number = is_single_number is None and GROUPED_NUMBER_PATTERN.search(number_run)  # such as `12,05`
    if is_single_number or is_foreign_number:
        return [number_run]

    return number_run.split(",")


def _parse_value(whole_digits: str, decimal_digits: str, percent_sign: str) -> int:
    """Return the exact value of a number, as a whole number of tiny units: 10**UNIT_DIGITS units make 1.

    There are two digits more than a number may have decimals, because a percent sign divides by 100.

    Example:
        "1,200", "5" and "" give 1200.5 * 10**UNIT_DIGITS, and "5", "" and "%" give 0.05 * 10**UNIT_DIGITS.

    Args:
        whole_digits: The digits before the point, possibly with commas. They are empty in `.5`.
        decimal_digits: The digits after the point, possibly none.
        percent_sign: `%`, or empty.
    """
    digits = whole_digits.replace(",", "") + decimal_digits.ljust(UNIT_DIGITS, "0")
    value = int(digits)
    return value // 100 if percent_sign else value
