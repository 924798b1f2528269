"""Sentences and words, with the stems by which they are compared."""

import functools
import re
from dataclasses import dataclass

import tantivy

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
class Word:
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


def words(sentence: str) -> list[Word]:
    """Words, numbers and punctuation marks in order."""
    return [Word(m[0], stem(m[0].lower()), m.start(), m.end()) for m in _WORD.finditer(sentence)]


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
