"""Benchmarks: questions, and the rules that judge answers (paper, section 4.2). Imports no torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from unicodedata import normalize


@dataclass(frozen=True, slots=True)
class BenchmarkQuestion:
    """A question of a benchmark. The model continues its prompt.

    Attributes:
        prompt: The text that the model continues.
        right_answers: Answers of which any is right.
        target_tool_key: The key of the tool that the question needs ("calculator"), or empty.
        context: The ISO date that the calendar returns, or the JSON of a question's own functions. Else empty.
        wording: The template or type of the question, or empty.
    """

    prompt: str
    right_answers: tuple[str, ...]
    target_tool_key: str = ""
    context: str = ""
    wording: str = ""


CorrectnessRule = Callable[[str, Sequence[str]], bool]
"""Called as (text written after the prompt, without calls; right answers); returns whether the text is right."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Questions with the rule that judges the answers.

    Attributes:
        name: The name of the benchmark in tables.
        questions: The questions.
        is_correct: The rule, which judges the text that is written after a prompt.
        withheld: Names, as written in texts, of tools that may not be called, because they would make the benchmark
            trivial.
        left_out_counts: How many records of the source became no question, by reason.
        requires_no_call: Whether exactly the answers without a call are right. `is_correct` is then not used.
        max_function_calls: If questions bring their own functions, the most calls of an answer, which is judged by its
            calls alone. 0 if the tools of the settings are called.
    """

    name: str
    questions: tuple[BenchmarkQuestion, ...]
    is_correct: CorrectnessRule
    withheld: frozenset[str] = frozenset()
    left_out_counts: Mapping[str, int] = field(default_factory=dict)
    requires_no_call: bool = False
    max_function_calls: int = 0


SIGN_PATTERN = r"(?:(?<!\w)[-\u2212])?"
"""A minus, or nothing. The hyphen of `COVID-19` is no minus."""
NUMBER_PATTERN = re.compile(rf"{SIGN_PATTERN}(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?|{SIGN_PATTERN}\.\d+")
"""A number, maybe with commas between thousands."""
EQUALS_PATTERN = re.compile(r"(?<![^\n=?&<.])(?P<side>[^\n=?&<.]*+)=")
"""A `=` with the text before it, back to the beginning of the equation or of a parameter of an address."""
EQUATION_SIDE_PATTERN = re.compile(r"\d|[\s%)]\Z|\b[a-zA-Z]\Z")
"""Occurs in the text before the `=` of an equation, but not before that of `width=300` or `?id=77`."""
WORD_PATTERN = re.compile(
    r"(?<![.,])(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+)(?![.,]?\d|[^\W_])|[^\W_]+(?:(?<!\d)[+#]+)?"
)
"""A word: a number with its commas and decimals, or letters and digits, as in `C++`."""


def is_in_first_words(output: str, right_answers: Sequence[str], words: int) -> bool:
    """Return whether one of `right_answers` occurs within the first `words` words of `output`, without case.

    The first words are counted by white space. Within them, a word is what WORD_PATTERN matches: `(C++)` has the word
    `c++`. An empty answer never occurs.
    """
    beginning = " ".join(output.split()[:words])
    first_words = _split_into_words(beginning)
    return any(_has_answer(first_words, _split_into_words(answer)) for answer in right_answers)


is_in_first_five_words: CorrectnessRule = partial(is_in_first_words, words=5)
"""The rule of LAMA, TempLAMA and Dateset."""
is_in_first_ten_words: CorrectnessRule = partial(is_in_first_words, words=10)
"""The rule of MLQA."""
is_in_first_twenty_words: CorrectnessRule = partial(is_in_first_words, words=20)
"""The rule of WebQuestions, Natural Questions and TriviaQA."""


def is_number_right(output: str, right_answers: Sequence[str]) -> bool:
    """Return whether the predicted number is within 0.005 of an answer: the rule of ASDiv, SVAMP and MAWPS."""
    predicted_number = find_predicted_number(output)
    if predicted_number is None:
        return False

    for answer in right_answers:
        difference = abs(predicted_number - _parse_number(answer))
        if difference <= Decimal("0.005"):
            return True
    return False


def find_predicted_number(output: str) -> Decimal | None:
    """Find the number that a text gives as its answer (footnote 7 of the paper).

    Returns:
        The first number after the `=` of an equation such as `5+3=8`. Without an equation, the first number of the
        text. None if the text has no number.
    """
    number_match = None
    right_side_start = _find_right_side_start(output)
    if right_side_start is not None:
        number_match = NUMBER_PATTERN.search(output, right_side_start)

    # There is no equation, or no number follows its `=`.
    if number_match is None:
        number_match = NUMBER_PATTERN.search(output)

    if number_match is None:
        return None
    return _parse_number(number_match[0])


def _find_right_side_start(output: str) -> int | None:
    """Return the index of the character after the first `=` of an equation: 4 in "5+3=8", None in "width=300".

    It belongs to an equation if the text before it has a digit or ends with white space, `%`, `)` or a single letter,
    or if a line break is directly before it.
    """
    # A match is a `=` with the text before it, back to a line break, a dot or one of `=?&<`. That text is the group
    # "side", which may be empty.
    for equals_match in EQUALS_PATTERN.finditer(output):
        left_side = equals_match["side"]
        follows_line_break = not left_side and output.endswith("\n", 0, equals_match.start())
        if follows_line_break or EQUATION_SIDE_PATTERN.search(left_side):
            return equals_match.end()
    return None


def parse_numbers(text: str) -> list[Decimal]:
    """Return all numbers of a text, in order."""
    return [_parse_number(written) for written in NUMBER_PATTERN.findall(text)]


def _parse_number(text: str) -> Decimal:
    """Return the value of a written number, as NUMBER_PATTERN matches it: 1200.5 for "1,200.5"."""
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


def _split_into_words(text: str) -> list[str]:
    """Return the words of a text (WORD_PATTERN) in small letters, without the commas of numbers."""
    # Normalized, since `é` may be written as one letter, or as `e` and an accent.
    normalized_text = normalize("NFC", text).casefold()
    return [word.replace(",", "") for word in WORD_PATTERN.findall(normalized_text)]


def _has_answer(words: list[str], answer_words: list[str]) -> bool:
    """Return whether the words of an answer occur in `words` one after another. An empty answer never does."""
    if not answer_words:
        return False

    answer_length = len(answer_words)
    return any(words[start : start + answer_length] == answer_words for start in range(len(words)))
