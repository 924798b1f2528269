"""The reader without weights. Its figures on real questions: benchmarks/qa.py."""

from collections.abc import Callable, Sequence

from toolformer_dag.tools.question_answering.extraction.reader import extract
from toolformer_dag.tools.question_answering.reader import NO_ANSWER
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult


class EmbeddedReader:
    """Takes the span that question words, overlap and nearness point to."""

    def __init__(self, rarity: Callable[[str], float]) -> None:
        self._rarity = rarity

    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        found = [extract(text, own, self._rarity) for text, own in zip(questions, passages, strict=True)]
        return [ToolResult(answer.text) if answer else NO_ANSWER for answer in found]
