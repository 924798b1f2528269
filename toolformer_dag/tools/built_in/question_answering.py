"""Question answering: search passages, and let a reader answer from them (paper, section 3)."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.tools.model_readers import load_reader
from toolformer_dag.tools.options import mask_url
from toolformer_dag.tools.passage_index import IndexingProgress
from toolformer_dag.tools.passage_search import PassageSearch
from toolformer_dag.tools.passages import Passage
from toolformer_dag.tools.reader_options import QuestionAnsweringOptions, Reader
from toolformer_dag.tools.rules import questions
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote

READER_RULES_VERSION = 4
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
        self._passage_search: PassageSearch | None = None  # opened by `prepare`, unless no passages are read
        self._reader: Reader | None = None  # loaded by `prepare`
        self._lock = threading.Lock()  # held while these are loaded, and while a local model reads
        # Tokenizers are not thread-safe; requests to an endpoint may overlap.
        self._reader_lock = nullcontext() if options.reader == "http" else self._lock

    def at_inference(self) -> Tool:
        """Return the tool with the reader of `inference`."""
        if self.options.inference is None:
            return self
        return type(self)(self.key, self.options.at_inference(), self.prompt)

    def prepare(self, progress: IndexingProgress) -> None:
        """Open the search over passages, building a missing index, and load the reader. This is done only once.

        Args:
            progress: Called with the number of passages indexed so far.

        Raises:
            PassageError: The passages cannot be read, or the index cannot be written.
            ModelError: The model of the reader cannot be loaded.
            ToolDown: The key of an endpoint is missing.
        """
        with self._lock:
            if self.options.passages_read and self._passage_search is None:
                self._passage_search = self.options.open_passage_search(progress)
            if self._reader is None:
                self._reader = load_reader(self.options)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return questions.propose_questions(text)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": questions.VERSION}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Answer the question of each call: search passages for it, and let the reader answer from them.

        Returns:
            A result per call. An input without a letter or digit has the reason `no_question`.

        Raises:
            PassageError: The passages cannot be read or indexed.
            ModelError: The model of the reader cannot be loaded.
            Exception: Whatever the reader raises.
        """
        self.prepare(lambda done_count: None)  # without a report of progress

        results = [ToolResult(None, "no_question")] * len(calls)
        question_by_index = _map_index_to_question(calls)  # by the index of the call
        if not question_by_index:
            return results

        question_texts = list(question_by_index.values())
        answers = self._answer_questions(question_texts)
        for index, answer in zip(question_by_index, answers, strict=True):
            results[index] = answer
        return results

    def _answer_questions(self, question_texts: Sequence[str]) -> list[ToolResult]:
        """Return the reader's answer to each question, from the passages that the search finds for it."""
        assert self._reader is not None  # loaded by `prepare`
        passages_per_question = [self._search_passages(question) for question in question_texts]
        with self._reader_lock:
            return self._reader(question_texts, passages_per_question)

    def _search_passages(self, question: str) -> list[Passage]:
        """Return the best passages for a question, at most `passages_read`, or none if this option is 0."""
        if self._passage_search is None:
            return []
        scored_passages = self._passage_search.find_passages(question, self.options.passages_read)
        return [scored.passage for scored in scored_passages]

    def identity(self) -> Mapping[str, object]:
        """Return what determines the answers, for fingerprints: how passages are found, if any are, and the reader."""
        reads_passages = self.options.passages_read > 0
        retrieval_identity = self.options.build_retrieval_identity() if reads_passages else {}
        return {
            **select_determining_settings(self.options, "reader", "passages_read"),
            **retrieval_identity,
            **self._build_reader_identity(),
        }

    def _build_reader_identity(self) -> Mapping[str, object]:
        """Return what determines the reader's answers to the same questions and passages, for fingerprints.

        The reader is what writes the answers: rules ("embedded"), the model of an endpoint ("http"), or otherwise a
        model that runs on this machine.

        Raises:
            ModelError: The model is a folder that is not a model folder.
        """
        if self.options.reader == "embedded":
            return {"rules": READER_RULES_VERSION}

        if self.options.reader == "http":
            masked_url = mask_url(str(self.options.url))
            return {**select_determining_settings(self.options, "model", "max_answer_tokens"), "url": masked_url}

        return {
            **self.options.build_weights_identity(),
            **select_determining_settings(self.options, "max_input_tokens", "max_answer_tokens"),
        }


def _map_index_to_question(calls: Sequence[ToolCall]) -> dict[int, str]:
    """Return the questions of calls, by the indices of the calls.

    A call whose input has no letter or digit asks no question, and is left out.
    """
    question_by_index = {}
    for index, call in enumerate(calls):
        question = unquote(call.input)
        has_letter_or_digit = any(map(str.isalnum, question))
        if has_letter_or_digit:
            question_by_index[index] = question
    return question_by_index
