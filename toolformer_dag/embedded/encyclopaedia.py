"""The made world's encyclopaedia: two or three short passages per entity, each with two facts in shuffled order."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from toolformer_dag.embedded.relation import Relation
from toolformer_dag.embedded.relations import RELATIONS
from toolformer_dag.embedded.world import Entity, World

FACTS_PER_PASSAGE = 2


@dataclass(frozen=True, slots=True)
class Passage:
    """A section of an article; `id` is unique in its world, `text` is one line; a snippet has under 40 words."""

    id: str
    title: str
    section: str
    text: str

    @property
    def snippet(self) -> str:
        """The passage as a search returns it: `title > section > text`."""
        return f"{self.title} > {self.section} > {self.text}"


def passages(world: World) -> Iterator[Passage]:
    """All passages of all parts, in a fixed order."""
    for entity in world.all_entities():
        yield from dict.fromkeys(passages_by_relation(entity, world.seed).values())


def passages_by_relation(entity: Entity, seed: int) -> dict[str, Passage]:
    """For each relation's key the passage of the entity's article that holds that fact."""
    random = Random(f"passages {seed} {entity.name}")
    relations = random.sample(RELATIONS[entity.kind], len(RELATIONS[entity.kind]))
    found: dict[str, Passage] = {}
    for number, start in enumerate(range(0, len(relations), FACTS_PER_PASSAGE)):
        group = relations[start : start + FACTS_PER_PASSAGE]
        passage = _passage(random, entity, group, number)
        found |= {relation.key: passage for relation in group}
    return found


def _passage(random: Random, entity: Entity, group: list[Relation], number: int) -> Passage:
    section = " and ".join(relation.keyword for relation in group).capitalize()
    sentences = [random.choice(r.sentences).format(e=entity.name, v=entity.facts[r.key]) for r in group]
    random.shuffle(sentences)
    return Passage(f"{entity.name}/{number}".replace(" ", "_"), entity.name, section, " ".join(sentences))
