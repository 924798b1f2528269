"""Wikipedia search: the best passage by BM25, as `title > section > text` (paper, section 3).

wiki_search.txt is the prompt of appendix A.2, with a space restored in the Input of its second example ("Some
nanomaterials") that the paper lost at a line break.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.tools.passage_index import IndexingProgress
from toolformer_dag.tools.passage_search import PassageSearch, RetrievalOptions
from toolformer_dag.tools.passages import format_snippet
from toolformer_dag.tools.rules import facts
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote


class WikiSearchOptions(RetrievalOptions):
    """Options of Wikipedia search; snippet_characters: the most characters of a result, cut at a word's end."""

    snippet_characters: int = Field(300, ge=1)


class WikiSearch(Tool):
    """Searches an encyclopedia and returns a snippet of a passage. Reasons: `no_search_terms`, `nothing_found`."""

    name = "WikiSearch"
    version = "2"
    description = "Searches Wikipedia and returns a passage."
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = WikiSearchOptions
    rule_looks_ahead = True
    options: WikiSearchOptions

    def __init__(self, key: str, options: WikiSearchOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self._passage_search: PassageSearch | None = None  # opened by `prepare`
        self._opening_lock = threading.Lock()  # held while it is opened

    def prepare(self, progress: IndexingProgress) -> None:
        """Open the search over passages, and build its index first if it is missing. This is done only once.

        Args:
            progress: Called with the number of passages indexed so far.

        Raises:
            PassageError: The passages cannot be read, or the index cannot be written.
        """
        with self._opening_lock:
            if self._passage_search is None:
                self._passage_search = self.options.open_passage_search(progress)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return facts.propose_searches(text)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": facts.VERSION}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Search for the input of each call.

        Returns:
            A snippet of the best passage per call, or the reason why there is none.

        Raises:
            PassageError: The passages cannot be read or indexed.
        """
        self.prepare(lambda done_count: None)  # without a report of progress
        return [self._answer_query(unquote(call.input)) for call in calls]

    def _answer_query(self, query: str) -> ToolResult:
        """Return a snippet of the best passage for a query, or the reason why there is none.

        The reason is `no_search_terms` for a query without a letter or digit, and otherwise `nothing_found`.
        """
        assert self._passage_search is not None  # opened by `prepare`

        has_search_terms = any(map(str.isalnum, query))
        if not has_search_terms:
            return ToolResult(None, "no_search_terms")

        results = self._passage_search.find_passages(query, max_passages=1)
        if not results:
            return ToolResult(None, "nothing_found")

        best_passage = results[0].passage
        return ToolResult(format_snippet(best_passage, self.options.snippet_characters))

    def identity(self) -> Mapping[str, object]:
        return {
            **self.options.build_retrieval_identity(),
            **select_determining_settings(self.options, "snippet_characters"),
        }
