"""Wikipedia search: the best passage by BM25, as `title > section > text` (paper, section 3).

wiki_search.txt is the prompt of appendix A.2, with a space restored in the Input of its second example ("Some
nanomaterials") that the paper lost at a line break.
"""

import threading
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.passage_index import IndexingProgress
from toolformer_dag.tools.passage_search import PassageSearch, RetrievalOptions
from toolformer_dag.tools.passages import snippet
from toolformer_dag.tools.rules import facts
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote


class WikiSearchOptions(RetrievalOptions):
    """Options of Wikipedia search; snippet_characters: the most characters of a result, cut at a word's end."""

    snippet_characters: int = Field(300, ge=1)


class WikiSearch(Tool):
    """Returns a snippet per call. Reasons: `no_search_terms`, `nothing_found`."""

    name = "WikiSearch"
    version = "2"
    description = "Searches Wikipedia and returns a passage."
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = WikiSearchOptions
    rule_looks_ahead = True
    options: WikiSearchOptions

    def __init__(self, key: str, options: WikiSearchOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self._search: PassageSearch | None = None  # opened by `prepare`
        self._opening = threading.Lock()  # held while it is opened

    def prepare(self, progress: IndexingProgress) -> None:
        """Build the index if it is missing and open it; does nothing the next time. Raises PassageError."""
        with self._opening:
            if self._search is None:
                self._search = self.options.open_search(progress)

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        return facts.propose_searches(text)

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": facts.VERSION}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Search for inputs. Raises PassageError when the passages cannot be read or indexed."""
        self.prepare(lambda done: None)
        return [self._answer_query(unquote(call.input)) for call in calls]

    def _answer_query(self, query: str) -> ToolResult:
        """Return the snippet of the best passage for a query; the index is open."""
        assert self._search is not None
        if not any(map(str.isalnum, query)):
            return ToolResult(None, "no_search_terms")
        results = self._search.search(query, limit=1)
        if not results:
            return ToolResult(None, "nothing_found")
        return ToolResult(snippet(results[0].passage, self.options.snippet_characters))

    def identity(self) -> Mapping[str, object]:
        return {**self.options.build_retrieval_identity(), **determining(self.options, "snippet_characters")}
