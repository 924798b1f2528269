"""Find the values in a tool's result, and say whether two results hold the same ones.

A value is a string, a number, a boolean or null of a result that is JSON or a Python literal, or the whole of a result
that is plain text. It is found by its place in the text, so that a value can be exchanged while everything around it
keeps its spelling. A result that was cut in the middle of its JSON is read as far as it goes.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

QUOTED = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
CUT_QUOTED = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|\'(?:[^\'\\]|\\.)*(?:\'|\\?\Z)'
"""The same, where a mark that is not closed quotes the rest of the text: no search begins again at each mark."""
BARE = r"[^\s\[\]{},:\"']+"
LEXEME = re.compile(rf"(?P<string>{CUT_QUOTED})|(?P<bare>{BARE})|(?P<mark>[\[\]{{}},:])", re.DOTALL)
"""What JSON and Python literals consist of: quoted strings, numbers and words, and marks."""
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
WORD = re.compile(r"[-+]?\d[\w.,:/+-]*|\w+(?:['’]\w+)?")
"""Words of a text; what begins with a digit is one word up to the next space: a number, a date, a time or a code."""
NUMBER_AND_UNIT = re.compile(rf"({NUMBER.pattern})([^\W\d_]*)")
UNIT_KEYS = frozenset({"unit", "units", "currency", "currency_code", "base_currency", "target_currency"})
"""Fields that say in what a number is measured."""
UNIT_WORDS = (
    "mm cm m km in inch inches ft foot feet yd yards mi mile miles meter meters metre metres kilometer kilometers "
    "kilometre kilometres mg g kg t gram grams kilogram kilograms lb lbs pound pounds oz ounce ounces ml l liter "
    "liters litre litres gallon gallons s sec secs second seconds min mins minute minutes h hr hrs hour hours day "
    "days week weeks month months year years c f k celsius fahrenheit kelvin degree degrees deg percent pct mph kmh "
    "kph kwh kw w v b kb mb gb tb bytes usd eur gbp jpy inr cad aud chf cny dollar dollars euro euros cent cents "
    "yen rupee rupees kcal cal calories unit units square cubic"
)
UNITS = frozenset(UNIT_WORDS.split())
"""Words that name a unit or a currency; behind or beside a number they are no value of their own."""
LONGEST_NUMBER = 28  # characters; a longer one is an id, and would be rounded
COMPARED = 1 << 13
"""Characters of a result that are compared with another one; a judge reads fewer."""
AFFIRMATIONS = frozenset({"success", "successful", "successfully", "succeeded", "ok", "true"})
"""Words that say that a call went well, which is no value."""


@dataclass(frozen=True, slots=True)
class ResultValue:
    """A value of a result.

    `key`: the field that holds it, of a list's items that of the list, "" where there is none. `text`: without quotes
    and escapes. `start`, `end`: its place in the result, without quotes. `quote`: the quotation mark around it, or "".
    """

    key: str
    text: str
    start: int
    end: int
    quote: str = ""


def result_values(result: str) -> list[ResultValue]:
    """Return the values of a result in their order; plain text is one value without a key."""
    if result.lstrip()[:1] in ("{", "["):
        return list(_literal_values(result))
    text = result.strip()
    start = len(result) - len(result.lstrip())
    if len(text) > 1 and re.fullmatch(QUOTED, text, re.DOTALL):  # a string in JSON
        return [ResultValue("", _unquoted(text), start + 1, start + len(text) - 1, text[0])]
    return [ResultValue("", text, start, start + len(text))] if text else []


def _literal_values(result: str) -> Iterator[ResultValue]:
    """Yield the values of JSON or a Python literal. `keys`: the field of each list or object that is open."""
    keys = [""]
    lexemes = list(LEXEME.finditer(result))
    for number, lexeme in enumerate(lexemes):
        mark = lexeme["mark"]
        if mark in ("{", "["):
            keys.append(keys[-1])
        elif mark in ("}", "]") and len(keys) > 1:
            keys.pop()
        if mark:
            continue
        following = lexemes[number + 1 : number + 2]
        is_key = bool(following) and following[0]["mark"] == ":"
        if is_key:
            keys[-1] = _unquoted(lexeme[0])
        elif lexeme["string"]:
            yield ResultValue(keys[-1], _unquoted(lexeme[0]), lexeme.start() + 1, lexeme.end() - 1, lexeme[0][0])
        else:
            yield ResultValue(keys[-1], lexeme[0], lexeme.start(), lexeme.end())


def _unquoted(literal: str) -> str:
    """Return what a quoted string says; one whose escapes are not JSON's keeps them."""
    if literal[:1] not in ('"', "'"):
        return literal
    inner = literal[1:-1]
    if literal[0] == "'":
        inner = inner.replace("\\'", "'").replace('"', '\\"')
    with suppress(ValueError):
        return str(json.loads(f'"{inner}"', strict=False))
    return literal[1:-1]


def value_words(text: str) -> tuple[str, ...]:
    """Return the words of a text in one spelling: in lower case, numbers normalized, units and affirmations left out.

    `$1,150.50`, `1150.5 USD` and `1150.5` have the same words; a number that begins with 0 is a code and keeps it.
    """
    words: list[str] = []
    for written in WORD.findall(text.casefold().replace("_", " ")):
        word = written.rstrip(".,:/+-")
        parts = NUMBER_AND_UNIT.fullmatch(word)
        is_code = bool(re.match(r"[-+]?0\d", word))
        if parts and not is_code and (not parts[2] or parts[2] in UNITS):
            words.append(normalized_number(parts[1]))
        elif word not in UNITS and word not in AFFIRMATIONS:
            words.append(word)
    return tuple(words)


def normalized_number(number: str) -> str:
    """Return a number without separators of thousands, a plus sign, or zeros that say nothing: 2.50 is 2.5."""
    if len(number) > LONGEST_NUMBER:
        return number
    try:
        value = Decimal(number.replace(",", "")).normalize()
    except ArithmeticError:  # an exponent of many digits
        return number
    return str(value) if value else "0"


def same_values(first: str, second: str) -> bool:
    """Return whether two results say the same, whatever their spelling is.

    Numbers are compared by their value; units, currencies, quotes, the order of keys and words such as "success" are
    set aside. Keys count where both results have the same ones, so that {"low": 1, "high": 2} is not {"low": 2,
    "high": 1}; a result with other keys is compared by its values alone. Dates are compared as they are written, and of
    a long result only the first COMPARED characters.
    """
    if first == second:
        return True
    one = _keyed_words(first)
    other = _keyed_words(second)
    if {key for key, _ in one} == {key for key, _ in other}:
        return one == other
    return sorted(words for _, words in one) == sorted(words for _, words in other)


@lru_cache(1024)
def _keyed_words(result: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the fields of a result with the words of their values, sorted."""
    keyed: list[tuple[str, tuple[str, ...]]] = []
    for value in result_values(result[:COMPARED]):
        words = value_words(value.text)
        if words and value.key.casefold() not in UNIT_KEYS:
            keyed.append((value.key.casefold(), words))
    return sorted(keyed)
