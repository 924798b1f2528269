"""Write a result with other values: same fields, same form, other numbers, and strings of other results.

What the answer says after a call is likelier under the recorded result than under this one only if it rests on the
values that the tool has added. Values that occur before the call stay as they are: the answer may have them from
there.
"""

import json
import re
from bisect import insort
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from toolformer_dag.traces.result_values import (
    AFFIRMATION_WORDS,
    UNIT_KEYS,
    UNIT_NAMES,
    WORD_PATTERN,
    ResultValue,
    find_result_values,
    have_same_values,
    normalize_words,
)

MAX_POOL_STRINGS = 32
"""The maximum number of strings that a pool keeps."""
MAX_NAME_WORDS = 4
"""The maximum number of words of a name; a string of more words is prose."""
MAX_CODED_WORDS = 12
"""The maximum number of words of a string with digits that is no prose."""
MAX_ATTEMPTS = 8
"""How often random values are drawn until they differ from the old ones."""
OUTCOME_KEYS = frozenset({"success", "ok", "status", "error"})
"""Fields that say whether a call went well."""
CODED_PATTERN = re.compile(
    r"(?P<date>(?P<year>\b\d{4})-\d\d-\d\d(?=\b|T))"
    r"|(?P<time>(?<!\d)(?P<hour>[01]?\d|2[0-3]):[0-5]\d(?!\d))"
    r"|(?P<scientific>\d+(?:\.\d+)?)(?=[eE][-+]?\d)|(?P<code>(?<!\w)(?<!\d[eE][-+])[^\W\d]*\d\w*)",
    re.ASCII,
)
"""Matches what is redrawn. One of these named groups matches:

- `date`: 2024-05-31, with the group `year` in it
- `time`: 09:30, with the group `hour` in it
- `scientific`: the digits before an exponent, 1.5 of 1.5e10
- `code`: any other word with a digit: 42, 12kg, 3rd, AB12
"""
DIGIT_RUN_PATTERN = re.compile(r"\d+", re.ASCII)
NUMBER_ENDINGS = frozenset({"am", "pm", "st", "nd", "rd", "th", "x", "k"})
"""Letters after a number that stay when its digits are redrawn, as in 3rd and 9am."""
OPPOSITE_BOOLEANS = {"true": "false", "false": "true", "True": "False", "False": "True"}
EMPTY_VALUES = frozenset({"null", "None", ""})


@dataclass
class StringPools:
    """The strings with which a string of a result may be replaced, collected from many results.

    A string is in three pools: of its tool and field, of its field, and of its kind (`classify_value`). A pool keeps
    the MAX_POOL_STRINGS strings of the lowest hash, so it is the same in whatever order results are added.

    Attributes:
        entries_by_pool_name: by the name of a pool (`_list_pool_names`), its strings as pairs (hash, string), lowest
            hash first.
    """

    entries_by_pool_name: dict[tuple[str, ...], list[tuple[str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add_result_strings(self, tool: str, result: str) -> None:
        """Add the names and prose of a result to their pools."""
        for value in find_result_values(result):
            kind = classify_value(value)
            if kind not in ("name", "prose"):
                continue
            for pool_name in _list_pool_names(tool, value.key, kind):
                self._add_to_pool(pool_name, value.text)

    def _add_to_pool(self, pool_name: tuple[str, ...], text: str) -> None:
        """Insert a string into a pool by its hash, and drop the last one if the pool is too full."""
        pool = self.entries_by_pool_name[pool_name]
        entry = (_hash_text(text), text)
        if entry not in pool:
            insort(pool, entry)
            del pool[MAX_POOL_STRINGS:]

    def choose_replacement(self, tool: str, value: ResultValue, seed: str, words_before: Collection[str]) -> str | None:
        """Choose a string of other results to put in place of a value, for example "Porto" for "Lima".

        The pools are tried in turn: strings of the same tool and field, then of the same field, then of the same kind.

        Args:
            tool: The tool that gave the value.
            value: The value to replace. A string with the same words is never chosen.
            seed: A text that determines the choice.
            words_before: Words that were said before the call. A string of such words alone is never chosen.

        Returns:
            The string, or None if no pool has a suitable one.
        """
        for pool_name in _list_pool_names(tool, value.key, classify_value(value)):
            candidates = self._list_other_strings(pool_name, value, words_before)
            if candidates:
                # Random, but stable: another candidate changes the choice only if its own hash is the smallest.
                return min(candidates, key=lambda candidate: _hash_text(f"{seed} {candidate}"))
        return None

    def _list_other_strings(
        self, pool_name: tuple[str, ...], value: ResultValue, words_before: Collection[str]
    ) -> list[str]:
        """List the strings of a pool that may be put in place of a value.

        Args:
            pool_name: The name of the pool.
            value: The value. A string with the same words is left out.
            words_before: Words that were said before the call. A string of such words alone is left out.
        """
        words_of_value = normalize_words(value.text)
        other_strings = []
        for _, text in self.entries_by_pool_name.get(pool_name, ()):
            has_same_words = normalize_words(text) == words_of_value
            if not has_same_words and not _is_said_before(text, words_before):
                other_strings.append(text)
        return other_strings


def _list_pool_names(tool: str, key: str, kind: str) -> tuple[tuple[str, ...], ...]:
    """Return the names of the three pools of a string: of its tool and field, of its field, of its kind."""
    return ("tool", tool, key, kind), ("key", key, kind), ("kind", kind)


def classify_value(value: ResultValue) -> str:
    """Return the kind of a value, which decides how the value is replaced.

    Returns:
        One of these kinds:

        - "empty": null, "" or a unit of measurement, such as "celsius" in the field `unit`
        - "boolean": true or false without quotes
        - "state": a word that says that the call went well, such as "ok"
        - "confirmation": a message with such a word, such as "Order 17 placed successfully"
        - "coded": at most MAX_CODED_WORDS words with a digit among them, such as "AB12" or "3 May 2024"
        - "name": at most MAX_NAME_WORDS words without digits, such as "New York"
        - "prose": a longer text
    """
    text = value.text.strip()

    if text in EMPTY_VALUES or value.key.casefold() in UNIT_KEYS:
        return "empty"
    if not value.quotation_mark and text in OPPOSITE_BOOLEANS:
        return "boolean"
    if text.casefold() in AFFIRMATION_WORDS:
        return "state"
    return _classify_text(text)


def _classify_text(text: str) -> str:
    """Return the kind of a text, which decides how it is replaced: "confirmation", "coded", "name" or "prose".

    Examples are "Order 17 placed successfully", "AB12", "New York" and a longer text.
    """
    words_in_lower_case = re.findall(r"\w+", text.casefold())
    if AFFIRMATION_WORDS.intersection(words_in_lower_case):
        return "confirmation"

    word_count = len(text.split())
    if DIGIT_RUN_PATTERN.search(text):
        return "coded" if word_count <= MAX_CODED_WORDS else "prose"
    return "name" if word_count <= MAX_NAME_WORDS else "prose"


def exchange_values(result: str, tool: str, seed: str, text_before: str, string_pools: StringPools) -> str | None:
    """Replace the values in the result of a call at random, for example {"temp": 18} with {"temp": 31}.

    The changed result is for a test: an answer that rests on the real result is less likely after the changed one.
    The form of the result stays. Equal values get the same replacement.

    Args:
        result: The result as text.
        tool: The tool that gave it. Its strings are replaced with other strings of the same tool by preference.
        seed: A text that determines the random choices.
        text_before: The arguments of the call and what was said before it. Values that occur there stay, as do null,
            units of measurement, "success" and fields that say whether the call went well.
        string_pools: The strings to choose from.

    Returns:
        The changed result. None if no value can be replaced, or if MAX_ATTEMPTS attempts all failed to give other
        values.
    """
    words_before = _to_word_set(text_before)
    for attempt in range(MAX_ATTEMPTS):
        replacer = _ValueReplacer(tool, f"{seed} {attempt}", words_before, string_pools)
        changed = replacer.replace_values(result)
        if changed == result:  # no value that could be replaced
            return None

        # Without quotes, two words in place of one are read as two values.
        has_same_fields = _list_value_keys(changed) == _list_value_keys(result)
        if has_same_fields and not have_same_values(changed, result):
            return changed
    return None


def _list_value_keys(result: str) -> list[str]:
    """Return the field of each value of a result.

    They may differ after a replacement: without quotes, a text of two words is read as two values.
    """
    return [value.key for value in find_result_values(result)]


@dataclass(frozen=True)
class _ValueReplacer:
    """Replaces the values of a result at random; what is drawn follows from a seed.

    Attributes:
        tool: the tool that gave the result.
        seed: a text from which all choices follow.
        words_before: words that were said before the call; values of such words alone stay.
        string_pools: the strings to choose from.
    """

    tool: str
    seed: str
    words_before: Collection[str]
    string_pools: StringPools

    def replace_values(self, result: str) -> str:
        """Replace every value of a result that can be replaced, and keep all text between the values."""
        pieces: list[str] = []
        end_of_last = 0  # the offset after the last value that was replaced
        for value in find_result_values(result):
            replacement = self._choose_replacement(value)
            if replacement is not None:
                pieces.append(result[end_of_last : value.start])
                pieces.append(_escape_text(replacement, value.quotation_mark))
                end_of_last = value.end

        pieces.append(result[end_of_last:])
        return "".join(pieces)

    def _choose_replacement(self, value: ResultValue) -> str | None:
        """Choose a text to put in place of a value, for example "true" for "false" or "52" for "17".

        Returns:
            The text, or None if the value stays. It stays if it says nothing (null, a unit), if it only says whether
            the call went well ("ok", or a boolean in the field "success"), or if there is no other text for it. Values
            that were said before the call stay too, except true and false, because an answer may have them from there.
        """
        kind = classify_value(value)
        if kind in ("empty", "state"):
            return None
        if kind == "boolean":
            return _find_opposite_boolean(value)
        if _is_said_before(value.text, self.words_before):
            return None
        return self._choose_other_text(value, kind)

    def _choose_other_text(self, value: ResultValue, kind: str) -> str | None:
        """Return a value with other digits if it is coded or a confirmation, else a string of the pools."""
        value_seed = f"{self.seed} {value.text}"  # the same for equal values
        if kind in ("coded", "confirmation"):
            return redraw_digits(value.text, value_seed, self.words_before)
        return self.string_pools.choose_replacement(self.tool, value, value_seed, self.words_before)


def _find_opposite_boolean(value: ResultValue) -> str | None:
    """Return "false" for true and the reverse, or None if the field only says whether the call went well."""
    if value.key.casefold() in OUTCOME_KEYS:
        return None
    return OPPOSITE_BOOLEANS[value.text]


def redraw_digits(text: str, seed: str, words_before: Collection[str] = ()) -> str:
    """Replace the digits in the numbers, dates, times and codes of a text at random.

    Examples:
        "17 km" becomes "52 km", "007" becomes "038": numbers keep their length, sign and decimal point.
        "2024-05-31" becomes "2024-11-04": dates and times stay possible ones.
        "AB12" becomes "QK75": codes get other letters too.

    Args:
        text: The text.
        seed: A text that determines the random choices.
        words_before: Words that stay because they were said before the call, spelled as by `normalize_words`.

    Returns:
        The changed text. The same text if no digit may change, or if MAX_ATTEMPTS attempts all failed to give other
        values.
    """
    for attempt in range(MAX_ATTEMPTS):  # random digits may be the ones that stood there
        digits = _Digits(f"{seed} {attempt}")
        redraw_word = partial(_redraw_word, digits=digits, words_before=words_before)
        changed = WORD_PATTERN.sub(redraw_word, text)
        if normalize_words(changed) != normalize_words(text):
            return changed
    return text


def _redraw_word(match: re.Match[str], digits: "_Digits", words_before: Collection[str]) -> str:
    """Return a matched word with other digits, or as it is if it was said before the call."""
    word = match[0]
    if _is_said_before(word, words_before):
        return word
    return CODED_PATTERN.sub(digits.redraw_match, word)


class _Digits:
    """Draws random numbers and letters that follow from a seed; each draw changes what the next one gives."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._draw_count = 0

    def draw_number(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        self._draw_count += 1
        random_number = int(_hash_text(f"{self._seed} {self._draw_count}"), 16)
        return low + random_number % (high - low + 1)

    def redraw_match(self, match: re.Match[str]) -> str:
        """Draw another date, time, number or code in place of one that was found in a text.

        Args:
            match: What CODED_PATTERN found. The name of the group that matched says which of them it is.
        """
        if match["date"]:
            return self._draw_date(match["year"])
        if match["time"]:
            return self._draw_time(hour_digits=len(match["hour"]))
        if match["scientific"]:  # 1.5 of 1.5e10
            return self._redraw_digit_runs(match["scientific"])

        word = match["code"]
        if _is_number(word):  # 42, 12kg
            return self._redraw_digit_runs(word)
        return "".join(self._redraw_character(character) for character in word)  # AB12

    def _draw_date(self, year: str) -> str:
        """Return a date of a year, as 2024-11-04."""
        month = self.draw_number(1, 12)
        day = self.draw_number(1, 28)
        return f"{year}-{month:02}-{day:02}"

    def _draw_time(self, hour_digits: int) -> str:
        """Return a time from 1:00 to 12:59, as 09:30 with two digits of the hour."""
        hour = str(self.draw_number(1, 12)).zfill(hour_digits)
        minute = self.draw_number(0, 59)
        return f"{hour}:{minute:02}"

    def _redraw_digit_runs(self, text: str) -> str:
        """Return a text with other digits in each run of digits: 12kg becomes 47kg."""
        return DIGIT_RUN_PATTERN.sub(self._redraw_digit_run, text)

    def _redraw_digit_run(self, match: re.Match[str]) -> str:
        """Draw other digits for a run of digits.

        A year keeps its century, so 1987 may become 1942. Of other digits, a 0 before further ones stays, and no new 0
        is drawn.
        """
        digits = match[0]
        is_year = re.fullmatch(r"(19|20)\d\d", digits)
        if is_year:
            return f"{digits[:2]}{self.draw_number(10, 99)}"

        has_leading_zero = len(digits) > 1 and digits[0] == "0"
        leading_zero = "0" if has_leading_zero else ""
        drawn_count = len(digits) - len(leading_zero)
        drawn_digits = "".join(str(self.draw_number(1, 9)) for _ in range(drawn_count))
        return leading_zero + drawn_digits

    def _redraw_character(self, character: str) -> str:
        """Return another digit for a digit, another letter for an ASCII letter; other characters stay."""
        if character.isdigit():
            return str(self.draw_number(1, 9))
        if character.isascii() and character.isalpha():
            letter = chr(self.draw_number(ord("a"), ord("z")))
            return letter.upper() if character.isupper() else letter
        return character


def _is_number(word: str) -> bool:
    """Return whether a word with digits is a number, perhaps with a unit or an ending: 42, 12kg, 3rd; not AB12."""
    letters = re.sub(r"\d", "", word).casefold()
    return not letters or letters in UNIT_NAMES or letters in NUMBER_ENDINGS


def _escape_text(text: str, quotation_mark: str) -> str:
    """Return a text escaped to stand between quotation marks, or as it is if `quotation_mark` is ""."""
    if quotation_mark == '"':
        return json.dumps(text, ensure_ascii=False)[1:-1]
    if quotation_mark == "'":
        return text.replace("\\", "\\\\").replace("'", "\\'")
    return text


def _is_said_before(text: str, words_before: Collection[str]) -> bool:
    """Return whether all words of a text are among the words that were said before a call."""
    return _to_word_set(text) <= set(words_before)


def _to_word_set(text: str) -> set[str]:
    """Return the words of a text in one spelling, see `normalize_words`."""
    return set(normalize_words(text))


def _hash_text(text: str) -> str:
    """Return a random number that follows from the text, as 16 hexadecimal digits."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
