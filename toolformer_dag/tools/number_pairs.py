"""Find the numbers of a text, and select texts for the calculator (appendix A)."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from hashlib import blake2b
from itertools import chain
from math import gcd
from operator import itemgetter
from typing import NamedTuple

from toolformer_dag.tools.tool import WorkBudget

WINDOW = 100
"""Tokens within which the three numbers must stand (paper, appendix A.1)."""

MAX_WHOLE_DIGITS = 15
MAX_DECIMALS = 12
UNIT_DIGITS = MAX_DECIMALS + 2  # a percent sign needs two more
UNIT = 10**UNIT_DIGITS

# Possessive, so that no part of `10.5kg` matches. The lookbehinds follow the first character: a pattern that begins
# with a character set is found many times faster. A point after a closing mark ends a sentence.
RUN = re.compile(r"[.0-9](?<![\w.,].)(?<![\"'”’»)\]}%]\.)[0-9]*+(?:[.,][0-9]++)*+(?!\w)%?")
WHOLE = (
    rf"0|[1-9][0-9]{{0,{MAX_WHOLE_DIGITS - 1}}}|[1-9][0-9]{{0,2}}(?:,[0-9]{{3}}){{1,4}}"
    r"|[1-9][0-9]?(?:,[0-9]{2}){1,5},[0-9]{3}"  # Indian
)
PART_OF_A_GROUPED_NUMBER = re.compile(",0[0-9]")
SINGLE = re.compile(rf"({WHOLE}|(?=\.))(?:\.([0-9]{{1,{MAX_DECIMALS}}}))?(%?)")
TOKEN = re.compile(r"\w+|[^\w\s]")
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
    """Return numbers such as 7, 2017, 1,234.5, 12,34,567 (Indian), .5, 11.4% and each of 1,2,3.

    Not covered: digits joined to letters or an underscore (20th, 1990s, x86, 5kg), versions and addresses (1.2.3),
    account and telephone numbers (`IDENTIFIER`), whole numbers that begin with a zero (007), more than 15 digits before
    or 12 after the point. Signs are not read: in prose they are mostly dashes.
    """
    read: list[Number] = []
    identifiers = [match.span() for match in IDENTIFIER.finditer(text)]
    for run in RUN.finditer(text):
        if _within(run.start(), identifiers):
            continue
        for piece in _pieces(run[0]):
            if single := SINGLE.fullmatch(piece):
                read.append(Number(run.start(), run.end(), _value(*single.groups(""))))
    return read


def _within(place: int, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether a character lies in one of these sorted, disjoint spans."""
    before = bisect_right(spans, place, key=itemgetter(0)) - 1
    return before >= 0 and place < spans[before][1]


def _pieces(run: str) -> Sequence[str]:
    single = "." in run or "," not in run or SINGLE.fullmatch(run) or PART_OF_A_GROUPED_NUMBER.search(run)
    return (run,) if single else run.split(",")


def _value(whole: str, decimals: str, percent: str) -> int:
    value = int(whole.replace(",", "") + decimals.ljust(UNIT_DIGITS, "0"))
    return value // 100 if percent else value


MAX_PAIRS = 1_000_000
"""The most pairs of numbers that are tried per document; of 4,035 real pages one needs more than 10,000."""


def holds_operation(text: str, all_numbers: Sequence[Number]) -> bool:
    """Return whether three numbers within WINDOW tokens hold a result of +, -, * or / of the other two.

    The result may be exact or rounded as the calculator rounds; a whole number is only an exact result, because
    2001 / 1999 is 1.00 for any two years. A number, a word and a punctuation mark each count as a token. At most WINDOW
    pairs per number are tried. Raises OverBudget after MAX_PAIRS pairs.
    """
    at = _token_positions(text, all_numbers)
    values, unit = _scaled([number.value for number in all_numbers])
    places: dict[int, list[int]] = defaultdict(list)
    for value, position in zip(values, at, strict=True):
        places[value].append(position)
    limits = (min(places, default=0) - unit // 100, max(places, default=0) + unit // 100)
    budget, nearest = WorkBudget(MAX_PAIRS), 0
    for second, position in enumerate(at):
        while position - at[nearest] >= WINDOW:
            nearest += 1
        budget.spend(second - nearest)
        sums = _sums(values, nearest, second, places, unit)
        for first, result in chain(sums, _products(values, nearest, second, places, unit, limits)):
            third = bisect_right(places[result], position - WINDOW)  # the first within a window with the second
            near = places[result][third : third + 3]
            if any(each not in (at[first], position) and each < at[first] + WINDOW for each in near):
                return True
    return False


def _scaled(values: Sequence[int]) -> tuple[list[int], int]:
    """Return the values in the largest unit, of at most a hundredth, in which all are whole; and how many make 1.

    Small integers are added and looked up several times faster.
    """
    step = gcd(UNIT // 100, *values)
    return [value // step for value in values], UNIT // step


def _sums(
    values: Sequence[int], begin: int, second: int, places: Container[int], unit: int
) -> Iterator[tuple[int, int]]:
    """Yield (first, result) for the pairs of number `second` with each one from `begin`: results that are in `places`.

    A result is exact, or rounded half up to hundredths and no whole number.
    """
    hundredth, half = unit // 100, unit // 200
    b = values[second]
    for first in range(begin, second):
        a = values[first]
        for exact in (a + b, a - b if a > b else b - a):
            if exact in places:
                yield first, exact
            if hundredth > 1:
                rounded = (exact + half) // hundredth * hundredth
                if rounded % unit and rounded in places:
                    yield first, rounded


def _products(
    values: Sequence[int], begin: int, second: int, places: Container[int], unit: int, limits: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (first, result) as `_sums` does. Nothing in `places` lies outside `limits`."""
    hundredth, (least, most) = unit // 100, limits
    b = values[second]
    for first in range(begin, second):
        a = values[first]
        for numerator, denominator in ((a * b, unit), (a * unit, b), (b * unit, a)):
            if denominator and least * denominator <= numerator <= most * denominator:
                exact, rest = divmod(numerator, denominator)
                if not rest and exact in places:
                    yield first, exact
                rounded = (2 * numerator + denominator * hundredth) // (2 * denominator * hundredth) * hundredth
                if rounded % unit and rounded in places:
                    yield first, rounded


def _token_positions(text: str, all_numbers: Sequence[Number]) -> list[int]:
    """Return the token position of each number; a gap longer than any window is counted only in part."""
    at, position, end = [], 0, 0
    for number in all_numbers:
        position += 1 + _tokens(text, end, number.start)
        end = number.end
        at.append(position)
    return at


def _tokens(text: str, start: int, end: int) -> int:
    near = min(end, start + 10 * WINDOW)
    count = len(TOKEN.findall(text, start, near))
    return count if count >= WINDOW or near == end else len(TOKEN.findall(text, start, end))


PHRASES = ("=", "equals", "equal to", "total of", "average of")
BETWEEN = " $€£¥(+-−~≈"
LOOK_BACK = 24
ONE_OF = 100


def selection_rule(text: str, whole: str) -> str | None:
    """Return the first rule that `text` meets (appendix A); None where it meets none.

    - "operation" (i): `holds_operation`.
    - "phrase" (ii): `=`, `equals`, `equal to`, `total of` or `average of` before a number. White space, a currency or
      another sign may stand between them.
    - "three_numbers" (iii): three numbers, for 1 % of the documents. A hash of `whole`, the document's text, selects
      them, so a document and its segments are selected together.
    """
    all_numbers = numbers(text)
    if len(all_numbers) >= 3 and holds_operation(text, all_numbers):
        return "operation"
    if any(_after_phrase(text, number) for number in all_numbers):
        return "phrase"
    return "three_numbers" if len(all_numbers) >= 3 and _picked(whole) else None


def _after_phrase(text: str, number: Number) -> bool:
    before = text[max(0, number.start - LOOK_BACK) : number.start]
    return " ".join(before.lower().split()).rstrip(BETWEEN).endswith(PHRASES)


def _picked(whole: str) -> bool:
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_OF == 0
