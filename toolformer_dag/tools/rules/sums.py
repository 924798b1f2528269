"""Propose sums whose result the text says next: `a op b` of two numbers before, without a model and without gold.

The rule looks at the number after the call; the loss judges whether the sum is meant. A coincidence has the same result
as a meant sum, so the judge and the threshold have to tell them apart: of 851 coincidences 1 % gained 0.3 nats.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from toolformer_dag.texts.look_ahead import SPELLED
from toolformer_dag.tools.calculator_selection import WINDOW
from toolformer_dag.tools.text_numbers import SINGLE_NUMBER, TOKEN, UNIT, numbers
from toolformer_dag.tools.tool import ProposedCall

VERSION = "1"
"""Raised when the rule gives other calls."""
MOST_OPERANDS = 16
"""How many numbers before a result are tried as operands, in pairs: those nearest to it."""
MOST_CALLS = 12
"""The most calls that are proposed before one number."""
LEAST_WHOLE_RESULT = 20 * UNIT
"""The smallest whole number that the strict rule takes for a result: 20, in units of 1 / UNIT."""
SMALL_OPERANDS = (0, UNIT, 2 * UNIT)
"""The operands 0, 1 and 2, which a strict rule takes for no quantities."""
HUNDREDTH: int = UNIT // 100
"""0.01 in units of 1 / UNIT."""
YEAR = re.compile(r"(?:19|20)[0-9]{2}")
WORD = re.compile(r"[A-Za-z]+")
UNITS_OF_TIME = {"minute", "hour", "day", "week", "year"}
NO_OPERANDS = UNITS_OF_TIME | {"zero", "one", "hundred", "thousand", "million", "percent"}
"""Words that SPELLED has as numbers, and that are rarely quantities by themselves."""


def _choose_whole_number(spellings: Iterable[str]) -> str:
    """Return the spelling in digits without a point: `12` of `12` and `12.0`."""
    return next(number for number in spellings if "." not in number)


NUMBER_WORDS = {word: _choose_whole_number(spelled) for word, spelled in SPELLED.items() if word not in NO_OPERANDS}
"""Words that are operands, such as `dozen`, and how calls write them: `12`."""


class Operand(NamedTuple):
    """A number of the text."""

    start: int  # its first character
    end: int  # the character after it
    written: str  # how a call writes it
    value: int  # in units of 1 / UNIT
    in_digits: bool


def propose_sums(text: str, strict: bool) -> Iterator[ProposedCall]:
    """Propose calculator calls before numbers that are the sum, difference, product or quotient of two earlier numbers.

    In "He had 12 apples and 30 pears, 42 in all." the call `12 + 30` is proposed before `42`. There are at most
    MOST_CALLS per number, and calls with the nearest operands come first.

    Args:
        strict: Whether to leave out results that may be years, dates, times, versions or small counts, and the
            operands 0, 1 and 2. This is for web pages.
    """
    text_numbers = sorted([*_iter_numbers_in_digits(text), *_iter_numbers_in_words(text)])
    token_positions = _compute_token_positions(text, text_numbers)

    for index, result in enumerate(text_numbers):
        if _may_be_result(text, result, strict=strict):
            first_operand = _find_first_operand(token_positions, index)  # operands stand in a window of tokens before
            operands = text_numbers[first_operand:index]
            calls = _iter_calls_with_result(result, operands, strict=strict)
            for call in islice(calls, MOST_CALLS):
                yield ProposedCall(result.start, call)


def _may_be_result(text: str, number: Operand, *, strict: bool) -> bool:
    """Return whether the calculator may answer with a number of a text. strict: see `propose_sums`."""
    return _is_printed_form(number) and (not strict or _is_quantity(text, number))


def _compute_token_positions(text: str, text_numbers: Sequence[Operand]) -> list[int]:
    """Return the position of each number of a text in tokens: words, numbers and punctuation marks."""
    token_starts = [match.start() for match in TOKEN.finditer(text)]
    return [bisect_right(token_starts, number.start) for number in text_numbers]


def _find_first_operand(positions: Sequence[int], result: int) -> int:
    """Return the index of the first number that may be an operand of the number with the index `result`.

    It is within WINDOW tokens before the result, and at most the MOST_OPERANDS-th number before it.

    positions: of each number of the text, its position in tokens; ascending.
    """
    first_in_window = bisect_left(positions, positions[result] - WINDOW + 1)
    return max(first_in_window, result - MOST_OPERANDS)


def _iter_numbers_in_digits(text: str) -> Iterator[Operand]:
    """Yield the numbers in digits, without the items of lists such as `1,2,3`."""
    for start, end, value in numbers(text):
        written = text[start:end]
        if SINGLE_NUMBER.fullmatch(written):
            yield Operand(start, end, written, value, in_digits=True)


def _iter_numbers_in_words(text: str) -> Iterator[Operand]:
    """Yield the numbers in words."""
    for match in WORD.finditer(text):
        written = NUMBER_WORDS.get(match[0].lower())
        if written:
            yield Operand(match.start(), match.end(), written, int(written) * UNIT, in_digits=False)


def _is_printed_form(number: Operand) -> bool:
    """Return whether the calculator could print a number: in digits, no percent sign, at most two decimals."""
    has_at_most_two_decimals = number.value % HUNDREDTH == 0
    return number.in_digits and "%" not in number.written and has_at_most_two_decimals


def _is_quantity(text: str, number: Operand) -> bool:
    """Return whether a number of a web page is at least 20 or has decimals, and is no year, date, time or version."""
    has_decimals = "." in number.written
    if number.value < LEAST_WHOLE_RESULT and not has_decimals:
        return False
    is_year = YEAR.fullmatch(number.written) is not None
    return not is_year and not _is_part_of_longer_form(text, number)


def _is_part_of_longer_form(text: str, number: Operand) -> bool:
    """Return whether a number is part of a form such as `#25`, `25:30` or `25/8`."""
    before = text[max(0, number.start - 1) : number.start]
    ends_longer_form = before != "" and before in ":-#./"
    after = text[number.end : number.end + 2]
    begins_longer_form = after.startswith((":", "/", "-")) and after[1:].isdigit()
    return ends_longer_form or begins_longer_form


def _iter_calls_with_result(result: Operand, operands: Sequence[Operand], *, strict: bool) -> Iterator[str]:
    """Find calls such as `12 + 30` that have a certain result.

    Args:
        result: The number that is the result.
        operands: The numbers before it, in the order of the text.
        strict: Whether to leave out pairs with 0, 1 or 2.

    Yields:
        The calls. Pairs of operands near the result come first.
    """
    for farther, nearer in _iter_distinct_pairs(operands):
        is_small = farther.value in SMALL_OPERANDS or nearer.value in SMALL_OPERANDS
        if not (strict and is_small):
            yield from _iter_calls_on_pair(result.value, farther, nearer)


def _iter_distinct_pairs(operands: Sequence[Operand]) -> Iterator[tuple[Operand, Operand]]:
    """Yield the pairs of operands, the nearest to the result first; of pairs with the same values only the first."""
    seen_values: set[tuple[int, ...]] = set()
    for farther, nearer in _iter_pairs_nearest_first(operands):
        values = tuple(sorted((farther.value, nearer.value)))
        if values not in seen_values:
            seen_values.add(values)
            yield farther, nearer


def _iter_pairs_nearest_first(operands: Sequence[Operand]) -> Iterator[tuple[Operand, Operand]]:
    """Yield each pair of operands, the farther one from the result first: (b, c), (a, c), (a, b) for a, b, c."""
    nearest_first = operands[::-1]
    for count, farther in enumerate(nearest_first):
        for nearer in nearest_first[:count]:
            yield farther, nearer


def _iter_calls_on_pair(result: int, a: Operand, b: Operand) -> Iterator[str]:
    """Find the operations on two numbers that have a certain result.

    Differences below or equal to zero, `a * 1` and `a / 1` are left out.

    Yields:
        The operations as calls. For 12 and 30 and the result 18 this is `30 - 12`.
    """
    large, small = (a, b) if a.value > b.value else (b, a)

    if _is_sum(result, a.value, b.value):
        yield f"{a.written} + {b.written}"
    if _is_difference(result, large.value, small.value):
        yield f"{large.written} - {small.written}"
    if _is_product(result, a.value, b.value):
        yield f"{a.written} * {b.written}"
    if _is_quotient(result, dividend=a.value, divisor=b.value):
        yield f"{a.written} / {b.written}"
    if _is_quotient(result, dividend=b.value, divisor=a.value):
        yield f"{b.written} / {a.written}"


# All values below are in units of 1 / UNIT: 2.5 is 2.5 * UNIT.


def _is_sum(result: int, a: int, b: int) -> bool:
    """Return whether the calculator prints a + b as this result."""
    return _rounds_to(result, numerator=a + b, denominator=1)


def _is_difference(result: int, large: int, small: int) -> bool:
    """Return whether the calculator prints large - small as this result; False if both are equal."""
    return large > small and _rounds_to(result, numerator=large - small, denominator=1)


def _is_product(result: int, a: int, b: int) -> bool:
    """Return whether the calculator prints a * b as this result; False if one of them is 1."""
    return UNIT not in (a, b) and _rounds_to(result, numerator=a * b, denominator=UNIT)


def _is_quotient(result: int, *, dividend: int, divisor: int) -> bool:
    """Return whether the calculator prints dividend / divisor as this result; False for 0 / b, a / 0 and a / 1."""
    may_divide = divisor not in (0, UNIT) and dividend != 0
    return may_divide and _rounds_to(result, numerator=dividend * UNIT, denominator=divisor)


def _rounds_to(result: int, *, numerator: int, denominator: int) -> bool:
    """Check whether the calculator prints numerator / denominator, rounded half up to two decimals, as this result.

    A whole result has to be exact, because otherwise 2001 / 1999 would be 1.00 for any two years.

    Args:
        result: The result, in units of 1 / UNIT: 2.5 is 2.5 * UNIT.
        numerator: The numerator, in the same units.
        denominator: A positive number.
    """
    # result - 0.005 <= value < result + 0.005, with all sides multiplied by the denominator, so nothing is rounded.
    difference = numerator - result * denominator
    hundredth = HUNDREDTH * denominator

    is_whole = result % UNIT == 0
    if is_whole:
        return difference == 0
    return -hundredth <= 2 * difference < hundredth
