"""Translate Spanish, German and French with a closed lexicon, and write phrases followed by their English."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random
from typing import Literal, NamedTuple

from toolformer_dag.synthetic.sentences import Phenomenon, fill_template, type_question
from toolformer_dag.synthetic.wordings import (
    FOLDER,
    KINDS,
    PARTS,
    WordingSet,
    WorldPart,
    deal,
    get_name_pool,
    get_translation_templates,
    get_word_list,
)

Language = Literal["es", "de", "fr"]
LANGUAGES: tuple[Language, ...] = ("es", "de", "fr")
ARTICLES: dict[Language, dict[str, str]] = {
    "es": {"m": "el", "f": "la"},
    "de": {"m": "der", "f": "die", "n": "das"},
    "fr": {"m": "le", "f": "la"},
}


@dataclass(frozen=True, slots=True)
class LexiconWord:
    """A noun or an adjective of a foreign language, with its English."""

    language: Language
    forms: tuple[str, ...]
    """One form for a noun; for an adjective one per gender, in the order of ARTICLES, or one for all genders."""
    english: str
    gender: str
    """The gender of a noun, a key of ARTICLES."""

    def form(self, gender: str) -> str:
        """Return the form that agrees with a noun of this gender."""
        if len(self.forms) == 1:
            return self.forms[0]
        genders = list(ARTICLES[self.language])
        return self.forms[genders.index(gender)]


@cache
def words(language: Language, word_class: str) -> tuple[LexiconWord, ...]:
    """Return the words of a language in the order of lexicon.tsv. `word_class`: "noun" or "adjective"."""
    chosen = []
    for row in _read_rows():
        if row["language"] == language and row["class"] == word_class:
            forms = tuple(row["forms"].split())
            chosen.append(LexiconWord(language, forms, english=row["english"], gender=row["gender"]))
    return tuple(chosen)


@cache
def _read_rows() -> list[dict[str, str]]:
    """Return the rows of lexicon.tsv by column: language, class, forms, english, gender."""
    with (FOLDER / "lexicon.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@cache
def words_of(language: Language, word_class: str, part: WorldPart) -> tuple[LexiconWord, ...]:
    """Return the words that belong to a part of the world; each word belongs to one part."""
    shuffled = list(words(language, word_class))
    Random(f"lexicon {language} {word_class}").shuffle(shuffled)
    return tuple(deal(shuffled, part))


@cache
def english(word_class: str) -> dict[str, str]:
    """Return the English of every form of the nouns or adjectives of all languages, in lower case."""
    english_of_form = {}
    for language in LANGUAGES:
        for word in words(language, word_class):
            for form in word.forms:
                english_of_form[form.lower()] = word.english
    return english_of_form


@cache
def lexicon() -> dict[str, str]:
    """Return the English of every foreign form, in lower case."""
    return {**english("noun"), **english("adjective")}


PUNCTUATION_AROUND = " .,;:!?¿¡\"'“”‘’«»()"
"""Characters around a phrase that are not translated."""
FOREIGN_ARTICLES = frozenset(chain.from_iterable(articles.values() for articles in ARTICLES.values()))
"""The articles of all languages."""


def translate(phrase: str) -> str | None:
    """Translate a phrase word by word: `la tortuga roja` becomes `the red turtle`.

    The English is in lower case, without punctuation around it. Unknown words stay as they are. Returns None if the
    lexicon has no word of the phrase.
    """
    words = phrase.lower().strip(PUNCTUATION_AROUND).split()
    without_articles = [word for word in words if word not in FOREIGN_ARTICLES]
    if lexicon().keys().isdisjoint(without_articles):
        return None
    english_words = _translate_words(without_articles)
    has_article = len(without_articles) < len(words)
    if has_article:
        english_words.insert(0, "the")
    return " ".join(english_words)


def _translate_words(foreign_words: Sequence[str]) -> list[str]:
    """Return the English of words, adjectives first; unknown words stay as they are."""
    adjectives = english("adjective")
    nouns = english("noun")
    english_adjectives = [adjectives[word] for word in foreign_words if word in adjectives]
    other_words = [nouns.get(word, word) for word in foreign_words if word not in adjectives]
    return [*english_adjectives, *other_words]


QUESTION_SHARE = 0.35
PSEUDO_SHARE = 0.85  # of the pretraining phrases: invented words, so that the model has to read the call's result
ADJECTIVE_SHARE = 0.75
QUOTES = ("", '"', "'")
"""What may stand around a foreign phrase."""
QUOTE_WEIGHTS = (16, 3, 1)
"""How often each of QUOTES is drawn."""


class Translation(NamedTuple):
    """A foreign phrase and its English."""

    foreign: str
    english: str


class _Noun(NamedTuple):
    """A foreign noun with its article, and its English."""

    article: str
    noun: str
    english: str

    def alone(self) -> Translation:
        """Return the phrase of the noun alone: `la tortuga` and `the turtle`."""
        return Translation(f"{self.article} {self.noun}", english=f"the {self.english}")

    def with_adjective(self, language: Language, adjective: str, english_adjective: str) -> Translation:
        """Return the phrase with an adjective: `la tortuga roja` and `the red turtle`."""
        foreign = _join_in_order(language, noun=self.noun, adjective=adjective)
        return Translation(f"{self.article} {foreign}", english=f"the {english_adjective} {self.english}")


def translated(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question with a foreign phrase and its English, with a call that translates the phrase.

    For example `What is "la tortuga"?`, the call on `la tortuga`, and ` the turtle.`
    """
    translation = _draw_translation(random, part)
    is_question = random.random() < QUESTION_SHARE
    slots = _draw_slots(random, translation.foreign)
    templates = get_translation_templates(wordings)
    written = fill_template(random, templates, slots, is_question=is_question)
    before = type_question(random, written.text) if is_question else written.text
    ending = random.choice(get_word_list("tails", "translation")).format(**slots)
    return Phenomenon(
        tool="machine_translation",
        before=before,
        after=f" {translation.english}{ending}",
        input=translation.foreign,
        result=translation.english,
        answer=translation.english,
        wording=f"machine_translation/{wordings}/{written.wording}",
    )


def _draw_slots(random: Random, foreign: str) -> dict[str, str]:
    """Return the values of the slots `{f}`, the foreign phrase in drawn quotes, and `{x}`, a drawn person."""
    [quote] = random.choices(QUOTES, QUOTE_WEIGHTS)
    person = random.choice(get_word_list("filler", "persons"))
    return {"f": f"{quote}{foreign}{quote}", "x": person}


def _draw_translation(random: Random, part: WorldPart) -> Translation:
    """Draw a phrase with its English; in training mostly of invented words, so that a model has to read the result."""
    is_pseudo = part == "pretraining" and random.random() < PSEUDO_SHARE
    return _draw_pseudo_phrase(random) if is_pseudo else phrase(random, part)


def phrase(random: Random, part: WorldPart) -> Translation:
    """Draw a phrase with its English from a part of the world: `la tortuga roja` and `the red turtle`."""
    language = random.choice(LANGUAGES)
    word = random.choice(words_of(language, "noun", part))
    noun = _Noun(ARTICLES[language][word.gender], word.form(word.gender), word.english)
    if random.random() >= ADJECTIVE_SHARE:
        return noun.alone()
    adjective = random.choice(words_of(language, "adjective", part))
    return noun.with_adjective(language, adjective.form(word.gender), adjective.english)


def _draw_pseudo_phrase(random: Random) -> Translation:
    """Draw a phrase of invented words with a real article, and an unrelated English phrase as its translation."""
    language = random.choice(LANGUAGES)
    foreign_noun = _capitalize_if_german(language, _invent_word(random))
    adjective = _invent_word(random)
    article = random.choice(tuple(ARTICLES[language].values()))
    english_noun = random.choice(get_word_list("translation", "english_nouns"))
    noun = _Noun(article, foreign_noun, english_noun)
    if random.random() >= ADJECTIVE_SHARE:
        return noun.alone()
    english_adjective = random.choice(get_word_list("translation", "english_adjectives"))
    return noun.with_adjective(language, adjective, english_adjective)


def _join_in_order(language: Language, *, noun: str, adjective: str) -> str:
    """Join noun and adjective in the order of the language."""
    return f"{adjective} {noun}" if language == "de" else f"{noun} {adjective}"


def _capitalize_if_german(language: Language, noun: str) -> str:
    """Return a noun as its language writes it: German nouns have a capital."""
    return noun.capitalize() if language == "de" else noun


def _invent_word(random: Random) -> str:
    """Invent a word that is neither in the lexicon nor a name of the synthetic world."""
    heads = get_word_list("translation", "pseudo_heads")
    tails = get_word_list("translation", "pseudo_tails")
    while True:
        head_count = random.choice((1, 1, 2))
        word = "".join(random.choices(heads, k=head_count)) + random.choice(tails)
        if word not in lexicon() and word not in _collect_names():
            return word


@cache
def _collect_names() -> frozenset[str]:
    """Return all names of the synthetic world, in lower case."""
    names = set[str]()
    for kind in KINDS:
        for part in PARTS:
            names.update(name.lower() for name in get_name_pool(kind, part))
    return frozenset(names)
