"""Machine translation: a foreign phrase into English (section 3); by a model or the synthetic dictionary."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.model.weights import ModelError
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.foreign_text import IdentifierError
from toolformer_dag.tools.tool import Tool, ToolCall, ToolDefaults, ToolDown, ToolResult, unquote
from toolformer_dag.tools.translators import NeuralTranslator, TranslationOptions, Translator


def input_after_call_only(text: str, offset: int, input: str) -> bool:
    """Whether `input` stands in the text after the call's place and not before it; white space counts as one space.

    Such calls are removed: at inference the model cannot look ahead. `offset`: the character at which x_i begins.
    """
    wanted = " ".join(input.split())
    return wanted in " ".join(text[offset:].split()) and wanted not in " ".join(text[:offset].split())


class EmbeddedTranslator:
    """Translates phrases of article, noun and adjective, with one word of the lexicon or more.

    Words that it does not know stay as they are; a phrase of nothing else is `unknown_phrase`.
    """

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        from toolformer_dag.synthetic.lexicon import translate

        english = [translate(text) for text in texts]
        return [ToolResult(found) if found else ToolResult(None, "unknown_phrase") for found in english]

    def wants(self, text: str) -> str | None:
        """`lexicon_phrase` for an article followed by a word of the lexicon, with words before and after.

        The phrases have two or three words, too few for fastText.
        """
        for found in _article().finditer(text):
            if found[1].lower() in _lexicon() and text[: found.start()].strip() and text[found.end() :].strip(" .\n"):
                return "lexicon_phrase"
        return None

    def identity(self) -> Mapping[str, object]:
        """The words of the dictionary; the tool's version stands for its rules."""
        return {"backend": "embedded", "lexicon": fingerprint(_lexicon())}


@functools.cache
def _article() -> re.Pattern[str]:
    from toolformer_dag.synthetic.lexicon import ARTICLES

    forms = sorted({form for genders in ARTICLES.values() for form in genders.values()})
    return re.compile(rf"\b(?:{'|'.join(forms)}) (\w+)")


@functools.cache
def _lexicon() -> dict[str, str]:
    """Every form of every word, with its English."""
    from toolformer_dag.synthetic.lexicon import LANGUAGES, words

    return {
        form.lower(): word.english
        for language in LANGUAGES
        for word_class in ("noun", "adjective")
        for word in words(language, word_class)
        for form in word.forms
    }


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
