"""Question answering: search passages, and let a reader answer from them (paper, section 3)."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.options import shown_url
from toolformer_dag.tools.passage_search import IndexingProgress, PassageSearch
from toolformer_dag.tools.readers import QuestionAnsweringOptions, Reader, load_reader
from toolformer_dag.tools.rules import questions
from toolformer_dag.tools.tool import Proposed, Tool, ToolCall, ToolDefaults, ToolResult, unquote

READER_RULES = 4  # raise this when the reader without weights would answer a question in another way


class QuestionAnswering(Tool):
    """Answers questions in a few words. Reasons: `no_question`, `no_answer`, and those of the reader."""

    name = "QA"
    version = "6"
    description = "Answers a question about a fact in a few words."
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = QuestionAnsweringOptions
    options: QuestionAnsweringOptions

    def __init__(self, key: str, options: QuestionAnsweringOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.batch_size = 1 if options.reader == "http" else Tool.batch_size
        self._search: PassageSearch | None = None
        self._reader: Reader | None = None
        self._in_use = threading.Lock()
        self._reading = nullcontext() if options.reader == "http" else self._in_use  # tokenizers are not thread-safe

    def at_inference(self) -> Tool:
        """Return the tool with the reader of `inference`."""
        if self.options.inference is None:
            return self
        return type(self)(self.key, self.options.at_inference(), self.prompt)

    def prepare(self, progress: IndexingProgress) -> None:
        """Build the index if it is missing, and load the reader."""
        with self._in_use:
            if self.options.passages_read:
                self._search = self._search or self.options.open_search(progress)
            self._reader = self._reader or load_reader(self.options)

    def propose(self, text: str, context: str) -> Iterable[Proposed]:
        return questions.propose_questions(text)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": questions.VERSION}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer questions. Raises PassageError and ModelError where these cannot be read, and the reader's errors."""
        self.prepare(lambda done: None)
        assert self._reader is not None
        texts = [unquote(call.input) for call in calls]
        asked = {n: text for n, text in enumerate(texts) if any(map(str.isalnum, text))}
        search, most = self._search, self.options.passages_read
        passages = [[passage for _, passage in search.search(one, most)] if search else [] for one in asked.values()]
        with self._reading:
            answers = self._reader(list(asked.values()), passages) if asked else []
        by_number = dict(zip(asked, answers, strict=True))
        return [by_number.get(n, ToolResult(None, "no_question")) for n in range(len(calls))]

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
