"""Wikipedia search."""

from toolformer_dag.tools.wiki_search.tool import WikiSearch

__all__ = ["WikiSearch"]
