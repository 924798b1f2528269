"""The world: three disjoint parts, so that what evaluation asks is learnt nowhere; encyclopaedia and dictionary."""

import re
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolformer_dag.synthetic.lexicon import LANGUAGES, list_lexicon_words, list_words_of_part, translate_phrase
from toolformer_dag.synthetic.phenomena import SYNTHETIC_TOOLS, write_phenomenon
from toolformer_dag.synthetic.today import get_part_of_day
from toolformer_dag.synthetic.web import iter_web_records
from toolformer_dag.synthetic.wordings import ENTITY_KINDS, WORLD_PARTS, WorldPart
from toolformer_dag.synthetic.world import Entity, World, iter_article_passages, write_passages_by_relation

Gold = dict[tuple[str, WorldPart], list]


def _entities(world: World, part: WorldPart) -> list[Entity]:
    return [entity for kind in ENTITY_KINDS for entity in world.get_entities(part, kind)]


def _calculation(expression: str) -> tuple[str, str, str]:
    """Return first number, operator and second number; a percentage is a product by hundred.

    Of a calculation with brackets those are the first two within.
    """
    if "(" in expression:
        expression = " ".join(re.split(r"[()]", expression)[1].split(" ")[:3])
    first, operator, second = expression.replace(",", "").removesuffix(" / 100").split(" ")
    return first, operator, second


@pytest.fixture(scope="module")
def gold(world: World) -> Gold:
    """Phenomena of every tool and part."""
    random = Random(3)
    return {
        (tool, part): [write_phenomenon(random, world, tool, part, "seen") for _ in range(1500)]
        for tool in SYNTHETIC_TOOLS
        for part in WORLD_PARTS
    }


def test_thousands_of_names_none_twice(world: World) -> None:
    names = [entity.name for entity in world.list_entities()]
    assert len(names) == len(set(names)) > 6000
    assert set(names) == {entity.name for part in WORLD_PARTS for entity in _entities(world, part)}


@pytest.mark.parametrize(("one", "other"), list(combinations(WORLD_PARTS, 2)))
def test_no_name_word_in_two_parts_of_any_worlds(one: WorldPart, other: WorldPart) -> None:
    # first names are everybody's; a surname, town, firm or river belongs to one part in every world
    def names(part: WorldPart, seed: int) -> set[str]:
        return {entity.name.split()[-1] for entity in _entities(World(seed), part)}

    assert not names(one, 0) & names(other, 1)


@pytest.mark.parametrize("part", WORLD_PARTS)
def test_facts_stay_in_their_part(world: World, part: WorldPart) -> None:
    people, towns, rivers = (
        {entity.name for entity in world.get_entities(part, kind)} for kind in ("person", "town", "river")
    )
    for person in world.get_entities(part, "person"):
        assert {person.fact_by_relation["birthplace"], person.fact_by_relation["home"]} <= towns
        assert person.fact_by_relation["teacher"] in people
    for town in world.get_entities(part, "town"):
        assert town.fact_by_relation["mayor"] in people
        assert town.fact_by_relation["river"] in rivers


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_pages_hold_no_name_of_evaluation(world: World, part: WorldPart) -> None:
    found = {
        word for one in iter_web_records(0, part, 2000) for word in one["raw_content"].replace("\n", " ").split(" ")
    }
    names = {entity.name.split()[-1] for entity in _entities(world, "evaluation")}
    assert not {word.strip(".,:;!?'\"") for word in found} & names


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_numbers_of_evaluation_are_asked_elsewhere(gold: Gold, part: WorldPart) -> None:
    def pairs(of: WorldPart) -> set[frozenset[str]]:
        inputs = [_calculation(one.input) for one in gold["calculator", of]]
        return {frozenset({float(a), float(b)}) for a, _, b in inputs}

    assert len(pairs("evaluation")) > 800
    assert not pairs("evaluation") & pairs(part)


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_foreign_word_of_evaluation_stands_elsewhere(gold: Gold, part: WorldPart) -> None:
    asked, others = (
        {word for one in gold["machine_translation", of] for word in one.input.lower().split()[1:]}
        for of in ("evaluation", part)
    )
    assert len(asked) > 80 and not asked & others


@pytest.mark.parametrize("part", WORLD_PARTS)
def test_dates_belong_to_one_part(gold: Gold, part: WorldPart) -> None:
    assert {get_part_of_day(one.page_date) for one in gold["calendar", part] if one.page_date} == {part}


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_question_of_evaluation_stands_elsewhere(gold: Gold, part: WorldPart) -> None:
    for tool in ("question_answering", "wiki_search", "calculator", "machine_translation"):
        assert not {one.input for one in gold[tool, "evaluation"]} & {one.input for one in gold[tool, part]}


def test_every_fact_stands_in_a_short_passage_of_its_article(world: World) -> None:
    found = list(iter_article_passages(world))
    assert len({passage.id for passage in found}) == len(found) > 15_000
    assert not any("\n" in one.snippet or len(one.snippet.split()) >= 40 for one in found)
    assert {"Birthplace and home", "Home and birthplace"} <= {passage.section for passage in found}
    texts = {passage.text for passage in found}
    for entity in world.list_entities()[::7]:
        for key, passage in write_passages_by_relation(entity, world.seed).items():
            assert passage.title == entity.name and entity.fact_by_relation[key] in passage.text
            assert passage.text in texts


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
        *((unknown, None) for unknown in ("", "   ", "el", "the old baker", "die zzyx", "42")),
    ],
)
def test_the_dictionary_knows_phrases_of_its_lexicon_only(phrase: str, english: str | None) -> None:
    assert translate_phrase(phrase) == english


@given(st.text())
def test_any_text_is_a_phrase_or_none(text: str) -> None:
    english = translate_phrase(text)
    assert english is None or english == english.lower().strip()


def test_the_parts_share_no_word_and_a_form_means_one_thing_in_one_language() -> None:
    forms: list[str] = []
    for language in LANGUAGES:
        for word_class in ("noun", "adjective"):
            dealt = [word for part in WORLD_PARTS for word in list_words_of_part(language, word_class, part)]
            assert len(dealt) == len(set(dealt)) and set(dealt) == set(list_lexicon_words(language, word_class))
            forms += [form.lower() for word in dealt for form in set(word.forms)]
    assert len(forms) == len(set(forms))


def test_pretraining_has_words_that_no_dictionary_knows(gold: Gold) -> None:
    unknown = [one.input for one in gold["machine_translation", "pretraining"] if translate_phrase(one.input) is None]
    assert len(unknown) > 900
    assert len(set(unknown)) > 0.98 * len(unknown)
