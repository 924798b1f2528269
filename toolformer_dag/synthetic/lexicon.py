"""Translate Spanish, German and French with a closed lexicon, and write phrases followed by their English."""

import csv
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random
from typing import Literal

from toolformer_dag.synthetic.sentences import Phenomenon, typed_question, worded
from toolformer_dag.synthetic.wordings import (
    FOLDER,
    KINDS,
    PARTS,
    WordingSet,
    WorldPart,
    deal,
    name_pool,
    translation_templates,
    word_list,
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
    """Hold a noun or an adjective."""

    language: Language
    forms: tuple[str, ...]
    """One for a noun; for an adjective one for each gender, in the order of ARTICLES, or one for all."""
    english: str
    gender: str
    """That of a noun, a key of ARTICLES."""

    def form(self, gender: str) -> str:
        """Return the form that agrees with a noun of this gender; some adjectives have one form only."""
        if len(self.forms) == 1:
            return self.forms[0]
        genders = list(ARTICLES[self.language])
        return self.forms[genders.index(gender)]


@cache
def words(language: Language, word_class: str) -> tuple[LexiconWord, ...]:
    """Return the nouns or adjectives of a language, in the order of lexicon.tsv. word_class: "noun" or "adjective"."""
    with (FOLDER / "lexicon.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    chosen = []
    for row in rows:
        if row["language"] == language and row["class"] == word_class:
            forms = tuple(row["forms"].split())
            chosen.append(LexiconWord(language, forms, english=row["english"], gender=row["gender"]))
    return tuple(chosen)


@cache
def words_of(language: Language, word_class: str, part: WorldPart) -> tuple[LexiconWord, ...]:
    """Return the part's share of the nouns or adjectives."""
    shuffled = list(words(language, word_class))
    Random(f"lexicon {language} {word_class}").shuffle(shuffled)
    return tuple(deal(shuffled, part))


@cache
def english(word_class: str) -> dict[str, str]:
    """Return the English of every form of the nouns or adjectives, in lower case."""
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


AROUND = " .,;:!?¿¡\"'“”‘’«»()"
"""What a call may leave around a phrase."""
THE = frozenset(chain.from_iterable(articles.values() for articles in ARTICLES.values()))
"""The articles of all languages."""


def translate(phrase: str) -> str | None:
    """Translate a phrase word by word into lower-case English, with adjectives before the noun.

    `la tortuga roja` becomes `the red turtle`. Unknown words stay as they are; punctuation and quotes around the phrase
    are left out. None where the lexicon has no word of the phrase.
    """
    words = phrase.lower().strip(AROUND).split()
    without_articles = [word for word in words if word not in THE]
    if lexicon().keys().isdisjoint(without_articles):
        return None
    adjectives = english("adjective")
    nouns = english("noun")
    article = ["the"] if len(without_articles) < len(words) else []
    english_adjectives = [adjectives[word] for word in without_articles if word in adjectives]
    other_words = [nouns.get(word, word) for word in without_articles if word not in adjectives]
    return " ".join([*article, *english_adjectives, *other_words])


QUESTION_SHARE = 0.35
PSEUDO_SHARE = 0.85  # of the pretraining phrases: invented words, so that the model has to read the call's result
ADJECTIVE_SHARE = 0.75
QUOTES = ("", '"', "'")
"""What may stand around a foreign phrase."""
QUOTE_WEIGHTS = (16, 3, 1)
"""How often each of QUOTES does."""


def translated(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Write a sentence or question with a foreign phrase, followed by its English, which a translation call helps with.

    As an example, `What is "la tortuga"?`, the call on `la tortuga`, and ` the turtle.` For training (part
    "pretraining") most phrases are of invented words, whose English a model cannot know without the call's result.
    """
    is_pseudo = part == "pretraining" and random.random() < PSEUDO_SHARE
    foreign, english = _pseudo_phrase(random) if is_pseudo else phrase(random, part)
    is_question = random.random() < QUESTION_SHARE
    quote = random.choices(QUOTES, QUOTE_WEIGHTS)[0]
    person = random.choice(word_list("filler", "persons"))
    slots = {"f": f"{quote}{foreign}{quote}", "x": person}  # the slots `{f}` and `{x}` of the templates
    text, wording = worded(random, translation_templates(wordings), slots, is_question=is_question)
    before = typed_question(random, text) if is_question else text  # as somebody types it, with a lead to the answer
    ending = random.choice(word_list("tails", "translation")).format(**slots)
    return Phenomenon(
        tool="machine_translation",
        before=before,
        after=f" {english}{ending}",
        input=foreign,
        result=english,
        answer=english,
        wording=f"machine_translation/{wordings}/{wording}",
    )


def phrase(random: Random, part: WorldPart) -> tuple[str, str]:
    """Draw a foreign phrase, such as `la tortuga roja`; return it and its English, `the red turtle`.

    It is an article, a noun and often an adjective. part: of the world; each word belongs to one part alone.
    """
    language = random.choice(LANGUAGES)
    noun = random.choice(words_of(language, "noun", part))
    article = ARTICLES[language][noun.gender]
    if random.random() >= ADJECTIVE_SHARE:
        return f"{article} {noun.forms[0]}", f"the {noun.english}"
    adjective = random.choice(words_of(language, "adjective", part))
    foreign = _ordered(language, noun=noun.forms[0], adjective=adjective.form(noun.gender))
    return f"{article} {foreign}", f"the {adjective.english} {noun.english}"


def _pseudo_phrase(random: Random) -> tuple[str, str]:
    """Draw a phrase of invented words with a real article; return it and an English phrase as its translation.

    The English is drawn too, so that only the call's result tells it.
    """
    language = random.choice(LANGUAGES)
    noun = _cased(language, _pseudo_word(random))
    adjective = _pseudo_word(random)
    article = random.choice(tuple(ARTICLES[language].values()))
    english_noun = random.choice(word_list("translation", "english_nouns"))
    if random.random() >= ADJECTIVE_SHARE:
        return f"{article} {noun}", f"the {english_noun}"
    foreign = _ordered(language, noun=noun, adjective=adjective)
    english_adjective = random.choice(word_list("translation", "english_adjectives"))
    return f"{article} {foreign}", f"the {english_adjective} {english_noun}"


def _ordered(language: Language, *, noun: str, adjective: str) -> str:
    """Return noun and adjective in the order of the language."""
    return f"{adjective} {noun}" if language == "de" else f"{noun} {adjective}"


def _cased(language: Language, noun: str) -> str:
    """Return a noun as the language writes it: German ones have a capital."""
    return noun.capitalize() if language == "de" else noun


def _pseudo_word(random: Random) -> str:
    """Invent a word that is neither in the lexicon nor a name of the synthetic world."""
    heads = word_list("translation", "pseudo_heads")
    tails = word_list("translation", "pseudo_tails")
    while True:
        head_count = random.choice((1, 1, 2))
        word = "".join(random.choices(heads, k=head_count)) + random.choice(tails)
        if word not in lexicon() and word not in _names():
            return word


@cache
def _names() -> frozenset[str]:
    """Return all names of the synthetic world, in lower case."""
    names = set[str]()
    for kind in KINDS:
        for part in PARTS:
            names.update(name.lower() for name in name_pool(kind, part))
    return frozenset(names)
