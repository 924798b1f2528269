"""The options that say where passages come from and where their index lies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ValidationInfo

from toolformer_dag.settings.values import under
from toolformer_dag.tools.options import OptionPath, ToolOptions
from toolformer_dag.tools.retrieval.identity import source_digest
from toolformer_dag.tools.retrieval.index import INDEX_VERSION, Progress, ensure_index
from toolformer_dag.tools.retrieval.search import PassageSearch
from toolformer_dag.tools.retrieval.source import EMBEDDED


def _under_root(source: str, info: ValidationInfo) -> str:
    root: Path = (info.context or {}).get("root", Path())
    return source if source == EMBEDDED else str(under(root, source))


class RetrievalOptions(ToolOptions):
    """Options of a tool that answers from passages.

    passages: `embedded`, or a file of JSON lines (KILT's knowledge source, or `id`, `title`, `section`, `text`).
    index_folder: where indexes lie; the default is `indexes` in the user's cache. It determines no result.
    """

    passages: Annotated[str, AfterValidator(_under_root)] = EMBEDDED
    index_folder: OptionPath | None = None

    def open_search(self, progress: Progress | None = None) -> PassageSearch:
        """The index, built first where it is missing. Raises PassageError."""
        return PassageSearch(ensure_index(self.passages, self.index_folder, progress))

    def retrieval_identity(self) -> Mapping[str, object]:
        """The content of the passages and the way they are searched; no path."""
        return {"retriever": "bm25", "passages": source_digest(self.passages), "index_version": INDEX_VERSION}
