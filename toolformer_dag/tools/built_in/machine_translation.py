"""Machine translation into English (paper, section 3), with a model or the synthetic world's dictionary."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from toolformer_dag.identity import fingerprint
from toolformer_dag.synthetic.lexicon import FOREIGN_ARTICLES, get_lexicon, translate_phrase
from toolformer_dag.texts.document import Document
from toolformer_dag.tools.language_identifier import ENGLISH_LABEL, Identifier, has_letter
from toolformer_dag.tools.rules import glosses
from toolformer_dag.tools.tool import ProposedCall, Tool, ToolCall, ToolDefaults, ToolResult, unquote
from toolformer_dag.tools.translators import NeuralTranslator, TranslationOptions

DICTIONARY_VERSION = 2
"""Raise this when the dictionary would translate a phrase in another way."""
CONTEXT_WORDS = 20
"""The words on either side of a phrase that must be English."""
CONTEXT_CHARACTERS = 300
"""The characters on either side of a phrase in which these words are looked for."""
_PHRASE_PATTERN = re.compile(rf"\b(?:{'|'.join(sorted(FOREIGN_ARTICLES))}) (?P<noun>\w+)")
"""An article and the word behind it."""


class EmbeddedTranslator:
    """Translates phrases of article, noun and adjective with the synthetic world's lexicon.

    Unknown words stay unchanged; a phrase without a known word has the reason `unknown_phrase`.
    """

    def __init__(self, identifier_path: Path | None) -> None:
        self._identifier_path = identifier_path

    @functools.cached_property
    def _identifier(self) -> Identifier:
        """The fastText model that identifies languages.

        It is made at first use, because looking for its file imports a package that wants a temporary folder.
        """
        return Identifier(self._identifier_path)

    def translate_texts(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate each text word by word.

        Returns:
            A result per text. A text without a word of the lexicon has the reason `unknown_phrase`.
        """
        results = []
        for text in texts:
            translation = translate_phrase(text)
            if translation:
                results.append(ToolResult(translation))
            else:
                results.append(ToolResult(None, "unknown_phrase"))
        return results

    def find_selection_reason(self, text: str) -> str | None:
        """Return "lexicon_phrase" for a text with a foreign phrase that may be translated, else None.

        The phrase is a foreign article and a word of the lexicon between English words: "She saw la tortuga on the
        beach".
        """
        for phrase_match in _PHRASE_PATTERN.finditer(text):
            is_known = phrase_match["noun"].lower() in get_lexicon()
            if is_known and self._is_between_english(text, phrase_match):
                return "lexicon_phrase"
        return None

    def _is_between_english(self, text: str, phrase_match: re.Match[str]) -> bool:
        """Return whether there are words before and after a phrase that fastText takes for English.

        Args:
            text: The text.
            phrase_match: The match of the phrase in the text.
        """
        words_before = _select_words_before(text, phrase_match.start())
        words_after = _select_words_after(text, phrase_match.end())
        if not (has_letter(words_before) and has_letter(words_after)):
            return False

        # The phrase itself is too short for fastText.
        languages = self._identifier.identify_languages([words_before, words_after])
        return all(language.label == ENGLISH_LABEL for language in languages)

    def build_identity(self) -> Mapping[str, object]:
        """Return what determines translations, for fingerprints: the lexicon, its rules and the identifier's file."""
        return {
            "backend": "embedded",
            "rules": DICTIONARY_VERSION,
            "lexicon": fingerprint(get_lexicon()),
            "identifier": self._identifier.compute_file_hash(),
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
        return self._translator.find_selection_reason(document.text)

    def wants(self, text: str, document: Document) -> str | None:
        """Return why translations are worth trying in a text, or None if they are not.

        The reason of the neural backend is `foreign_chunk`: a chunk in another language is between English ones. That
        of the embedded backend is `lexicon_phrase`: a phrase with a word of the synthetic world's lexicon is between
        English words.

        Args:
            text: The text.
            document: Not used.

        Raises:
            OverBudget: The text costs too much work.
        """
        return self._translator.find_selection_reason(text)

    def keeps(self, text: str, offset: int, input: str) -> bool:
        """Return whether to keep a call that passed the filter (appendix A).

        It is dropped if its input, the phrase to translate, is in the text after the call only: at the call, nobody has
        read it yet. A phrase that is nowhere in the text is kept.

        Args:
            text: The text.
            offset: The call is written before this character of the text.
            input: The input of the call.
        """
        phrase = _normalize_spaces(unquote(input))
        is_before_call = phrase in _normalize_spaces(text[:offset])
        is_after_call = phrase in _normalize_spaces(text[offset:])
        return is_before_call or not is_after_call

    def propose(self, text: str, context: str) -> Iterable[ProposedCall]:
        """Return translation calls for the quoted foreign phrases that a text explains.

        In `"la tortuga" means "the turtle"` the call stands before `the turtle`.
        """
        calls = list(glosses.propose_glosses(text))  # for phrases in any language
        phrases = [call.input.lower() for call in calls]
        languages = Identifier(self.options.identifier).identify_languages(phrases)

        foreign_calls = []
        for call, language in zip(calls, languages, strict=True):
            if language.label != ENGLISH_LABEL:
                foreign_calls.append(call)
        return foreign_calls

    def rule_identity(self) -> Mapping[str, object]:
        return {"rule": glosses.VERSION, "identifier": Identifier(self.options.identifier).compute_file_hash()}

    def prepare(self, progress: Callable[[int], None]) -> None:
        """Load the models by a first translation, that of an empty text.

        Raises:
            ModelError: The translation model cannot be loaded.
            IdentifierError: fastText's model cannot be loaded.
        """
        self._translator.translate_texts([""])

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Translate the input of each call into English.

        Returns:
            A translation per call, or the reason why there is none.

        Raises:
            ModelError: The translation model cannot be loaded.
            IdentifierError: fastText's model cannot be loaded.
        """
        texts = [unquote(call.input) for call in calls]
        return self._translator.translate_texts(texts)

    def identity(self) -> Mapping[str, object]:
        return self._translator.build_identity()


def _select_words_before(text: str, end_offset: int) -> str:
    """Return the last CONTEXT_WORDS words before the character `end_offset` of a text, within CONTEXT_CHARACTERS."""
    start_offset = max(0, end_offset - CONTEXT_CHARACTERS)
    words = text[start_offset:end_offset].split()
    return " ".join(words[-CONTEXT_WORDS:])


def _select_words_after(text: str, start_offset: int) -> str:
    """Return the first CONTEXT_WORDS words from the character `start_offset` of a text, within CONTEXT_CHARACTERS."""
    words = text[start_offset : start_offset + CONTEXT_CHARACTERS].split()
    return " ".join(words[:CONTEXT_WORDS])


def _normalize_spaces(text: str) -> str:
    """Return a text with single spaces in place of white space."""
    return " ".join(text.split())
