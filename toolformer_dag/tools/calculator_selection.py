"""Select texts for the calculator (appendix A): texts with a number that may be computed from two other numbers."""

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
CHARACTERS_BETWEEN = " $€£¥(+-−~≈"
"""The characters that may stand between a phrase and its number."""
LOOK_BACK = 24
"""Characters before a number in which a phrase is looked for."""
PICKED_ONE_IN = 100
"""By the paper's third rule, one of so many documents is selected."""


def find_selection_rule(text: str, whole: str) -> str | None:
    """Find the first rule of appendix A that makes calculator calls worth trying in a text.

    Args:
        whole: The text of the whole document, which decides rule iii by its hash.

    Returns:
        One of these names, or None if no rule applies:

        - "operation" (i): of three numbers close together, one is the result of an operation on the others
        - "phrase" (ii): one of PHRASES, such as `equals`, is before a number
        - "three_numbers" (iii): there are three numbers, and the document is one of the 1 % that are picked

    Raises:
        OverBudget: There are too many pairs of numbers to try.
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
    return words.rstrip(CHARACTERS_BETWEEN).endswith(PHRASES)


def _is_picked(whole: str) -> bool:
    """Return whether the hash of a document's text selects it: one of PICKED_ONE_IN."""
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % PICKED_ONE_IN == 0


def holds_operation(text: str, all_numbers: Sequence[Number]) -> bool:
    """Check whether, of three numbers close together, one is the sum, difference, product or quotient of the others.

    Close together means within WINDOW tokens. A result with decimals may be rounded to two of them, but a whole
    number has to be exact.

    Example:
        True for "3 men and 4 women, 7 people", because 3 + 4 = 7.

    Args:
        all_numbers: The numbers in the text, in order.

    Raises:
        OverBudget: There are more than MAX_PAIRS pairs of numbers to try.
    """
    placed = _place_numbers(text, all_numbers)  # with positions in tokens
    budget = WorkBudget(MAX_PAIRS)

    # Each number is tried as the second operand, with all numbers in the window before it as the first.
    for second, position in enumerate(placed.positions):
        first_near = bisect_right(placed.positions, position - WINDOW)  # index of the first number in the window
        budget.spend(second - first_near)
        if _is_last_operand(placed, first_near, second):
            return True

    return False


def _is_last_operand(placed: "_PlacedNumbers", first_near: int, second: int) -> bool:
    """Return whether an operation on number `second` and a number before it has a result that stands near them.

    first_near: the index of the first number that may be the other operand.
    """
    operations = chain(_iter_sums(placed, first_near, second), _iter_products(placed, first_near, second))
    return any(_has_result_nearby(placed, operation, second) for operation in operations)


class _Operation(NamedTuple):
    """An operation on two numbers of a text, whose result is a number of the text too."""

    first: int  # the index of the earlier operand among the numbers of the text
    result: int  # its value, in units of 1 / `_PlacedNumbers.unit`


@dataclass(frozen=True, slots=True)
class _PlacedNumbers:
    """The values of the numbers of a text, and their positions in tokens, both in the order of the text.

    The values are small integers, 250 for 2.5 with the unit 100: several times faster than `Number.value`.
    """

    values: Sequence[int]
    unit: int  # the value of 1: as small as possible, but at least 100
    positions: Sequence[int]
    positions_of: Mapping[int, Sequence[int]]  # value -> positions of the numbers with this value, ascending
    smallest: int  # of the values; 0 without any
    largest: int


def _place_numbers(text: str, all_numbers: Sequence[Number]) -> _PlacedNumbers:
    """Convert the numbers of a text to small integers, and find their positions in tokens.

    Example:
        2.5 and 3 become 250 and 300 with the unit 100. 2.125 and 3 become 2125 and 3000 with the unit 1000.
    """
    # `Number.value` is a whole number of units of 1 / UNIT. The step is the greatest that divides all values; and a
    # hundredth too, because results are rounded to hundredths.
    step = gcd(UNIT // 100, *(number.value for number in all_numbers))
    values = [number.value // step for number in all_numbers]
    positions = _compute_token_positions(text, all_numbers)

    return _PlacedNumbers(
        values=values,
        unit=UNIT // step,
        positions=positions,
        positions_of=_group_positions_by_value(values, positions),
        smallest=min(values, default=0),
        largest=max(values, default=0),
    )


def _group_positions_by_value(values: Sequence[int], positions: Sequence[int]) -> Mapping[int, Sequence[int]]:
    """Return for each value the positions of the numbers with this value, in order."""
    positions_of: dict[int, list[int]] = defaultdict(list)
    for value, position in zip(values, positions, strict=True):
        positions_of[value].append(position)
    return dict(positions_of)


def _has_result_nearby(placed: _PlacedNumbers, operation: _Operation, second: int) -> bool:
    """Check whether the result of an operation is a third number, within WINDOW tokens of its operands.

    Example:
        True for the operands 2 and 3 in "2 and 3 is 5".

    Args:
        placed: The numbers of the text.
        second: The index of the later operand.
    """
    first_position = placed.positions[operation.first]
    second_position = placed.positions[second]

    # The result has to stand between these two, which are not included.
    after = second_position - WINDOW
    before = first_position + WINDOW

    result_positions = placed.positions_of[operation.result]  # ascending
    start = bisect_right(result_positions, after)

    # Three are enough: at most two of them are the operands themselves, as in "4 - 2".
    for position in result_positions[start : start + 3]:
        is_operand = position in (first_position, second_position)
        if not is_operand and position < before:
            return True

    return False


def _iter_sums(placed: _PlacedNumbers, first_near: int, second: int) -> Iterator[_Operation]:
    """Find sums and differences whose result is a number of the text.

    One operand is number `second`, and the other is each number from index `first_near` up to it.

    Yields:
        The operations. The result is exact, or rounded to hundredths if it has decimals.
    """
    values = placed.values  # integers in units of 1 / unit: with the unit 1000, 2.125 is 2125 and 3 is 3000
    positions_of = placed.positions_of  # its keys are the values that the text has
    unit = placed.unit
    hundredth = unit // 100
    has_finer_values = unit > 100  # else every sum is exact in hundredths

    for first in range(first_near, second):
        total = values[first] + values[second]
        difference = abs(values[first] - values[second])
        for exact in (total, difference):
            if exact in positions_of:
                yield _Operation(first, exact)
            if has_finer_values:
                rounded = _round_half_up(exact, 1, hundredth)
                if rounded in positions_of and rounded % unit:  # not for a whole number, which has to be exact
                    yield _Operation(first, rounded)


def _iter_products(placed: _PlacedNumbers, first_near: int, second: int) -> Iterator[_Operation]:
    """Find products and quotients whose result is a number of the text.

    One operand is number `second`, and the other is each number from index `first_near` up to it.

    Yields:
        The operations. The result is exact, or rounded to hundredths if it has decimals.
    """
    # All values are integers >= 0 in units of 1 / unit: with the unit 100, 2.5 is 250 and 3 is 300.
    unit = placed.unit
    hundredth = unit // 100
    positions_of = placed.positions_of  # its keys are the values that the text has

    # Most results lie outside the values of the text, and are skipped before the division, which costs the most.
    least_result = placed.smallest - hundredth
    most_result = placed.largest + hundredth

    b = placed.values[second]
    for first in range(first_near, second):
        a = placed.values[first]
        # a * b, a / b and b / a as numerator and denominator; the quotient is in units of 1 / unit again.
        fractions = ((a * b, unit), (a * unit, b), (b * unit, a))

        for numerator, denominator in fractions:
            if not denominator or not least_result * denominator <= numerator <= most_result * denominator:
                continue

            exact, remainder = divmod(numerator, denominator)
            if remainder == 0 and exact in positions_of:
                yield _Operation(first, exact)

            rounded = _round_half_up(numerator, denominator, hundredth)
            if rounded in positions_of and rounded % unit:  # not for a whole number, which has to be exact
                yield _Operation(first, rounded)


def _round_half_up(numerator: int, denominator: int, hundredth: int) -> int:
    """Return numerator / denominator rounded half up to a multiple of `hundredth`: 10 for 15 / 2 with 5."""
    hundredths = (2 * numerator + denominator * hundredth) // (2 * denominator * hundredth)  # floor(quotient + 1/2)
    return hundredths * hundredth


def _compute_token_positions(text: str, all_numbers: Sequence[Number]) -> list[int]:
    """Compute the position of each number in tokens: [1, 4] for "3 men and 4 women".

    If two numbers are more than WINDOW tokens apart, not all tokens between them are counted, because no operation
    connects such numbers.
    """
    positions = []
    position = 0
    end_of_last = 0

    for number in all_numbers:
        tokens_between = _count_tokens(text, end_of_last, number.start)
        position += tokens_between + 1
        positions.append(position)
        end_of_last = number.end
    return positions


def _count_tokens(text: str, start: int, end: int) -> int:
    """Count the tokens of `text[start:end]`. In a long text it is enough to count the first WINDOW or more."""
    near_end = min(end, start + 10 * WINDOW)
    count = len(TOKEN.findall(text, start, near_end))

    if count >= WINDOW or near_end == end:
        return count
    return len(TOKEN.findall(text, start, end))  # few and long tokens
