"""Create the synthetic world (people, towns, firms and rivers, in three disjoint parts) and its encyclopedia."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from random import Random

from toolformer_dag.synthetic.wordings import (
    WORLD_PARTS,
    EntityKind,
    Relation,
    WorldPart,
    draw_word,
    get_name_pool,
    get_relations,
    get_word_list,
)

WORLD_SEED = 0  # the world of the shipped encyclopedia, web and questions
PERSON_COUNT_BY_PART: dict[WorldPart, int] = {"pretraining": 1600, "corpus": 1400, "evaluation": 1000}


@dataclass(frozen=True, slots=True)
class Entity:
    """A person, town, firm or river with its facts.

    Attributes:
        kind: What it is, such as "person".
        name: Its name, such as "Ada Stavern".
        fact_by_relation: Its facts by the key of their relation, such as "birthplace": "Ravenford".
    """

    kind: EntityKind
    name: str
    fact_by_relation: Mapping[str, str]


class World:
    """All entities of a seed, in three disjoint parts. The facts of a part name only entities of that part."""

    def __init__(self, seed: int = WORLD_SEED) -> None:
        self.seed = seed
        self._entities_by_part_and_kind: dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]] = {}
        for part in WORLD_PARTS:
            self._entities_by_part_and_kind |= _draw_entities(Random(f"world {seed} {part}"), part)

    def get_entities(self, part: WorldPart, kind: EntityKind) -> tuple[Entity, ...]:
        """Return the entities of a part and kind, such as its towns, in a fixed order."""
        return self._entities_by_part_and_kind[part, kind]

    def list_entities(self) -> list[Entity]:
        """Return every entity, part by part."""
        return list(chain.from_iterable(self._entities_by_part_and_kind.values()))


@cache
def get_world() -> World:
    """Return the world of the shipped encyclopedia, web and questions."""
    return World(WORLD_SEED)


def _draw_entities(random: Random, part: WorldPart) -> dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]]:
    """Draw all entities of a part of the world with their facts, which name entities of the same part only.

    Returns:
        The entities by the part and their kind.
    """
    names_by_kind: dict[EntityKind, tuple[str, ...]] = {
        "person": _draw_person_names(random, part),
        "town": get_name_pool("town", part),
        "firm": get_name_pool("firm", part),
        "river": get_name_pool("river", part),
    }

    # The facts come after all names, because they name other entities.
    entities_by_part_and_kind = {}
    for kind, names in names_by_kind.items():
        entities = []
        for name in names:
            facts = _draw_facts(random, kind, name, names_by_kind)
            entities.append(Entity(kind, name, facts))
        entities_by_part_and_kind[part, kind] = tuple(entities)
    return entities_by_part_and_kind


def _draw_facts(
    random: Random, kind: EntityKind, entity_name: str, names_by_kind: Mapping[EntityKind, tuple[str, ...]]
) -> Mapping[str, str]:
    """Draw the facts about an entity.

    Args:
        random: The source of the draws.
        kind: The kind of the entity.
        entity_name: The name of the entity.
        names_by_kind: The names of all entities in its part of the world, which the facts may name.

    Returns:
        The facts by the key of their relation, such as "birthplace": "Ravenford".
    """
    person_names = names_by_kind["person"]
    town_names = names_by_kind["town"]
    match kind:
        case "person":
            return _draw_person_facts(random, entity_name, person_names=person_names, town_names=town_names)
        case "town":
            return _draw_town_facts(random, person_names=person_names, river_names=names_by_kind["river"])
        case "firm":
            return _draw_firm_facts(random, person_names=person_names, town_names=town_names)
        case "river":
            return _draw_river_facts(random, town_names=town_names)


def _draw_person_names(random: Random, part: WorldPart) -> tuple[str, ...]:
    """Draw the names of the people in a part of the world, such as "Ada Stavern". All are different."""
    possible_names = []
    for first_name in get_word_list("names", "first_names"):
        for surname in get_name_pool("person", part):
            possible_names.append(f"{first_name} {surname}")
    return tuple(random.sample(possible_names, PERSON_COUNT_BY_PART[part]))


def _draw_person_facts(
    random: Random, person_name: str, *, person_names: tuple[str, ...], town_names: tuple[str, ...]
) -> dict[str, str]:
    """Draw the facts about a person, by the key of their relation.

    Args:
        random: The source of the draws.
        person_name: The name of the person.
        person_names: The people of the same part of the world, one of whom is the teacher.
        town_names: The towns of the same part of the world.
    """
    return {
        "birthplace": random.choice(town_names),
        "profession": draw_word(random, "facts", "professions"),
        "birth_year": str(random.randint(1801, 1989)),
        "teacher": _draw_unrelated_person(random, person_name, person_names),
        "home": random.choice(town_names),
        "instrument": draw_word(random, "facts", "instruments"),
    }


def _draw_unrelated_person(random: Random, person_name: str, person_names: tuple[str, ...]) -> str:
    """Draw a person whose first name and surname both differ from those of `person_name`."""
    names_of_person = set(person_name.split())
    while True:
        drawn_name = random.choice(person_names)
        if names_of_person.isdisjoint(drawn_name.split()):
            return drawn_name


def _draw_town_facts(random: Random, *, person_names: tuple[str, ...], river_names: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a town, by the key of their relation.

    The mayor and the river are from the same part of the world: `person_names` and `river_names`.
    """
    country = draw_word(random, "facts", "countries")
    river = random.choice(river_names)
    product = draw_word(random, "facts", "products")
    nickname_adjective = draw_word(random, "facts", "nickname_adjectives")
    nickname_noun = draw_word(random, "facts", "nickname_nouns")
    return {
        "country": country,
        "river": river,
        "product": product,
        "nickname": f"the {nickname_adjective} {nickname_noun}",
        "mayor": random.choice(person_names),
        "founded": str(random.randint(1001, 1799)),
    }


def _draw_firm_facts(random: Random, *, person_names: tuple[str, ...], town_names: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a firm, by the key of their relation, from the people and towns of its part of the world."""
    return {
        "founder": random.choice(person_names),
        "head_office": random.choice(town_names),
        "wares": draw_word(random, "facts", "products"),
        "opened": str(random.randint(1801, 1999)),
    }


def _draw_river_facts(random: Random, town_names: tuple[str, ...]) -> dict[str, str]:
    """Draw the facts about a river, by the key of their relation, from the towns of its part of the world."""
    return {
        "length": f"{random.randint(30, 989)} miles",
        "sea": draw_word(random, "facts", "seas"),
        "source": random.choice(town_names),
    }


FACTS_PER_PASSAGE = 2


@dataclass(frozen=True, slots=True)
class ArticlePassage:
    """A section of an article of the encyclopedia.

    Attributes:
        id: Unique in its world, such as "Ada_Stavern/0".
        title: The title of the article, which is the name of an entity.
        section: The heading of the section, such as "Birthplace and teacher".
        text: A single line of a few sentences.
    """

    id: str
    title: str
    section: str
    text: str

    @property
    def snippet(self) -> str:
        """The passage as a search returns it, `title > section > text`, with fewer than 40 words."""
        return f"{self.title} > {self.section} > {self.text}"


def iter_article_passages(world: World) -> Iterator[ArticlePassage]:
    """Yield the passages of the whole encyclopedia, article by article, in a fixed order."""
    for entity in world.list_entities():
        passage_by_relation = write_passages_by_relation(entity, world.seed)
        # Several relations have the same passage, which is yielded once.
        yield from dict.fromkeys(passage_by_relation.values())


def write_passages_by_relation(entity: Entity, world_seed: int) -> dict[str, ArticlePassage]:
    """Write the article about an entity, the same for the same seed.

    Args:
        entity: The entity.
        world_seed: The seed of the entity's world, which the wording depends on.

    Returns:
        The passage that states a fact, by the key of the fact's relation. A passage states up to
        FACTS_PER_PASSAGE facts, so it may occur more than once.
    """
    random = Random(f"passages {world_seed} {entity.name}")
    relation_groups = _group_relations(random, get_relations(entity.kind))

    passage_by_relation: dict[str, ArticlePassage] = {}
    for passage_index, passage_relations in enumerate(relation_groups):
        passage = _write_passage(random, entity, passage_relations, passage_index)
        for relation in passage_relations:
            passage_by_relation[relation.key] = passage
    return passage_by_relation


def _group_relations(random: Random, all_relations: Sequence[Relation]) -> list[list[Relation]]:
    """Return relations in random order, in groups of FACTS_PER_PASSAGE. The last group may be smaller."""
    shuffled = random.sample(all_relations, len(all_relations))
    starts = range(0, len(shuffled), FACTS_PER_PASSAGE)
    return [shuffled[start : start + FACTS_PER_PASSAGE] for start in starts]


def _write_passage(
    random: Random, entity: Entity, passage_relations: list[Relation], passage_index: int
) -> ArticlePassage:
    """Write a passage of the article about an entity, with a sentence per fact, in random order.

    Args:
        random: The source of the draws.
        entity: The entity.
        passage_relations: The relations of the facts that the passage states.
        passage_index: The index of the passage in its article, which makes its id unique.
    """
    sentences = []
    for relation in passage_relations:
        template = random.choice(relation.sentences)
        fact = entity.fact_by_relation[relation.key]
        sentences.append(template.format(e=entity.name, v=fact))
    random.shuffle(sentences)

    keywords = " and ".join(relation.keyword for relation in passage_relations)
    return ArticlePassage(
        id=f"{entity.name}/{passage_index}".replace(" ", "_"),
        title=entity.name,
        section=keywords.capitalize(),
        text=" ".join(sentences),
    )
