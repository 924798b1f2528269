"""A set of questions with the rule by which they are judged. Imports no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from toolformer_dag.evaluation.question import Question

Rule = Callable[[str, Sequence[str]], bool]
"""What was written (calls taken out) and the right answers -> whether it is right."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`withheld`: tools, by name in the text, that may not be called because they would make it trivial.

    `left_out`: records of the source that made no question, by reason.
    """

    name: str
    questions: tuple[Question, ...]
    correct: Rule
    withheld: frozenset[str] = frozenset()
    left_out: Mapping[str, int] = field(default_factory=dict)
