"""The best span over the passages: what the question shares with title and sentence, and how near the span stands."""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.tools.question_answering.extraction.candidates import Span, candidates
from toolformer_dag.tools.question_answering.extraction.question import PLACES, Question, parse_question
from toolformer_dag.tools.question_answering.extraction.words import Word, sentences, words
from toolformer_dag.tools.retrieval.passage import Passage

LEAST_SHARED = 0.5
OPENERS = frozenset({"a", "an", "the", "is", "are", "was", "were", "as", "its"})
CONTEXT = OPENERS | {
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
ATTRIBUTE = 1.0  # `main` in `the main product`, where a product is asked for
OTHER_CLASS = 0.5  # `the Coral Sea`, or `country of Umbaria`, where a town is asked for
NAMESAKE = 0.5  # `Hugo` in a passage on Hugo Garwick, where Grace Garwick is asked about
PREPOSITIONS = frozenset({"in", "at", "near", "from", "to", "of"})


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    score: float


def extract(text: str, passages: Sequence[Passage], rarity: Callable[[str], float]) -> Answer | None:
    """The answer to a question found in the passages, best passage first; None where too little is shared."""
    question = parse_question(text, rarity)
    if not question.weights:
        return None
    found = [answer for rank, passage in enumerate(passages) for answer in _answers(question, passage, rank)]
    return max(found, key=lambda answer: answer.score, default=None)


def _answers(question: Question, passage: Passage, rank: int) -> Iterator[Answer]:
    title = {word.stem for word in words(passage.title)}
    for sentence in sentences(passage.text):
        tokens = words(sentence)
        places = _places(tokens)
        shared = _share(question, places.keys(), title)
        if shared < LEAST_SHARED:
            continue
        for span in candidates(tokens, question):
            score = shared + _nearness(question, places, span) + _fitness(question, tokens, span) - 0.03 * rank
            score -= NAMESAKE * _is_namesake(question, tokens, span, title)
            yield Answer(sentence[tokens[span.first].start : tokens[span.last].end], score)


def _places(tokens: Sequence[Word]) -> dict[str, list[int]]:
    """At which tokens each stem stands."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, word in enumerate(tokens):
        found[word.stem].append(at)
    return found


def _share(question: Question, sentence: Collection[str], title: set[str]) -> float:
    """How much of the question the sentence holds, the title standing in for what it does not repeat; at most 2."""
    weights = question.weights
    total = sum(weights.values())
    here = sum(weight for stem, weight in weights.items() if stem in sentence)
    somewhere = sum(weight for stem, weight in weights.items() if stem in sentence or stem in title)
    about = len(title & weights.keys()) / max(len(title), 1)
    return (here + 2 * somewhere) / (2 * total) + 0.5 * about


def _nearness(question: Question, places: Mapping[str, Sequence[int]], span: Span) -> float:
    """Weighted mean over the question's words in the sentence of 1 / distance to the span, of each where it is nearest.

    Words within the span do not count.
    """
    distances = {stem: _distance(places[stem], span) for stem in question.weights if stem in places}
    near = {stem: 1 / distance for stem, distance in distances.items() if distance is not None}
    total = sum(question.weights[stem] for stem in near)
    return sum(question.weights[stem] * closeness for stem, closeness in near.items()) / total if near else 0.0


def _distance(places: Sequence[int], span: Span) -> int | None:
    """From the span to the nearest of some places (sorted) outside it."""
    before, after = bisect_left(places, span.first), bisect_right(places, span.last)
    left = [span.first - places[before - 1]] if before else []
    right = [places[after] - span.last] if after < len(places) else []
    return min(left + right, default=None)


def _fitness(question: Question, tokens: list[Word], span: Span) -> float:
    """What stands right before the span: a place follows a preposition, a thing an article or `is`."""
    before = tokens[span.first - 1].text.lower() if span.first else ""
    if question.kind == "place":
        fits = before in PREPOSITIONS or before in PLACES or before == "the"
        return 0.3 * fits - OTHER_CLASS * _is_of_other_class(question, tokens, span)
    if question.kind == "person":
        return 0.2 * (span.last > span.first) - 0.3 * (before == "the")
    if question.kind == "thing":
        after = tokens[span.last + 1].stem if span.last + 1 < len(tokens) else ""
        plain = span.first == span.last and not tokens[span.first].capital
        verb = plain and before not in CONTEXT
        return (
            0.3 * (before in OPENERS)
            + 0.05 * tokens[span.first].capital
            - 0.5 * (verb or span.first == 0)
            - (ATTRIBUTE if plain else 0.3) * (after in question.weights)
        )
    return 0.0


def _is_of_other_class(question: Question, tokens: list[Word], span: Span) -> bool:
    """Whether the words of the span, or those right before it, name another class of place than the question does."""
    around = (word.text.lower() for word in tokens[max(0, span.first - 2) : span.last + 1])
    named = {word for word in around if word in PLACES}
    return question.noun is not None and bool(named) and question.noun not in named


def _is_namesake(question: Question, tokens: list[Word], span: Span, title: set[str]) -> bool:
    """Whether the span is what the title has beside a name that the question holds."""
    return (
        title & question.weights.keys() != set() and {word.stem for word in tokens[span.first : span.last + 1]} <= title
    )
