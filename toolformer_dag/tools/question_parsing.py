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
birth birthplace born native comes originally hometown hail hails
home live lives lived reside resided residence resident dwell dwells address settled
job profession occupation work worked works working career living trade employed employment earn earns
teach taught teacher tutor lessons pupil student mentor trained instructed apprentice
found founded founder founding establish established establishment creator created create creates
name named called nickname nicknamed
make made maker product wares sell produce manufacture known famous buy goods offer deals specialty export factory
head lead leads led leader
base based office headquarters seat headquartered
open opened opening opens
play plays played instrument
flow flows end ends reach reaches empty empties pour pours drain drains mouth
rise rises source spring begin begins originate originates start starts origin
long length longer
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
ASKED_PLACES = PLACES | {"address", "birthplace", "headquarters", "home", "hometown", "land", "location"}
MEASURES = word_set("age area depth distance height length number population size weight width")
PEOPLE = word_set(
    """actor actress artist author boss composer director founder inventor king leader mayor mentor painter person
    player poet president queen singer teacher tutor woman man writer"""
)
RARITY_SHARE = 0.1
QUESTION_WORDS = frozenset({"who", "whom", "whose", "where", "whereabouts", "when", "how", "what", "which", "why"})
SCAFFOLD = STOP_WORDS | QUESTION_WORDS | {"one", "name", "does", "did", "tell", "firm", "person", "year"}

_KNOWN = re.compile(r"\bknown\b(?! for\b)(?: by\b| as\b)?")
_OTHER_NAME = re.compile(r"\b(?:other|another|pet|popular|second) name\b")


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
    text = _OTHER_NAME.sub("nickname", _KNOWN.sub("called", text))
    tokens = [word for word in words(text) if word.alphanumeric]
    lower = [word.text.lower() for word in tokens]
    content = [word for n, word in enumerate(tokens) if (n and word.capital) or lower[n] not in SCAFFOLD] or tokens
    kind, noun = _kind(lower)
    return ParsedQuestion(kind, {word.stem: 1 + RARITY_SHARE * rarity(word.text) for word in content}, noun)


def _kind(lower: list[str]) -> tuple[AnswerKind, str | None]:
    place = next((n for n, word in enumerate(lower) if word in QUESTION_WORDS), None)
    if place is None:  # a request: "tell me the country of", "the birthplace of"
        return _first_kind(lower)
    word, rest = lower[place], lower[place + 1 :]
    if word in {"who", "whom", "whose"}:
        return "person", None
    if word == "when":
        return "date", None
    if word in {"where", "whereabouts"}:
        return "place", None
    if word == "how":
        return "number" if rest[:1] and rest[0] in _AMOUNTS else "thing", None
    if all(other in STOP_WORDS | _NO_NOUNS for other in rest):  # "in which town?", "a river; what is it called?"
        return _first_kind(lower[:place])
    return _noun_kind(rest)


_NO_NOUNS = frozenset({"called", "one"})


_AMOUNTS = frozenset({"big", "deep", "far", "heavy", "high", "large", "long", "many", "much", "old", "tall", "wide"})


_KINDS: tuple[tuple[frozenset[str], AnswerKind], ...] = (
    (frozenset({"year"}), "year"),
    (frozenset({"date", "day", "month"}), "date"),
    (MEASURES, "number"),
    (PEOPLE, "person"),
    (ASKED_PLACES, "place"),
)


def _noun_kind(rest: list[str]) -> tuple[AnswerKind, str | None]:
    """Return the kind after `what` or `which`: of the next noun, or of the noun after `is the` or a genitive."""
    if not (rest[:1] and rest[0] in STOP_WORDS):
        return _first_kind(rest[:1])
    nouns = [word for word in rest if word not in STOP_WORDS]
    owner = next((n for n, word in enumerate(nouns[:3]) if word.endswith(("'s", "’s"))), -1)
    return _first_kind(nouns[owner + 1 : owner + 3])


def _first_kind(nouns: list[str]) -> tuple[AnswerKind, str | None]:
    """Return the kind of the first noun that has one, and the noun where it is a class of places."""
    for noun in nouns:
        for known, kind in _KINDS:
            if found := next(
                (one for one in (noun, noun.removesuffix("s"), noun.removesuffix("'s")) if one in known), None
            ):
                return kind, None if found in ASKED_PLACES - PLACES else noun
    return "thing", None
