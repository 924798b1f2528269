"""What a reader is, and which one the options name."""

from collections.abc import Callable, Sequence
from typing import Protocol

from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.tool import ToolResult

NO_ANSWER = ToolResult(None, "no_answer")


class Reader(Protocol):
    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """An answer or a reason for each question, from its passages, best first."""


def load_reader(options: QuestionAnsweringOptions, rarity: Callable[[str], float]) -> Reader:
    """The reader with its weights; `rarity`: what a word weighs. Raises ModelError."""
    match options.reader:
        case "embedded":
            from toolformer_dag.tools.question_answering.embedded import EmbeddedReader

            return EmbeddedReader(rarity)
        case "http":
            from toolformer_dag.tools.question_answering.http import HttpReader

            return HttpReader(options)
        case "extractive":
            from toolformer_dag.tools.question_answering.extractive import ExtractiveReader

            return ExtractiveReader(options)
        case "fid":
            from toolformer_dag.tools.question_answering.fid import FidReader

            return FidReader(options)
        case "seq2seq":
            from toolformer_dag.tools.question_answering.seq2seq import Seq2SeqReader

            return Seq2SeqReader(options)
