"""Parse questions by rules of English for the reader without weights: words, stems, and the answer's kind."""

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import tantivy

from toolformer_dag.tools.passage_search import STOP_WORDS

_SENTENCE_END = re.compile(r"(?<=[.!?][\"”’)])\s+(?=[\"“(]?[A-Z0-9])|(?<=[.!?])\s+(?=[\"“(]?[A-Z0-9])")
_ABBREVIATION = re.compile(r"(?:\b[A-Z]|\b(?:Dr|Mr|Mrs|Ms|St|Jr|Sr|vs|c|ca|No|Gen|Col|Sgt|Prof|Rev|Inc|Ltd|U\.S))\.$")
_WORD = re.compile(r"\d+(?:[.,]\d+)*%?|[^\W\d_]+(?:['’\-.][^\W_]+)*|\w+|[^\w\s]")

# Families of English words with related meaning: a question and a sentence may use different words of a family.
_FAMILIES = """
birth birthplace born native comes
home live lives lived reside resided residence
job profession occupation work worked career living
teach taught teacher tutor lessons pupil
found founded founder founding established establish started created
name named called nickname
make makes made maker product products wares sell sells produce manufacture known famous
head lead leads led leader
base based office headquarters
open opened opening opens
play plays played instrument
flow flows end ends reach reaches empty empties
rise rises source spring begin begins originate originates
long length
tall height high
lie lies located situated country
die died death dead
write wrote written writer author
marry married wife husband spouse
direct directed director
invent invented inventor
discover discovered discoverer
win won winner
"""


def word_set(text: str) -> frozenset[str]:
    """Return the set of space-separated words."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class StemmedWord:
    """A token of a sentence, with its stem and its character offsets `start` and `end`."""

    text: str
    stem: str
    start: int
    end: int

    @property
    def capital(self) -> bool:
        return self.text[0].isupper()

    @property
    def alphanumeric(self) -> bool:
        return self.text[0].isalnum()


def sentences(text: str) -> list[str]:
    """Split a passage into sentences, in linear time; abbreviations and initials do not end a sentence."""
    found: list[list[str]] = []
    for piece in _SENTENCE_END.split(text):
        if found and _ABBREVIATION.search(found[-1][-1]):
            found[-1].append(piece)
        else:
            found.append([piece])
    return [" ".join(pieces) for pieces in found]


def words(sentence: str) -> list[StemmedWord]:
    """Split a sentence into words, numbers and punctuation marks."""
    return [StemmedWord(m[0], stem(m[0].lower()), m.start(), m.end()) for m in _WORD.finditer(sentence)]


@functools.lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """Return the stem of a word; the forms of a word and the words of a family share a stem."""
    bare = word.removesuffix("'s").removesuffix("’s")
    families = _families()
    return families.get(bare) or families.get(_stemmed(bare) + "-") or _stemmed(bare)


@functools.cache
def _families() -> dict[str, str]:
    """Map words, and stems followed by a hyphen, to their family; a stem belongs to its first family."""
    found: dict[str, str] = {}
    for line in filter(None, map(str.split, _FAMILIES.split("\n"))):
        for word in line:
            found[word] = line[0].upper()
            found.setdefault(_stemmed(word) + "-", line[0].upper())
    return found


def _stemmed(word: str) -> str:
    found = _stemmer().analyze(word)
    return found[0] if len(found) == 1 else word


@functools.cache
def _stemmer() -> tantivy.TextAnalyzer:
    folding = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple()).filter(tantivy.Filter.ascii_fold())
    return folding.filter(tantivy.Filter.stemmer("english")).build()


AnswerKind = Literal["person", "place", "year", "date", "number", "thing"]

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
class ParsedQuestion:
    """A question's answer kind and words.

    - `kind`: the kind of the answer.
    - `weights`: by stem, the weights of the words that a sentence with the answer should contain.
    - `noun`: the word that determines the kind, `town` in "in which town"; None where the question word does.
    """

    kind: AnswerKind
    weights: Mapping[str, float]
    noun: str | None = None


def parse_question(text: str, rarity: Callable[[str], float]) -> ParsedQuestion:
    """Parse the question word, the noun after it, and the question's subject words.

    `rarity` returns the weight of a word; rare words weigh more.
    """
    text = _KNOWN_BY.sub("called", text)
    tokens = [word for word in words(text) if word.alphanumeric]
    lower = [word.text.lower() for word in tokens]
    content = [word for n, word in enumerate(tokens) if (n and word.capital) or lower[n] not in SCAFFOLD] or tokens
    kind, noun = _kind(lower)
    return ParsedQuestion(kind, {word.stem: 1 + RARITY_SHARE * rarity(word.text) for word in content}, noun)


def _kind(lower: list[str]) -> tuple[AnswerKind, str | None]:
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


def _noun_kind(rest: list[str]) -> tuple[AnswerKind, str | None]:
    """Return the kind after `what` or `which`: of the next noun, the noun after `is the`, or the first noun."""
    nouns = [word for word in rest if word not in STOP_WORDS][:2] if rest[:1] and rest[0] in STOP_WORDS else rest[:1]
    kinds: tuple[tuple[frozenset[str], AnswerKind], ...] = (
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
