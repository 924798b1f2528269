"""The dictionary: phrases of its lexicon into lower-case English."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.synthetic.lexicon import ARTICLES, LANGUAGES, lexicon, translate, words, words_of
from toolformer_dag.synthetic.names import PARTS
from toolformer_dag.synthetic.phenomena import phenomenon
from toolformer_dag.synthetic.world import World


@pytest.mark.parametrize(
    ("phrase", "english"),
    [
        ("el perro perdido", "the lost dog"),
        ("la tortuga", "the turtle"),
        ("der alte Hund", "the old dog"),
        ("das kurze Huhn", "the short hen"),
        ("la maison verte", "the green house"),
        ("maison verte", "green house"),
        ("chat", "cat"),
        ("LE CHAT", "the cat"),
        ("le chat de Paris", "the cat de paris"),
    ],
)
def test_phrases(phrase: str, english: str) -> None:
    assert translate(phrase) == english


@pytest.mark.parametrize("phrase", ["", "   ", "el", "the old baker", "die zzyx", "42"])
def test_nothing_known_is_no_translation(phrase: str) -> None:
    assert translate(phrase) is None


@given(st.text())
def test_any_text_is_a_phrase_or_none(text: str) -> None:
    english = translate(text)
    assert english is None or english == english.lower().strip()


def test_the_parts_share_no_word_and_make_up_the_lexicon() -> None:
    for language in LANGUAGES:
        for word_class in ("noun", "adjective"):
            dealt = [word for part in PARTS for word in words_of(language, word_class, part)]
            assert len(dealt) == len(set(dealt))
            assert set(dealt) == set(words(language, word_class))


def test_a_form_means_one_thing_in_one_language() -> None:
    forms = [
        form.lower()
        for language in LANGUAGES
        for word_class in ("noun", "adjective")
        for word in words(language, word_class)
        for form in set(word.forms)
    ]
    assert len(forms) == len(set(forms)) == len(lexicon())


def test_every_language_has_enough_words() -> None:
    for language in LANGUAGES:
        assert len(words(language, "noun")) >= 100
        assert len(words(language, "adjective")) >= 30
        assert all(word.gender in ARTICLES[language] for word in words(language, "noun"))


@pytest.mark.parametrize("part", ["corpus", "evaluation"])
def test_phrases_of_pages_are_translated_as_the_page_says(world: World, part: str) -> None:
    random = Random(2)
    for _ in range(500):
        one = phenomenon(random, world, "machine_translation", part, "seen")
        assert translate(one.input) == one.result


def test_pretraining_has_words_that_no_dictionary_knows(world: World) -> None:
    random = Random(2)
    drawn = [phenomenon(random, world, "machine_translation", "pretraining", "seen") for _ in range(500)]
    unknown = [one for one in drawn if translate(one.input) is None]
    assert len(unknown) > 300
    assert len({one.input for one in unknown}) > 0.98 * len(unknown)
