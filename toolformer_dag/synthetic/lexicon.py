"""Translate Spanish, German and French with a closed lexicon, and write phrases followed by their English."""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random
from typing import Literal, NamedTuple

from toolformer_dag.synthetic.sentences import Phenomenon, fill_random_template, make_typed_question
from toolformer_dag.synthetic.wordings import (
    ENTITY_KINDS,
    TEMPLATE_FOLDER,
    WORLD_PARTS,
    WordingSet,
    WorldPart,
    get_name_pool,
    get_translation_templates,
    get_word_list,
    select_share_of_part,
)

Language = Literal["es", "de", "fr"]
LANGUAGES: tuple[Language, ...] = ("es", "de", "fr")
ARTICLES_BY_LANGUAGE: dict[Language, dict[str, str]] = {
    "es": {"m": "el", "f": "la"},
    "de": {"m": "der", "f": "die", "n": "das"},
    "fr": {"m": "le", "f": "la"},
}


@dataclass(frozen=True, slots=True)
class LexiconWord:
    """A noun or an adjective of a foreign language, with its English.

    Attributes:
        language: The foreign language.
        forms: One form for a noun. For an adjective one per gender, in the order of ARTICLES_BY_LANGUAGE, or one for
            all genders.
        english: The English word.
        gender: The gender of a noun: "m", "f" or "n".
    """

    language: Language
    forms: tuple[str, ...]
    english: str
    gender: str

    def get_form(self, gender: str) -> str:
        """Return the form that agrees with a noun of this gender, such as "roja" with a feminine noun."""
        if len(self.forms) == 1:
            return self.forms[0]
        genders = list(ARTICLES_BY_LANGUAGE[self.language])
        return self.forms[genders.index(gender)]


@cache
def list_lexicon_words(language: Language, word_class: str) -> tuple[LexiconWord, ...]:
    """Return the words of a language in the order of the file lexicon.tsv.

    Args:
        language: The foreign language.
        word_class: "noun" or "adjective".
    """
    words = []
    for row in _read_lexicon_rows():
        if row["language"] == language and row["class"] == word_class:
            forms = tuple(row["forms"].split())
            words.append(LexiconWord(language, forms, english=row["english"], gender=row["gender"]))
    return tuple(words)


@cache
def _read_lexicon_rows() -> list[dict[str, str]]:
    """Return the rows of lexicon.tsv, each by column: language, class, forms, english and gender."""
    with (TEMPLATE_FOLDER / "lexicon.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@cache
def list_words_of_part(language: Language, word_class: str, part: WorldPart) -> tuple[LexiconWord, ...]:
    """Return the words of a language that belong to a part of the synthetic world.

    Each word belongs to one part only. The order is random, but always the same.

    Args:
        language: The foreign language.
        word_class: "noun" or "adjective".
        part: The part of the world, such as "evaluation".
    """
    words = list(list_lexicon_words(language, word_class))
    Random(f"lexicon {language} {word_class}").shuffle(words)
    return tuple(select_share_of_part(words, part))


@cache
def get_english_by_form(word_class: str) -> dict[str, str]:
    """Return the English of every form of the words of all languages.

    Args:
        word_class: "noun" or "adjective".

    Returns:
        The English by foreign form in lower case, such as "roja": "red".
    """
    english_by_form = {}
    for language in LANGUAGES:
        for word in list_lexicon_words(language, word_class):
            for form in word.forms:
                english_by_form[form.lower()] = word.english
    return english_by_form


@cache
def get_lexicon() -> dict[str, str]:
    """Return the English of every foreign noun and adjective, by form in lower case."""
    return {**get_english_by_form("noun"), **get_english_by_form("adjective")}


OUTER_PUNCTUATION = " .,;:!?¿¡\"'“”‘’«»()"
"""Characters around a phrase that are not translated."""
FOREIGN_ARTICLES = frozenset(chain.from_iterable(articles.values() for articles in ARTICLES_BY_LANGUAGE.values()))
"""The articles of all languages."""


def translate_phrase(phrase: str) -> str | None:
    """Translate a phrase word by word.

    Unknown words stay as they are. The English is in lower case, without punctuation around it.

    Returns:
        The English, or None if the lexicon has no word of the phrase.

    Example:
        "La tortuga roja!" gives "the red turtle".
    """
    words = phrase.lower().strip(OUTER_PUNCTUATION).split()
    words_without_articles = [word for word in words if word not in FOREIGN_ARTICLES]
    if get_lexicon().keys().isdisjoint(words_without_articles):
        return None

    english_words = _translate_words(words_without_articles)
    has_article = len(words_without_articles) < len(words)
    if has_article:
        english_words.insert(0, "the")
    return " ".join(english_words)


def _translate_words(foreign_words: Sequence[str]) -> list[str]:
    """Translate words without articles, and put the adjectives first, as in English.

    Unknown words stay as they are.

    Example:
        ["tortuga", "roja"] gives ["red", "turtle"].
    """
    english_by_adjective = get_english_by_form("adjective")
    english_by_noun = get_english_by_form("noun")

    english_adjectives = []
    english_nouns_and_unknown_words = []
    for word in foreign_words:
        if word in english_by_adjective:
            english_adjectives.append(english_by_adjective[word])
        else:
            english_nouns_and_unknown_words.append(english_by_noun.get(word, word))
    return english_adjectives + english_nouns_and_unknown_words


QUESTION_SHARE = 0.35
INVENTED_PHRASE_SHARE = 0.85
"""Share of the pretraining phrases with invented words, so that the model has to read the call's result."""
ADJECTIVE_SHARE = 0.75
QUOTES = ("", '"', "'")
"""What may stand around a foreign phrase."""
QUOTE_WEIGHTS = (16, 3, 1)
"""How often each of QUOTES is drawn."""


class Translation(NamedTuple):
    """A foreign phrase and its English, such as "la tortuga roja" and "the red turtle"."""

    foreign_phrase: str
    english_phrase: str


class _TranslatedNoun(NamedTuple):
    """A foreign noun with its article, and its English, such as "la", "tortuga" and "turtle"."""

    article: str
    foreign_noun: str
    english_noun: str

    def build_phrase(self) -> Translation:
        """Return the phrase of the noun alone: "la tortuga" and "the turtle"."""
        return Translation(f"{self.article} {self.foreign_noun}", english_phrase=f"the {self.english_noun}")

    def build_phrase_with_adjective(
        self, language: Language, foreign_adjective: str, english_adjective: str
    ) -> Translation:
        """Return the phrase of the noun with an adjective: "la tortuga roja" and "the red turtle"."""
        if language == "de":
            foreign_words = f"{foreign_adjective} {self.foreign_noun}"
        else:
            foreign_words = f"{self.foreign_noun} {foreign_adjective}"

        return Translation(
            foreign_phrase=f"{self.article} {foreign_words}",
            english_phrase=f"the {english_adjective} {self.english_noun}",
        )


def write_translation_phenomenon(random: Random, part: WorldPart, wording_set: WordingSet) -> Phenomenon:
    """Write a sentence or question with a foreign phrase and its English, with a call that translates the phrase.

    Example:
        The text `What is "la tortuga"?`, a call with the input "la tortuga", and the text " the turtle.".
    """
    translation = _draw_translation(random, part)
    is_question = random.random() < QUESTION_SHARE
    value_by_slot = _draw_value_by_slot(random, translation.foreign_phrase)

    templates = get_translation_templates(wording_set)
    written = fill_random_template(random, templates, value_by_slot, is_question=is_question)
    text_before_call = make_typed_question(random, written.text) if is_question else written.text
    ending = random.choice(get_word_list("tails", "translation")).format(**value_by_slot)

    return Phenomenon(
        tool="machine_translation",
        text_before_call=text_before_call,
        text_after_call=f" {translation.english_phrase}{ending}",
        input=translation.foreign_phrase,
        result=translation.english_phrase,
        answer=translation.english_phrase,
        wording_name=f"machine_translation/{wording_set}/{written.wording_name}",
    )


def _draw_value_by_slot(random: Random, foreign_phrase: str) -> dict[str, str]:
    """Return the values of the templates' slots.

    Returns:
        The foreign phrase in random quotes, or without any, under "f", and a random person under "x".
    """
    [quote] = random.choices(QUOTES, QUOTE_WEIGHTS)
    person = random.choice(get_word_list("filler", "persons"))
    return {"f": f"{quote}{foreign_phrase}{quote}", "x": person}


def _draw_translation(random: Random, part: WorldPart) -> Translation:
    """Draw a phrase with its English from a part of the synthetic world.

    In the part "pretraining" most phrases have invented words, which a model can only translate by reading the
    call's result.
    """
    is_invented = part == "pretraining" and random.random() < INVENTED_PHRASE_SHARE
    if is_invented:
        return _draw_invented_phrase(random)
    return draw_phrase(random, part)


def draw_phrase(random: Random, part: WorldPart) -> Translation:
    """Draw a phrase of a noun, and mostly an adjective, with its English.

    The words belong to a part of the synthetic world.

    Example:
        "la tortuga roja" with the English "the red turtle".
    """
    language = random.choice(LANGUAGES)
    drawn_noun = random.choice(list_words_of_part(language, "noun", part))
    gender = drawn_noun.gender
    noun = _TranslatedNoun(
        article=ARTICLES_BY_LANGUAGE[language][gender],
        foreign_noun=drawn_noun.get_form(gender),
        english_noun=drawn_noun.english,
    )

    has_adjective = random.random() < ADJECTIVE_SHARE
    if not has_adjective:
        return noun.build_phrase()

    adjective = random.choice(list_words_of_part(language, "adjective", part))
    return noun.build_phrase_with_adjective(language, adjective.get_form(gender), adjective.english)


def _draw_invented_phrase(random: Random) -> Translation:
    """Draw a phrase of invented words after a real article, with an unrelated English phrase as its translation."""
    # The adjective is invented even if the phrase goes without it: the order of the draws must not change.
    language = random.choice(LANGUAGES)
    foreign_noun = _capitalize_if_german(language, _invent_word(random))
    foreign_adjective = _invent_word(random)
    article = random.choice(tuple(ARTICLES_BY_LANGUAGE[language].values()))
    english_noun = random.choice(get_word_list("translation", "english_nouns"))
    noun = _TranslatedNoun(article, foreign_noun, english_noun)

    has_adjective = random.random() < ADJECTIVE_SHARE
    if not has_adjective:
        return noun.build_phrase()

    english_adjective = random.choice(get_word_list("translation", "english_adjectives"))
    return noun.build_phrase_with_adjective(language, foreign_adjective, english_adjective)


def _capitalize_if_german(language: Language, noun: str) -> str:
    """Return a noun as its language writes it: German nouns have a capital."""
    return noun.capitalize() if language == "de" else noun


def _invent_word(random: Random) -> str:
    """Invent a word that is neither in the lexicon nor a name of the synthetic world.

    It is made of one or two random beginnings and an ending.
    """
    beginnings = get_word_list("translation", "pseudo_heads")
    endings = get_word_list("translation", "pseudo_tails")
    while True:
        beginning_count = random.choice((1, 1, 2))
        drawn_beginnings = random.choices(beginnings, k=beginning_count)
        word = "".join(drawn_beginnings) + random.choice(endings)

        is_known = word in get_lexicon() or word in _collect_world_names()
        if not is_known:
            return word


@cache
def _collect_world_names() -> frozenset[str]:
    """Return all names of the synthetic world, in lower case."""
    names = set[str]()
    for kind in ENTITY_KINDS:
        for part in WORLD_PARTS:
            names.update(name.lower() for name in get_name_pool(kind, part))
    return frozenset(names)
