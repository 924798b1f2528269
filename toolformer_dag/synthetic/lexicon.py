"""Translate Spanish, German and French with a closed lexicon, and write phrases followed by their English."""

import csv
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from toolformer_dag.synthetic.sentences import Phenomenon, asked, worded
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
    """Hold a noun (one form, a gender) or an adjective (a form for each gender, in the order of ARTICLES)."""

    language: Language
    forms: tuple[str, ...]
    english: str
    gender: str

    def form(self, gender: str) -> str:
        """Return the form that agrees with a noun of this gender; some adjectives have one form only."""
        place = list(ARTICLES[self.language]).index(gender)
        return self.forms[place] if len(self.forms) > 1 else self.forms[0]


@cache
def words(language: Language, word_class: str) -> tuple[LexiconWord, ...]:
    """Return the words of a language in the file's order; `word_class` is `noun` or `adjective`."""
    with (FOLDER / "lexicon.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    chosen = [row for row in rows if row["language"] == language and row["class"] == word_class]
    return tuple(LexiconWord(language, tuple(row["forms"].split()), row["english"], row["gender"]) for row in chosen)


@cache
def words_of(language: Language, word_class: str, part: WorldPart) -> tuple[LexiconWord, ...]:
    """Return the part's share of the nouns or adjectives."""
    shuffled = list(words(language, word_class))
    Random(f"lexicon {language} {word_class}").shuffle(shuffled)
    return tuple(deal(shuffled, part))


@cache
def english(word_class: str) -> dict[str, str]:
    """Return the English of every form of the nouns or adjectives, in lower case."""
    known = [word for language in LANGUAGES for word in words(language, word_class)]
    return {form.lower(): word.english for word in known for form in word.forms}


@cache
def lexicon() -> dict[str, str]:
    """Return the English of every foreign form, in lower case."""
    return {**english("noun"), **english("adjective")}


AROUND = " .,;:!?¿¡\"'“”‘’«»()"
"""What a call may leave around a phrase."""
THE = frozenset(article for articles in ARTICLES.values() for article in articles.values())


def translate(phrase: str) -> str | None:
    """Translate a phrase of article, adjective and noun into lower-case English; adjectives move before the noun.

    Unknown words stay as they are, in their place; punctuation and quotes around the phrase are left out. Return None
    when the lexicon has no word of the phrase.
    """
    tokens = phrase.lower().strip(AROUND).split()
    rest = [token for token in tokens if token not in THE]
    adjectives = english("adjective")
    if lexicon().keys().isdisjoint(rest):
        return None
    article = ["the"] if len(rest) < len(tokens) else []
    modifiers = [adjectives[token] for token in rest if token in adjectives]
    others = [english("noun").get(token, token) for token in rest if token not in adjectives]
    return " ".join([*article, *modifiers, *others])


QUESTION_SHARE = 0.35
PSEUDO_SHARE = 0.85  # of the pretraining phrases: invented words, so that the model has to read the call's result
ADJECTIVE_SHARE = 0.75
QUOTES, QUOTE_WEIGHTS = ("", '"', "'"), (16, 3, 1)


def translated(random: Random, part: WorldPart, wordings: WordingSet) -> Phenomenon:
    """Quote a foreign phrase, then say it in English."""
    pseudo = part == "pretraining" and random.random() < PSEUDO_SHARE
    foreign, english = _pseudo_phrase(random) if pseudo else phrase(random, part)
    is_question = random.random() < QUESTION_SHARE
    quote = random.choices(QUOTES, QUOTE_WEIGHTS)[0]
    slots = {"f": f"{quote}{foreign}{quote}", "x": random.choice(word_list("filler", "persons"))}
    before, wording = worded(random, translation_templates(wordings), slots, is_question=is_question)
    return Phenomenon(
        tool="machine_translation",
        before=asked(random, before) if is_question else before,
        after=f" {english}{random.choice(word_list('tails', 'translation')).format(**slots)}",
        input=foreign,
        result=english,
        answer=english,
        wording=f"machine_translation/{wordings}/{wording}",
    )


def phrase(random: Random, part: WorldPart) -> tuple[str, str]:
    """Draw a phrase of the part's words; return it and its English."""
    language = random.choice(LANGUAGES)
    noun = random.choice(words_of(language, "noun", part))
    article = ARTICLES[language][noun.gender]
    if random.random() >= ADJECTIVE_SHARE:
        return f"{article} {noun.forms[0]}", f"the {noun.english}"
    adjective = random.choice(words_of(language, "adjective", part))
    foreign = _ordered(language, noun.forms[0], adjective.form(noun.gender))
    return f"{article} {foreign}", f"the {adjective.english} {noun.english}"


def _pseudo_phrase(random: Random) -> tuple[str, str]:
    language = random.choice(LANGUAGES)
    noun, adjective = _pseudo_word(random), _pseudo_word(random)
    article = random.choice(tuple(ARTICLES[language].values()))
    english = random.choice(word_list("translation", "english_nouns"))
    if random.random() >= ADJECTIVE_SHARE:
        return f"{article} {_cased(language, noun)}", f"the {english}"
    foreign = _ordered(language, _cased(language, noun), adjective)
    return f"{article} {foreign}", f"the {random.choice(word_list('translation', 'english_adjectives'))} {english}"


def _ordered(language: Language, noun: str, adjective: str) -> str:
    return f"{adjective} {noun}" if language == "de" else f"{noun} {adjective}"


def _cased(language: Language, noun: str) -> str:
    return noun.capitalize() if language == "de" else noun


def _pseudo_word(random: Random) -> str:
    """Invent a word that is neither in the lexicon nor a name of the synthetic world."""
    heads, tails = word_list("translation", "pseudo_heads"), word_list("translation", "pseudo_tails")
    while True:
        word = "".join(random.choices(heads, k=random.choice((1, 1, 2)))) + random.choice(tails)
        if word not in lexicon() and word not in _names():
            return word


@cache
def _names() -> frozenset[str]:
    return frozenset(name.lower() for kind in KINDS for part in PARTS for name in name_pool(kind, part))
