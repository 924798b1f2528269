"""Spans of a sentence that could answer a question of some kind."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from toolformer_dag.tools.question_answering.extraction.question import PLACES, Question
from toolformer_dag.tools.question_answering.extraction.words import Word, word_set
from toolformer_dag.tools.retrieval.terms import STOP_WORDS

YEAR = re.compile(r"1[0-9]{3}|20[0-9]{2}")
MONTHS = word_set("""january february march april may june july august september october november december""")
NUMBER_WORDS = word_set(
    """one two three four five six seven eight nine ten eleven twelve hundred thousand million billion"""
)
JOINS = frozenset({"of", "the", "de", "von", "van", "der", "and", "&"})
MOST_WORDS = 6


@dataclass(frozen=True, slots=True)
class Span:
    """Words `first` to `last` (inclusive) of a sentence."""

    first: int
    last: int


def candidates(sentence: list[Word], question: Question) -> Iterator[Span]:
    """Spans of the question's kind that do not repeat the question."""
    asked = set(question.weights)
    if question.kind in ("year", "date"):
        yield from _dates(sentence, question.kind == "year")
    elif question.kind == "number":
        yield from _numbers(sentence, asked)
    else:
        named = question.kind in ("person", "place")
        for span in _runs(sentence, asked, named):
            if span.last - span.first < MOST_WORDS:
                yield span if question.kind == "person" else _with_article(sentence, span)


def _dates(sentence: list[Word], year_only: bool) -> Iterator[Span]:
    for at, word in enumerate(sentence):
        if YEAR.fullmatch(word.text):
            yield Span(at if year_only else _date_start(sentence, at), at)


def _date_start(sentence: list[Word], year: int) -> int:
    """`14 December 1972`, `December 14, 1972`, `December 1972`: where the date of this year begins."""
    start = year
    while start and year - start < 3 and _is_date_part(sentence[start - 1]):
        start -= 1
    return start if any(word.text.lower() in MONTHS for word in sentence[start:year]) else year


def _is_date_part(word: Word) -> bool:
    return word.text.lower() in MONTHS or word.text == "," or (word.text.isdigit() and len(word.text) <= 2)


def _numbers(sentence: list[Word], asked: set[str]) -> Iterator[Span]:
    """A number, with the unit after it unless the question names it."""
    for at, word in enumerate(sentence):
        if not (word.text[0].isdigit() or word.text.lower() in NUMBER_WORDS):
            continue
        last = at
        while last + 1 < len(sentence) and sentence[last + 1].text.lower() in NUMBER_WORDS:
            last += 1
        after = sentence[last + 1] if last + 1 < len(sentence) else None
        unit = (
            after is not None
            and after.text.isalpha()
            and after.stem not in asked
            and after.text.lower() not in STOP_WORDS
        )
        yield Span(at, last + unit)


def _runs(sentence: list[Word], asked: set[str], named: bool) -> Iterator[Span]:
    """Longest stretches of words that the question does not hold; names only, where a name is asked for."""
    start: int | None = None
    for at, word in enumerate([*sentence, Word(".", ".", 0, 0)]):
        fits = _fits(word, asked, named)
        if fits and start is None:
            start = at
        elif not fits and start is not None:
            if named and at + 1 < len(sentence) and word.text in JOINS and _fits(sentence[at + 1], asked, named):
                continue
            if _is_class_noun(word):
                continue
            yield Span(start, at - 1)
            start = None


def _fits(word: Word, asked: set[str], named: bool) -> bool:
    if not word.alphanumeric or word.stem in asked or word.text.lower() in STOP_WORDS:
        return False
    return word.capital or not named


def _is_class_noun(word: Word) -> bool:
    """`Sea` in `the Black Sea`: part of the name, though a question for a sea holds it."""
    return word.capital and word.text.lower() in PLACES


def _with_article(sentence: list[Word], span: Span) -> Span:
    """Names of several words keep their article: `the Black Sea`."""
    several = span.last > span.first and all(word.capital for word in sentence[span.first : span.last + 1])
    article = several and span.first > 0 and sentence[span.first - 1].text == "the"
    return Span(span.first - article, span.last)
