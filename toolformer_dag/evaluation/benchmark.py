"""Benchmarks: questions, and the rules that judge answers (paper, section 4.2). Imports no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from unicodedata import normalize


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """A question whose `prompt` the model continues; any of `answers` is right.

    - `tool`: the key of the tool that the question targets, else empty.
    - `context`: the ISO date for the calendar, else empty; where the question brings functions, these as JSON.
    - `wording`: the template or type of the question.
    """

    prompt: str
    answers: tuple[str, ...]
    tool: str = ""
    context: str = ""
    wording: str = ""


Rule = Callable[[str, Sequence[str]], bool]
"""(output without calls, right answers) -> whether the output is right."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Questions with their rule.

    - `withheld`: names, in the text, of tools that may not be called because they would make the benchmark trivial.
    - `left_out`: the number of the source's records without a question, by reason.
    - `calls_nothing`: whether an answer is right that calls no tool, whatever it says; `correct` is then not asked.
    - `function_calls`: where questions bring functions, the most calls of an answer, which is right by its calls alone;
      0 where the tools of the settings are called.
    """

    name: str
    questions: tuple[BenchmarkQuestion, ...]
    correct: Rule
    withheld: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = field(default_factory=dict)
    calls_nothing: bool = False
    function_calls: int = 0


SIGN = r"(?:(?<!\w)[-\u2212])?"  # not the hyphen of `COVID-19`
NUMBER = re.compile(rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|{SIGN}\.\d+")
EQUALS = re.compile(r"(?:[\s\d%)]|\b[a-zA-Z]|\d[^\n=?&<.]*)=")  # not the `=` in `width=300` or `?id=77`
WORD = re.compile(r"(?<![.,])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?![.,]?\d|[^\W_])|[^\W_]+(?:(?<!\d)[+#]+)?")


def in_first_words(output: str, answers: Sequence[str], words: int) -> bool:
    """Return whether any of `answers` occurs within the first `words` words of `output`; empty answers do not."""
    written = _words(" ".join(output.split()[:words]))
    return any(_holds(written, _words(answer)) for answer in answers)


in_first_five_words: Rule = partial(in_first_words, words=5)
"""The rule of LAMA, TempLAMA and Dateset."""
in_first_ten_words: Rule = partial(in_first_words, words=10)
"""The rule of MLQA."""
in_first_twenty_words: Rule = partial(in_first_words, words=20)
"""The rule of WebQuestions, Natural Questions and TriviaQA."""


def number_is_right(output: str, answers: Sequence[str]) -> bool:
    """Judge ASDiv, SVAMP and MAWPS: compare the predicted number with the answers, within 0.005."""
    predicted = predicted_number(output)
    return predicted is not None and any(
        abs(predicted - number) <= Decimal("0.005") for number in map(_number, answers)
    )


def predicted_number(output: str) -> Decimal | None:
    """Return the first number, or the first number after `=` of an equation such as `5+3=8` (footnote 7)."""
    equals = EQUALS.search(output)
    match = (NUMBER.search(output, equals.end()) if equals else None) or NUMBER.search(output)
    return _number(match[0]) if match else None


def numbers_in(text: str) -> list[Decimal]:
    """Return all numbers of a text, in order."""
    return [_number(written) for written in NUMBER.findall(text)]


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def _words(text: str) -> list[str]:
    composed = normalize("NFC", text)  # `é` is one letter, or `e` and an accent
    return [word.replace(",", "") for word in WORD.findall(composed.casefold())]


def _holds(words: list[str], answer: list[str]) -> bool:
    return bool(answer) and any(words[at : at + len(answer)] == answer for at in range(len(words)))
