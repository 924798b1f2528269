"""Create the synthetic world (people, towns, firms and rivers, in three disjoint parts) and its encyclopaedia."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random

from toolformer_dag.synthetic.wordings import (
    PARTS,
    EntityKind,
    Relation,
    WorldPart,
    name_pool,
    pick,
    relations,
    word_list,
)

WORLD_SEED = 0  # the world of the shipped encyclopaedia, web and questions
PEOPLE: dict[WorldPart, int] = {"pretraining": 1600, "corpus": 1400, "evaluation": 1000}


@dataclass(frozen=True, slots=True)
class Entity:
    """Hold a person, town, firm or river."""

    kind: EntityKind
    name: str
    facts: Mapping[str, str]
    """By the key of a relation, the words that answer it: `{"birthplace": "Ravenford"}`."""


class World:
    """Hold all entities of one seed; the facts of a part name entities of that part only."""

    def __init__(self, seed: int = WORLD_SEED) -> None:
        """Draw the entities of all parts."""
        self.seed = seed
        self._entities: dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]] = {}
        for part in PARTS:
            self._entities |= _entities_of(Random(f"world {seed} {part}"), part)

    def entities(self, part: WorldPart, kind: EntityKind) -> tuple[Entity, ...]:
        """Return the entities of a part and kind, in a fixed order."""
        return self._entities[part, kind]

    def all_entities(self) -> list[Entity]:
        """Return every entity, part by part."""
        return list(chain.from_iterable(self._entities.values()))


@cache
def the_world() -> World:
    """Return the world of the shipped encyclopaedia, web and questions."""
    return World(WORLD_SEED)


def _entities_of(random: Random, part: WorldPart) -> dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]]:
    """Draw the people, towns, firms and rivers of a part of the world, with their facts; return them by part and kind.

    Facts name entities of the same part only. All names of a part but those of people are used.
    """
    towns = name_pool("town", part)
    firms = name_pool("firm", part)
    rivers = name_pool("river", part)
    names = []
    for first_name in word_list("names", "first_names"):
        names += [f"{first_name} {surname}" for surname in name_pool("person", part)]
    people = tuple(random.sample(names, PEOPLE[part]))
    facts_of_people = {name: _person(random, name, people=people, towns=towns) for name in people}
    facts_of_towns = {name: _town(random, people=people, rivers=rivers) for name in towns}
    facts_of_firms = {name: _firm(random, people=people, towns=towns) for name in firms}
    facts_of_rivers = {name: _river(random, towns) for name in rivers}
    return {
        (part, "person"): _entities("person", facts_of_people),
        (part, "town"): _entities("town", facts_of_towns),
        (part, "firm"): _entities("firm", facts_of_firms),
        (part, "river"): _entities("river", facts_of_rivers),
    }


def _entities(kind: EntityKind, facts_by_name: Mapping[str, Mapping[str, str]]) -> tuple[Entity, ...]:
    return tuple(Entity(kind, name, facts) for name, facts in facts_by_name.items())


def _person(random: Random, name: str, *, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a person, by the keys of relations; people and towns that they name are of the same part."""
    return {
        "birthplace": random.choice(towns),
        "profession": pick(random, "facts", "professions"),
        "birth_year": str(random.randint(1801, 1989)),
        "teacher": _stranger(random, name, people),
        "home": random.choice(towns),
        "instrument": pick(random, "facts", "instruments"),
    }


def _stranger(random: Random, name: str, people: tuple[str, ...]) -> str:
    """Draw a person with another first name and another surname."""
    while True:
        person = random.choice(people)
        if set(name.split()).isdisjoint(person.split()):
            return person


def _town(random: Random, *, people: tuple[str, ...], rivers: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a town, by the keys of relations; people and rivers that they name are of the same part."""
    return {
        "country": pick(random, "facts", "countries"),
        "river": random.choice(rivers),
        "product": pick(random, "facts", "products"),
        "nickname": f"the {pick(random, 'facts', 'nickname_adjectives')} {pick(random, 'facts', 'nickname_nouns')}",
        "mayor": random.choice(people),
        "founded": str(random.randint(1001, 1799)),
    }


def _firm(random: Random, *, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a firm."""
    return {
        "founder": random.choice(people),
        "head_office": random.choice(towns),
        "wares": pick(random, "facts", "products"),
        "opened": str(random.randint(1801, 1999)),
    }


def _river(random: Random, towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a river."""
    return {
        "length": f"{random.randint(30, 989)} miles",
        "sea": pick(random, "facts", "seas"),
        "source": random.choice(towns),
    }


FACTS_PER_PASSAGE = 2


@dataclass(frozen=True, slots=True)
class ArticlePassage:
    """Hold a section of an article of the encyclopaedia."""

    id: str  # unique in its world
    title: str
    section: str
    text: str  # one line

    @property
    def snippet(self) -> str:
        """Return the passage as a search returns it, `title > section > text`: fewer than 40 words."""
        return f"{self.title} > {self.section} > {self.text}"


def passages(world: World) -> Iterator[ArticlePassage]:
    """Yield the passages of all parts, in a fixed order."""
    for entity in world.all_entities():
        yield from dict.fromkeys(passages_by_relation(entity, world.seed).values())


def passages_by_relation(entity: Entity, seed: int) -> dict[str, ArticlePassage]:
    """Write the encyclopaedia's article about an entity; return, for each of its facts, the passage that states it.

    Facts are named by the key of their relation, such as "birthplace". A passage states FACTS_PER_PASSAGE of them, in
    random groups, so a passage is there once for each of its facts.
    """
    random = Random(f"passages {seed} {entity.name}")
    relations_of_kind = relations(entity.kind)
    shuffled = random.sample(relations_of_kind, len(relations_of_kind))
    by_relation: dict[str, ArticlePassage] = {}
    for number, start in enumerate(range(0, len(shuffled), FACTS_PER_PASSAGE)):
        group = shuffled[start : start + FACTS_PER_PASSAGE]
        passage = _passage(random, entity, group, number)
        for relation in group:
            by_relation[relation.key] = passage
    return by_relation


def _passage(random: Random, entity: Entity, group: list[Relation], number: int) -> ArticlePassage:
    """Write a passage of an entity's article: a sentence for each relation of a group, in random order.

    number: of the passage in its article, from 0.
    """
    sentences = []
    for relation in group:
        template = random.choice(relation.sentences)
        sentences.append(template.format(e=entity.name, v=entity.facts[relation.key]))
    random.shuffle(sentences)
    return ArticlePassage(
        id=f"{entity.name}/{number}".replace(" ", "_"),
        title=entity.name,
        section=" and ".join(relation.keyword for relation in group).capitalize(),
        text=" ".join(sentences),
    )
