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

TEMPLATE_FOLDER = Path(__file__).resolve().parent / "templates"

WordingSet = Literal["seen", "unseen"]
EntityKind = Literal["person", "town", "firm", "river"]
Operation = Literal["+", "-", "*", "/", "%"]
NumberKind = Literal[
    "count", "money", "distance", "rate", "prices", "share", "percent", "half", "third", "quarter", "double", "triple"
]
"""The kinds of pairs of numbers. From `half` on, the text has only one number, and a word stands for the other."""

TEMPLATE_FILE_BY_OPERATION: dict[Operation, str] = {
    "+": "addition",
    "-": "subtraction",
    "*": "multiplication",
    "/": "division",
}
"""The operations that stories are about, and the files of their templates."""


@dataclass(frozen=True, slots=True)
class Templates:
    """Sentences with slots that lead to an answer, and the words that may stand before them.

    Attributes:
        leads: The words before a statement.
        statements: The sentences that state the answer.
        question_leads: The words before a question.
        questions: The sentences that ask for the answer.
    """

    leads: Sequence[str]
    statements: Sequence[str]
    question_leads: Sequence[str]
    questions: Sequence[str]

    def get_leads_and_sentences(self, *, is_question: bool) -> tuple[Sequence[str], Sequence[str]]:
        """Return the questions, or the statements, after the leads that go with them."""
        if is_question:
            return self.question_leads, self.questions
        return self.leads, self.statements


@dataclass(frozen=True, slots=True)
class Relation:
    """A kind of fact, such as the birthplace of a person.

    Its templates have the slot `{e}` for the entity, which comes first, and `{v}` for the value of the fact.

    Attributes:
        kind: The kind of entity that has such a fact.
        key: The name of the relation, such as "birthplace".
        keyword: Its name in headings of the encyclopedia and in searches.
        question: The input of question answering if a text states the fact.
        sentences: The templates of the encyclopedia.
        statements: The templates of statements with "seen" wordings.
        questions: The templates of questions with "seen" wordings.
        unseen_statements: The templates of statements with "unseen" wordings.
        unseen_questions: The templates of questions with "unseen" wordings.
    """

    kind: EntityKind
    key: str
    keyword: str
    question: str
    sentences: Sequence[str]
    statements: Sequence[str]
    questions: Sequence[str]
    unseen_statements: Sequence[str]
    unseen_questions: Sequence[str]


@dataclass(frozen=True, slots=True)
class Scheme:
    """The templates of one kind of story with a number to work out, or of one kind of bare sum.

    Any setup goes with any question and with any ending. The templates name the two operands in the slots `{a}`
    and `{b}`.

    Attributes:
        operation: The operation of the calculator between the operands.
        name: The name of the scheme.
        numbers: What the operands are about.
        unit: What may follow the result, such as apples. It may be empty.
        endings: Sentences, or the ends of the setup's sentence, up to the result.
        questions: Questions for the result.
        setups: The beginnings of stories. Empty for a bare sum, which is a single sentence.
    """

    operation: Operation
    name: str
    numbers: NumberKind
    unit: str
    endings: Sequence[str]
    questions: Sequence[str]
    setups: Sequence[str] = ()


@cache
def get_word_list(table: str, list_name: str) -> tuple[str, ...]:
    """Return a list of words or phrases from `templates/words.toml`.

    Raises:
        KeyError: The file has no such table, or the table no such list.
    """
    return tuple(_read_template_file("words")[table][list_name])


def draw_word(random: Random, table: str, list_name: str) -> str:
    """Draw a word or phrase from a list of `templates/words.toml` (see `get_word_list`)."""
    return random.choice(get_word_list(table, list_name))


@cache
def get_relations(kind: EntityKind) -> tuple[Relation, ...]:
    """Return the kinds of facts about people, towns, firms or rivers, in the file's order."""
    return tuple(Relation(kind=kind, **row) for row in _read_template_file(kind)["relation"])


@cache
def get_story_schemes(wording_set: WordingSet) -> tuple[tuple[Scheme, ...], ...]:
    """Return the schemes of the stories, which are the templates of word problems, in a group for each operation.

    The operations are in the order of TEMPLATE_FILE_BY_OPERATION.
    """
    schemes_by_operation = []
    for operation, file_stem in TEMPLATE_FILE_BY_OPERATION.items():
        rows = _read_template_file(file_stem)[wording_set]
        schemes_by_operation.append(tuple(Scheme(operation=operation, **row) for row in rows))
    return tuple(schemes_by_operation)


@cache
def get_sum_schemes() -> tuple[Scheme, ...]:
    """Return the schemes of the bare sums, in the file's order. They only have "seen" wordings."""
    return tuple(Scheme(**row) for row in _read_template_file("sums")["seen"])


@cache
def get_date_templates(date_part: str, wording_set: WordingSet) -> Templates:
    """Return the sentences that lead to one part of today's date.

    Args:
        date_part: "weekday", "month", "month_day", "year" or "full".
        wording_set: "seen" or "unseen" templates.
    """
    tables = _read_template_file("calendar")[wording_set]
    return Templates(leads=tables["leads"], question_leads=tables["question_leads"], **tables[date_part])


@cache
def get_translation_templates(wording_set: WordingSet) -> Templates:
    """Return the sentences that quote a foreign phrase, in the slot `{f}`, and lead to its English."""
    return Templates(**_read_template_file("translation")[wording_set])


@cache
def get_chain_templates(table: str, wording_set: WordingSet) -> Mapping[str, Sequence[str]]:
    """Return the templates of texts that take several calls, by relation.

    Args:
        table: "described" for descriptions of entities, such as "the town where {e} was born". "years" and
            "two_numbers" for calculations, whose keys also tell questions from statements ("founded_questions").
        wording_set: "seen" or "unseen" templates.
    """
    templates: Mapping[str, Sequence[str]] = _read_template_file("two_hop")[wording_set][table]
    return templates


@cache
def get_named_tool_templates(tool_key: str, wording_set: WordingSet) -> Templates:
    """Return the sentences about a tool with named arguments, "distance" or "price"."""
    return Templates(**_read_template_file("named_tools")[wording_set][tool_key])


def get_fact_templates(relation: Relation, tool_key: str, wording_set: WordingSet) -> Templates:
    """Return the templates that state a fact, such as a birthplace, or ask for it, with their leads.

    Args:
        relation: The relation of the fact.
        tool_key: "question_answering" or "wiki_search". The leads, the words before a sentence, depend on it.
        wording_set: "seen" or "unseen" templates.
    """
    if wording_set == "unseen":
        statements = relation.unseen_statements
        questions = relation.unseen_questions
    else:
        statements = relation.statements
        questions = relation.questions

    leads_by_kind = _read_template_file("leads")[wording_set][tool_key]
    return Templates(
        leads=leads_by_kind["leads"],
        statements=statements,
        question_leads=leads_by_kind["question_leads"],
        questions=questions,
    )


@cache
def _read_template_file(file_stem: str) -> Mapping[str, Any]:
    """Return the content of a file in `templates/`. `file_stem` is its name without ".toml"."""
    with (TEMPLATE_FOLDER / f"{file_stem}.toml").open("rb") as file:
        return tomllib.load(file)


WorldPart = Literal["pretraining", "corpus", "evaluation"]
WORLD_PARTS: tuple[WorldPart, ...] = ("pretraining", "corpus", "evaluation")
PART_SHARES = (0.4, 0.35, 0.25)  # of all names, words and numbers, in the order of WORLD_PARTS

ENTITY_KINDS: tuple[EntityKind, ...] = ("person", "town", "firm", "river")

T = TypeVar("T")


@cache
def get_name_pool(kind: EntityKind, part: WorldPart) -> tuple[str, ...]:
    """Return the names that entities of a kind may have in a part of the world. For people, these are surnames.

    A name is a combination of a beginning and an ending, such as "Stav" and "ern". Each name is in one part only.
    """
    first_names = get_word_list("names", "first_names")
    names = []
    for beginning in get_word_list("names", "onsets"):
        for ending in get_word_list("name_endings", kind):
            name = beginning + ending
            # The first name of a person would be ambiguous.
            if name not in first_names:
                names.append(name)

    Random(f"names of every {kind}").shuffle(names)
    return tuple(select_share_of_part(names, part))


def select_share_of_part(items: Sequence[T], part: WorldPart) -> Sequence[T]:
    """Return the items that belong to a part of the world.

    The parts divide the items into consecutive slices, whose lengths follow PART_SHARES.
    """
    part_index = WORLD_PARTS.index(part)
    start = round(sum(PART_SHARES[:part_index]) * len(items))
    stop = round(sum(PART_SHARES[: part_index + 1]) * len(items))
    return items[start:stop]


def get_part_of_slot(slot: int, slot_count: int) -> WorldPart:
    """Return the part of the world that a slot belongs to.

    Things that cannot be listed, such as pairs of numbers, are hashed into numbered slots. Each part of the
    world has its share of the slots.

    Args:
        slot: The number of the slot, from 0 to `slot_count` - 1.
        slot_count: How many slots there are.

    Raises:
        ValueError: There is no such slot.
    """
    all_slots = range(slot_count)
    for part in WORLD_PARTS:
        if slot in select_share_of_part(all_slots, part):
            return part
    raise ValueError(f"{slot} is no slot below {slot_count}")
