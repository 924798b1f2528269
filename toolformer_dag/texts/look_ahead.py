"""Find calls that look ahead: their input names what the text says only later, as `Calculator(24 * 5)` before "120/24".

A call that looks ahead helps to predict the text because it repeats the text; at inference the model cannot write it.
The paper has a rule for machine translation alone (appendix A, the whole input). This rule is for every tool, and
compares units: a unit is a number or a word.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

VERSION = 1
"""Raised when the rule gives other units for the same call."""
UNIT = re.compile(r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+|[^\W\d_]+")
"""A number (`1,240`, `2.50`, `.5`) or a word; `Biden's` is two words."""
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
SPELLED: dict[str, tuple[str, ...]] = {
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
NEVER_NAMES = frozenset(FUNCTION_WORDS.split())
"""FUNCTION_WORDS as a set."""


class Unit(NamedTuple):
    """A number or a word of a text."""

    key: str  # equal for equal numbers ("1,240.50" and "1240.5") and for equal words ("Rome" and "rome")
    written: str  # as the text has it
    end: int  # the character after it

    @property
    def is_number(self) -> bool:
        """Whether it is a number."""
        return not self.key[0].isalpha()


@dataclass(frozen=True, slots=True)
class TextUnits:
    """Where the numbers and words of a text (its units) stand; built once for all calls in the text (`of`).

    "Rome has twelve" gives ends {"rome": 4, "has": 8, "twelve": 15}, ends_of_spelled_numbers {"12": 15} and names
    {"rome"}.
    """

    ends: dict[str, int]  # key of a unit -> the character after its first occurrence
    ends_of_spelled_numbers: dict[str, int]  # number -> the character after its first word: "twelve" or "dozen" for 12
    names: frozenset[str]  # keys of the words that have a capital wherever they stand in the text

    @staticmethod
    def of(text: str) -> "TextUnits":
        """Find the units of a text: where each ends for the first time, and which are names."""
        units = list(_iter_units(text))
        ends: dict[str, int] = {}
        for unit in units:
            ends.setdefault(unit.key, unit.end)
        return TextUnits(ends, _find_ends_of_spelled_numbers(units), _collect_names(units))

    def ahead(self, offset: int, input: str) -> list[str]:
        """List the numbers and names in a call's input that the text has only after the call.

        Example:
            In "It is 24 times = 5", the input "24 * 5" of a call before "= 5" gives ["5"].

        Args:
            offset: The offset of x_i, the token after the call.
            input: The input of the call.
        """
        # Not covered: numbers that are words in the input, names in scripts without capitals or in another spelling.
        later_units: dict[str, str] = {}  # key (equal for "1,240.50" and "1240.5") -> as the input has it first

        for unit in _iter_units(input):  # its numbers and words
            is_relevant = unit.is_number or unit.key in self.names  # the text's names
            if is_relevant and self._is_only_after(offset, unit.key):
                later_units.setdefault(unit.key, unit.written)

        return list(later_units.values())

    def _is_only_after(self, offset: int, key: str) -> bool:
        """Return whether the text has a unit after the character `offset`, and neither the unit nor its word before."""
        if key not in self.ends or self.ends[key] <= offset:
            return False
        spelled_end = self.ends_of_spelled_numbers.get(key)
        return spelled_end is None or spelled_end > offset


def _find_ends_of_spelled_numbers(units: Sequence[Unit]) -> dict[str, int]:
    """Return for each number that a text has as a word the character after the first such word: {"12": 15}."""
    ends: dict[str, int] = {}
    previous = ""  # the word before, for "twenty four"
    for unit in units:
        for number in _list_numbers_of_word(unit.key, previous):
            ends.setdefault(number, unit.end)
        previous = unit.key
    return ends


def _collect_names(units: Sequence[Unit]) -> frozenset[str]:
    """Collect the keys of words that are names: two characters or more, always with a capital, not in NEVER_NAMES."""
    with_capital: set[str] = set()
    without_capital: set[str] = set()

    for unit in units:
        has_capital = unit.written[0].isupper()
        keys = with_capital if has_capital else without_capital
        keys.add(unit.key)

    always_with_capital = with_capital - without_capital - NEVER_NAMES
    return frozenset(key for key in always_with_capital if len(key) > 1)


def _list_numbers_of_word(word: str, previous: str) -> list[str]:
    """Return the numbers that a word stands for: ["4"] for "four", ["4", "24"] if the `previous` word is "twenty"."""
    singular = word.removesuffix("s")
    numbers = list(SPELLED.get(word, SPELLED.get(singular, ())))
    if previous in TENS and word in ONES:
        numbers.append(str(TENS[previous] + ONES.index(word)))
    return numbers


def _iter_units(text: str) -> Iterator[Unit]:
    """Yield the numbers and words of a text, in order."""
    for match in UNIT.finditer(text):
        written = match[0]
        is_word = written[0].isalpha()
        key = written.casefold() if is_word else _normalize_number(written)
        yield Unit(key, written, match.end())


def _normalize_number(written: str) -> str:
    """Write a number without commas and needless zeros: "1240.5" for "1,240.50", ".5" for "0.5"."""
    whole, _, decimals = written.replace(",", "").partition(".")
    whole = whole.lstrip("0")
    decimals = decimals.rstrip("0")
    if decimals:
        return f"{whole}.{decimals}"
    return whole or "0"
