"""Which calls look ahead: their input names what the text says only later, as `Calculator(24 * 5)` before "120/24 = 5".

Such a call helps to predict the text because it tells the text, and at inference the model cannot ask it. The paper has
a rule for machine translation alone (appendix A, the whole input); this rule is for every tool and looks at units.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class TextUnits:
    """The units of a text.

    `ends`: unit -> character at which its first occurrence ends; `in_words`: the same of numbers that words stand for;
    `names`: words that have a capital wherever the text has them.
    """

    ends: dict[str, int]
    in_words: dict[str, int]
    names: frozenset[str]

    @staticmethod
    def of(text: str) -> "TextUnits":
        """Read the units of a text, once for all calls in it."""
        ends: dict[str, int] = {}
        in_words: dict[str, int] = {}
        capital: set[str] = set()
        small: set[str] = set()
        before = ""
        for unit, written, end in _units(text):
            ends.setdefault(unit, end)
            (capital if written[0].isupper() else small).add(unit)
            spelled = SPELLED.get(unit, SPELLED.get(unit.removesuffix("s"), ()))
            if before in TENS and unit in ONES:  # twenty-four
                spelled += (str(TENS[before] + ONES.index(unit)),)
            for number in spelled:
                in_words.setdefault(number, end)
            before = unit
        names = frozenset(unit for unit in capital - small - UNNAMED if len(unit) > 1)
        return TextUnits(ends, in_words, names)

    def ahead(self, offset: int, input: str) -> list[str]:
        """Return the units of `input` that the text has after character `offset` and not before, as written, in order.

        Units are numbers, and words that are names in this text; x_i begins at `offset`. A unit that the text has
        nowhere is no look ahead: a tool may be asked anything. Not covered: numbers that are words in the input, names
        in scripts without capitals, names that are spelled otherwise, and the call's result.
        """
        units: dict[str, str] = {}
        for unit, written, _ in _units(input):
            later = self.ends.get(unit, 0) > offset and self.in_words.get(unit, offset + 1) > offset
            if later and (unit in self.names or not unit[0].isalpha()):
                units.setdefault(unit, written)
        return list(units.values())


def _units(text: str) -> Iterator[tuple[str, str, int]]:
    """(unit, as written, end): equal numbers and equal words are equal units."""
    for match in UNIT.finditer(text):
        written = match[0]
        yield written.casefold() if written[0].isalpha() else _number(written), written, match.end()


def _number(written: str) -> str:
    """Write a number without commas and without zeros that say nothing: `1,240.50` is `1240.5`, `0.5` is `.5`."""
    whole, point, decimals = written.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") + (point + decimals if decimals else "")) or "0"
