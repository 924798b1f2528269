"""Benchmarks: questions, and the rules that judge answers (paper, section 4.2). Imports no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from unicodedata import normalize


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """A question: the model continues `prompt`, and any of `answers` is right.

    - `tool`: the key of the tool that the question needs, else empty
    - `context`: the ISO date that the calendar returns; for a question that brings its own functions, the functions as
      JSON; else empty
    - `wording`: the template or type of the question, else empty
    """

    prompt: str
    answers: tuple[str, ...]
    tool: str = ""
    context: str = ""
    wording: str = ""


Rule = Callable[[str, Sequence[str]], bool]
"""Called as (text written after the prompt, without calls; right answers); returns whether the text is right."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Questions with the rule that judges the texts after their prompts.

    - `correct`: the rule
    - `withheld`: names, in the text, of tools that may not be called because they would make the benchmark trivial
    - `left_out`: reason -> number of the source's records that are no question here
    - `calls_nothing`: whether exactly the answers without a call are right; `correct` is then not used
    - `function_calls`: if questions bring their own functions, the most calls of an answer, which is judged by its
      calls alone; 0 if the tools of the settings are called
    """

    name: str
    questions: tuple[BenchmarkQuestion, ...]
    correct: Rule
    withheld: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = field(default_factory=dict)
    calls_nothing: bool = False
    function_calls: int = 0


SIGN = r"(?:(?<!\w)[-\u2212])?"
"""A minus, or nothing. The hyphen of `COVID-19` is no minus."""
NUMBER = re.compile(rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|{SIGN}\.\d+")
"""A number, maybe with commas between thousands."""
EQUALS = re.compile(r"(?<![^\n=?&<.])(?P<side>[^\n=?&<.]*+)=")
"""A `=` with the text before it, back to the beginning of the equation or of a parameter of an address."""
SIDE = re.compile(r"\d|[\s%)]\Z|\b[a-zA-Z]\Z")
"""Occurs in the text before the `=` of an equation, but not before that of `width=300` or `?id=77`."""
WORD = re.compile(r"(?<![.,])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?![.,]?\d|[^\W_])|[^\W_]+(?:(?<!\d)[+#]+)?")
"""A word: a number with its commas and decimals, or letters and digits, as in `C++`."""


def in_first_words(output: str, answers: Sequence[str], words: int) -> bool:
    """Return whether one of `answers` occurs within the first `words` words of `output`, without case.

    The first words are separated by white space; within them, a word is what WORD matches. Empty answers never occur.
    """
    first_words = _split_into_words(" ".join(output.split()[:words]))
    return any(_has_answer(first_words, _split_into_words(answer)) for answer in answers)


in_first_five_words: Rule = partial(in_first_words, words=5)
"""The rule of LAMA, TempLAMA and Dateset."""
in_first_ten_words: Rule = partial(in_first_words, words=10)
"""The rule of MLQA."""
in_first_twenty_words: Rule = partial(in_first_words, words=20)
"""The rule of WebQuestions, Natural Questions and TriviaQA."""


def number_is_right(output: str, answers: Sequence[str]) -> bool:
    """Return whether the predicted number is within 0.005 of an answer: the rule of ASDiv, SVAMP and MAWPS."""
    predicted = find_predicted_number(output)
    if predicted is None:
        return False
    return any(abs(predicted - _parse_number(answer)) <= Decimal("0.005") for answer in answers)


def find_predicted_number(output: str) -> Decimal | None:
    """Return the first number after `=` of an equation such as `5+3=8`, else the first number; None without numbers.

    See footnote 7 of the paper.
    """
    match = None
    right_side = _find_right_side_start(output)
    if right_side is not None:
        match = NUMBER.search(output, right_side)
    if match is None:
        match = NUMBER.search(output)
    return _parse_number(match[0]) if match else None


def _find_right_side_start(output: str) -> int | None:
    """Return the index of the character after the first `=` of an equation; None without an equation."""
    for equals in EQUALS.finditer(output):
        begins_line = output[equals.start() - 1 : equals.end()] == "\n="
        if begins_line or SIDE.search(equals["side"]):
            return equals.end()
    return None


def parse_numbers(text: str) -> list[Decimal]:
    """Return all numbers of a text, in order."""
    return [_parse_number(written) for written in NUMBER.findall(text)]


def _parse_number(text: str) -> Decimal:
    """Return the value of a number as NUMBER matches it: 1,200.5."""
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def _split_into_words(text: str) -> list[str]:
    """Return the words of a text (WORD), without case and without the commas of numbers."""
    composed = normalize("NFC", text)  # `é` is one letter, or `e` and an accent
    return [word.replace(",", "") for word in WORD.findall(composed.casefold())]


def _has_answer(words: list[str], answer: list[str]) -> bool:
    """Return whether the words of an answer occur in `words` one after another; False for an empty answer."""
    if not answer:
        return False
    length = len(answer)
    return any(words[start : start + length] == answer for start in range(len(words)))
