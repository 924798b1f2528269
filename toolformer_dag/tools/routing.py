"""Which of many tools a text is for: the few whose descriptions it fits best, by BM25."""

from collections.abc import Mapping, Sequence

import tantivy

from toolformer_dag.texts.arguments import argument_names
from toolformer_dag.tools.passage_search import analyzer, query_terms
from toolformer_dag.tools.tool import Tool

HEAP_BYTES = 15_000_000
"""The least that tantivy takes."""


def told(tool: Tool) -> str:
    """Return what texts are compared with: the names, the description, the arguments and the examples of a tool."""
    properties = (tool.schema or {}).get("properties", {})
    arguments = [str(one.get("description", "")) for one in properties.values() if isinstance(one, Mapping)]
    words = [tool.key.replace("_", " "), tool.about, *argument_names(tool.schema or {}), *arguments]
    return "\n".join([*words, tool.prompt.partition("Input:")[2]])


class Router:
    """Ranks tools by a text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        builder = tantivy.SchemaBuilder()
        builder.add_text_field("told", tokenizer_name="words")
        builder.add_unsigned_field("number", stored=True)
        self._keys = [tool.key for tool in tools]
        self._schema = builder.build()
        self._index = tantivy.Index(self._schema)
        self._index.register_tokenizer("words", analyzer())
        writer = self._index.writer(HEAP_BYTES, 1)
        for number, tool in enumerate(tools):
            document = tantivy.Document()
            document.add_text("told", told(tool))
            document.add_unsigned("number", number)
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        self._index.reload()
        self._searcher = self._index.searcher()

    def top(self, text: str, most: int) -> dict[str, float]:
        """Return the scores of at most `most` tools that share words with the text, the best first, by key."""
        terms = [tantivy.Query.term_query(self._schema, "told", term, "freq") for term in query_terms(text)]
        query = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        hits = self._searcher.search(query, len(self._keys)).hits if terms else []
        found = [(self._keys[self._searcher.doc(at)["number"][0]], float(score)) for score, at in hits]
        return dict(sorted(found, key=lambda one: (-one[1], one[0]))[:most])
