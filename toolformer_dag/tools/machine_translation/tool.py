"""Machine translation, always into English (section 3): NLLB with fastText naming the source language.

prompt.txt is appendix A.2's with one change: in its last example the paper's Output leaves out the Chinese phrase that
the Input begins with; it stands before the call here, so that taking the call out gives the Input back.
"""

from collections.abc import Callable, Mapping, Sequence

from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.machine_translation.embedded import EmbeddedTranslator
from toolformer_dag.tools.machine_translation.identify import IdentifierError
from toolformer_dag.tools.machine_translation.keeps import input_after_call_only
from toolformer_dag.tools.machine_translation.options import TranslationOptions
from toolformer_dag.tools.machine_translation.translator import NeuralTranslator, Translator
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult
from toolformer_dag.tools.unquote import unquote


class MachineTranslation(Tool):
    """One translation per call, or why there is none."""

    name = "MT"
    version = "2"
    defaults = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
    Options = TranslationOptions
    options: TranslationOptions

    def __init__(self, key: str, options: TranslationOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        embedded = options.backend == "embedded"
        self._translator: Translator = EmbeddedTranslator() if embedded else NeuralTranslator(options)

    def wants_document(self, document: Document) -> str | None:
        return self._translator.wants(document.text)

    def wants(self, text: str, document: Document) -> str | None:
        """`foreign_chunk` for a foreign chunk between English ones; with the embedded backend `lexicon_phrase`."""
        return self._translator.wants(text)

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Not where the input stands after the call but not before it."""
        return not input_after_call_only(text, offset, unquote(input))

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Load the model: a first translation, thrown away."""
        self._translated([""])
        progress(0)

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Raises ToolDown when the model or the language identification cannot be loaded."""
        return self._translated([unquote(call.input) for call in calls])

    def _translated(self, texts: Sequence[str]) -> list[ToolResult]:
        try:
            return self._translator.translate(texts)
        except (ModelError, IdentifierError, ImportError) as error:
            raise ToolDown(f"[tools.{self.key}] {error}") from error

    def identity(self) -> Mapping[str, object]:
        return self._translator.identity()
