"""Find calls that look ahead: their input names what the text says only later, as `Calculator(24 * 5)` before "120/24".

A call that looks ahead helps to predict the text because it repeats the text; at inference the model cannot write it.
The paper has a rule for machine translation alone (appendix A, the whole input). This rule is for every tool, and
compares units: a unit is a number or a word.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LOOK_AHEAD_VERSION = 1
"""Raised when the rule gives other units for the same call."""
UNIT_PATTERN = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+|[^\W\d_]+")
"""A number (`1,240`, `2.50`, `.5`) or a word; `Biden's` is two words."""
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
NUMBERS_BY_WORD: dict[str, tuple[str, ...]] = {
    **{word: (str(number),) for number, word in enumerate((*ONES, *TEENS))},
    **{word: (str(number),) for word, number in TENS.items()},
    "hundred": ("100",),
    "thousand": ("1000",),
    "million": ("1000000",),
    "dozen": ("12",),
    "half": (".5", "2"),
    "third": ("3",),
    "quarter": (".25", "4"),
    "twice": ("2",),
    "double": ("2",),
    "pair": ("2",),
    "couple": ("2",),
    "percent": ("100",),
    "minute": ("60",),
    "hour": ("60",),
    "day": ("24",),
    "week": ("7",),
    "year": ("12", "52", "365"),
}
"""Words and the numbers that they stand for: a text with "twelve" or "a dozen" before the call has said 12."""
FUNCTION_WORDS = """
a about after all also although an and any are as at be because been before between both but by can could did do does
during each first for from had has have he her here his how however i if in into is it its just last many may me might
more most much my name no not now of on one only or other our she should so some such than that the their them then
there these they this those to us very was we were what when where which while who whom whose why will with would yes
you your born called known made
"""
"""Words that are no names although they may have a capital everywhere, because they begin sentences and questions."""
NON_NAME_WORDS = frozenset(FUNCTION_WORDS.split())
"""FUNCTION_WORDS as a set."""


class Unit(NamedTuple):
    """A number or a word of a text."""

    key: str  # equal for equal numbers ("1,240.50" and "1240.5") and for equal words ("Rome" and "rome")
    text: str  # as the text has it
    end_offset: int  # the character after it

    @property
    def is_number(self) -> bool:
        """Whether this is a number rather than a word."""
        return not self.key[0].isalpha()


@dataclass(frozen=True, slots=True)
class TextUnits:
    """The offsets of the numbers and words of a text (its units), built once for all calls in the text (`from_text`).

    The comments show the values for the text "Rome has twelve".

    Attributes:
        first_ends_by_key: For each unit, the offset after its first occurrence.
        first_ends_by_spelled_number: For each number, the offset after its first word, such as "twelve" or "dozen".
        name_keys: The words that have a capital wherever they stand in the text.
    """

    first_ends_by_key: dict[str, int]  # {"rome": 4, "has": 8, "twelve": 15}
    first_ends_by_spelled_number: dict[str, int]  # {"12": 15}
    name_keys: frozenset[str]  # {"rome"}

    @staticmethod
    def from_text(text: str) -> "TextUnits":
        """Find the units of a text: where each ends for the first time, and which are names."""
        units = list(_iter_units(text))

        first_ends: dict[str, int] = {}
        for unit in units:
            first_ends.setdefault(unit.key, unit.end_offset)

        return TextUnits(first_ends, _find_ends_of_spelled_numbers(units), _collect_names(units))

    def list_units_ahead(self, call_offset: int, call_input: str) -> list[str]:
        """List the numbers and names in a call's input that the text has only after the call.

        Example:
            In "It is 24 times = 5", the input "24 * 5" of a call before "= 5" gives ["5"].

        Args:
            call_offset: The offset of x_i, the token after the call.
            call_input: The input of the call.
        """
        # Not covered: numbers that are words in the input, names in scripts without capitals or in another spelling.
        later_units: dict[str, str] = {}  # key (equal for "1,240.50" and "1240.5") -> as the input has it first

        for unit in _iter_units(call_input):
            is_number_or_name = unit.is_number or unit.key in self.name_keys
            if is_number_or_name and self._is_only_after_call(call_offset, unit.key):
                later_units.setdefault(unit.key, unit.text)

        return list(later_units.values())

    def _is_only_after_call(self, call_offset: int, unit_key: str) -> bool:
        """Check whether the text has a number or word, and has it only after an offset.

        Example:
            In "Rome has 12 hills", "12" is only after offset 5. In "twelve hills, 12 in all" it is not only after
            offset 7, because "twelve" says it before.

        Args:
            call_offset: The offset.
            unit_key: The key of the number or word.
        """
        first_end = self.first_ends_by_key.get(unit_key)
        if first_end is None or first_end <= call_offset:
            return False

        first_spelled_end = self.first_ends_by_spelled_number.get(unit_key)
        return first_spelled_end is None or first_spelled_end > call_offset


def _find_ends_of_spelled_numbers(units: Sequence[Unit]) -> dict[str, int]:
    """Find the numbers that a text has as words, with the offset after the first such word.

    Returns:
        The offset by number: {"12": 15} for the text "Rome has twelve".
    """
    first_ends: dict[str, int] = {}
    previous_word = ""  # for numbers of two words, such as "twenty four"
    for unit in units:
        for number in _list_numbers_of_word(unit.key, previous_word):
            first_ends.setdefault(number, unit.end_offset)
        previous_word = unit.key
    return first_ends


def _collect_names(units: Sequence[Unit]) -> frozenset[str]:
    """Collect the keys of the words that are names.

    A name has two characters or more, begins with a capital wherever it stands, and is not in NON_NAME_WORDS.
    """
    with_capital: set[str] = set()
    without_capital: set[str] = set()

    for unit in units:
        has_capital = unit.text[0].isupper()
        keys = with_capital if has_capital else without_capital
        keys.add(unit.key)

    always_with_capital = with_capital - without_capital - NON_NAME_WORDS
    return frozenset(key for key in always_with_capital if len(key) > 1)


def _list_numbers_of_word(word: str, previous_word: str) -> list[str]:
    """List the numbers that a word stands for.

    Returns:
        ["4"] for "four", ["4", "24"] for "four" after "twenty", and an empty list for a word that is not a number.
    """
    singular = word.removesuffix("s")
    numbers = list(NUMBERS_BY_WORD.get(word, NUMBERS_BY_WORD.get(singular, ())))

    if previous_word in TENS and word in ONES:
        numbers.append(str(TENS[previous_word] + ONES.index(word)))
    return numbers


def _iter_units(text: str) -> Iterator[Unit]:
    """Yield the numbers and words of a text, in order."""
    for match in UNIT_PATTERN.finditer(text):
        unit_text = match[0]
        is_word = unit_text[0].isalpha()
        key = unit_text.casefold() if is_word else _normalize_number(unit_text)
        yield Unit(key, unit_text, match.end())


def _normalize_number(number_text: str) -> str:
    """Remove commas and needless zeros from a number: "1,240.50" becomes "1240.5", and "0.5" becomes ".5"."""
    without_commas = number_text.replace(",", "")
    whole_part, _, decimals = without_commas.partition(".")
    whole_part = whole_part.lstrip("0")
    decimals = decimals.rstrip("0")

    if decimals:
        return f"{whole_part}.{decimals}"
    return whole_part or "0"
