"""Question answering."""

from toolformer_dag.tools.question_answering.tool import QuestionAnswering

__all__ = ["QuestionAnswering"]
