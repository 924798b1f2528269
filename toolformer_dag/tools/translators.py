"""What translates: NLLB in transformers, or as int8 in CTranslate2, and the options that choose."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from toolformer_dag.file_hash import file_hash
from toolformer_dag.model.weights import ModelError
from toolformer_dag.tools.foreign_text import ENGLISH, ENGLISH_LABEL, Identifier, flores_code, holds_foreign_chunk
from toolformer_dag.tools.options import OptionPath, PretrainedName, PretrainedOptions, load_model, load_tokenizer
from toolformer_dag.tools.tool import ToolResult


class TranslationOptions(PretrainedOptions):
    """backend: `nllb` (transformers), `ctranslate2` (int8; `model` is then a folder written by CTranslate2's converter
    with the tokenizer's files beside it) or `embedded` (the made world's dictionary); identifier: a fastText language
    identification model, by default the lid.176.ftz that is installed; max_input_tokens: longer inputs have no result;
    max_output_tokens: where a translation is cut.
    """

    backend: Literal["nllb", "ctranslate2", "embedded"] = "nllb"
    model: PretrainedName = "facebook/nllb-200-distilled-600M"
    identifier: OptionPath | None = None
    max_input_tokens: int = Field(128, ge=1)
    max_output_tokens: int = Field(128, ge=1)


def load_nllb_tokenizer(options: PretrainedOptions) -> Any:
    """NLLB's tokenizer; a folder whose vocabulary was silently not read is refused with ModelError."""
    tokenizer = load_tokenizer("NllbTokenizer", options)
    pieces = tokenizer("A sentence of English words.", add_special_tokens=False).input_ids
    if set(pieces) <= {tokenizer.unk_token_id} or not knows(tokenizer, ENGLISH):
        raise ModelError(
            f"the tokenizer of {options.model!r} reads English as unknown tokens only or lacks {ENGLISH}; its folder "
            "needs the tokenizer.json of an NLLB checkpoint"
        )
    return tokenizer


def knows(tokenizer: Any, code: str) -> bool:
    """Whether a FLORES code is a token; the tokenizer itself takes any code and uses <unk> without a word."""
    return bool(tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id)


def encode(tokenizer: Any, texts: Sequence[str], codes: Sequence[str]) -> list[list[int]]:
    """Token ids of each text marked as being in its language."""
    ids = []
    for text, code in zip(texts, codes, strict=True):
        tokenizer.src_lang = code
        ids.append(tokenizer(text).input_ids)
    return ids


class Nllb:
    """A loaded checkpoint. Greedy, so that a text has one translation whatever the batch around it."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        self.tokenizer = load_nllb_tokenizer(options)
        self._model = load_model("AutoModelForSeq2SeqLM", options)
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """English for each encoded text, at most `max_tokens` tokens long."""
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
    """Content hashes of the converted folder's files. Raises ModelError where there is no model.bin."""
    folder = Path(model)
    if not (folder / "model.bin").is_file():
        raise ModelError(
            f"{model!r} holds no model.bin; convert a checkpoint with `ct2-transformers-converter --quantization int8 "
            "--copy_files tokenizer.json tokenizer_config.json` and set `model` to its output folder"
        )
    return {"model": {file.name: file_hash(file) for file in sorted(folder.glob("*.*"))}, "dtype": "int8"}


class Int8:
    """A loaded checkpoint, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        import ctranslate2

        folder_identity(options.model)
        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """English for each encoded text, greedily, at most `max_tokens` tokens long."""
        pieces = [self.tokenizer.convert_ids_to_tokens(one) for one in ids]
        found = self._translator.translate_batch(
            pieces, target_prefix=[[ENGLISH]] * len(pieces), beam_size=1, max_decoding_length=self._max_tokens
        )
        english = [self.tokenizer.convert_tokens_to_ids(one.hypotheses[0]) for one in found]
        texts: list[str] = self.tokenizer.batch_decode(english, skip_special_tokens=True)
        return texts


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
