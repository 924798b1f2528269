"""Write a result with other values: same fields, same form, numbers redrawn, strings of other results in their place.

What the answer says after a call is likelier under the recorded result than under this one only if it rests on the
values that the tool has added. Values that were said before the call stay as they are: the answer may have them from
there.
"""

import json
import re
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

from toolformer_dag.traces.result_values import (
    AFFIRMATIONS,
    UNIT_KEYS,
    UNITS,
    WORD,
    ResultValue,
    result_values,
    same_values,
    value_words,
)

POOL_SIZE = 32  # strings that are kept per pool
NAME_WORDS = 4  # a string of more words is prose
CODED_WORDS = 12  # the same of one with digits in it
ATTEMPTS = 8  # draws until one has other values
CODED = re.compile(
    r"(?P<date>(?P<year>\b\d{4})-\d\d-\d\d(?=\b|T))"
    r"|(?P<time>(?<!\d)(?P<hour>[01]?\d|2[0-3]):[0-5]\d(?!\d))"
    r"|(?P<scientific>\d+(?:\.\d+)?)(?=[eE][-+]?\d)|(?P<code>(?<!\w)(?<!\d[eE][-+])[^\W\d]*\d\w*)",
    re.ASCII,
)
"""A date as ISO 8601 has it, a time of day, the digits before an exponent, or a word with a digit."""
DIGIT_RUN = re.compile(r"\d+", re.ASCII)
NUMBER_ENDINGS = frozenset({"am", "pm", "st", "nd", "rd", "th", "x", "k"})
OPPOSITES = {"true": "false", "false": "true", "True": "False", "False": "True"}
EMPTY_VALUES = frozenset({"null", "None", ""})


@dataclass
class StringPools:
    """Strings of results by tool and field, by field, and by kind: what a string may be exchanged for.

    Each pool keeps the POOL_SIZE strings of the lowest hash. So it is the same in whatever order results are added, and
    a result that is added later changes few of the exchanges.
    """

    pools: dict[tuple[str, ...], list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, tool: str, result: str) -> None:
        """Add the strings of a result."""
        for value in result_values(result):
            kind = kind_of(value)
            if kind not in ("name", "prose"):
                continue
            for pool_name in _pool_names(tool, value.key, kind):
                self._keep(pool_name, value.text)

    def _keep(self, pool_name: tuple[str, ...], text: str) -> None:
        pool = self.pools[pool_name]
        entry = (_hash(text), text)
        if entry not in pool:
            insort(pool, entry)
            del pool[POOL_SIZE:]

    def other(self, tool: str, value: ResultValue, seed: str, unlike: Collection[str]) -> str | None:
        """Return a string of the same field, else of the same kind, whose words are not `unlike`; None without one.

        Of the first pool that has one, the string is chosen by the hash of it and the seed: a further string in the
        pool changes the choice only where it is chosen itself.
        """
        for pool_name in _pool_names(tool, value.key, kind_of(value)):
            candidates = [text for _, text in self.pools.get(pool_name, ()) if not _words(text) <= set(unlike)]
            others = [text for text in candidates if value_words(text) != value_words(value.text)]
            if others:
                return min(others, key=lambda text: _hash(f"{seed} {text}"))
        return None


def string_pools(results: Iterable[tuple[str, str]]) -> StringPools:
    """Return the strings of results, each given with its tool."""
    pools = StringPools()
    for tool, result in results:
        pools.add(tool, result)
    return pools


def _pool_names(tool: str, key: str, kind: str) -> tuple[tuple[str, ...], ...]:
    """Return the pools that a string is kept in, the closest first."""
    return ("tool", tool, key, kind), ("key", key, kind), ("kind", kind)


def kind_of(value: ResultValue) -> str:
    """Return the kind of a value: empty, state, boolean, confirmation, coded, name, or prose.

    A confirmation is a message that something went well, of which only numbers and codes are values. Coded is what has
    digits and few words.
    """
    text = value.text.strip()
    if text in EMPTY_VALUES or value.key.casefold() in UNIT_KEYS:
        return "empty"
    if not value.quote and text in OPPOSITES:
        return "boolean"
    if text.casefold() in AFFIRMATIONS:
        return "state"
    if AFFIRMATIONS.intersection(re.findall(r"\w+", text.casefold())):
        return "confirmation"
    words = text.split()
    if DIGIT_RUN.search(text):
        return "coded" if len(words) <= CODED_WORDS else "prose"
    return "name" if len(words) <= NAME_WORDS else "prose"


def exchanged_result(result: str, tool: str, identity: str, before: str, pools: StringPools) -> str | None:
    """Return a result with other values than its own; None where no value could be exchanged.

    `identity`: what the choice follows from, so that it is the same whatever else the source holds. `before`: the
    arguments and what was said before the call; values that stand there stay. A value that occurs twice is exchanged
    for the same one. Not exchanged are null, units, "success" and fields that say whether the call went well.
    """
    said_before = _words(before)
    for attempt in range(ATTEMPTS):
        changed = _with_other_values(result, tool, f"{identity} {attempt}", said_before, pools)
        if changed == result:  # no value that could be exchanged
            return None
        if _keys(changed) == _keys(result) and not same_values(changed, result):
            return changed
    return None


def _keys(result: str) -> list[str]:
    """Return the fields of the values of a result: other ones where a text of two words stands without quotes."""
    return [value.key for value in result_values(result)]


def _with_other_values(result: str, tool: str, seed: str, said_before: Collection[str], pools: StringPools) -> str:
    pieces: list[str] = []
    written = 0
    for value in result_values(result):
        other = _other_value(value, tool, seed, said_before, pools)
        if other is not None:
            pieces += [result[written : value.start], _escaped(other, value.quote)]
            written = value.end
    return "".join([*pieces, result[written:]])


def _other_value(
    value: ResultValue, tool: str, seed: str, said_before: Collection[str], pools: StringPools
) -> str | None:
    """Return what a value is exchanged for; None where it stays."""
    kind = kind_of(value)
    if kind in ("empty", "state"):
        return None
    if kind == "boolean":
        goes_well = value.key.casefold() in ("success", "ok", "status", "error")
        return None if goes_well else OPPOSITES[value.text]
    if _words(value.text) <= set(said_before):
        return None
    if kind in ("coded", "confirmation"):
        return redrawn(value.text, f"{seed} {value.text}", said_before)
    return pools.other(tool, value, f"{seed} {value.text}", said_before)


def redrawn(text: str, seed: str, said_before: Collection[str] = ()) -> str:
    """Return a text with other digits in its numbers, dates and times; one without digits stays.

    A number keeps its length, its sign and its point, and begins with no other 0; a date and a time stay possible; in
    an id or a code, which is a word of digits and letters, the letters change too. `said_before`: words, as
    `value_words` writes them, that stay.
    """
    for attempt in range(ATTEMPTS):  # a draw may give what stood there
        digits = _Digits(f"{seed} {attempt}")
        changed = WORD.sub(partial(_redrawn_word, digits=digits, said_before=said_before), text)
        if value_words(changed) != value_words(text):
            return changed
    return text


def _redrawn_word(match: re.Match[str], digits: "_Digits", said_before: Collection[str]) -> str:
    word = match[0]
    return word if _words(word) <= set(said_before) else CODED.sub(digits.redraw, word)


class _Digits:
    """Draws that follow from a seed. State: how many were drawn."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._drawn = 0

    def draw(self, low: int, high: int) -> int:
        """Return a whole number from low to high."""
        self._drawn += 1
        return low + int(_hash(f"{self._seed} {self._drawn}"), 16) % (high - low + 1)

    def redraw(self, match: re.Match[str]) -> str:
        """Return another date, time, number or code in place of one that CODED has matched."""
        if match["date"]:
            year, month, day = match["year"], self.draw(1, 12), self.draw(1, 28)
            return f"{year}-{month:02}-{day:02}"
        if match["time"]:
            hour = str(self.draw(1, 12)).zfill(len(match["hour"]))
            return f"{hour}:{self.draw(0, 59):02}"
        if match["scientific"]:
            return DIGIT_RUN.sub(self._number, match["scientific"])
        word = match["code"]
        letters = re.sub(r"\d", "", word).casefold()
        if letters and letters not in UNITS and letters not in NUMBER_ENDINGS:
            return "".join(self._character(character) for character in word)
        return DIGIT_RUN.sub(self._number, word)

    def _number(self, match: re.Match[str]) -> str:
        digits = match[0]
        if re.fullmatch(r"(19|20)\d\d", digits):  # a year
            return f"{digits[:2]}{self.draw(10, 99)}"
        kept = "0" if len(digits) > 1 and digits[0] == "0" else ""
        return kept + "".join(str(self.draw(1, 9)) for _ in digits[len(kept) :])

    def _character(self, character: str) -> str:
        if character.isdigit():
            return str(self.draw(1, 9))
        if character.isascii() and character.isalpha():
            letter = chr(self.draw(ord("a"), ord("z")))
            return letter.upper() if character.isupper() else letter
        return character


def _escaped(text: str, quote: str) -> str:
    """Return a text as it stands between such quotes."""
    if quote == '"':
        return json.dumps(text, ensure_ascii=False)[1:-1]
    return text.replace("\\", "\\\\").replace("'", "\\'") if quote else text


def _words(text: str) -> set[str]:
    return set(value_words(text))


def _hash(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
