"""Machine translation into English (paper, section 3), with a model or the synthetic world's dictionary."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from toolformer_dag.identity import fingerprint
from toolformer_dag.synthetic.lexicon import THE, lexicon, translate
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.foreign_text import ENGLISH_LABEL, Identifier
from toolformer_dag.tools.rules import glosses
from toolformer_dag.tools.tool import Proposed, Tool, ToolCall, ToolDefaults, ToolResult, unquote
from toolformer_dag.tools.translators import NeuralTranslator, TranslationOptions

DICTIONARY_RULES = 2  # raise this when the dictionary would translate a phrase in another way
BESIDE, REACH = 20, 300
"""The words on either side of a phrase that must be English, and the characters in which they are looked for."""


_PHRASE = re.compile(rf"\b(?:{'|'.join(sorted(THE))}) (\w+)")
"""An article and the word behind it."""


class EmbeddedTranslator:
    """Translates phrases of article, noun and adjective with the synthetic world's lexicon.

    Unknown words stay unchanged; a phrase without a known word has the reason `unknown_phrase`.
    """

    def __init__(self, identifier: Path | None) -> None:
        self._chosen = identifier

    @functools.cached_property
    def _identifier(self) -> Identifier:  # looking for its file imports a package that wants a temporary folder
        return Identifier(self._chosen)

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        english = [translate(text) for text in texts]
        return [
            ToolResult(translation) if translation else ToolResult(None, "unknown_phrase") for translation in english
        ]

    def wants(self, text: str) -> str | None:
        """Return `lexicon_phrase` where an article and a word of the lexicon stand between English words.

        The phrases have two or three words, too few for fastText; it identifies up to BESIDE words before and after.
        """
        for match in _PHRASE.finditer(text):
            if match[1].lower() in lexicon() and self._is_english_beside(text, *match.span()):
                return "lexicon_phrase"
        return None

    def _is_english_beside(self, text: str, start: int, end: int) -> bool:
        before = text[max(0, start - REACH) : start].split()[-BESIDE:]
        after = text[end : end + REACH].split()[:BESIDE]
        sides = [" ".join(side) for side in (before, after)]
        if not all(any(map(str.isalpha, side)) for side in sides):
            return False
        return all(language.label == ENGLISH_LABEL for language in self._identifier.identify(sides))

    def identity(self) -> Mapping[str, object]:
        """Return the fingerprint of the dictionary and the version of its rules."""
        return {
            "backend": "embedded",
            "rules": DICTIONARY_RULES,
            "lexicon": fingerprint(lexicon()),
            "identifier": self._identifier.identity(),
        }


class MachineTranslation(Tool):
    """Translates the input of each call, or returns the reason why not."""

    name = "MT"
    looks_for = "another language between English"
    version = "3"
    description = "Translates a text from any language into English."
    defaults = ToolDefaults(tau_s=0.0, k=20, m=10, tau_f=0.5)
    Options = TranslationOptions
    options: TranslationOptions

    def __init__(self, key: str, options: TranslationOptions, prompt: str) -> None:
        super().__init__(key, options, prompt)
        self.by_paragraph = options.english_around == "paragraph"
        embedded = options.backend == "embedded"
        self._translator = EmbeddedTranslator(options.identifier) if embedded else NeuralTranslator(options)

    def wants_document(self, document: Document) -> str | None:
        return self._translator.wants(document.text)

    def wants(self, text: str, document: Document) -> str | None:
        """Return `foreign_chunk` for a foreign chunk between English chunks; embedded backend: `lexicon_phrase`."""
        return self._translator.wants(text)

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Return False where the input occurs after the call but not before it, up to white space (appendix A).

        At inference the model cannot look ahead.
        """
        phrase, before, after = (" ".join(part.split()) for part in (unquote(input), text[:offset], text[offset:]))
        return phrase in before or phrase not in after

    def propose(self, text: str, context: str) -> Iterable[Proposed]:
        """Return translations inside the quotes of a gloss, of phrases that fastText takes for another language."""
        proposed = list(glosses.glosses(text))
        labels = Identifier(self.options.identifier).identify([call.input.lower() for call in proposed])
        return [call for call, language in zip(proposed, labels, strict=True) if language.label != ENGLISH_LABEL]

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": glosses.VERSION, "identifier": Identifier(self.options.identifier).identity()}

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Load the model with a first translation."""
        self._translator.translate([""])

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Translate inputs. Raises ModelError and IdentifierError where these cannot be loaded."""
        return self._translator.translate([unquote(call.input) for call in calls])

    def identity(self) -> Mapping[str, object]:
        return self._translator.identity()
