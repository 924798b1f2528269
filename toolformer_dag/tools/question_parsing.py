"""Words with their stems, and what a question asks for: rules of English for the reader without weights."""

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

# Words of one family of meaning, by which a question and a sentence may say the same thing: general English.
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
flow flows end ends reach reaches
rise rises source
long length
tall height high
lie lies located country
die died death dead
write wrote written writer author
marry married wife husband spouse
direct directed director
invent invented inventor
discover discovered discoverer
win won winner
"""


def word_set(text: str) -> frozenset[str]:
    """The words of a text that lists some."""
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class StemmedWord:
    """A token of a sentence; `start` and `end` are characters of the sentence."""

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
    """The sentences of a passage; abbreviations and initials do not end one. Linear in the length."""
    found: list[list[str]] = []
    for piece in _SENTENCE_END.split(text):
        if found and _ABBREVIATION.search(found[-1][-1]):
            found[-1].append(piece)
        else:
            found.append([piece])
    return [" ".join(pieces) for pieces in found]


def words(sentence: str) -> list[StemmedWord]:
    """Words, numbers and punctuation marks in order."""
    return [StemmedWord(m[0], stem(m[0].lower()), m.start(), m.end()) for m in _WORD.finditer(sentence)]


@functools.lru_cache(maxsize=100_000)
def stem(word: str) -> str:
    """Words of one family share a stem, and so do the forms of a word."""
    bare = word.removesuffix("'s").removesuffix("’s")
    families = _families()
    return families.get(bare) or families.get(_stemmed(bare) + "-") or _stemmed(bare)


@functools.cache
def _families() -> dict[str, str]:
    """Words as they are, and stems with a hyphen after them; a stem belongs to the first family that has it."""
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
    """`kind`: of the answer; `weights`: by stem, of the words that a sentence with the answer should hold.

    `noun`: the word that tells the kind, `town` in "in which town"; None where the question word does.
    """

    kind: AnswerKind
    weights: Mapping[str, float]
    noun: str | None = None


def parse_question(text: str, rarity: Callable[[str], float]) -> ParsedQuestion:
    """Reads the question word, the noun after it, and what the question is about.

    `rarity`: what a word weighs, rare words more.
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
    """What `what` and `which` ask for: the noun right after, or the one after `is the` or at the text's beginning."""
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
