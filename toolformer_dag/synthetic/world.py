"""The synthetic world: people, towns, firms and rivers with their facts, in three disjoint parts; its encyclopaedia."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random

from toolformer_dag.synthetic.names import FIRST_NAMES, PARTS, EntityKind, Relation, WorldPart, name_pool
from toolformer_dag.synthetic.wordings.firm import FIRM
from toolformer_dag.synthetic.wordings.person import PERSON
from toolformer_dag.synthetic.wordings.river import RIVER
from toolformer_dag.synthetic.wordings.town import TOWN
from toolformer_dag.synthetic.wordings.word_list import spaced

WORLD_SEED = 0  # the world of the shipped encyclopaedia, web and questions
PEOPLE: dict[WorldPart, int] = {"pretraining": 1600, "corpus": 1400, "evaluation": 1000}

COUNTRIES = spaced(
    "Norland Estavia Querin Valdoria Marenia Tesland Orvania Lutria Kasmir Ferrano Belmark Sundria Pollan "
    "Drenia Wexland Ilvaria Corania Zemland Hestia Ruvania Altonia Brevia Carpania Dovania Elmark Falonia "
    "Gorland Helvara Istvar Jarland Kolmark Livania Moltaria Narvia Ostland Pernia Rolland Savonia Tarvia "
    "Umbaria"
)
PROFESSIONS = spaced(
    "painter singer lawyer doctor chemist farmer pilot poet teacher judge dancer sailor banker baker "
    "builder nurse historian soldier priest tailor weaver miller printer gardener hunter potter butcher "
    "surgeon jeweller barber cook diver juggler librarian clown locksmith brewer cobbler shepherd "
    "fisherman"
)
INSTRUMENTS = spaced(
    "piano violin flute harp guitar trumpet drum organ cello clarinet horn lute oboe banjo bassoon tuba fiddle"
)
PRODUCTS = spaced(
    "glass wool cheese salt paper silk clocks shoes bread tea iron wine soap tiles ships toys bells boats "
    "lamps carpets honey candles knives leather mirrors pottery rope sugar tents umbrellas wagons yarn "
    "bricks buttons coffee drums gloves hats jewels keys"
)
NICKNAMES = (
    spaced("Steel River Silver Golden Windy Green White Quiet Iron Sunny Stone Garden Harbor Bell Copper Rainy"),
    spaced("City Town Gate Crown Jewel Pearl Rose Star Castle Mountain"),
)
SEAS = tuple(
    f"the {name} Sea"
    for name in spaced("Black Cold North Amber Green Silent Southern Coral Whale Winter Long Misty Old Yellow")
)


@dataclass(frozen=True, slots=True)
class Entity:
    """A person, town, firm or river; `facts` maps a relation's key to the words that answer it."""

    kind: EntityKind
    name: str
    part: WorldPart
    facts: Mapping[str, str]


class World:
    """All entities of one seed; a fact of a part names entities of the same part only."""

    def __init__(self, seed: int = WORLD_SEED) -> None:
        self.seed = seed
        self._entities: dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]] = {}
        for part in PARTS:
            self._entities |= _make_part(Random(f"world {seed} {part}"), part)

    def entities(self, part: WorldPart, kind: EntityKind) -> tuple[Entity, ...]:
        """The entities of a part and kind, in a fixed order."""
        return self._entities[part, kind]

    def all_entities(self) -> list[Entity]:
        """Every entity, part by part."""
        return [entity for group in self._entities.values() for entity in group]


@cache
def the_world() -> World:
    """The world of the shipped encyclopaedia, web and questions."""
    return World(WORLD_SEED)


def _make_part(random: Random, part: WorldPart) -> dict[tuple[WorldPart, EntityKind], tuple[Entity, ...]]:
    towns, firms, rivers = (name_pool(kind, part) for kind in ("town", "firm", "river"))
    people = _people(random, part)
    return {
        (part, "person"): tuple(Entity("person", name, part, _person(random, name, people, towns)) for name in people),
        (part, "town"): tuple(Entity("town", name, part, _town(random, people, rivers)) for name in towns),
        (part, "firm"): tuple(Entity("firm", name, part, _firm(random, people, towns)) for name in firms),
        (part, "river"): tuple(Entity("river", name, part, _river(random, towns)) for name in rivers),
    }


def _people(random: Random, part: WorldPart) -> tuple[str, ...]:
    surnames = name_pool("person", part)
    names = [f"{first} {surname}" for first in FIRST_NAMES for surname in surnames]
    return tuple(random.sample(names, PEOPLE[part]))


def _person(random: Random, name: str, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    return {
        "birthplace": random.choice(towns),
        "profession": random.choice(PROFESSIONS),
        "birth_year": str(random.randint(1801, 1989)),
        "teacher": _stranger(random, name, people),
        "home": random.choice(towns),
        "instrument": random.choice(INSTRUMENTS),
    }


def _stranger(random: Random, name: str, people: tuple[str, ...]) -> str:
    """Somebody with another first name and another surname."""
    while True:
        other = random.choice(people)
        if not set(name.split()) & set(other.split()):
            return other


def _town(random: Random, people: tuple[str, ...], rivers: tuple[str, ...]) -> dict[str, str]:
    first, second = NICKNAMES
    return {
        "country": random.choice(COUNTRIES),
        "river": random.choice(rivers),
        "product": random.choice(PRODUCTS),
        "nickname": f"the {random.choice(first)} {random.choice(second)}",
        "mayor": random.choice(people),
        "founded": str(random.randint(1001, 1799)),
    }


def _firm(random: Random, people: tuple[str, ...], towns: tuple[str, ...]) -> dict[str, str]:
    return {
        "founder": random.choice(people),
        "head_office": random.choice(towns),
        "wares": random.choice(PRODUCTS),
        "opened": str(random.randint(1801, 1999)),
    }


def _river(random: Random, towns: tuple[str, ...]) -> dict[str, str]:
    return {
        "length": f"{random.randint(30, 989)} miles",
        "sea": random.choice(SEAS),
        "source": random.choice(towns),
    }


RELATIONS: dict[EntityKind, tuple[Relation, ...]] = {"person": PERSON, "town": TOWN, "firm": FIRM, "river": RIVER}


FACTS_PER_PASSAGE = 2


@dataclass(frozen=True, slots=True)
class ArticlePassage:
    """A section of an article; `id` is unique in its world, `text` is one line; a snippet has under 40 words."""

    id: str
    title: str
    section: str
    text: str

    @property
    def snippet(self) -> str:
        """The passage as a search returns it: `title > section > text`."""
        return f"{self.title} > {self.section} > {self.text}"


def passages(world: World) -> Iterator[ArticlePassage]:
    """All passages of all parts, in a fixed order."""
    for entity in world.all_entities():
        yield from dict.fromkeys(passages_by_relation(entity, world.seed).values())


def passages_by_relation(entity: Entity, seed: int) -> dict[str, ArticlePassage]:
    """For each relation's key the passage of the entity's article that holds that fact."""
    random = Random(f"passages {seed} {entity.name}")
    relations = random.sample(RELATIONS[entity.kind], len(RELATIONS[entity.kind]))
    found: dict[str, ArticlePassage] = {}
    for number, start in enumerate(range(0, len(relations), FACTS_PER_PASSAGE)):
        group = relations[start : start + FACTS_PER_PASSAGE]
        passage = _passage(random, entity, group, number)
        found |= {relation.key: passage for relation in group}
    return found


def _passage(random: Random, entity: Entity, group: list[Relation], number: int) -> ArticlePassage:
    section = " and ".join(relation.keyword for relation in group).capitalize()
    sentences = [random.choice(r.sentences).format(e=entity.name, v=entity.facts[r.key]) for r in group]
    random.shuffle(sentences)
    return ArticlePassage(f"{entity.name}/{number}".replace(" ", "_"), entity.name, section, " ".join(sentences))
