"""The options of question answering, and what a reader is."""

from collections.abc import Callable, Sequence
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from toolformer_dag.tools.options import MAX_TIMEOUT_SECONDS, PretrainedName, PretrainedOptions, WebAddress
from toolformer_dag.tools.passage_search import RetrievalOptions
from toolformer_dag.tools.passages import EMBEDDED_SOURCE, Passage
from toolformer_dag.tools.tool import ToolResult

ReaderName = Literal["seq2seq", "extractive", "http", "embedded"]


class InferenceReader(BaseModel):
    """The reader that answers a finetuned model, in evaluation and `generate`.

    What is left out is as while C*, the corpus with calls, is made. But if a model is named, its revision counts too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reader: ReaderName | None = None
    model: PretrainedName | None = None
    revision: str | None = None


class QuestionAnsweringOptions(RetrievalOptions, PretrainedOptions):
    """Options of question answering.

    - reader: `seq2seq` (Flan-T5 and similar), `extractive` (a model of AutoModelForQuestionAnswering), `http` (an
      OpenAI-compatible endpoint) or `embedded` (rules, no weights).
    - inference: the reader, model and revision that answer a finetuned model, in evaluation and `generate`, where they
      differ from those that answer while C* is made. C* does not depend on them.
    - passages_read: how many passages the reader gets; 0 only for `seq2seq` and `http`, which then use no passages.
    - max_input_tokens: the limit of an input, for `extractive` of a passage.
    - max_answer_tokens: the limit of an answer.
    - For `http` only: url, including `/v1`; api_key_variable, the environment variable with the key;
      request_timeout_s, the deadline of a whole answer. A URL with a user, a query or a key in its path is recorded by
      its hash.
    """

    reader: ReaderName = "seq2seq"
    inference: InferenceReader | None = None
    model: PretrainedName = "google/flan-t5-base"
    passages_read: int = Field(5, ge=0)
    max_input_tokens: int = Field(512, ge=16)
    max_answer_tokens: int = Field(32, ge=1)
    url: WebAddress | None = None
    api_key_variable: str | None = None
    request_timeout_s: float = Field(60.0, gt=0, le=MAX_TIMEOUT_SECONDS)

    @model_validator(mode="after")
    def _require_consistent_options(self) -> Self:
        """Check that each reader gets what it needs: an endpoint its URL, and others the right passages.

        Raises:
            ValueError: A reader does not.
        """
        for reader in {self.reader, self.at_inference().reader}:
            if reader == "http" and not self.url:
                raise ValueError("reader = 'http' needs url, such as 'http://localhost:8000/v1'")
            if self.passages_read == 0 and reader not in ("seq2seq", "http"):
                raise ValueError(f"reader = {reader!r} answers from passages only: set passages_read to 1 or more")
            if reader == "embedded" and self.passages != EMBEDDED_SOURCE:
                raise ValueError("reader = 'embedded' reads only passages = 'embedded'; choose another reader")
        return self

    def at_inference(self) -> Self:
        """Return the options with which the tool answers a finetuned model: these, changed by those of `inference`.

        Where `inference` names a model, its revision replaces that of these options, even if it is None.
        """
        if self.inference is None:
            return self

        changed_options = self.inference.model_dump(exclude_none=True)
        if self.inference.model is not None:
            changed_options["revision"] = self.inference.revision

        return self.model_copy(update={"inference": None, **changed_options})


Reader = Callable[[Sequence[str], Sequence[Sequence[Passage]]], list[ToolResult]]
"""(questions, passages of each question, the best first) -> an answer per question."""


def format_reader_input(question: str, passages: Sequence[Passage]) -> str:
    """Write a question and the passages that may answer it as one text for a model.

    The question comes first: where the text is truncated, the last passages are lost.
    """
    if not passages:
        return f"Answer the question in a few words.\nQuestion: {question}"

    passage_lines = "\n".join(f"{passage.title}: {passage.text}" for passage in passages)
    return f"Answer the question in a few words, from the passages.\nQuestion: {question}\nPassages:\n{passage_lines}"
