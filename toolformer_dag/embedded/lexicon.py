"""The closed lexicon of Spanish, German and French words, dealt to the three parts."""

import csv
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from toolformer_dag.embedded.folder import EMBEDDED
from toolformer_dag.embedded.names import Part, deal

Language = Literal["es", "de", "fr"]
LANGUAGES: tuple[Language, ...] = ("es", "de", "fr")
ARTICLES: dict[Language, dict[str, str]] = {
    "es": {"m": "el", "f": "la"},
    "de": {"m": "der", "f": "die", "n": "das"},
    "fr": {"m": "le", "f": "la"},
}


@dataclass(frozen=True, slots=True)
class Word:
    """A noun (one form, a gender) or an adjective (the form for each gender, in the order of ARTICLES)."""

    language: Language
    forms: tuple[str, ...]
    english: str
    gender: str

    def form(self, gender: str) -> str:
        """The form that agrees with a noun of this gender; some adjectives have one form only."""
        place = list(ARTICLES[self.language]).index(gender)
        return self.forms[place] if len(self.forms) > 1 else self.forms[0]


@cache
def words(language: Language, word_class: str) -> tuple[Word, ...]:
    """All nouns or adjectives of a language, in the file's order; `word_class` is `noun` or `adjective`."""
    with (EMBEDDED / "wordings" / "lexicon.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    chosen = [row for row in rows if row["language"] == language and row["class"] == word_class]
    return tuple(Word(language, tuple(row["forms"].split()), row["english"], row["gender"]) for row in chosen)


@cache
def words_of(language: Language, word_class: str, part: Part) -> tuple[Word, ...]:
    """The part's share of the nouns or adjectives."""
    shuffled = list(words(language, word_class))
    Random(f"lexicon {language} {word_class}").shuffle(shuffled)
    return tuple(deal(shuffled, part))


@cache
def all_forms() -> frozenset[str]:
    """Every foreign form, in lower case."""
    classes = [(language, word_class) for language in LANGUAGES for word_class in ("noun", "adjective")]
    return frozenset(form.lower() for one in classes for word in words(*one) for form in word.forms)
