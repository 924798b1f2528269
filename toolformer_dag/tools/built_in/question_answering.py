"""Question answering: search passages, and let a reader answer from them (paper, section 3)."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.model_readers import load_reader
from toolformer_dag.tools.options import mask_url
from toolformer_dag.tools.passage_index import IndexingProgress
from toolformer_dag.tools.passage_search import PassageSearch
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, Reader
from toolformer_dag.tools.rules import questions
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote

READER_RULES = 4
"""Raise this when the reader without weights would answer a question in another way."""


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
        self._search: PassageSearch | None = None  # opened by `prepare`, unless no passages are read
        self._reader: Reader | None = None  # loaded by `prepare`
        self._in_use = threading.Lock()  # held while these are loaded, and while a local model reads
        # Tokenizers are not thread-safe; requests to an endpoint may overlap.
        self._reading = nullcontext() if options.reader == "http" else self._in_use

    def at_inference(self) -> Tool:
        """Return the tool with the reader of `inference`."""
        if self.options.inference is None:
            return self
        return type(self)(self.key, self.options.at_inference(), self.prompt)

    def prepare(self, progress: IndexingProgress) -> None:
        """Open the search over passages, building a missing index, and load the reader; do nothing the next time.

        Raises PassageError and ModelError where passages or model cannot be read.
        """
        with self._in_use:
            if self.options.passages_read and self._search is None:
                self._search = self.options.open_search(progress)
            if self._reader is None:
                self._reader = load_reader(self.options)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return questions.propose_questions(text)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": questions.VERSION}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer the question of each call; search passages for it, and let the reader answer from them.

        An input without a letter or digit has the reason `no_question`. Raises PassageError and ModelError where
        passages or model cannot be read, and what the reader raises.
        """
        self.prepare(lambda done: None)  # without a report of progress
        results = [ToolResult(None, "no_question")] * len(calls)
        question_by_index = _map_index_to_question(calls)  # index of a call -> its question
        if question_by_index:
            answers = self._answer_questions(list(question_by_index.values()))
            for index, answer in zip(question_by_index, answers, strict=True):
                results[index] = answer
        return results

    def _answer_questions(self, question_texts: Sequence[str]) -> list[ToolResult]:
        """Return the reader's answer to each question, from the passages that the search finds for it."""
        assert self._reader is not None
        passages = [self._search_passages(question) for question in question_texts]
        with self._reading:
            return self._reader(question_texts, passages)

    def _search_passages(self, question: str) -> list[Passage]:
        """Return the best passages for a question; none where `passages_read` is 0."""
        if self._search is None:
            return []
        return [hit.passage for hit in self._search.search(question, self.options.passages_read)]

    def identity(self) -> Mapping[str, object]:
        """Return what determines answers: how passages are found, where any are read, and the reader."""
        retrieval = self.options.build_retrieval_identity() if self.options.passages_read else {}
        return {**determining(self.options, "reader", "passages_read"), **retrieval, **self._build_reader_identity()}

    def _build_reader_identity(self) -> Mapping[str, object]:
        """Return what determines the answers of the reader to the same questions and passages."""
        if self.options.reader == "embedded":
            return {"rules": READER_RULES}
        if self.options.reader == "http":
            url = mask_url(str(self.options.url))
            return {**determining(self.options, "model", "max_answer_tokens"), "url": url}
        return {
            **self.options.build_weights_identity(),
            **determining(self.options, "max_input_tokens", "max_answer_tokens"),
        }


def _map_index_to_question(calls: Sequence[ToolCall]) -> dict[int, str]:
    """Return the questions of calls by the call's index; an input without a letter or digit is no question."""
    question_by_index = {}
    for index, call in enumerate(calls):
        question = unquote(call.input)
        if any(map(str.isalnum, question)):
            question_by_index[index] = question
    return question_by_index
