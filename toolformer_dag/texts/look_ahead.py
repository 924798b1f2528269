"""Which calls look ahead: their input names what the text says only later, as `Calculator(24 * 5)` before "120/24 = 5".

Such a call helps to predict the text because it tells the text, and at inference the model cannot ask it. The paper has
a rule for machine translation alone (appendix A, the whole input); this rule is for every tool and looks at units.
"""

import re
from collections.abc import Iterator
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
"""Words that stand for numbers: a text that says "twelve" or "a dozen" before the call has said 12."""
FUNCTION_WORDS = """
a about after all also although an and any are as at be because been before between both but by can could did do does
during each first for from had has have he her here his how however i if in into is it its just last many may me might
more most much my name no not now of on one only or other our she should so some such than that the their them then
there these they this those to us very was we were what when where which while who whom whose why will with would yes
you your born called known made
"""
"""Words that begin sentences and questions, and are no names for their capital."""
UNNAMED = frozenset(FUNCTION_WORDS.split())
"""The same as a set."""


class Unit(NamedTuple):
    """A number or a word of a text."""

    key: str  # equal for equal numbers ("1,240.50" and "1240.5") and for equal words ("Rome" and "rome")
    written: str  # as the text has it
    end: int  # the character after it


@dataclass(frozen=True, slots=True)
class TextUnits:
    """Where the numbers and words of a text stand; built once for all calls in it (`of`). Units are named by their key.

    - ends: for each unit, the character after its first occurrence
    - in_words: for each number that words stand for, such as 12 for "twelve" or "a dozen", the character after the
      first of these words
    - names: the words that have a capital wherever the text has them
    """

    ends: dict[str, int]
    in_words: dict[str, int]
    names: frozenset[str]

    @staticmethod
    def of(text: str) -> "TextUnits":
        """Read the numbers and words (units) of a text, and where each ends for the first time.

        A word counts as a name where it is longer than a character, never stands without a capital, and is none of
        UNNAMED.
        """
        ends: dict[str, int] = {}
        in_words: dict[str, int] = {}
        with_capital: set[str] = set()
        without_capital: set[str] = set()
        previous = ""
        for unit in _units(text):
            ends.setdefault(unit.key, unit.end)
            if unit.written[0].isupper():
                with_capital.add(unit.key)
            else:
                without_capital.add(unit.key)
            for number in _numbers_of_word(unit.key, previous):
                in_words.setdefault(number, unit.end)
            previous = unit.key
        always_with_capital = with_capital - without_capital - UNNAMED
        names = frozenset(key for key in always_with_capital if len(key) > 1)
        return TextUnits(ends, in_words, names)

    def ahead(self, offset: int, input: str) -> list[str]:
        """Return the units of a call's input that the text has only after the call, as the input has them, in order.

        offset: the character at which x_i, the token after the call, begins.

        Only numbers count, and words that are names in this text. A unit that the text has nowhere is no look ahead: a
        tool may be asked anything. Not covered: numbers that are words in the input, names in scripts without capitals,
        names that are spelled otherwise, and the call's result.
        """
        later_units: dict[str, str] = {}  # key -> as the input has it first
        for unit in _units(input):
            is_number = not unit.key[0].isalpha()
            if (is_number or unit.key in self.names) and self._only_after(offset, unit.key):
                later_units.setdefault(unit.key, unit.written)
        return list(later_units.values())

    def _only_after(self, offset: int, key: str) -> bool:
        """Return whether the text has a unit, and neither it nor a word for it ends before a character."""
        if key not in self.ends or self.ends[key] <= offset:
            return False
        return key not in self.in_words or self.in_words[key] > offset


def _numbers_of_word(word: str, previous: str) -> list[str]:
    """Return the numbers that a word stands for, with the word before it: "four" is 4, and after "twenty" also 24.

    Words are keys of units. A plural ("dozens", "thirds") counts as its singular.
    """
    singular = word.removesuffix("s")
    numbers = list(SPELLED.get(word, SPELLED.get(singular, ())))
    if previous in TENS and word in ONES:
        numbers.append(str(TENS[previous] + ONES.index(word)))
    return numbers


def _units(text: str) -> Iterator[Unit]:
    """Yield the numbers and words of a text, in order."""
    for match in UNIT.finditer(text):
        written = match[0]
        is_word = written[0].isalpha()
        key = written.casefold() if is_word else _number_key(written)
        yield Unit(key, written, match.end())


def _number_key(written: str) -> str:
    """Write a number without commas and without zeros that say nothing: `1,240.50` is `1240.5`, `0.5` is `.5`."""
    whole, _, decimals = written.replace(",", "").partition(".")
    whole = whole.lstrip("0")
    decimals = decimals.rstrip("0")
    if decimals:
        return f"{whole}.{decimals}"
    return whole or "0"
