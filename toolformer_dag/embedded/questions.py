"""Questions about facts, numbers, dates and phrases of the evaluation part."""

import datetime
from dataclasses import dataclass
from random import Random

from toolformer_dag.embedded.phenomenon import phenomenon
from toolformer_dag.embedded.relation import WordingSet
from toolformer_dag.embedded.world import the_world


@dataclass(frozen=True, slots=True)
class Question:
    """A text to be continued; it is answered when `answer` comes within the first words."""

    prompt: str
    answer: str
    tool: str
    date: datetime.date | None
    wording: str


def questions(seed: int, tool: str, n: int, wordings: WordingSet) -> list[Question]:
    """`n` different questions of evaluation for one tool, half of them questions, half statements to be completed."""
    random, found = Random(f"questions {seed} {tool} {wordings}"), dict[Question, None]()
    while len(found) < n:
        one = phenomenon(random, the_world(), tool, "evaluation", wordings)
        found[Question(one.before, one.answer, one.tool, one.date, one.wording)] = None
    return list(found)
