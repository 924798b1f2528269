"""Read the wordings of the synthetic world from `templates/`, and deal out its names to its three parts.

Each file is read once, when it is first asked for. No part shares a name with another.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar

FOLDER = Path(__file__).resolve().parent / "templates"

WordingSet = Literal["seen", "unseen"]
EntityKind = Literal["person", "town", "firm", "river"]
Operation = Literal["+", "-", "*", "/", "%"]
Numbers = Literal[
    "count", "money", "distance", "rate", "prices", "share", "percent", "half", "third", "quarter", "double", "triple"
]
"""The kinds of pairs of numbers; from `half` on, a number alone."""

STORIES: dict[Operation, str] = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}
"""The operations that stories are about, and the files of their templates."""


@dataclass(frozen=True, slots=True)
class Templates:
    """The sentences that state an answer, the questions that ask for it, and the words before each."""

    leads: Sequence[str]
    statements: Sequence[str]
    question_leads: Sequence[str]
    questions: Sequence[str]

    def choices(self, *, is_question: bool) -> tuple[Sequence[str], Sequence[str]]:
        """Return the leads and the sentences that go with them."""
        if is_question:
            return self.question_leads, self.questions
        return self.leads, self.statements


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact; templates hold `{e}` for the entity, which comes first, and `{v}` for its value."""

    kind: EntityKind
    key: str
    keyword: str  # in headings of the encyclopaedia and in searches
    question: str  # the input of question answering if the text states the fact
    sentences: Sequence[str]  # of the encyclopaedia
    statements: Sequence[str]
    questions: Sequence[str]
    unseen_statements: Sequence[str]
    unseen_questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A story with a number to work out, or without `setups` a calculation in a single template.

    Any setup goes with any ending, which ends before the result, and any question. The call is `{a} operation {b}`; for
    + and * the operands come in the order in which the setup names them.
    """

    operation: Operation
    name: str
    numbers: Numbers
    unit: str
    endings: Sequence[str]
    questions: Sequence[str]
    setups: Sequence[str] = ()


@cache
def get_word_list(table: str, name: str) -> tuple[str, ...]:
    """Return a list of `templates/words.toml`; raises KeyError for an unknown table or name."""
    return tuple(_read_templates("words")[table][name])


def pick(random: Random, table: str, name: str) -> str:
    """Draw from a list of `templates/words.toml`."""
    return random.choice(get_word_list(table, name))


@cache
def get_relations(kind: EntityKind) -> tuple[Relation, ...]:
    """Return the kinds of facts about people, towns, firms or rivers, in the file's order."""
    return tuple(Relation(kind=kind, **row) for row in _read_templates(kind)["relation"])


@cache
def get_schemes(wordings: WordingSet) -> tuple[tuple[Scheme, ...], ...]:
    """Return the schemes of each operation, in the order of STORIES."""
    schemes_by_operation = []
    for operation, name in STORIES.items():
        rows = _read_templates(name)[wordings]
        schemes_by_operation.append(tuple(Scheme(operation=operation, **row) for row in rows))
    return tuple(schemes_by_operation)


@cache
def sums() -> tuple[Scheme, ...]:
    """Return the calculations in a single template, in the file's order; all are seen wordings."""
    return tuple(Scheme(**row) for row in _read_templates("sums")["seen"])


@cache
def get_date_templates(slot: str, wordings: WordingSet) -> Templates:
    """Return the sentences that lead to one form of today's date: `weekday`, `month`, `month_day`, `year`, `full`."""
    of_set = _read_templates("calendar")[wordings]
    return Templates(leads=of_set["leads"], question_leads=of_set["question_leads"], **of_set[slot])


@cache
def get_translation_templates(wordings: WordingSet) -> Templates:
    """Return the sentences that quote a foreign phrase, `{f}`, and lead to its English."""
    return Templates(**_read_templates("translation")[wordings])


@cache
def get_chain_templates(table: str, wordings: WordingSet) -> Mapping[str, Sequence[str]]:
    """Return the wordings of chains, by relation: `described` entities, `years` between, `two_numbers`."""
    templates: Mapping[str, Sequence[str]] = _read_templates("two_hop")[wordings][table]
    return templates


@cache
def get_named_templates(tool: str, wordings: WordingSet) -> Templates:
    """Return the sentences of a tool with named arguments, `distance` or `price`."""
    return Templates(**_read_templates("named_tools")[wordings][tool])


def get_fact_templates(relation: Relation, tool: str, wordings: WordingSet) -> Templates:
    """Return the templates that state a relation, such as a birthplace, or ask for it, with their leads.

    Leads are the words before a sentence; they depend on the tool, "question_answering" or "wiki_search".
    """
    is_unseen = wordings == "unseen"
    leads = _read_templates("leads")[wordings][tool]
    return Templates(
        leads=leads["leads"],
        statements=relation.unseen_statements if is_unseen else relation.statements,
        question_leads=leads["question_leads"],
        questions=relation.unseen_questions if is_unseen else relation.questions,
    )


@cache
def _read_templates(name: str) -> Mapping[str, Any]:
    """Return the content of `templates/NAME.toml`."""
    with (FOLDER / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


WorldPart = Literal["pretraining", "corpus", "evaluation"]
PARTS: tuple[WorldPart, ...] = ("pretraining", "corpus", "evaluation")
SHARES = (0.4, 0.35, 0.25)  # of every name space, in the order of PARTS

KINDS: tuple[EntityKind, ...] = ("person", "town", "firm", "river")

T = TypeVar("T")


@cache
def get_name_pool(kind: EntityKind, part: WorldPart) -> tuple[str, ...]:
    """Return the names that people (surnames), towns, firms or rivers may have in a part of the world.

    Names are combinations of a beginning and an ending, such as `Stav` and `ern`; each is in one part alone.
    """
    first_names = get_word_list("names", "first_names")
    names = []
    for onset in get_word_list("names", "onsets"):
        for ending in get_word_list("name_endings", kind):
            name = onset + ending
            if name not in first_names:  # it would look like a person's
                names.append(name)
    Random(f"names of every {kind}").shuffle(names)
    return tuple(deal(names, part))


def deal(items: Sequence[T], part: WorldPart) -> Sequence[T]:
    """Return the part's share of the items; the shares of all parts are consecutive slices of the items."""
    number = PARTS.index(part)
    start = round(sum(SHARES[:number]) * len(items))
    stop = round(sum(SHARES[: number + 1]) * len(items))
    return items[start:stop]


def get_part_of_slot(slot: int, slots: int) -> WorldPart:
    """Return the part of the world that a slot, from 0 to `slots` - 1, belongs to; each part has its share."""
    all_slots = range(slots)
    for part in PARTS:
        if slot in deal(all_slots, part):
            return part
    raise ValueError(f"{slot} is no slot below {slots}")
