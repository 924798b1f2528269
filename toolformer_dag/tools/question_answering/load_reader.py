"""Which reader the options name."""

from collections.abc import Callable

from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.question_answering.reader import Reader


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
