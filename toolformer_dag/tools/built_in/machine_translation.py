"""Machine translation into English (paper, section 3), with a model or the synthetic world's dictionary."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from toolformer_dag.identity import fingerprint
from toolformer_dag.synthetic.lexicon import FOREIGN_ARTICLES, lexicon, translate
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.language_identifier import ENGLISH_LABEL, Identifier, has_letter
from toolformer_dag.tools.rules import glosses
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote
from toolformer_dag.tools.translators import NeuralTranslator, TranslationOptions

DICTIONARY_RULES = 2
"""Raise this when the dictionary would translate a phrase in another way."""
WORDS_AROUND = 20
"""The words on either side of a phrase that must be English."""
CHARACTERS_AROUND = 300
"""The characters on either side of a phrase in which these words are looked for."""
_PHRASE = re.compile(rf"\b(?:{'|'.join(sorted(FOREIGN_ARTICLES))}) (?P<noun>\w+)")
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
        """Translate each text word by word; a text without a word of the lexicon has the reason `unknown_phrase`."""
        results = []
        for text in texts:
            translation = translate(text)
            if translation:
                results.append(ToolResult(translation))
            else:
                results.append(ToolResult(None, "unknown_phrase"))
        return results

    def wants(self, text: str) -> str | None:
        """Return "lexicon_phrase" for a text with a foreign phrase that may be translated, else None.

        The phrase is a foreign article and a word of the lexicon between English words: "She saw la tortuga on the
        beach".
        """
        for match in _PHRASE.finditer(text):
            if match["noun"].lower() in lexicon() and self._is_between_english(text, match):
                return "lexicon_phrase"
        return None

    def _is_between_english(self, text: str, phrase: re.Match[str]) -> bool:
        """Return whether there are words before and after a phrase that fastText takes for English."""
        before = _select_words_before(text, phrase.start())
        after = _select_words_after(text, phrase.end())
        if not (has_letter(before) and has_letter(after)):
            return False
        languages = self._identifier.identify([before, after])  # the phrase itself is too short for fastText
        return all(language.label == ENGLISH_LABEL for language in languages)

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
        self._translator: EmbeddedTranslator | NeuralTranslator
        if options.backend == "embedded":
            self._translator = EmbeddedTranslator(options.identifier)
        else:
            self._translator = NeuralTranslator(options)

    def wants_document(self, document: Document) -> str | None:
        return self._translator.wants(document.text)

    def wants(self, text: str, document: Document) -> str | None:
        """Return `foreign_chunk` for a foreign chunk between English chunks; embedded backend: `lexicon_phrase`."""
        return self._translator.wants(text)

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Return False if the input occurs in the text after the call but not before it (appendix A)."""
        phrase = _normalize_spaces(unquote(input))
        is_before = phrase in _normalize_spaces(text[:offset])
        is_after = phrase in _normalize_spaces(text[offset:])
        return is_before or not is_after

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        """Return translation calls for the quoted foreign phrases that a text explains.

        In `"la tortuga" means "the turtle"` the call stands before `the turtle`.
        """
        all_glosses = list(glosses.glosses(text))  # glosses of phrases in any language
        phrases = [call.input.lower() for call in all_glosses]
        languages = Identifier(self.options.identifier).identify(phrases)
        proposed = []
        for call, language in zip(all_glosses, languages, strict=True):
            if language.label != ENGLISH_LABEL:
                proposed.append(call)
        return proposed

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": glosses.VERSION, "identifier": Identifier(self.options.identifier).identity()}

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Load the model with a first translation."""
        self._translator.translate([""])

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Translate inputs. Raises ModelError and IdentifierError if these cannot be loaded."""
        return self._translator.translate([unquote(call.input) for call in calls])

    def identity(self) -> Mapping[str, object]:
        return self._translator.identity()


def _select_words_before(text: str, end: int) -> str:
    """Return the last WORDS_AROUND words before the character `end` of a text, within CHARACTERS_AROUND."""
    words = text[max(0, end - CHARACTERS_AROUND) : end].split()
    return " ".join(words[-WORDS_AROUND:])


def _select_words_after(text: str, start: int) -> str:
    """Return the first WORDS_AROUND words from the character `start` of a text, within CHARACTERS_AROUND."""
    words = text[start : start + CHARACTERS_AROUND].split()
    return " ".join(words[:WORDS_AROUND])


def _normalize_spaces(text: str) -> str:
    """Return a text with single spaces in place of white space."""
    return " ".join(text.split())
