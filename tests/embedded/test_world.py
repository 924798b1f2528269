"""Three disjoint parts: what evaluation asks is not in what the model learns from."""

import re
from decimal import Decimal
from itertools import combinations
from random import Random

import pytest

from toolformer_dag.synthetic.calculations import part_of
from toolformer_dag.synthetic.names import KINDS, PARTS, WorldPart
from toolformer_dag.synthetic.phenomena import TOOLS, phenomenon
from toolformer_dag.synthetic.today import part_of_day
from toolformer_dag.synthetic.web import records
from toolformer_dag.synthetic.wordings import relations
from toolformer_dag.synthetic.world import Entity, World

Gold = dict[tuple[str, WorldPart], list]


def _entities(world: World, part: WorldPart) -> list[Entity]:
    return [entity for kind in KINDS for entity in world.entities(part, kind)]


def _calculation(expression: str) -> tuple[str, str, str]:
    """Return first number, operator and second number; a percentage is a product by hundred."""
    first, operator, second = expression.replace(",", "").removesuffix(" / 100").split(" ")
    return first, operator, second


@pytest.fixture(scope="module")
def gold(world: World) -> Gold:
    """Phenomena of every tool and part."""
    random = Random(3)
    return {
        (tool, part): [phenomenon(random, world, tool, part, "seen") for _ in range(1500)]
        for tool in TOOLS
        for part in PARTS
    }


def test_thousands_of_names_none_twice(world: World) -> None:
    names = [entity.name for entity in world.all_entities()]
    assert len(names) == len(set(names)) > 6000
    assert set(names) == {entity.name for part in PARTS for entity in _entities(world, part)}


def test_every_relation_has_a_value(world: World) -> None:
    for entity in world.all_entities():
        assert set(entity.facts) == {relation.key for relation in relations(entity.kind)}


@pytest.mark.parametrize(("one", "other"), list(combinations(PARTS, 2)))
def test_no_name_word_in_two_parts_of_any_worlds(one: WorldPart, other: WorldPart) -> None:
    # first names are everybody's; a surname, town, firm or river belongs to one part in every world
    def words(part: WorldPart, seed: int) -> set[str]:
        return {entity.name.split()[-1] for entity in _entities(World(seed), part)}

    assert not words(one, 0) & words(other, 1)


@pytest.mark.parametrize("part", PARTS)
def test_facts_stay_in_their_part(world: World, part: WorldPart) -> None:
    people, towns, rivers = (
        {entity.name for entity in world.entities(part, kind)} for kind in ("person", "town", "river")
    )
    for person in world.entities(part, "person"):
        assert {person.facts["birthplace"], person.facts["home"]} <= towns
        assert person.facts["teacher"] in people
    for town in world.entities(part, "town"):
        assert town.facts["mayor"] in people
        assert town.facts["river"] in rivers


def test_the_same_seed_makes_the_same_world() -> None:
    assert World(4).all_entities() == World(4).all_entities()
    assert World(4).all_entities() != World(5).all_entities()


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_pages_hold_no_name_of_evaluation(world: World, part: WorldPart) -> None:
    words = {word for one in records(0, part, 2000) for word in one["raw_content"].replace("\n", " ").split(" ")}
    words = {word.strip(".,:;!?'\"") for word in words}
    assert not words & {entity.name.split()[-1] for entity in _entities(world, "evaluation")}


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_numbers_of_evaluation_are_asked_elsewhere(gold: Gold, part: WorldPart) -> None:
    def pairs(of: WorldPart) -> set[frozenset[str]]:
        inputs = [_calculation(one.input) for one in gold["calculator", of]]
        return {frozenset({float(a), float(b)}) for a, _, b in inputs}

    assert len(pairs("evaluation")) > 800
    assert not pairs("evaluation") & pairs(part)


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_foreign_word_of_evaluation_stands_elsewhere(gold: Gold, part: WorldPart) -> None:
    def words(of: WorldPart) -> set[str]:
        return {word for one in gold["machine_translation", of] for word in one.input.lower().split()[1:]}

    assert len(words("evaluation")) > 80
    assert not words("evaluation") & words(part)


@pytest.mark.parametrize("part", PARTS)
def test_dates_belong_to_one_part(gold: Gold, part: WorldPart) -> None:
    assert {part_of_day(one.date) for one in gold["calendar", part] if one.date} == {part}


def test_a_pair_of_numbers_belongs_to_its_part_in_either_order(gold: Gold) -> None:
    for part in PARTS:
        for one in gold["calculator", part]:
            a, _, b = _calculation(one.input)
            assert part_of(Decimal(b), Decimal(a)) == part


def test_sums_and_products_name_their_numbers_as_the_text_does(gold: Gold) -> None:
    for part in PARTS:
        for one in gold["calculator", part]:
            if one.input.endswith(" / 100") or "multiple" in one.wording:  # `72% of 59` is 59 * 72 / 100; `twice 59`
                continue
            a, operator, b = one.input.split(" ")
            in_order = re.search(rf"(?<![\d.,]){a}(?!\d).*(?<![\d.,]){b}(?!\d)", one.before)
            assert operator in "-/" or in_order, one


@pytest.mark.parametrize("part", ["pretraining", "corpus"])
def test_no_question_of_evaluation_stands_elsewhere(gold: Gold, part: WorldPart) -> None:
    for tool in ("question_answering", "wiki_search", "calculator", "machine_translation"):
        assert not {one.input for one in gold[tool, "evaluation"]} & {one.input for one in gold[tool, part]}
