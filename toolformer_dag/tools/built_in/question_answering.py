"""Question answering: search passages, and let a reader answer from them (paper, section 3)."""

import threading
from collections.abc import Callable, Mapping, Sequence

from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.options import shown_url
from toolformer_dag.tools.passage_search import PassageSearch
from toolformer_dag.tools.passages import Passage, PassageError
from toolformer_dag.tools.readers import QuestionAnsweringOptions, Reader, load_reader
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult, unquote

READER_RULES = 4  # raise this when the reader without weights would answer a question in another way


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
                self._reader = load_reader(self.options)
        except (PassageError, ModelError) as error:
            raise ToolDown(f"[tools.{self.key}] {error}") from error

    def identity(self) -> Mapping[str, object]:
        retrieval = self.options.retrieval_identity() if self.options.passages_read else {}
        return {**determining(self.options, "reader", "passages_read"), **retrieval, **self._reader_identity()}

    def _reader_identity(self) -> Mapping[str, object]:
        if self.options.reader == "embedded":
            return {"rules": READER_RULES}
        if self.options.reader == "http":
            url = shown_url(str(self.options.url))
            return {**determining(self.options, "model", "max_answer_tokens"), "url": url}
        return {**self.options.weights_identity(), **determining(self.options, "max_input_tokens", "max_answer_tokens")}
