"""What a reader is."""

from collections.abc import Sequence
from typing import Protocol

from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult

NO_ANSWER = ToolResult(None, "no_answer")


class Reader(Protocol):
    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """An answer or a reason for each question, from its passages, best first."""
