"""Deal out names to the three parts of the synthetic world, so that no part shares a name with another."""

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Literal, TypeVar

from toolformer_dag.synthetic.wordings import EntityKind, word_list

WorldPart = Literal["pretraining", "corpus", "evaluation"]
PARTS: tuple[WorldPart, ...] = ("pretraining", "corpus", "evaluation")
SHARES = (0.4, 0.35, 0.25)  # of every name space, in the order of PARTS

KINDS: tuple[EntityKind, ...] = ("person", "town", "firm", "river")

T = TypeVar("T")


def first_names() -> tuple[str, ...]:
    """Return the first names of people, the same in every part."""
    return word_list("names", "first_names")


@cache
def name_pool(kind: EntityKind, part: WorldPart) -> tuple[str, ...]:
    """Return the names of a part; for people, their surnames."""
    return tuple(deal(_name_space(kind), part))


def _name_space(kind: EntityKind) -> list[str]:
    onsets, endings = word_list("names", "onsets"), word_list("name_endings", kind)
    names = [onset + ending for onset in onsets for ending in endings if onset + ending not in first_names()]
    Random(f"names of every {kind}").shuffle(names)
    return names


def deal(items: Sequence[T], part: WorldPart) -> Sequence[T]:
    """Return the part's share of the items; the shares are consecutive slices, disjoint and together everything."""
    place = PARTS.index(part)
    start, stop = (round(sum(SHARES[:i]) * len(items)) for i in (place, place + 1))
    return items[start:stop]


def part_of_slot(slot: int, slots: int) -> WorldPart:
    """Return the part that owns `slot` of so many (0 to `slots` - 1), by SHARES."""
    borders = [round(sum(SHARES[: place + 1]) * slots) for place in range(len(PARTS))]
    return PARTS[sum(slot >= border for border in borders)]
