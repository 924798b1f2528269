"""Select texts for the calculator (appendix A): texts with a number that may be computed from two other numbers."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from math import gcd
from typing import NamedTuple

from toolformer_dag.tools.text_numbers import TOKEN_PATTERN, UNITS_PER_ONE, Number, find_numbers
from toolformer_dag.tools.tool import WorkBudget

WINDOW_TOKENS = 100
"""Tokens within which the three numbers must stand (paper, appendix A.1)."""
MAX_NUMBER_PAIRS = 1_000_000
"""The most pairs of numbers that are tried per document; of 4,035 real pages one needs more than 10,000."""
RESULT_PHRASES = ("=", "equals", "equal to", "total of", "average of")
"""The phrases of the paper's second rule, which stand before a number."""
PHRASE_GAP_CHARACTERS = " $€£¥(+-−~≈"
"""The characters that may stand between a phrase and its number."""
LOOK_BACK_CHARACTERS = 24
"""Characters before a number in which a phrase is looked for."""
DOCUMENTS_PER_PICK = 100
"""By the paper's third rule, one of so many documents is selected."""


def find_selection_rule(text: str, document_text: str) -> str | None:
    """Find the first rule of appendix A that makes calculator calls worth trying in a text.

    Args:
        text: The text, a part of a document.
        document_text: The text of the whole document, which decides rule iii by its hash.

    Returns:
        One of these names, or None if no rule applies:

        - "operation" (i): of three numbers close together, one is the result of an operation on the others
        - "phrase" (ii): one of RESULT_PHRASES, such as `equals`, is before a number
        - "three_numbers" (iii): there are three numbers, and the document is one of the 1 % that are picked

    Raises:
        OverBudget: There are too many pairs of numbers to try.
    """
    all_numbers = find_numbers(text)
    has_three_numbers = len(all_numbers) >= 3

    if has_three_numbers and has_operation_with_result(text, all_numbers):
        return "operation"
    if any(_follows_result_phrase(text, number) for number in all_numbers):
        return "phrase"
    if has_three_numbers and _is_document_picked(document_text):
        return "three_numbers"
    return None


def _follows_result_phrase(text: str, number: Number) -> bool:
    """Return whether one of RESULT_PHRASES, such as `equals`, stands right before a number.

    Signs such as `$` may stand between the two.
    """
    window_start = max(0, number.start - LOOK_BACK_CHARACTERS)
    text_before = text[window_start : number.start]
    words_before = " ".join(text_before.lower().split())
    return words_before.rstrip(PHRASE_GAP_CHARACTERS).endswith(RESULT_PHRASES)


def _is_document_picked(document_text: str) -> bool:
    """Return whether the hash of a document's text picks it, as it does one in DOCUMENTS_PER_PICK documents."""
    encoded_text = document_text.encode("utf-8", "surrogatepass")
    digest = blake2b(encoded_text, digest_size=8).digest()
    return int.from_bytes(digest) % DOCUMENTS_PER_PICK == 0


def has_operation_with_result(text: str, all_numbers: Sequence[Number]) -> bool:
    """Check whether, of three numbers close together, one is the sum, difference, product or quotient of the others.

    Close together means within WINDOW_TOKENS tokens. A result with decimals may be rounded to two of them, but a whole
    number has to be exact.

    Example:
        True for "3 men and 4 women, 7 people", because 3 + 4 = 7.

    Args:
        text: The text.
        all_numbers: The numbers in the text, in order.

    Raises:
        OverBudget: There are more than MAX_NUMBER_PAIRS pairs of numbers to try.
    """
    placed = _place_numbers(text, all_numbers)  # the same numbers with positions in tokens
    pair_budget = WorkBudget(MAX_NUMBER_PAIRS)

    # Each number is tried as the second operand, with all numbers in the window before it as the first.
    for second_index, position in enumerate(placed.token_positions):
        window_start = position - WINDOW_TOKENS
        first_nearby_index = bisect_right(placed.token_positions, window_start)  # of the first number in the window
        pair_budget.spend(second_index - first_nearby_index)
        if _is_last_operand(placed, first_nearby_index, second_index):
            return True

    return False


def _is_last_operand(placed: "_PlacedNumbers", first_nearby_index: int, second_index: int) -> bool:
    """Check whether a number is the later operand of an operation whose result stands in the text near both operands.

    Example:
        In "3 men and 4 women, 7 people" it is true for the 4 (index 1), because 3 + 4 = 7.

    Args:
        placed: The numbers of the text.
        first_nearby_index: The index of the first number that may be the earlier operand. All numbers from this one up
            to the later operand are tried.
        second_index: The index of the later operand.
    """
    operations = chain(
        _iter_sums_and_differences(placed, first_nearby_index, second_index),
        _iter_products_and_quotients(placed, first_nearby_index, second_index),
    )
    return any(_has_result_nearby(placed, operation, second_index) for operation in operations)


class _Operation(NamedTuple):
    """An operation on two numbers of a text, whose result is a number of the text too.

    Attributes:
        first_index: The index of the earlier operand among the numbers of the text.
        result_value: The value of the result, in units of 1 / `_PlacedNumbers.units_per_one`.
    """

    first_index: int
    result_value: int


@dataclass(frozen=True, slots=True)
class _PlacedNumbers:
    """The values of the numbers of a text, and their positions in tokens, both in the order of the text.

    The values are small integers: 2.5 is 250 if there are 100 units per one. Computing with them is several times
    faster than with the large integers of `Number.value_in_units`.

    Attributes:
        values: The value of each number, in units.
        units_per_one: The value of 1: as small as possible, but at least 100.
        token_positions: The position of each number in tokens, ascending.
        positions_by_value: For each value, the positions of the numbers with this value, ascending.
        smallest_value: The smallest of the values, or 0 without any.
        largest_value: The largest of the values, or 0 without any.
    """

    values: Sequence[int]
    units_per_one: int
    token_positions: Sequence[int]
    positions_by_value: Mapping[int, Sequence[int]]
    smallest_value: int
    largest_value: int


def _place_numbers(text: str, all_numbers: Sequence[Number]) -> _PlacedNumbers:
    """Convert the numbers of a text to small integers, and find their positions in tokens.

    Example:
        2.5 and 3 become 250 and 300, with 100 units per one. 2.125 and 3 become 2125 and 3000, with 1000 units per one.
    """
    # In finest units, of which UNITS_PER_ONE make 1, each value is a whole number, but a large one. So several of them
    # (`step`) are taken as the new unit: as many as possible, so that each value is still a whole number of units, and
    # so is a hundredth, to which results are rounded.
    values_in_finest_units = [number.value_in_units for number in all_numbers]
    step = gcd(UNITS_PER_ONE // 100, *values_in_finest_units)
    values_in_steps = [value // step for value in values_in_finest_units]
    positions = _compute_token_positions(text, all_numbers)

    return _PlacedNumbers(
        values=values_in_steps,
        units_per_one=UNITS_PER_ONE // step,
        token_positions=positions,
        positions_by_value=_group_positions_by_value(values_in_steps, positions),
        smallest_value=min(values_in_steps, default=0),
        largest_value=max(values_in_steps, default=0),
    )


def _group_positions_by_value(values: Sequence[int], positions: Sequence[int]) -> Mapping[int, Sequence[int]]:
    """Return for each value the positions of the numbers with this value, in order."""
    positions_by_value: dict[int, list[int]] = defaultdict(list)
    for value, position in zip(values, positions, strict=True):
        positions_by_value[value].append(position)
    return dict(positions_by_value)


def _has_result_nearby(placed: _PlacedNumbers, operation: _Operation, second_index: int) -> bool:
    """Check whether the result of an operation is a third number, within WINDOW_TOKENS tokens of its operands.

    Example:
        True for the operands 2 and 3 in "2 and 3 is 5".

    Args:
        placed: The numbers of the text.
        operation: The operation, with the index of the earlier operand.
        second_index: The index of the later operand.
    """
    first_position = placed.token_positions[operation.first_index]
    second_position = placed.token_positions[second_index]

    # The result has to stand between these two positions, which are not included.
    window_start = second_position - WINDOW_TOKENS
    window_end = first_position + WINDOW_TOKENS

    result_positions = placed.positions_by_value[operation.result_value]  # ascending
    start = bisect_right(result_positions, window_start)

    # Three are enough: at most two of them are the operands themselves, as in "4 - 2".
    for position in result_positions[start : start + 3]:
        is_operand = position in (first_position, second_position)
        if not is_operand and position < window_end:
            return True

    return False


def _iter_sums_and_differences(
    placed: _PlacedNumbers, first_nearby_index: int, second_index: int
) -> Iterator[_Operation]:
    """Find sums and differences whose result is a number of the text.

    Args:
        placed: The numbers of the text.
        first_nearby_index: The index of the first number that may be the earlier operand. The numbers from this one up
            to the later operand are tried.
        second_index: The index of the later operand.

    Yields:
        The operations. The result is exact, or rounded to hundredths if it has decimals.
    """
    values = placed.values  # integers in units: with 1000 units per one, 2.125 is 2125 and 3 is 3000
    values_in_text = placed.positions_by_value.keys()
    units_per_one = placed.units_per_one
    hundredth = units_per_one // 100
    has_finer_values = units_per_one > 100  # else every sum is exact in hundredths

    for first_index in range(first_nearby_index, second_index):
        total = values[first_index] + values[second_index]
        difference = abs(values[first_index] - values[second_index])

        for exact_result in (total, difference):
            if exact_result in values_in_text:
                yield _Operation(first_index, exact_result)

            if has_finer_values:
                rounded_result = _round_half_up(exact_result, denominator=1, hundredth=hundredth)
                # A whole number has to be exact.
                if rounded_result in values_in_text and rounded_result % units_per_one != 0:
                    yield _Operation(first_index, rounded_result)


def _iter_products_and_quotients(
    placed: _PlacedNumbers, first_nearby_index: int, second_index: int
) -> Iterator[_Operation]:
    """Find products and quotients whose result is a number of the text.

    Args:
        placed: The numbers of the text.
        first_nearby_index: The index of the first number that may be the earlier operand. The numbers from this one up
            to the later operand are tried.
        second_index: The index of the later operand.

    Yields:
        The operations. The result is exact, or rounded to hundredths if it has decimals.
    """
    # All values are integers >= 0 in units: with 100 units per one, 2.5 is 250 and 3 is 300.
    units_per_one = placed.units_per_one
    hundredth = units_per_one // 100
    values_in_text = placed.positions_by_value.keys()

    # Most results lie outside the values of the text, and are skipped before the division, which costs the most.
    least_result = placed.smallest_value - hundredth
    most_result = placed.largest_value + hundredth

    b = placed.values[second_index]
    for first_index in range(first_nearby_index, second_index):
        a = placed.values[first_index]
        # a * b, a / b and b / a as numerator and denominator, so that the quotient is in the same units again.
        fractions = ((a * b, units_per_one), (a * units_per_one, b), (b * units_per_one, a))

        for numerator, denominator in fractions:
            if denominator == 0:
                continue
            if not least_result * denominator <= numerator <= most_result * denominator:
                continue

            exact_result, remainder = divmod(numerator, denominator)
            if remainder == 0 and exact_result in values_in_text:
                yield _Operation(first_index, exact_result)

            rounded_result = _round_half_up(numerator, denominator, hundredth)
            # A whole number has to be exact.
            if rounded_result in values_in_text and rounded_result % units_per_one != 0:
                yield _Operation(first_index, rounded_result)


def _round_half_up(numerator: int, denominator: int, hundredth: int) -> int:
    """Round a quotient half up to a multiple of `hundredth`.

    Example:
        15 / 2 is 7.5, which becomes 10 if a hundredth is 5 units.
    """
    hundredths = (2 * numerator + denominator * hundredth) // (2 * denominator * hundredth)  # floor(quotient + 1/2)
    return hundredths * hundredth


def _compute_token_positions(text: str, all_numbers: Sequence[Number]) -> list[int]:
    """Compute the position of each number in tokens: [1, 4] for "3 men and 4 women".

    If two numbers are more than WINDOW_TOKENS tokens apart, not all tokens between them are counted, because no
    operation connects such numbers.
    """
    positions = []
    position = 0
    previous_end = 0  # the end of the number before, in characters

    for number in all_numbers:
        tokens_between = _count_tokens(text, previous_end, number.start)
        position += tokens_between + 1
        positions.append(position)
        previous_end = number.end

    return positions


def _count_tokens(text: str, start: int, end: int) -> int:
    """Count the tokens of `text[start:end]`, or only the first of them if these are WINDOW_TOKENS or more.

    Numbers that are that many tokens apart belong to no operation, so their exact distance does not matter.
    """
    nearby_end = min(end, start + 10 * WINDOW_TOKENS)  # a token has fewer than 10 characters on average
    nearby_count = len(TOKEN_PATTERN.findall(text, start, nearby_end))

    if nearby_count >= WINDOW_TOKENS or nearby_end == end:
        return nearby_count
    return len(TOKEN_PATTERN.findall(text, start, end))  # a text of few and long tokens
