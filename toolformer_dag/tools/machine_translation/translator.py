"""Translation by a neural model: name the language, refuse what cannot be translated, translate the rest at once."""

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from toolformer_dag.tools.machine_translation.foreign import holds_foreign_chunk
from toolformer_dag.tools.machine_translation.identify import Identifier
from toolformer_dag.tools.machine_translation.languages import ENGLISH_LABEL, flores_code
from toolformer_dag.tools.machine_translation.nllb import Nllb, encode, knows
from toolformer_dag.tools.machine_translation.options import TranslationOptions
from toolformer_dag.tools.tool import ToolResult


class Translator(Protocol):
    """What answers the calls, and what tells which texts are worth one."""

    def translate(self, texts: Sequence[str]) -> list[ToolResult]: ...

    def wants(self, text: str) -> str | None: ...

    def identity(self) -> Mapping[str, object]: ...


class Checkpoint(Protocol):
    """A loaded translation model with NLLB's tokenizer."""

    tokenizer: Any

    def translate(self, ids: Sequence[list[int]]) -> list[str]: ...


class NeuralTranslator:
    """NLLB or its CTranslate2 form behind fastText's language identification."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._checkpoint: Checkpoint | None = None
        self._in_use = threading.Lock()

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """English, or `no_words`, `already_english`, `unknown_language`, `input_too_long`."""
        with self._in_use:
            checkpoint = self._loaded()
            codes = self._codes(texts, checkpoint.tokenizer)
            known = [
                (n, text, code.result) for n, (text, code) in enumerate(zip(texts, codes, strict=True)) if code.result
            ]
            ids = encode(checkpoint.tokenizer, [text for _, text, _ in known], [code for _, _, code in known])
            fitting = [
                (n, one)
                for (n, _, _), one in zip(known, ids, strict=True)
                if len(one) <= self._options.max_input_tokens
            ]
            english = checkpoint.translate([one for _, one in fitting]) if fitting else []
        found = {n: ToolResult(text) for (n, _), text in zip(fitting, english, strict=True)}
        too_long = ToolResult(None, "input_too_long")
        return [found.get(n, too_long) if code.result else code for n, code in enumerate(codes)]

    def _codes(self, texts: Sequence[str], tokenizer: Any) -> list[ToolResult]:
        """The FLORES code of each text's language as the result, or why it is not translated."""
        labels = [found.label for found in self._identifier.identify(texts)]
        return [_code(text, label, tokenizer) for text, label in zip(texts, labels, strict=True)]

    def wants(self, text: str) -> str | None:
        return "foreign_chunk" if holds_foreign_chunk(text, self._identifier) else None

    def identity(self) -> Mapping[str, object]:
        limits = {
            "max_input_tokens": self._options.max_input_tokens,
            "max_output_tokens": self._options.max_output_tokens,
        }
        return {**self._weights(), "identifier": self._identifier.identity(), **limits}

    def _weights(self) -> Mapping[str, object]:
        if self._options.backend == "ctranslate2":
            from toolformer_dag.tools.machine_translation.int8 import folder_identity

            return folder_identity(self._options.model)
        return self._options.weights_identity()

    def _loaded(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._load()
        return self._checkpoint

    def _load(self) -> Checkpoint:
        if self._options.backend == "ctranslate2":
            from toolformer_dag.tools.machine_translation.int8 import Int8

            return Int8(self._options, self._options.max_output_tokens)
        return Nllb(self._options, self._options.max_output_tokens)


def _code(text: str, label: str, tokenizer: Any) -> ToolResult:
    if not any(map(str.isalpha, text)):
        return ToolResult(None, "no_words")
    if label == ENGLISH_LABEL:
        return ToolResult(None, "already_english")
    code = flores_code(label)
    return ToolResult(code) if code and knows(tokenizer, code) else ToolResult(None, "unknown_language")
