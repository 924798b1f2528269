"""Find the values in a tool's result, and say whether two results hold the same ones.

A value is a string, a number, a boolean or null of a result that is JSON or a Python literal, or the whole of a result
that is plain text. It has its position in the text, so that a value can be replaced while everything around it
keeps its spelling. A result that was cut in the middle of its JSON is read as far as it goes.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import zip_longest

QUOTED_PATTERN = r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\''
CUT_QUOTED_PATTERN = r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)|\'(?:[^\'\\]|\\.)*(?:\'|\\?\Z)'
"""A quoted string, also one that lacks its end because the result was cut there."""
BARE_PATTERN = r"[^\s\[\]{},:\"']+"
LEXEME_PATTERN = re.compile(
    rf"(?P<string>{CUT_QUOTED_PATTERN})|(?P<bare>{BARE_PATTERN})|(?P<mark>[\[\]{{}},:])", re.DOTALL
)
"""The parts of JSON and Python literals: quoted strings, bare numbers and words, and marks such as { and ,."""
NUMBER_PATTERN = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
WORD_PATTERN = re.compile(r"[-+]?\d[\w.,:/+-]*|\w+(?:['’]\w+)?")
"""Words of a text; what begins with a digit is one word up to the next space: a number, a date, a time or a code."""
NUMBER_AND_UNIT_PATTERN = re.compile(rf"({NUMBER_PATTERN.pattern})([^\W\d_]*)")
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
UNIT_NAMES = frozenset(UNIT_WORDS.split())
"""Words that name a unit or a currency; after a number they are no value of their own."""
MAX_NUMBER_CHARACTERS = 28
"""The maximum number of characters of a number; a longer one is an id, and would be rounded."""
MAX_COMPARED_CHARACTERS = 1 << 13
"""The maximum number of characters of a result that are compared; a judge reads fewer."""
AFFIRMATION_WORDS = frozenset({"success", "successful", "successfully", "succeeded", "ok", "true"})
"""Words that say that a call went well, which is no value."""


@dataclass(frozen=True, slots=True)
class ResultValue:
    """A string, number or word of a tool's result, with its position.

    In {"city": "Porto"} it is ResultValue(key="city", text="Porto", start=10, end=15, quotation_mark='"').

    Attributes:
        key: the field that holds it; for the items of a list the field of the list; "" if there is none.
        text: the value without quotation marks and escapes.
        start: the offset of its first character in the result, after the quotation mark.
        end: the offset after its last character, before the quotation mark.
        quotation_mark: the quotation mark around it, or "".
    """

    key: str
    text: str
    start: int
    end: int
    quotation_mark: str = ""


def find_result_values(result: str) -> list[ResultValue]:
    """Return the values of a result, in their order: of {"low": 1, "sky": "clear"} the values 1 and "clear".

    A result that begins neither with { nor with [ is one value without a key: a quoted string, or plain text. An empty
    result has no values.
    """
    text = result.strip()
    if not text:
        return []
    if text[0] in ("{", "["):
        return list(_iter_literal_values(result))

    start = len(result) - len(result.lstrip())
    return [_parse_single_value(text, start)]


def _parse_single_value(text: str, start: int) -> ResultValue:
    """Return the value of a result that is one quoted string or plain text.

    Args:
        text: The result without spaces around it.
        start: The offset of `text` in the result.
    """
    end = start + len(text)
    is_quoted = len(text) > 1 and re.fullmatch(QUOTED_PATTERN, text, re.DOTALL)
    if is_quoted:
        return ResultValue(key="", text=_unquote(text), start=start + 1, end=end - 1, quotation_mark=text[0])
    return ResultValue(key="", text=text, start=start, end=end)


def _iter_literal_values(result: str) -> Iterator[ResultValue]:
    """Yield the values of JSON or a Python literal, as 1 and 2 with the key "low" for {"low": [1, 2]}.

    Strings before a colon are keys, not values. Text that is no valid literal is read as far as it goes.
    """
    # A stack: the last key that was read in each open list or object. Items of a list have the key of the list.
    keys = [""]
    lexemes = list(LEXEME_PATTERN.finditer(result))  # strings, bare words and marks
    for lexeme, next_lexeme in zip_longest(lexemes, lexemes[1:]):
        mark = lexeme["mark"]
        is_key = next_lexeme is not None and next_lexeme["mark"] == ":"
        if mark:  # a bracket, which pushes or pops a key; or a comma or colon, which changes nothing
            _update_open_keys(keys, mark)
        elif is_key:
            keys[-1] = _unquote(lexeme[0])
        else:
            yield _parse_literal_value(lexeme, keys[-1])


def _update_open_keys(open_keys: list[str], mark: str) -> None:
    """Add a key for a list or object that a bracket opens, or drop the key of the one that it closes.

    Example:
        In {"low": [1, 2]} the keys before `[` are ["", "low"]. They become ["", "low", "low"], so that 1 and 2 have the
        key "low", and after `]` they are ["", "low"] again.

    Args:
        open_keys: The last key that was read in each open list or object. It is changed in place. The first entry
            stands for what is outside of all brackets, and stays.
        mark: A bracket, colon or comma. Only brackets change something.
    """
    if mark in "{[":
        open_keys.append(open_keys[-1])  # until its own first key is read, it has the key under which it stands
    elif mark in "}]" and len(open_keys) > 1:
        open_keys.pop()


def _parse_literal_value(lexeme: re.Match[str], key: str) -> ResultValue:
    """Return the value of a quoted string, a bare number or a bare word.

    Example:
        The string "Porto" with its marks at the offsets 9 to 16 gives the text Porto with the offsets 10 to 15, which
        are inside of the marks.

    Args:
        lexeme: A match of LEXEME_PATTERN that is no mark.
        key: The field of the value.
    """
    text = lexeme[0]
    if lexeme["string"]:
        start = lexeme.start() + 1
        end = lexeme.end() - 1
        return ResultValue(key=key, text=_unquote(text), start=start, end=end, quotation_mark=text[0])
    return ResultValue(key=key, text=text, start=lexeme.start(), end=lexeme.end())


def _unquote(literal: str) -> str:
    """Return a string of JSON or Python without its quotation marks and escapes. A bare word is returned as it is.

    - "Porto" (with its marks) gives Porto, and 'it\\'s' gives it's
    - "\\x41" gives \\x41: if JSON does not know one of the escapes, all of them stay
    """
    if literal[:1] not in ('"', "'"):
        return literal

    inner_text = literal[1:-1]
    json_text = inner_text
    if literal[0] == "'":  # a Python string, rewritten as JSON would escape it
        json_text = inner_text.replace("\\'", "'").replace('"', '\\"')
    try:
        return str(json.loads(f'"{json_text}"', strict=False))
    except ValueError:  # an escape that JSON does not know
        return inner_text


def normalize_words(text: str) -> tuple[str, ...]:
    """Return the words of a text in one spelling: in lower case, numbers normalized, units and affirmations left out.

    `$1,150.50`, `1150.5 USD` and `1150.5` all give ("1150.5",). A number that begins with 0, as 0042, is a code and
    keeps its zeros. Affirmations are words such as "ok" and "successfully".
    """
    written_words = WORD_PATTERN.findall(text.casefold().replace("_", " "))
    words = [_normalize_word(word.rstrip(".,:/+-")) for word in written_words]
    return tuple(word for word in words if word)


def _normalize_word(word: str) -> str:
    """Return a word in one spelling, such as "12" for "12kg", or "" for a unit or an affirmation such as "ok"."""
    number, unit = _split_number_and_unit(word)
    is_number = number and (not unit or unit in UNIT_NAMES)
    if is_number:
        return normalize_number(number)
    is_value = word not in UNIT_NAMES and word not in AFFIRMATION_WORDS
    return word if is_value else ""


def _split_number_and_unit(word: str) -> tuple[str, str]:
    """Split a word into a number and the letters after it: 12kg into ("12", "kg").

    Returns:
        The number and the letters. Both are "" if the word is no number, or a code such as 0042, which begins with 0
        and another digit.
    """
    match = NUMBER_AND_UNIT_PATTERN.fullmatch(word)
    is_code = bool(re.match(r"[-+]?0\d", word))
    if match is None or is_code:
        return "", ""
    return match[1], match[2]


def normalize_number(number: str) -> str:
    """Return a number in the one spelling that all spellings of its value share, to compare numbers as texts.

    Example:
        The result is "2.5" for "+2.50", "1234" for "1,234.0" and "1E+2" for "100".

    A number of more than MAX_NUMBER_CHARACTERS characters is an id, and is returned as it is.
    """
    if len(number) > MAX_NUMBER_CHARACTERS:
        return number
    try:
        value = Decimal(number.replace(",", "")).normalize()
    except ArithmeticError:  # an exponent of many digits
        return number
    return str(value) if value else "0"


def have_same_values(first: str, second: str) -> bool:
    """Return whether two results hold the same values, whatever their spelling is.

    Numbers are compared by their value; units, currencies, quotes, the order of keys and words such as "success" do not
    count. If both results have the same keys, each key is compared: {"low": 1, "high": 2} is not {"low": 2, "high": 1}.
    Otherwise only the values are. Dates are compared as they are written. Only the first MAX_COMPARED_CHARACTERS
    characters are read.
    """
    if first == second:
        return True

    # Sorted pairs of a field and the words of its value, as [("low", ("1",))]; the field of plain text is "".
    first_pairs = _list_words_by_key(first)
    second_pairs = _list_words_by_key(second)
    have_same_keys = {key for key, _ in first_pairs} == {key for key, _ in second_pairs}
    if have_same_keys:
        return first_pairs == second_pairs

    first_values = sorted(words for _, words in first_pairs)
    second_values = sorted(words for _, words in second_pairs)
    return first_values == second_values


@lru_cache(1024)
def _list_words_by_key(result: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return a sorted list of pairs (field, words of its value), as [("low", ("1",))] for {"low": "1 km"}."""
    words_by_key: list[tuple[str, tuple[str, ...]]] = []
    for value in find_result_values(result[:MAX_COMPARED_CHARACTERS]):
        key = value.key.casefold()
        words = normalize_words(value.text)
        if words and key not in UNIT_KEYS:
            words_by_key.append((key, words))
    return sorted(words_by_key)
