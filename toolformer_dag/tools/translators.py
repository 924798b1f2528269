"""Translate into English with NLLB, in transformers or as int8 in CTranslate2, and the options for both."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from toolformer_dag.files import changed_unseen
from toolformer_dag.identity import file_hash
from toolformer_dag.model.sentencepieces import sentencepiece_file
from toolformer_dag.model.weights import DamagedModel, ModelError
from toolformer_dag.settings.setting_types import AsBefore, determining
from toolformer_dag.tools.foreign_text import ENGLISH, ENGLISH_LABEL, Identifier, flores_code, foreign_chunks
from toolformer_dag.tools.options import OptionPath, PretrainedName, PretrainedOptions, load_model, load_tokenizer
from toolformer_dag.tools.tool import ToolResult


class TranslationOptions(PretrainedOptions):
    """Options of machine translation.

    - backend: `nllb` (transformers), `ctranslate2` (int8) or `embedded` (the synthetic world's dictionary). For
      `ctranslate2`, `model` is a folder of CTranslate2's converter that also holds the tokenizer's files.
    - english_around: where English stands before and after a foreign chunk: in the same `paragraph`, which is then all
      that is annotated (appendix A), or anywhere in the same `text`.
    - identifier: a fastText language identification model, by default the installed lid.176.ftz.
    - max_input_tokens: longer inputs have no result.
    - max_output_tokens: the length to which a translation is cut.
    """

    backend: Literal["nllb", "ctranslate2", "embedded"] = "nllb"
    model: PretrainedName = "facebook/nllb-200-distilled-600M"
    english_around: Annotated[Literal["paragraph", "text"], AsBefore("text")] = "text"
    identifier: OptionPath | None = None
    max_input_tokens: int = Field(128, ge=1)
    max_output_tokens: int = Field(128, ge=1)


def load_nllb_tokenizer(options: PretrainedOptions) -> Any:
    """Load NLLB's tokenizer. Raises ModelError, also where transformers silently read no vocabulary."""
    tokenizer = load_tokenizer("NllbTokenizer", options)
    if file := sentencepiece_file(options.model, options.revision):
        tokenizer = _with_languages(tokenizer, file)
    pieces = tokenizer("A sentence of English words.", add_special_tokens=False).input_ids
    if set(pieces) <= {tokenizer.unk_token_id} or not knows(tokenizer, ENGLISH):
        raise ModelError(
            f"the tokenizer of {options.model!r} knows no English words or lacks {ENGLISH}; add the tokenizer.json of "
            "an NLLB checkpoint to the folder"
        )
    return tokenizer


def _with_languages(tokenizer: Any, file: Path) -> Any:
    """Give a tokenizer that was read from a sentencepiece model the languages, at the ids that checkpoints use.

    They follow the pieces, and <mask> comes last. transformers leaves them out, or puts them after <mask>, where every
    language has the id of the next one.
    """
    from sentencepiece import SentencePieceProcessor
    from transformers import NllbTokenizer
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    first = SentencePieceProcessor(model_file=str(file)).get_piece_size() + 1  # fairseq adds <pad>
    read = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pieces = {piece: number for piece, number in read["vocab"].items() if number < first}
    languages = {code: first + number for number, code in enumerate([*FAIRSEQ_LANGUAGE_CODES, tokenizer.mask_token])}
    whole = NllbTokenizer(vocab={**pieces, **languages}, merges=[tuple(merge) for merge in read["merges"]])
    whole.backend_tokenizer.normalizer = tokenizer.backend_tokenizer.normalizer
    return whole


def knows(tokenizer: Any, code: str) -> bool:
    """Return whether a FLORES code is a token; the tokenizer silently maps other codes to <unk>."""
    return bool(tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id)


def encode(tokenizer: Any, texts: Sequence[str], codes: Sequence[str]) -> list[list[int]]:
    """Tokenize each text with the marker of its language."""
    ids = []
    for text, code in zip(texts, codes, strict=True):
        tokenizer.src_lang = code
        ids.append(tokenizer(text).input_ids)
    return ids


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
    return {"model": {file.name: file_hash(file) for file in converted_files(model)}, "dtype": "int8"}


def converted_files(model: str) -> list[Path]:
    """Return the files that determine the results of a converted folder."""
    return sorted(Path(model).glob("*.*"))


class Int8:
    """NLLB as int8 in CTranslate2, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        import ctranslate2

        folder_identity(options.model)
        if damaged := changed_unseen(converted_files(options.model)):
            raise DamagedModel(damaged)
        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """Translate encoded texts greedily to English of at most `max_tokens` tokens each."""
        pieces = [self.tokenizer.convert_ids_to_tokens(each) for each in ids]
        translated = self._translator.translate_batch(
            pieces, target_prefix=[[ENGLISH]] * len(pieces), beam_size=1, max_decoding_length=self._max_tokens
        )
        english = [self.tokenizer.convert_tokens_to_ids(each.hypotheses[0]) for each in translated]
        texts: list[str] = self.tokenizer.batch_decode(english, skip_special_tokens=True)
        return texts


class NeuralTranslator:
    """NLLB, in transformers or CTranslate2, with fastText's language identification."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._in_use = threading.Lock()

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts. Reasons: `no_words`, `already_english`, `unknown_language`, `input_too_long`."""
        with self._in_use:
            checkpoint = self._checkpoint
            languages = self._identifier.identify(texts)
            coded = zip(texts, languages, strict=True)
            results = dict(enumerate(_code(text, language.label, checkpoint.tokenizer) for text, language in coded))
            known = {n: code.result for n, code in results.items() if code.result}
            ids = encode(checkpoint.tokenizer, [texts[n] for n in known], list(known.values()))
            placed = dict(zip(known, ids, strict=True))
            fitting = {n: own for n, own in placed.items() if len(own) <= self._options.max_input_tokens}
            english = checkpoint.translate(list(fitting.values())) if fitting else []
        results |= dict.fromkeys(known, ToolResult(None, "input_too_long"))
        results |= dict(zip(fitting, map(ToolResult, english), strict=True))
        return list(results.values())

    def wants(self, text: str) -> str | None:
        return next(("foreign_chunk" for _ in foreign_chunks(text, self._identifier)), None)

    def identity(self) -> Mapping[str, object]:
        limits = determining(self._options, "max_input_tokens", "max_output_tokens")
        converted = self._options.backend == "ctranslate2"
        weights = folder_identity(self._options.model) if converted else self._options.weights_identity()
        return {**weights, "identifier": self._identifier.identity(), **limits}

    @cached_property
    def _checkpoint(self) -> Nllb | Int8:
        backend = Int8 if self._options.backend == "ctranslate2" else Nllb
        return backend(self._options, self._options.max_output_tokens)


def _code(text: str, label: str, tokenizer: Any) -> ToolResult:
    if not any(map(str.isalpha, text)):
        return ToolResult(None, "no_words")
    if label == ENGLISH_LABEL:
        return ToolResult(None, "already_english")
    code = flores_code(label)
    return ToolResult(code) if code and knows(tokenizer, code) else ToolResult(None, "unknown_language")
