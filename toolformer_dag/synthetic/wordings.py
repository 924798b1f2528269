"""Read the wordings of the synthetic world from `templates/`: each file once, when it is first asked for."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

FOLDER = Path(__file__).resolve().parent / "templates"

WordingSet = Literal["seen", "unseen"]
EntityKind = Literal["person", "town", "firm", "river"]
Operation = Literal["+", "-", "*", "/", "%"]
PairOfNumbers = Literal["count", "money", "distance", "rate", "prices", "share", "percent"]
NumberAlone = Literal["half", "third", "quarter", "double", "triple"]
Numbers = PairOfNumbers | NumberAlone

STORIES: dict[Operation, str] = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}


@dataclass(frozen=True, slots=True)
class Templates:
    """Hold the sentences that state an answer, the questions that ask for it, and the words before each."""

    leads: tuple[str, ...]
    statements: tuple[str, ...]
    question_leads: tuple[str, ...]
    questions: tuple[str, ...]

    def choices(self, *, is_question: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the leads and the sentences that go with them."""
        return (self.question_leads, self.questions) if is_question else (self.leads, self.statements)


@dataclass(frozen=True, slots=True)
class Relation:
    """Describe a kind of fact; templates hold `{e}` for the entity, which comes first, and `{v}` for its value.

    `keyword` heads the encyclopaedia's sections and search terms, `sentences` are the encyclopaedia's own. `question`
    is the input of the QA tool when the text states the fact; a text that asks passes on its own words.
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


@dataclass(frozen=True, slots=True)
class Scheme:
    """Describe a story with a number to work out; any setup goes with any ending and any question.

    The call is `{a} operation {b}`; for + and * the operands come in the order in which the setup names them. The
    other slots are listed in `templates/addition.toml`.
    """

    operation: Operation
    name: str
    numbers: Numbers
    unit: str
    setups: tuple[str, ...]
    endings: tuple[str, ...]
    questions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """Describe a calculation in a single template, in the words of somebody who asks for its result.

    `questions` are whole, `statements` end before the result. The slots are those of a `Scheme`.
    """

    operation: Operation
    name: str
    numbers: Numbers
    unit: str
    questions: tuple[str, ...]
    statements: tuple[str, ...]


def word_list(table: str, name: str) -> tuple[str, ...]:
    """Return a list of `templates/words.toml`; raises KeyError for an unknown table or name."""
    found: tuple[str, ...] = _file("words")[table][name]
    return found


@cache
def relations(kind: EntityKind) -> tuple[Relation, ...]:
    """Return the kinds of facts about people, towns, firms or rivers, in the file's order."""
    return tuple(Relation(kind=kind, **row) for row in _file(kind)["relation"])


@cache
def schemes(wordings: WordingSet) -> tuple[tuple[Scheme, ...], ...]:
    """Return the schemes of each operation, in the order of STORIES."""
    return tuple(
        tuple(Scheme(operation=operation, **row) for row in _file(name)[wordings])
        for operation, name in STORIES.items()
    )


@cache
def sums() -> tuple[Sum, ...]:
    """Return the calculations in a single template, in the file's order; all are seen wordings."""
    return tuple(Sum(**row) for row in _file("sums")["seen"])


@cache
def date_templates(slot: str, wordings: WordingSet) -> Templates:
    """Return the sentences that lead to one form of today's date: `weekday`, `month`, `month_day`, `year`, `full`."""
    found = _file("calendar")[wordings]
    return Templates(leads=found["leads"], question_leads=found["question_leads"], **found[slot])


@cache
def translation_templates(wordings: WordingSet) -> Templates:
    """Return the sentences that quote a foreign phrase, `{f}`, and lead to its English."""
    return Templates(**_file("translation")[wordings])


def fact_templates(relation: Relation, tool: str, wordings: WordingSet) -> Templates:
    """Return the sentences about a relation, with the leads of `question_answering` or `wiki_search` pages."""
    statements, questions = relation.statements, relation.questions
    if wordings == "unseen":
        statements, questions = relation.unseen_statements, relation.unseen_questions
    return Templates(statements=statements, questions=questions, **_file("leads")[wordings][tool])


@cache
def _file(name: str) -> Mapping[str, Any]:
    with (FOLDER / f"{name}.toml").open("rb") as file:
        tables: Mapping[str, Any] = _frozen(tomllib.load(file))
    return tables


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, at any depth."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
