"""Benchmarks: questions, and the rules by which answers are judged (section 4.2). Imports no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from unicodedata import normalize


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """`prompt` is continued by the model; any of `answers` is right.

    `tool`: the key of the tool that it is made for, empty where none is; `context`: ISO date that the calendar gives,
    else empty; `wording`: what the prompt was made from.
    """

    prompt: str
    answers: tuple[str, ...]
    tool: str = ""
    context: str = ""
    wording: str = ""


Rule = Callable[[str, Sequence[str]], bool]
"""What was written (calls taken out) and the right answers -> whether it is right."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`withheld`: tools, by name in the text, that may not be called because they would make it trivial.

    `left_out`: records of the source that made no question, by reason.
    """

    name: str
    questions: tuple[BenchmarkQuestion, ...]
    correct: Rule
    withheld: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = field(default_factory=dict)


LAMA_WORDS, QUESTION_WORDS, MLQA_WORDS = 5, 20, 10
SIGN = r"(?:(?<!\w)[-\u2212])?"  # not the hyphen of `COVID-19`
NUMBER = re.compile(rf"{SIGN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|{SIGN}\.\d+")
EQUALS = re.compile(r"(?:[\s\d%)]|\b[a-zA-Z]|\d[^\n=?&<.]*)=")  # not that of `width=300` or `?id=77`
WORD = re.compile(r"(?<![.,])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?![.,]?\d|[^\W_])|[^\W_]+(?:(?<!\d)[+#]+)?")
HALF_A_HUNDREDTH = Decimal("0.005")


def in_first_five_words(output: str, answers: Sequence[str]) -> bool:
    """LAMA, TempLAMA and Dateset."""
    return in_first_words(output, answers, LAMA_WORDS)


def in_first_twenty_words(output: str, answers: Sequence[str]) -> bool:
    """WebQuestions, Natural Questions and TriviaQA."""
    return in_first_words(output, answers, QUESTION_WORDS)


def in_first_ten_words(output: str, answers: Sequence[str]) -> bool:
    """MLQA."""
    return in_first_words(output, answers, MLQA_WORDS)


def in_first_words(output: str, answers: Sequence[str], words: int) -> bool:
    """Whether one of `answers` stands within the first `words` words of `output`; an empty one stands nowhere."""
    written = _words(" ".join(output.split()[:words]))
    return any(_holds(written, _words(answer)) for answer in answers)


def number_is_right(output: str, answers: Sequence[str]) -> bool:
    """ASDiv, SVAMP and MAWPS."""
    found = predicted_number(output)
    return found is not None and any(abs(found - number) <= HALF_A_HUNDREDTH for number in map(_number, answers))


def predicted_number(output: str) -> Decimal | None:
    """The first number; where the output holds an equation (`5+3=8`), the first number after its `=` (footnote 7)."""
    equals = EQUALS.search(output)
    found = (NUMBER.search(output, equals.end()) if equals else None) or NUMBER.search(output)
    return _number(found[0]) if found else None


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def _words(text: str) -> list[str]:
    composed = normalize("NFC", text)  # `é` is one letter, or `e` and an accent
    return [word.replace(",", "") for word in WORD.findall(composed.casefold())]


def _holds(words: list[str], answer: list[str]) -> bool:
    return bool(answer) and any(words[at : at + len(answer)] == answer for at in range(len(words)))
