"""A relation of the made world and the wordings in which web pages state it or ask for it."""

from dataclasses import dataclass
from typing import Literal

from toolformer_dag.embedded.names import Kind

WordingSet = Literal["seen", "unseen"]


@dataclass(frozen=True, slots=True)
class Relation:
    """Templates hold `{e}` for the entity and `{v}` for its value; `{e}` comes first.

    `keyword` heads the encyclopaedia's sections and search terms, `sentences` are the encyclopaedia's own, `question`
    is what is asked of the QA tool when the text states the fact; a text that asks is asked for in its own words.
    """

    kind: Kind
    key: str
    keyword: str
    question: str
    sentences: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    unseen_statements: tuple[str, ...]
    unseen_questions: tuple[str, ...]
