"""Translate into English with NLLB, in transformers or as int8 in CTranslate2, and the options for both."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from toolformer_dag.identity import file_hash
from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.tools.foreign_text import ENGLISH, ENGLISH_LABEL, Identifier, flores_code, holds_foreign_chunk
from toolformer_dag.tools.nllb_tokenizer import encode, knows, load_nllb_tokenizer
from toolformer_dag.tools.options import OptionPath, PretrainedName, PretrainedOptions, load_model
from toolformer_dag.tools.tool import ToolResult


class TranslationOptions(PretrainedOptions):
    """Options of machine translation.

    - backend: `nllb` (transformers), `ctranslate2` (int8) or `embedded` (the synthetic world's dictionary). For
      `ctranslate2`, `model` is a folder of CTranslate2's converter that also holds the tokenizer's files.
    - identifier: a fastText language identification model, by default the installed lid.176.ftz.
    - max_input_tokens: longer inputs have no result.
    - max_output_tokens: the length to which a translation is cut.
    """

    backend: Literal["nllb", "ctranslate2", "embedded"] = "nllb"
    model: PretrainedName = "facebook/nllb-200-distilled-600M"
    identifier: OptionPath | None = None
    max_input_tokens: int = Field(128, ge=1)
    max_output_tokens: int = Field(128, ge=1)


class Nllb:
    """NLLB in transformers, decoded greedily, so that a translation does not depend on the batch."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        self.tokenizer = load_nllb_tokenizer(options)
        self._model = load_model("AutoModelForSeq2SeqLM", options)
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """Translate encoded texts to English of at most `max_tokens` tokens each."""
        import torch

        batch = self.tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            english = self._model.generate(
                **batch,
                forced_bos_token_id=self.tokenizer.convert_tokens_to_ids(ENGLISH),
                max_new_tokens=self._max_tokens,
                do_sample=False,
                num_beams=1,
            )
        texts: list[str] = self.tokenizer.batch_decode(english, skip_special_tokens=True)
        return texts


def folder_identity(model: str) -> Mapping[str, object]:
    """Return content hashes of a converted folder's files. Raises ModelError where model.bin is missing."""
    folder = Path(model)
    if not (folder / "model.bin").is_file():
        raise ModelError(
            f"{model!r} holds no model.bin; convert a checkpoint with `ct2-transformers-converter --quantization int8 "
            "--copy_files tokenizer.json tokenizer_config.json` and set `model` to its output folder"
        )
    return {"model": {file.name: file_hash(file) for file in sorted(folder.glob("*.*"))}, "dtype": "int8"}


class Int8:
    """NLLB as int8 in CTranslate2, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        import ctranslate2

        folder_identity(options.model)
        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """Translate encoded texts greedily to English of at most `max_tokens` tokens each."""
        pieces = [self.tokenizer.convert_ids_to_tokens(each) for each in ids]
        found = self._translator.translate_batch(
            pieces, target_prefix=[[ENGLISH]] * len(pieces), beam_size=1, max_decoding_length=self._max_tokens
        )
        english = [self.tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in found]
        texts: list[str] = self.tokenizer.batch_decode(english, skip_special_tokens=True)
        return texts


class Translator(Protocol):
    """A backend that translates texts, selects texts for calls, and has an identity."""

    def translate(self, texts: Sequence[str]) -> list[ToolResult]: ...

    def wants(self, text: str) -> str | None: ...

    def identity(self) -> Mapping[str, object]: ...


class Checkpoint(Protocol):
    """A loaded translation model with NLLB's tokenizer."""

    tokenizer: Any

    def translate(self, ids: Sequence[list[int]]) -> list[str]: ...


class NeuralTranslator:
    """NLLB, in transformers or CTranslate2, with fastText's language identification."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._checkpoint: Checkpoint | None = None
        self._in_use = threading.Lock()

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts. Reasons: `no_words`, `already_english`, `unknown_language`, `input_too_long`."""
        with self._in_use:
            checkpoint = self._loaded()
            codes = self._codes(texts, checkpoint.tokenizer)
            known = [
                (n, text, code.result) for n, (text, code) in enumerate(zip(texts, codes, strict=True)) if code.result
            ]
            ids = encode(checkpoint.tokenizer, [text for _, text, _ in known], [code for _, _, code in known])
            fitting = [
                (n, encoded)
                for (n, _, _), encoded in zip(known, ids, strict=True)
                if len(encoded) <= self._options.max_input_tokens
            ]
            english = checkpoint.translate([encoded for _, encoded in fitting]) if fitting else []
        found = {n: ToolResult(text) for (n, _), text in zip(fitting, english, strict=True)}
        too_long = ToolResult(None, "input_too_long")
        return [found.get(n, too_long) if code.result else code for n, code in enumerate(codes)]

    def _codes(self, texts: Sequence[str], tokenizer: Any) -> list[ToolResult]:
        """Return the FLORES code of each text's language as a result, or the reason not to translate it."""
        labels = [found.label for found in self._identifier.identify(texts)]
        return [_code(text, label, tokenizer) for text, label in zip(texts, labels, strict=True)]

    def wants(self, text: str) -> str | None:
        return "foreign_chunk" if holds_foreign_chunk(text, self._identifier) else None

    def identity(self) -> Mapping[str, object]:
        limits = determining(self._options, "max_input_tokens", "max_output_tokens")
        return {**self._weights(), "identifier": self._identifier.identity(), **limits}

    def _weights(self) -> Mapping[str, object]:
        if self._options.backend == "ctranslate2":
            return folder_identity(self._options.model)
        return self._options.weights_identity()

    def _loaded(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._load()
        return self._checkpoint

    def _load(self) -> Checkpoint:
        if self._options.backend == "ctranslate2":
            return Int8(self._options, self._options.max_output_tokens)
        return Nllb(self._options, self._options.max_output_tokens)


def _code(text: str, label: str, tokenizer: Any) -> ToolResult:
    if not any(map(str.isalpha, text)):
        return ToolResult(None, "no_words")
    if label == ENGLISH_LABEL:
        return ToolResult(None, "already_english")
    code = flores_code(label)
    return ToolResult(code) if code and knows(tokenizer, code) else ToolResult(None, "unknown_language")
