"""What a question asks for."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from toolformer_dag.tools.question_answering.extraction.words import word_set, words
from toolformer_dag.tools.retrieval.terms import STOP_WORDS

Kind = Literal["person", "place", "year", "date", "number", "thing"]

PLACES = word_set(
    """area city capital continent country county district island nation place province region river sea state town
    village"""
)
MEASURES = frozenset({"age", "area", "depth", "height", "length", "number", "population", "size", "weight", "width"})
PEOPLE = word_set(
    """actor actress artist author composer director founder inventor king leader mayor painter person player poet
    president queen singer teacher woman man writer"""
)
RARITY_SHARE = 0.1
QUESTION_WORDS = frozenset({"who", "whom", "whose", "where", "when", "how", "what", "which", "why"})
SCAFFOLD = STOP_WORDS | QUESTION_WORDS | {"one", "name", "does", "did", "tell", "firm", "person", "year"}

_KNOWN_BY = re.compile(r"\bknown (?:by|as)\b")


@dataclass(frozen=True, slots=True)
class Question:
    """`kind`: of the answer; `weights`: by stem, of the words that a sentence with the answer should hold.

    `noun`: the word that tells the kind, `town` in "in which town"; None where the question word does.
    """

    kind: Kind
    weights: Mapping[str, float]
    noun: str | None = None


def parse_question(text: str, rarity: Callable[[str], float]) -> Question:
    """Reads the question word, the noun after it, and what the question is about.

    `rarity`: what a word weighs, rare words more.
    """
    text = _KNOWN_BY.sub("called", text)
    tokens = [word for word in words(text) if word.alphanumeric]
    lower = [word.text.lower() for word in tokens]
    content = [word for n, word in enumerate(tokens) if (n and word.capital) or lower[n] not in SCAFFOLD] or tokens
    kind, noun = _kind(lower)
    return Question(kind, {word.stem: 1 + RARITY_SHARE * rarity(word.text) for word in content}, noun)


def _kind(lower: list[str]) -> tuple[Kind, str | None]:
    place = next((n for n, word in enumerate(lower) if word in QUESTION_WORDS), None)
    if place is None:
        return "thing", None
    word, rest = lower[place], lower[place + 1 :]
    if word in {"who", "whom", "whose"}:
        return "person", None
    if word in {"where", "when"}:
        return "place" if word == "where" else "date", None
    if word == "how":
        return "number" if rest[:1] and rest[0] in _AMOUNTS else "thing", None
    at_end = rest in ([], ["one"])
    return _noun_kind(lower[:place] if at_end else rest)


_AMOUNTS = frozenset({"big", "deep", "far", "heavy", "high", "large", "long", "many", "much", "old", "tall", "wide"})


def _noun_kind(rest: list[str]) -> tuple[Kind, str | None]:
    """What `what` and `which` ask for: the noun right after, or the one after `is the` or at the text's beginning."""
    nouns = [word for word in rest if word not in STOP_WORDS][:2] if rest[:1] and rest[0] in STOP_WORDS else rest[:1]
    kinds: tuple[tuple[frozenset[str], Kind], ...] = (
        (frozenset({"year"}), "year"),
        (frozenset({"date", "day", "month"}), "date"),
        (MEASURES, "number"),
        (PEOPLE, "person"),
        (PLACES, "place"),
    )
    for noun in nouns:
        for known, kind in kinds:
            if noun in known or noun.removesuffix("s") in known:
                return kind, noun
    return "thing", None
