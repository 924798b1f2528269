"""When an answer is right (paper, section 4.2.1 to 4.2.5). Imports no torch.

Where the paper leaves it open: words are counted by white space; an answer matches as whole words, letters and digits
only, whatever the case (`Rihanna's` holds `Rihanna`, `1947` does not hold `19`), where a number is one word (`1,277` is
`1277` and does not hold `277`) and `+` and `#` belong to a word before them that ends in a letter (`C++`, `A+`, but
`18+` is `18`); an accent written as a character of its own is part of its letter; numbers are equal where they differ
by half of the calculator's last decimal or less, so that `0.63` is `0.625`.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from unicodedata import normalize

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
