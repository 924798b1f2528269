"""Create the synthetic world (people, towns, firms and rivers, in three disjoint parts) and its encyclopaedia."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random

from toolformer_dag.synthetic.wordings import (
    PARTS,
    EntityKind,
    Relation,
    WorldPart,
    get_name_pool,
    get_relations,
    get_word_list,
    pick,
)

WORLD_SEED = 0  # the world of the shipped encyclopaedia, web and questions
PEOPLE: dict[WorldPart, int] = {"pretraining": 1600, "corpus": 1400, "evaluation": 1000}


@dataclass(frozen=True, slots=True)
class Entity:
    """A person, town, firm or river with its facts."""

    kind: EntityKind
    name: str
    facts: Mapping[str, str]
    """The values of its relations: `{"birthplace": "Ravenford"}`."""


class World:
    """All entities of a seed; facts of a part name only entities of that part."""

    def __init__(self, seed: int = WORLD_SEED) -> None:
        self.seed = seed
        self._entities: dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]] = {}
        for part in PARTS:
            self._entities |= _draw_entities(Random(f"world {seed} {part}"), part)

    def entities(self, part: WorldPart, kind: EntityKind) -> tuple[Entity, ...]:
        """Return the entities of a part and kind, in a fixed order."""
        return self._entities[part, kind]

    def all_entities(self) -> list[Entity]:
        """Return every entity, part by part."""
        return list(chain.from_iterable(self._entities.values()))


@cache
def get_world() -> World:
    """Return the world of the shipped encyclopaedia, web and questions."""
    return World(WORLD_SEED)


def _draw_entities(random: Random, part: WorldPart) -> dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]]:
    """Draw the entities of a part of the world with their facts, which name entities of the same part only."""
    names: dict[EntityKind, tuple[str, ...]] = {
        "person": _draw_names_of_people(random, part),
        "town": get_name_pool("town", part),
        "firm": get_name_pool("firm", part),
        "river": get_name_pool("river", part),
    }
    entities = {}
    for kind, names_of_kind in names.items():
        entities[part, kind] = tuple(
            Entity(kind, name, _draw_facts(random, kind, name, names)) for name in names_of_kind
        )
    return entities


def _draw_facts(
    random: Random, kind: EntityKind, name: str, names: Mapping[EntityKind, tuple[str, ...]]
) -> Mapping[str, str]:
    """Draw the facts about an entity, by the keys of relations. names: all names of its part of the world."""
    match kind:
        case "person":
            return _draw_person_facts(random, name, people=names["person"], towns=names["town"])
        case "town":
            return _draw_town_facts(random, people=names["person"], rivers=names["river"])
        case "firm":
            return _draw_firm_facts(random, people=names["person"], towns=names["town"])
        case "river":
            return _draw_river_facts(random, towns=names["town"])


def _draw_names_of_people(random: Random, part: WorldPart) -> tuple[str, ...]:
    """Draw first names and surnames for the people of a part of the world."""
    names = []
    for first_name in get_word_list("names", "first_names"):
        names += [f"{first_name} {surname}" for surname in get_name_pool("person", part)]
    return tuple(random.sample(names, PEOPLE[part]))


def _draw_person_facts(random: Random, name: str, *, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a person from the people and towns of its part of the world."""
    return {
        "birthplace": random.choice(towns),
        "profession": pick(random, "facts", "professions"),
        "birth_year": str(random.randint(1801, 1989)),
        "teacher": _draw_stranger(random, name, people),
        "home": random.choice(towns),
        "instrument": pick(random, "facts", "instruments"),
    }


def _draw_stranger(random: Random, name: str, people: tuple[str, ...]) -> str:
    """Draw a person with another first name and another surname."""
    while True:
        person = random.choice(people)
        if set(name.split()).isdisjoint(person.split()):
            return person


def _draw_town_facts(random: Random, *, people: tuple[str, ...], rivers: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a town from the people and rivers of its part of the world."""
    return {
        "country": pick(random, "facts", "countries"),
        "river": random.choice(rivers),
        "product": pick(random, "facts", "products"),
        "nickname": f"the {pick(random, 'facts', 'nickname_adjectives')} {pick(random, 'facts', 'nickname_nouns')}",
        "mayor": random.choice(people),
        "founded": str(random.randint(1001, 1799)),
    }


def _draw_firm_facts(random: Random, *, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a firm."""
    return {
        "founder": random.choice(people),
        "head_office": random.choice(towns),
        "wares": pick(random, "facts", "products"),
        "opened": str(random.randint(1801, 1999)),
    }


def _draw_river_facts(random: Random, towns: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a river."""
    return {
        "length": f"{random.randint(30, 989)} miles",
        "sea": pick(random, "facts", "seas"),
        "source": random.choice(towns),
    }


FACTS_PER_PASSAGE = 2


@dataclass(frozen=True, slots=True)
class ArticlePassage:
    """A section of an article of the encyclopaedia."""

    id: str  # unique in its world
    title: str
    section: str
    text: str  # one line

    @property
    def snippet(self) -> str:
        """The passage as a search returns it, `title > section > text`: fewer than 40 words."""
        return f"{self.title} > {self.section} > {self.text}"


def passages(world: World) -> Iterator[ArticlePassage]:
    """Yield the passages of all parts, in a fixed order."""
    for entity in world.all_entities():
        yield from dict.fromkeys(write_passages_by_relation(entity, world.seed).values())


def write_passages_by_relation(entity: Entity, seed: int) -> dict[str, ArticlePassage]:
    """Write the article about an entity, and return the passage that states each fact, by the key of its relation.

    A passage states up to FACTS_PER_PASSAGE facts, so it is returned once for each of them.
    """
    random = Random(f"passages {seed} {entity.name}")
    by_relation: dict[str, ArticlePassage] = {}
    for number, group in enumerate(_group_relations(random, get_relations(entity.kind))):
        passage = _write_passage(random, entity, group, number)
        for relation in group:
            by_relation[relation.key] = passage
    return by_relation


def _group_relations(random: Random, all_relations: Sequence[Relation]) -> list[list[Relation]]:
    """Return relations in random order, in groups of FACTS_PER_PASSAGE; the last group may be smaller."""
    shuffled = random.sample(all_relations, len(all_relations))
    starts = range(0, len(shuffled), FACTS_PER_PASSAGE)
    return [shuffled[start : start + FACTS_PER_PASSAGE] for start in starts]


def _write_passage(random: Random, entity: Entity, group: list[Relation], number: int) -> ArticlePassage:
    """Write a passage with a sentence per relation, in random order. `number`: its index in the article."""
    sentences = []
    for relation in group:
        template = random.choice(relation.sentences)
        sentences.append(template.format(e=entity.name, v=entity.facts[relation.key]))
    random.shuffle(sentences)
    keywords = " and ".join(relation.keyword for relation in group)
    return ArticlePassage(
        id=f"{entity.name}/{number}".replace(" ", "_"),
        title=entity.name,
        section=keywords.capitalize(),
        text=" ".join(sentences),
    )
