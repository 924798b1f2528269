"""Wikipedia search: BM25 over passages, answered with the best one as `title > section > text` (section 3).

prompt.txt is appendix A.2's; in its second example the Input has a space restored ("Some nanomaterials"), which the
paper's line break swallowed.
"""

import threading
from collections.abc import Mapping, Sequence

from pydantic import Field

from toolformer_dag.tools.passage_search import IndexingProgress, PassageSearch, RetrievalOptions
from toolformer_dag.tools.passages import PassageError, snippet
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult, unquote


class WikiSearchOptions(RetrievalOptions):
    """snippet_characters: where the result is cut, at the end of a word."""

    snippet_characters: int = Field(300, ge=1)


class WikiSearch(Tool):
    """One snippet per call; a search without words (`no_search_terms`) or hits (`nothing_found`) has no result."""

    name = "WikiSearch"
    version = "2"
    defaults = ToolDefaults(tau_s=0.05, k=5, m=5, tau_f=1.0)
    Options = WikiSearchOptions
    options: WikiSearchOptions

    def __init__(self, key: str, options: WikiSearchOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self._search: PassageSearch | None = None
        self._opening = threading.Lock()

    def prepare(self, progress: IndexingProgress) -> None:
        """Build the index if it is missing and open it."""
        with self._opening:
            if self._search is None:
                try:
                    self._search = self.options.open_search(progress)
                except PassageError as error:
                    raise ToolDown(f"[tools.{self.key}] {error}") from error

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Raises ToolDown when the passages cannot be read or indexed."""
        self.prepare(lambda done: None)
        return [self._result(unquote(call.input)) for call in calls]

    def _result(self, query: str) -> ToolResult:
        assert self._search is not None
        if not any(character.isalnum() for character in query):
            return ToolResult(None, "no_search_terms")
        hits = self._search.search(query, 1)
        if not hits:
            return ToolResult(None, "nothing_found")
        return ToolResult(snippet(hits[0].passage, self.options.snippet_characters))

    def identity(self) -> Mapping[str, object]:
        return {**self.options.retrieval_identity(), "snippet_characters": self.options.snippet_characters}
