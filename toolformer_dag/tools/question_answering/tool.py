"""Question answering: retrieve passages, then read them (section 3; the paper's Atlas does the same).

prompt.txt is appendix A.2's.
"""

import threading
from collections.abc import Callable, Mapping, Sequence

from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.tools.question_answering.load_reader import load_reader
from toolformer_dag.tools.question_answering.options import QuestionAnsweringOptions
from toolformer_dag.tools.question_answering.reader import Reader
from toolformer_dag.tools.retrieval.passage import Passage
from toolformer_dag.tools.retrieval.search import PassageSearch
from toolformer_dag.tools.retrieval.source import PassageError
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult
from toolformer_dag.tools.unquote import unquote


class QuestionAnswering(Tool):
    """A short answer per call, or why there is none (`no_question`, `no_answer`)."""

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

    def answer(self, question: str) -> str | None:
        """One question alone."""
        return self.run([ToolCall(question)])[0].result

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Build the index if it is missing, and load the reader."""
        with self._in_use:
            self._load(progress)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Raises ToolDown when passages or reader cannot be loaded, RetryableError as the endpoint's reader does."""
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
        with self._in_use:  # tokenizers are not made for several threads
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
            return {}
        answers = {"max_answer_tokens": self.options.max_answer_tokens}
        if self.options.reader == "http":
            return {"model": self.options.model, "url": self.options.url, **answers}
        return {**self.options.weights_identity(), "max_input_tokens": self.options.max_input_tokens, **answers}
