"""A relation of the made world and the wordings in which web pages state it or ask for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal, TypeVar

from toolformer_dag.synthetic.wordings.word_list import spaced

WorldPart = Literal["pretraining", "corpus", "evaluation"]
PARTS: tuple[WorldPart, ...] = ("pretraining", "corpus", "evaluation")
SHARES = (0.4, 0.35, 0.25)  # of every name space, in the order of PARTS

EntityKind = Literal["person", "town", "firm", "river"]
KINDS: tuple[EntityKind, ...] = ("person", "town", "firm", "river")

T = TypeVar("T")

FIRST_NAMES = spaced(
    "Ada Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mary Nora Oscar Paul Quinn Rose Sam "
    "Tom Una Victor Wendy Xavier Yara Zoe Alan Bella Carl Diana Ethan Fiona George Hanna Ivan Julia Karl "
    "Laura Martin Nina Otto Peter Rita Simon Tina Ulla Vera Walter Anna Bruno Celia Derek Elsa Frank Gina "
    "Hugo Irma Jonas Lena Max"
)
ONSETS = spaced(
    "Bar Cal Dor Ful Gar Hal Kel Lam Mor Nor Pel Ras Sel Tor Val Wes Bran Cor Dun Fen Gil Hor Kin Lor Mel "
    "Nev Os Per Rin Sta Tal Ulm Ves Wil Yar Zan Ash Bel Cran Del Ever Fal Gren Hart Ing Jor Kes Lin Mar "
    "Nun Orr Pas Quil Rom Sut Thal Und Vin Wal Zel"
)
_ENDINGS: dict[EntityKind, tuple[str, ...]] = {
    "person": spaced(
        "ing wick ander ello ovic mann sen ard ette ston well ker by win mer lock ley son sky ins ner hard tock"
    ),
    "town": spaced(
        "ton bury field ham port dale ville burg stead mouth minster wood gate bridge haven cester ford hurst"
    ),
    "firm": spaced("tech corp works soft line craft fon dex lux trade press motors"),
    "river": spaced("a en o is une ey"),
}


def _name_space(kind: EntityKind) -> list[str]:
    names = [onset + ending for onset in ONSETS for ending in _ENDINGS[kind] if onset + ending not in FIRST_NAMES]
    Random(f"names of every {kind}").shuffle(names)
    return names


@cache
def name_pool(kind: EntityKind, part: WorldPart) -> tuple[str, ...]:
    """The names of a part; for people these are surnames."""
    return tuple(deal(_name_space(kind), part))


def deal(items: Sequence[T], part: WorldPart) -> Sequence[T]:
    """The share of a part: consecutive slices, so the three shares are disjoint and together everything."""
    place = PARTS.index(part)
    start, stop = (round(sum(SHARES[:i]) * len(items)) for i in (place, place + 1))
    return items[start:stop]


WordingSet = Literal["seen", "unseen"]


@dataclass(frozen=True, slots=True)
class Relation:
    """Templates hold `{e}` for the entity and `{v}` for its value; `{e}` comes first.

    `keyword` heads the encyclopaedia's sections and search terms, `sentences` are the encyclopaedia's own, `question`
    is what is asked of the QA tool when the text states the fact; a text that asks is asked for in its own words.
    """

    kind: EntityKind
    key: str
    keyword: str
    question: str
    sentences: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    unseen_statements: tuple[str, ...]
    unseen_questions: tuple[str, ...]
