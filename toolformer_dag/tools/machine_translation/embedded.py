"""The made world's translator: its closed dictionary, and the phrases of it that make a text worth a call."""

import functools
import re
from collections.abc import Mapping, Sequence

from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.tools.tool import ToolResult


class EmbeddedTranslator:
    """Translates phrases of article, noun and adjective, with one word of the lexicon or more.

    Words that it does not know stay as they are; a phrase of nothing else is `unknown_phrase`.
    """

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        from toolformer_dag.embedded.dictionary import translate

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
    from toolformer_dag.embedded.lexicon import ARTICLES

    forms = sorted({form for genders in ARTICLES.values() for form in genders.values()})
    return re.compile(rf"\b(?:{'|'.join(forms)}) (\w+)")


@functools.cache
def _lexicon() -> dict[str, str]:
    """Every form of every word, with its English."""
    from toolformer_dag.embedded.lexicon import LANGUAGES, words

    return {
        form.lower(): word.english
        for language in LANGUAGES
        for word_class in ("noun", "adjective")
        for word in words(language, word_class)
        for form in word.forms
    }
