"""Select texts for the calculator (appendix A): those with numbers of which one may follow from two others."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from math import gcd
from typing import NamedTuple

from toolformer_dag.tools.text_numbers import TOKEN, UNIT, Number, numbers
from toolformer_dag.tools.tool import WorkBudget

WINDOW = 100
"""Tokens within which the three numbers must stand (paper, appendix A.1)."""
MAX_PAIRS = 1_000_000
"""The most pairs of numbers that are tried per document; of 4,035 real pages one needs more than 10,000."""
PHRASES = ("=", "equals", "equal to", "total of", "average of")
"""The phrases of the paper's second rule, which stand before a number."""
BETWEEN = " $€£¥(+-−~≈"
"""The characters that may stand between a phrase and its number."""
LOOK_BACK = 24
"""Characters before a number in which a phrase is looked for."""
ONE_OF = 100
"""By the paper's third rule, one of so many documents is selected."""


def selection_rule(text: str, whole: str) -> str | None:
    """Return why calculator calls are worth trying in a text: the first rule that it meets (appendix A), or None.

    - "operation" (i): of three numbers close together, one is the result of an operation on the others.
    - "phrase" (ii): `=`, `equals`, `equal to`, `total of` or `average of` before a number. White space, a currency or
      another sign may stand between them.
    - "three_numbers" (iii): three numbers, for 1 % of the documents. A hash of `whole`, the text of the document, picks
      them, so a document and its segments are selected together.

    Raises OverBudget for a text with too many pairs of numbers to try (`holds_operation`).
    """
    all_numbers = numbers(text)
    has_three = len(all_numbers) >= 3
    if has_three and holds_operation(text, all_numbers):
        return "operation"
    if any(_follows_phrase(text, number) for number in all_numbers):
        return "phrase"
    if has_three and _is_picked(whole):
        return "three_numbers"
    return None


def _follows_phrase(text: str, number: Number) -> bool:
    """Return whether one of PHRASES stands before a number."""
    before = text[max(0, number.start - LOOK_BACK) : number.start]
    words = " ".join(before.lower().split())
    return words.rstrip(BETWEEN).endswith(PHRASES)


def _is_picked(whole: str) -> bool:
    """Return whether the hash of a document's text selects it: one of ONE_OF."""
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_OF == 0


def holds_operation(text: str, all_numbers: Sequence[Number]) -> bool:
    """Return whether a text has three numbers within WINDOW tokens of which one is a +, -, * or / b of the others.

    "3 men and 4 women, 7 people" has: 7 = 3 + 4. The result may be rounded to two decimals, as the calculator rounds; a
    whole number is only an exact result, because 2001 / 1999 is 1.00 for any two years. A word, a number and a
    punctuation mark are a token each.

    all_numbers: those of the text, in order. Each is paired with those before it. Raises OverBudget after MAX_PAIRS.
    """
    placed = _placed_numbers(text, all_numbers)
    budget = WorkBudget(MAX_PAIRS)
    first_near = 0  # the first number that is in one window with number `second`
    for second, position in enumerate(placed.positions):
        while position - placed.positions[first_near] >= WINDOW:
            first_near += 1
        budget.spend(second - first_near)
        operations = chain(_sums(placed, first_near, second), _products(placed, first_near, second))
        if any(_has_third(placed, operation, second) for operation in operations):
            return True
    return False


class _Operation(NamedTuple):
    """The result of an operation on number `first` of a text and another one; the text has the result as a number."""

    first: int
    result: int


@dataclass(frozen=True, slots=True)
class _PlacedNumbers:
    """The numbers of a text in order, with their places.

    - unit: the values are in units of 1 / unit: the largest, of at most a hundredth, in which all of them are whole.
      Small integers are added and looked up several times faster than numbers in units of 1 / UNIT.
    - positions: of each number, the number of tokens up to it.
    - positions_of: value -> positions of the numbers with this value, in order.
    - smallest, largest: of the values; 0 where there are none.
    """

    values: Sequence[int]
    unit: int
    positions: Sequence[int]
    positions_of: Mapping[int, Sequence[int]]
    smallest: int
    largest: int


def _placed_numbers(text: str, all_numbers: Sequence[Number]) -> _PlacedNumbers:
    """Return the numbers of a text as small integers, with their positions in tokens.

    Their values are in units of 1 / UNIT; here they get the largest unit, of at most a hundredth, in which all of them
    are whole: 2.5 and 3 become 250 and 300.
    """
    # The new unit is `step` old ones: the greatest number of them that divides a hundredth and every value.
    step = gcd(UNIT // 100, *(number.value for number in all_numbers))
    values = [number.value // step for number in all_numbers]
    positions = _token_positions(text, all_numbers)
    positions_of: dict[int, list[int]] = defaultdict(list)
    for value, position in zip(values, positions, strict=True):
        positions_of[value].append(position)
    return _PlacedNumbers(
        values=values,
        unit=UNIT // step,
        positions=positions,
        positions_of=dict(positions_of),
        smallest=min(values, default=0),
        largest=max(values, default=0),
    )


def _has_third(placed: _PlacedNumbers, operation: _Operation, second: int) -> bool:
    """Return whether the text states the result of an operation near its operands, as a third number.

    The operands are the numbers `operation.first` and `second`, of which the second comes later. All three have to lie
    within WINDOW tokens; the result may stand before, between or after the operands.
    """
    first_position = placed.positions[operation.first]
    second_position = placed.positions[second]
    result_positions = placed.positions_of[operation.result]
    start = bisect_right(result_positions, second_position - WINDOW)
    # The first three are enough: two of them may be the operands themselves.
    for position in result_positions[start : start + 3]:
        is_operand = position in (first_position, second_position)
        if not is_operand and position < first_position + WINDOW:
            return True
    return False


def _sums(placed: _PlacedNumbers, first_near: int, second: int) -> Iterator[_Operation]:
    """Yield the sums and differences of number `second` and each number from `first_near` up to it.

    Only those whose value the text has as a number too: the exact value, or the one rounded half up to hundredths. A
    rounded value that is whole does not count.
    """
    unit = placed.unit
    hundredth = unit // 100
    half_hundredth = unit // 200
    has_finer_values = hundredth > 1  # else every sum is exact in hundredths
    values = placed.values
    in_text = placed.positions_of
    b = values[second]
    for first in range(first_near, second):
        a = values[first]
        difference = a - b if a > b else b - a
        for exact in (a + b, difference):
            if exact in in_text:
                yield _Operation(first, exact)
            if has_finer_values:
                rounded = (exact + half_hundredth) // hundredth * hundredth
                is_whole = rounded % unit == 0
                if not is_whole and rounded in in_text:
                    yield _Operation(first, rounded)


def _products(placed: _PlacedNumbers, first_near: int, second: int) -> Iterator[_Operation]:
    """Yield the products and quotients of number `second` and each number from `first_near` up to it.

    Only those whose value the text has as a number too, exact or rounded half up to hundredths, as in `_sums`. A result
    is a fraction numerator / denominator, in units. Most lie far outside the numbers of the text, and are skipped
    before the division, which costs the most.
    """
    unit = placed.unit
    hundredth = unit // 100
    values = placed.values
    in_text = placed.positions_of
    # A result outside these bounds rounds to no number of the text.
    least = placed.smallest - hundredth
    most = placed.largest + hundredth
    b = values[second]
    for first in range(first_near, second):
        a = values[first]
        product = (a * b, unit)
        first_by_second = (a * unit, b)
        second_by_first = (b * unit, a)
        for numerator, denominator in (product, first_by_second, second_by_first):
            if denominator and least * denominator <= numerator <= most * denominator:
                exact, remainder = divmod(numerator, denominator)
                if remainder == 0 and exact in in_text:
                    yield _Operation(first, exact)
                # Half up: floor of the quotient in hundredths plus a half.
                rounded = (2 * numerator + denominator * hundredth) // (2 * denominator * hundredth) * hundredth
                if rounded % unit and rounded in in_text:
                    yield _Operation(first, rounded)


def _token_positions(text: str, all_numbers: Sequence[Number]) -> list[int]:
    """Return the position of each number in tokens: how many words, numbers and marks the text has up to it.

    Between two numbers that are further apart than any window, not all tokens are counted: only whether two numbers are
    within WINDOW tokens matters.
    """
    positions = []
    position = 0
    end_of_last = 0
    for number in all_numbers:
        position += _token_count(text, end_of_last, number.start) + 1
        positions.append(position)
        end_of_last = number.end
    return positions


def _token_count(text: str, start: int, end: int) -> int:
    """Count the tokens between two places, up to WINDOW or a few more where the text between them is long."""
    near_end = min(end, start + 10 * WINDOW)
    count = len(TOKEN.findall(text, start, near_end))
    if count >= WINDOW or near_end == end:
        return count
    return len(TOKEN.findall(text, start, end))  # few and long tokens
