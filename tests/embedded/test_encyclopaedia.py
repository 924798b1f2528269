"""The encyclopaedia: every fact once, in short passages, and readable again."""

from collections import defaultdict

import pytest

from toolformer_dag.synthetic.world import ArticlePassage, World, passages, passages_by_relation


@pytest.fixture(scope="module")
def articles(world: World) -> dict[str, list[ArticlePassage]]:
    found = defaultdict(list)
    for passage in passages(world):
        found[passage.title].append(passage)
    return found


def test_passages_are_short_and_their_ids_unique(world: World) -> None:
    found = list(passages(world))
    assert len({passage.id for passage in found}) == len(found) > 15_000
    assert max(len(passage.snippet.split()) for passage in found) < 40
    assert not any("\n" in passage.snippet for passage in found)


def test_every_fact_of_an_entity_stands_in_its_article(world: World, articles: dict[str, list[ArticlePassage]]) -> None:
    for entity in world.all_entities()[::7]:
        text = " ".join(passage.text for passage in articles[entity.name])
        assert all(value in text for value in entity.facts.values())


def test_the_passage_of_a_relation_holds_its_fact(world: World) -> None:
    for entity in world.entities("evaluation", "person")[:200]:
        for key, passage in passages_by_relation(entity, world.seed).items():
            assert entity.facts[key] in passage.text
            assert passage.title == entity.name


def test_facts_stand_in_any_order(articles: dict[str, list[ArticlePassage]]) -> None:
    sections = {passage.section for article in articles.values() for passage in article}
    assert {"Birthplace and home", "Home and birthplace"} <= sections
    first = [passage.text.startswith("The home of") for article in articles.values() for passage in article]
    assert 0 < sum(first) < len(first)


def test_a_wrong_seed_has_other_facts(world: World) -> None:
    texts = {passage.text for passage in passages(world)}
    others = [passage.text for passage in passages(World(9))]
    assert sum(text in texts for text in others) < len(others) / 20
