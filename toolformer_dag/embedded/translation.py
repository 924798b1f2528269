"""Foreign phrases in a page's words, with their English."""

from collections.abc import Mapping
from functools import cache
from random import Random

from toolformer_dag.embedded.gold import Phenomenon, worded
from toolformer_dag.embedded.lexicon import ARTICLES, LANGUAGES, Language, all_forms, words_of
from toolformer_dag.embedded.names import KINDS, PARTS, Part, name_pool
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.wordings import translation
from toolformer_dag.embedded.wordings.filler import PERSONS
from toolformer_dag.embedded.wordings.word_list import spaced

QUESTION_SHARE = 0.35
PSEUDO_SHARE = 0.85  # of the pretraining phrases: made-up words, so that the model has to read the call's result
ADJECTIVE_SHARE = 0.75
_HEADS = spaced(
    "ba ca de di fo ga hu ja ke la lu ma mo ne no pa pe qui ra ro sa so ta te tu ur ve vi wa zo zu bla "
    "fre gro kla ple stra bre cha cru"
)
_TAILS = spaced(
    "ta lo ro na sse cke nne rte lle mbre ndo rra ge che ste cht gen ter lur eau aille ette ion ique ier "
    "ado ina ero osa illo luz feld hand last dorf rin"
)


def translated(random: Random, part: Part, wordings: WordingSet) -> Phenomenon:
    """A foreign phrase followed by its English."""
    pseudo = part == "pretraining" and random.random() < PSEUDO_SHARE
    phrase, english = _pseudo_phrase(random) if pseudo else _phrase(random, part)
    is_question = random.random() < QUESTION_SHARE
    slots = {"f": phrase, "x": random.choice(PERSONS)}
    before, wording = _words(random, wordings, is_question, slots)
    return Phenomenon(
        tool="machine_translation",
        before=before + (" The answer is" if is_question else ""),
        after=f" {english}{random.choice(translation.TAILS).format(**slots)}",
        input=phrase,
        result=english,
        answer=english,
        wording=f"machine_translation/{wordings}/{wording}",
        is_question=is_question,
    )


def _words(random: Random, wordings: WordingSet, is_question: bool, slots: Mapping[str, str]) -> tuple[str, str]:
    leads: tuple[str, ...]
    templates: tuple[str, ...]
    if wordings == "seen":
        leads = translation.QUESTION_LEADS if is_question else translation.LEADS
        templates = translation.QUESTIONS if is_question else translation.STATEMENTS
    else:
        leads = translation.UNSEEN_QUESTION_LEADS if is_question else translation.UNSEEN_LEADS
        templates = translation.UNSEEN_QUESTIONS if is_question else translation.UNSEEN_STATEMENTS
    before, wording = worded(random, leads, templates, slots)
    return before, f"{'q' if is_question else 's'}{wording}"


def _phrase(random: Random, part: Part) -> tuple[str, str]:
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
    english = random.choice(translation.ENGLISH_NOUNS)
    if random.random() >= ADJECTIVE_SHARE:
        return f"{article} {_cased(language, noun)}", f"the {english}"
    foreign = _ordered(language, _cased(language, noun), adjective)
    return f"{article} {foreign}", f"the {random.choice(translation.ENGLISH_ADJECTIVES)} {english}"


def _ordered(language: Language, noun: str, adjective: str) -> str:
    return f"{adjective} {noun}" if language == "de" else f"{noun} {adjective}"


def _cased(language: Language, noun: str) -> str:
    return noun.capitalize() if language == "de" else noun


def _pseudo_word(random: Random) -> str:
    """A word that is neither in the lexicon nor a name of the made world."""
    while True:
        word = "".join(random.choices(_HEADS, k=random.choice((1, 1, 2)))) + random.choice(_TAILS)
        if word not in all_forms() and word not in _names():
            return word


@cache
def _names() -> frozenset[str]:
    return frozenset(name.lower() for kind in KINDS for part in PARTS for name in name_pool(kind, part))
