"""The numbers of a text, and which texts the calculator wants: two numbers with their result nearby."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

WINDOW = 100
"""Tokens within which the three numbers must stand (paper, appendix A.1)."""

MAX_WHOLE_DIGITS = 15
MAX_DECIMALS = 12
UNIT_DIGITS = MAX_DECIMALS + 2  # two more for the percent sign
UNIT = 10**UNIT_DIGITS
HUNDREDTH = UNIT // 100

# Possessive, so that of `10.5kg` no part is taken; what may not stand before is asked after the first character,
# because a pattern that begins with a set of characters is found many times faster. A point after a closing mark ends
# a sentence.
RUN = re.compile(r"[.0-9](?<![\w.,].)(?<![\"'”’»)\]}%]\.)[0-9]*+(?:[.,][0-9]++)*+(?!\w)%?")
INDIAN = "[1-9][0-9]?(?:,[0-9]{2}){1,5},[0-9]{3}"
WHOLE = rf"[0-9]{{1,{MAX_WHOLE_DIGITS}}}|[1-9][0-9]{{0,2}}(?:,[0-9]{{3}}){{1,4}}|{INDIAN}"
PART_OF_A_GROUPED_NUMBER = re.compile(",0[0-9]")
SINGLE = re.compile(rf"({WHOLE}|(?=\.))(?:\.([0-9]{{1,{MAX_DECIMALS}}}))?(%?)")
TOKEN = re.compile(r"\w+|[^\w\s]")


class Number(NamedTuple):
    """`value` in 1 / UNIT, with `%` as a hundredth; characters `start` to `end` of the text."""

    start: int
    end: int
    value: int


def numbers(text: str) -> list[Number]:
    """Numbers such as 7, 2017, 1,234.5, 12,34,567 (of India), .5, 11.4% and each of 1,2,3.

    Not numbers: what is joined to letters or an underscore (20th, 1990s, x86, 5kg), versions and addresses (1.2.3),
    more than 15 digits before or 12 after the point. Signs are not read: in prose they are mostly dashes.
    """
    found: list[Number] = []
    for run in RUN.finditer(text):
        for piece in _pieces(run[0]):
            if single := SINGLE.fullmatch(piece):
                found.append(Number(run.start(), run.end(), _value(*single.groups(""))))
    return found


def _pieces(run: str) -> Sequence[str]:
    one = "." in run or "," not in run or SINGLE.fullmatch(run) or PART_OF_A_GROUPED_NUMBER.search(run)
    return (run,) if one else run.split(",")


def _value(whole: str, decimals: str, percent: str) -> int:
    value = int(whole.replace(",", "") + decimals.ljust(UNIT_DIGITS, "0"))
    return value // 100 if percent else value


def holds_operation(text: str, found: Sequence[Number]) -> bool:
    """Whether of three numbers within WINDOW tokens one is +, -, * or / of the other two.

    The result may be exact or rounded as the calculator rounds. A number is one token, and so is each other word or
    mark. At most WINDOW pairs per number are tried.
    """
    at = _token_positions(text, found)
    places: dict[int, list[int]] = defaultdict(list)
    for number, position in zip(found, at, strict=True):
        places[number.value].append(position)
    largest = max(places, default=0)

    @lru_cache(WINDOW**2)  # price lists and tables say the same numbers over and over
    def present(a: int, b: int) -> list[int]:
        return [result for result in _results(a, b, largest) if result in places]

    return any(
        _third(at[first], at[second], places[result])
        for first, second in _near_pairs(at)
        for result in present(found[first].value, found[second].value)
    )


def _token_positions(text: str, found: Sequence[Number]) -> list[int]:
    """The token at which each number stands; of a gap that no window spans, only the beginning is counted."""
    at, position, end = [], 0, 0
    for number in found:
        position += 1 + _tokens(text, end, number.start)
        end = number.end
        at.append(position)
    return at


def _tokens(text: str, start: int, end: int) -> int:
    near = min(end, start + 10 * WINDOW)
    count = len(TOKEN.findall(text, start, near))
    return count if count >= WINDOW or near == end else len(TOKEN.findall(text, start, end))


def _near_pairs(at: Sequence[int]) -> Iterator[tuple[int, int]]:
    nearest = 0
    for second, position in enumerate(at):
        while position - at[nearest] >= WINDOW:
            nearest += 1
        for first in range(nearest, second):
            yield first, second


def _third(first: int, second: int, candidates: Sequence[int]) -> bool:
    """Whether a third number stands within one window with the two; all are token positions."""
    nearest = bisect_right(candidates, second - WINDOW)
    return any(each not in (first, second) and each < first + WINDOW for each in candidates[nearest : nearest + 3])


def _results(a: int, b: int, largest: int) -> Iterator[int]:
    """Sum, difference, product and quotients of two values up to `largest`, exact and as the calculator rounds."""
    yield from _exact_and_rounded(a + b, 1)
    yield from _exact_and_rounded(abs(a - b), 1)
    if a * b <= (largest + HUNDREDTH) * UNIT:
        yield from _exact_and_rounded(a * b, UNIT)
    if b:
        yield from _exact_and_rounded(a * UNIT, b)
    if a:
        yield from _exact_and_rounded(b * UNIT, a)


def _exact_and_rounded(numerator: int, denominator: int) -> tuple[int, int]:
    """In 1 / UNIT; the first is rounded instead where there is no exact value."""
    value, rest = divmod(numerator, denominator)
    rounded = (value + HUNDREDTH // 2) // HUNDREDTH * HUNDREDTH
    return (rounded if rest else value), rounded


PHRASES = ("=", "equals", "equal to", "total of", "average of")
BETWEEN = " $€£¥(+-−~≈"
LOOK_BACK = 24
ONE_OF = 100


def wanted(text: str, whole: str) -> str | None:
    """The first rule that `text` meets: "operation" (i), "phrase" (ii), "three_numbers" (iii); None without one.

    (i) `holds_operation`; (ii) `=`, `equals`, `equal to`, `total of` or `average of` before a number, with a currency
    or another sign between them or not, and white space of any kind; (iii) three numbers, for
    1 % of the documents, picked by a hash of `whole`, the document's text, so that a document and its segments are
    picked together.
    """
    found = numbers(text)
    if len(found) >= 3 and holds_operation(text, found):
        return "operation"
    if any(_after_phrase(text, number) for number in found):
        return "phrase"
    return "three_numbers" if len(found) >= 3 and _picked(whole) else None


def _after_phrase(text: str, number: Number) -> bool:
    before = text[max(0, number.start - LOOK_BACK) : number.start]
    return " ".join(before.lower().split()).rstrip(BETWEEN).endswith(PHRASES)


def _picked(whole: str) -> bool:
    digest = blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest) % ONE_OF == 0
