"""Extract answers from passages without a model: rank candidate spans by rules of English."""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.tools.built_in.question_answering import NO_ANSWER
from toolformer_dag.tools.passage_search import STOP_WORDS
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.question_parsing import (
    PLACES,
    ParsedQuestion,
    StemmedWord,
    parse_question,
    sentences,
    word_set,
    words,
)
from toolformer_dag.tools.tool import ToolResult

YEAR = re.compile(r"1[0-9]{3}|20[0-9]{2}")
MONTHS = word_set("""january february march april may june july august september october november december""")
NUMBER_WORDS = word_set(
    """one two three four five six seven eight nine ten eleven twelve hundred thousand million billion"""
)
UNITS = word_set("acres degrees feet hours inches kilometers kilometres km m meters metres miles minutes tons years")
NAME_CONNECTORS = frozenset({"of", "the", "de", "von", "van", "der", "and", "&"})
MAX_ANSWER_WORDS = 6


@dataclass(frozen=True, slots=True)
class CandidateSpan:
    """Words `first` to `last` (inclusive) of a sentence."""

    first: int
    last: int


def candidates(sentence: list[StemmedWord], question: ParsedQuestion) -> Iterator[CandidateSpan]:
    """Yield spans of the question's answer kind that do not repeat the question."""
    asked = set(question.weights)
    if question.kind in ("year", "date"):
        yield from _dates(sentence, question.kind == "year")
    elif question.kind == "number":
        yield from _numbers(sentence, asked)
    else:
        named = question.kind in ("person", "place")
        for span in _runs(sentence, asked, named):
            if span.last - span.first < MAX_ANSWER_WORDS:
                yield span if question.kind == "person" else _with_article(sentence, span)


def _dates(sentence: list[StemmedWord], year_only: bool) -> Iterator[CandidateSpan]:
    for at, word in enumerate(sentence):
        if YEAR.fullmatch(word.text):
            yield CandidateSpan(at if year_only else _date_start(sentence, at), at)


def _date_start(sentence: list[StemmedWord], year: int) -> int:
    """Find the first word of a year's date: `14 December 1972`, `December 14, 1972`, `December 1972`."""
    start = year
    while start and year - start < 3 and _is_date_part(sentence[start - 1]):
        start -= 1
    return start if any(word.text.lower() in MONTHS for word in sentence[start:year]) else year


def _is_date_part(word: StemmedWord) -> bool:
    return word.text.lower() in MONTHS or word.text == "," or (word.text.isdigit() and len(word.text) <= 2)


def _numbers(sentence: list[StemmedWord], asked: set[str]) -> Iterator[CandidateSpan]:
    """Yield numbers with the unit after each; what was counted (`people`) is left out where the question names it."""
    for at, word in enumerate(sentence):
        if not (word.text[0].isdigit() or word.text.lower() in NUMBER_WORDS):
            continue
        last = at
        while last + 1 < len(sentence) and sentence[last + 1].text.lower() in NUMBER_WORDS:
            last += 1
        after = sentence[last + 1] if last + 1 < len(sentence) else None
        yield CandidateSpan(at, last + (after is not None and _is_unit(after, asked)))


def _is_unit(word: StemmedWord, asked: set[str]) -> bool:
    if not word.text.isalpha() or word.text.lower() in STOP_WORDS:
        return False
    return word.text.lower() in UNITS or word.stem not in asked


def _runs(sentence: list[StemmedWord], asked: set[str], named: bool) -> Iterator[CandidateSpan]:
    """Yield the longest runs of words outside the question; only names where the question asks for a name."""
    start: int | None = None
    for at, word in enumerate([*sentence, StemmedWord(".", ".", 0, 0)]):
        fits = _fits(word, asked, named)
        if fits and start is None:
            start = at
        elif not fits and start is not None:
            if (
                named
                and at + 1 < len(sentence)
                and word.text in NAME_CONNECTORS
                and _fits(sentence[at + 1], asked, named)
            ):
                continue
            if _is_class_noun(word):
                continue
            yield CandidateSpan(start, at - 1)
            start = None


def _fits(word: StemmedWord, asked: set[str], named: bool) -> bool:
    if not word.alphanumeric or word.stem in asked or word.text.lower() in STOP_WORDS:
        return False
    return word.capital or not named


def _is_class_noun(word: StemmedWord) -> bool:
    """Return whether the word is the class in a name, such as `Sea` in `the Black Sea`."""
    return word.capital and word.text.lower() in PLACES


def _with_article(sentence: list[StemmedWord], span: CandidateSpan) -> CandidateSpan:
    """Extend a name of several words by its article: `the Black Sea`."""
    several = span.last > span.first and all(word.capital for word in sentence[span.first : span.last + 1])
    article = several and span.first > 0 and sentence[span.first - 1].text == "the"
    return CandidateSpan(span.first - article, span.last)


MIN_SHARED = 0.5
ARTICLES_AND_VERBS = frozenset({"a", "an", "the", "is", "are", "was", "were", "as", "its"})
CONTEXT = ARTICLES_AND_VERBS | {
    "in",
    "at",
    "near",
    "from",
    "to",
    "of",
    "by",
    "for",
    "with",
    "on",
    "or",
    "and",
    ",",
    "makes",
    "sells",
}
ATTRIBUTE_PENALTY = 1.0  # `main` in `the main product`, where a product is asked for
OTHER_CLASS_PENALTY = 0.5  # `the Coral Sea`, or `country of Umbaria`, where a town is asked for
NAMESAKE_PENALTY = 0.5  # `Hugo` in a passage on Hugo Garwick, where Grace Garwick is asked about
PREPOSITIONS = frozenset({"in", "at", "near", "from", "to", "of"})


@dataclass(frozen=True, slots=True)
class ExtractedAnswer:
    text: str
    score: float


def extract(text: str, passages: Sequence[Passage], rarity: Callable[[str], float]) -> ExtractedAnswer | None:
    """Return the best answer in the passages (best passage first); None where no sentence shares enough words."""
    question = parse_question(text, rarity)
    if not question.weights:
        return None
    found = [answer for rank, passage in enumerate(passages) for answer in _answers(question, passage, rank)]
    return max(found, key=lambda answer: answer.score, default=None)


def _answers(question: ParsedQuestion, passage: Passage, rank: int) -> Iterator[ExtractedAnswer]:
    title = {word.stem for word in words(passage.title)}
    for sentence in sentences(passage.text):
        tokens = words(sentence)
        places = _places(tokens)
        shared = _share(question, places.keys(), title)
        if shared < MIN_SHARED:
            continue
        for span in candidates(tokens, question):
            score = shared + _nearness(question, places, span) + _fitness(question, tokens, span) - 0.03 * rank
            score -= NAMESAKE_PENALTY * _is_namesake(question, tokens, span, title)
            yield ExtractedAnswer(sentence[tokens[span.first].start : tokens[span.last].end], score)


def _places(tokens: Sequence[StemmedWord]) -> dict[str, list[int]]:
    """Return the token indices of each stem."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, word in enumerate(tokens):
        found[word.stem].append(at)
    return found


def _share(question: ParsedQuestion, sentence: Collection[str], title: set[str]) -> float:
    """Compute the share of the question in the sentence and the passage's title; at most 2."""
    weights = question.weights
    total = sum(weights.values())
    here = sum(weight for stem, weight in weights.items() if stem in sentence)
    somewhere = sum(weight for stem, weight in weights.items() if stem in sentence or stem in title)
    about = len(title & weights.keys()) / max(len(title), 1)
    return (here + 2 * somewhere) / (2 * total) + 0.5 * about


def _nearness(question: ParsedQuestion, places: Mapping[str, Sequence[int]], span: CandidateSpan) -> float:
    """Compute the weighted mean of 1 / distance from the span to the nearest occurrence of each question word.

    Words inside the span do not count.
    """
    distances = {stem: _distance(places[stem], span) for stem in question.weights if stem in places}
    near = {stem: 1 / distance for stem, distance in distances.items() if distance is not None}
    total = sum(question.weights[stem] for stem in near)
    return sum(question.weights[stem] * closeness for stem, closeness in near.items()) / total if near else 0.0


def _distance(places: Sequence[int], span: CandidateSpan) -> int | None:
    """Compute the distance from the span to the nearest of some sorted indices outside it."""
    before, after = bisect_left(places, span.first), bisect_right(places, span.last)
    left = [span.first - places[before - 1]] if before else []
    right = [places[after] - span.last] if after < len(places) else []
    return min(left + right, default=None)


def _fitness(question: ParsedQuestion, tokens: list[StemmedWord], span: CandidateSpan) -> float:
    """Score the words around the span: a place follows a preposition, a thing an article or `is`."""
    before = tokens[span.first - 1].text.lower() if span.first else ""
    if question.kind == "place":
        fits = before in PREPOSITIONS or before in PLACES or before == "the"
        return 0.3 * fits - OTHER_CLASS_PENALTY * _is_of_other_class(question, tokens, span)
    if question.kind == "person":
        return 0.2 * (span.last > span.first) - 0.3 * (before == "the")
    if question.kind == "thing":
        after = tokens[span.last + 1].stem if span.last + 1 < len(tokens) else ""
        plain = span.first == span.last and not tokens[span.first].capital
        verb = plain and before not in CONTEXT
        return (
            0.3 * (before in ARTICLES_AND_VERBS)
            + 0.05 * tokens[span.first].capital
            - 0.5 * (verb or span.first == 0)
            - (ATTRIBUTE_PENALTY if plain else 0.3) * (after in question.weights)
        )
    return 0.0


def _is_of_other_class(question: ParsedQuestion, tokens: list[StemmedWord], span: CandidateSpan) -> bool:
    """Return whether the span, or the two words before it, name another class of place than the question."""
    around = (word.text.lower() for word in tokens[max(0, span.first - 2) : span.last + 1])
    named = {word for word in around if word in PLACES}
    return question.noun is not None and bool(named) and question.noun not in named


def _is_namesake(question: ParsedQuestion, tokens: list[StemmedWord], span: CandidateSpan, title: set[str]) -> bool:
    """Return whether the span is part of the title of a person whose other name the question holds."""
    return (
        title & question.weights.keys() != set() and {word.stem for word in tokens[span.first : span.last + 1]} <= title
    )


class EmbeddedReader:
    """Reader without weights: returns the span with the best overlap with, and nearness to, the question's words."""

    def __init__(self, rarity: Callable[[str], float]) -> None:
        self._rarity = rarity

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        found = [extract(text, own, self._rarity) for text, own in zip(questions, passages, strict=True)]
        return [ToolResult(answer.text) if answer else NO_ANSWER for answer in found]
