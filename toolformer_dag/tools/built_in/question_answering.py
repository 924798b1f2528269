"""Question answering: search passages, and let a reader answer from them (paper, section 3)."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from toolformer_dag.model.weights import ModelError
from toolformer_dag.tools.options import MAX_SECONDS, PretrainedName, PretrainedOptions, WebAddress, shown_url
from toolformer_dag.tools.passage_search import PassageSearch, RetrievalOptions
from toolformer_dag.tools.passages import Passage, PassageError
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult, unquote

ReaderName = Literal["seq2seq", "extractive", "http", "embedded"]
READER_RULES = 3  # raise this when the reader without weights would answer a question in another way


class InferenceReader(BaseModel):
    """The reader that answers a finetuned model; what is left out is as while C* is made, but for the revision."""

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
    request_timeout_s: float = Field(60.0, gt=0, le=MAX_SECONDS)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for reader in {self.reader, self.at_inference().reader}:
            if reader == "http" and not self.url:
                raise ValueError("reader = 'http' needs url, such as 'http://localhost:8000/v1'")
            if self.passages_read == 0 and reader not in ("seq2seq", "http"):
                raise ValueError(f"reader = {reader!r} answers from passages only: set passages_read to 1 or more")
        return self

    def at_inference(self) -> Self:
        """Return the options with which the tool answers a finetuned model."""
        if self.inference is None:
            return self
        chosen = self.inference.model_dump(exclude_none=True)
        revision = {} if self.inference.model is None else {"revision": self.inference.revision}
        return self.model_copy(update={"inference": None, **chosen, **revision})


NO_ANSWER = ToolResult(None, "no_answer")


class Reader(Protocol):
    def read(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[ToolResult]:
        """Answer each question from its passages, best passage first."""


def load_reader(options: QuestionAnsweringOptions, rarity: Callable[[str], float]) -> Reader:
    """Load the reader and its weights; `rarity` returns the weight of a word. Raises ModelError."""
    match options.reader:
        case "embedded":
            from toolformer_dag.tools.extraction import EmbeddedReader

            return EmbeddedReader(rarity)
        case "http":
            from toolformer_dag.tools.readers import HttpReader

            return HttpReader(options)
        case "extractive":
            from toolformer_dag.tools.readers import ExtractiveReader

            return ExtractiveReader(options)
        case "seq2seq":
            from toolformer_dag.tools.readers import Seq2SeqReader

            return Seq2SeqReader(options)


class QuestionAnswering(Tool):
    """Answers questions in a few words. Reasons: `no_question`, `no_answer`, and those of the reader."""

    name = "QA"
    version = "6"
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = QuestionAnsweringOptions
    options: QuestionAnsweringOptions

    def __init__(self, key: str, options: QuestionAnsweringOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.batch_size = 1 if options.reader == "http" else Tool.batch_size
        self._search: PassageSearch | None = None
        self._reader: Reader | None = None
        self._in_use = threading.Lock()

    def at_inference(self) -> Tool:
        """Return the tool with the reader of `inference`."""
        if self.options.inference is None:
            return self
        return type(self)(self.key, self.options.at_inference(), self.prompt)

    def answer(self, question: str) -> str | None:
        """Answer a single question; None without an answer."""
        return self.run([ToolCall(question)])[0].result

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Build the index if it is missing, and load the reader."""
        with self._in_use:
            self._load(progress)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer questions. Raises ToolDown when passages or reader cannot be loaded, and the reader's errors."""
        self.prepare(lambda done: None)
        questions = [unquote(call.input) for call in calls]
        asked = [n for n, question in enumerate(questions) if any(map(str.isalnum, question))]
        found = dict(zip(asked, self._read([questions[n] for n in asked]), strict=True))
        return [found.get(n, ToolResult(None, "no_question")) for n in range(len(calls))]

    def _read(self, questions: list[str]) -> list[ToolResult]:
        assert self._reader is not None
        if not questions:
            return []
        passages = [self._retrieved(question) for question in questions]
        if self.options.reader == "http":
            return self._reader.read(questions, passages)
        with self._in_use:  # tokenizers are not thread-safe
            return self._reader.read(questions, passages)

    def _retrieved(self, question: str) -> list[Passage]:
        hits = self._search.search(question, self.options.passages_read) if self._search else []
        return [hit.passage for hit in hits]

    def _load(self, progress: Callable[[int], None]) -> None:
        try:
            if self._search is None and self.options.passages_read:
                self._search = self.options.open_search(progress)
            if self._reader is None:
                self._reader = load_reader(self.options, self._search.rarity if self._search else lambda word: 0.0)
        except (PassageError, ModelError) as error:
            raise ToolDown(f"[tools.{self.key}] {error}") from error

    def identity(self) -> Mapping[str, object]:
        retrieval = self.options.retrieval_identity() if self.options.passages_read else {}
        common = {"reader": self.options.reader, "passages_read": self.options.passages_read}
        return {**common, **retrieval, **self._reader_identity()}

    def _reader_identity(self) -> Mapping[str, object]:
        if self.options.reader == "embedded":
            return {"rules": READER_RULES}
        answers = {"max_answer_tokens": self.options.max_answer_tokens}
        if self.options.reader == "http":
            return {"model": self.options.model, "url": shown_url(str(self.options.url)), **answers}
        return {**self.options.weights_identity(), "max_input_tokens": self.options.max_input_tokens, **answers}
