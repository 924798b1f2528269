"""Translate into English with NLLB, in transformers or as int8 in CTranslate2, and the options for both."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from toolformer_dag.files import changed_unseen
from toolformer_dag.identity import file_hash
from toolformer_dag.model.sentencepieces import sentencepiece_file
from toolformer_dag.model.weights import DamagedModel, ModelError
from toolformer_dag.settings.setting_types import AsBefore, determining
from toolformer_dag.tools.foreign_text import foreign_chunks
from toolformer_dag.tools.language_identifier import ENGLISH, ENGLISH_LABEL, Identifier, flores_code, has_letter
from toolformer_dag.tools.options import OptionPath, PretrainedName, PretrainedOptions, load_model, load_tokenizer
from toolformer_dag.tools.tool import NoResult, ToolResult


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
    """Load the tokenizer of an NLLB translation model. Raises ModelError where it knows no English words.

    transformers builds such a tokenizer, without a warning, from a folder without tokenizer files.
    """
    tokenizer = load_tokenizer("NllbTokenizer", options)
    sentencepiece_model = sentencepiece_file(options.model, options.revision)
    if sentencepiece_model is not None:
        tokenizer = _with_languages(tokenizer, sentencepiece_model)
    ids = tokenizer("A sentence of English words.", add_special_tokens=False).input_ids
    knows_no_words = set(ids) <= {tokenizer.unk_token_id}
    if knows_no_words or not knows(tokenizer, ENGLISH):
        raise ModelError(
            f"the tokenizer of {options.model!r} knows no English words or lacks {ENGLISH}; add the tokenizer.json of "
            "an NLLB checkpoint to the folder"
        )
    return tokenizer


def _with_languages(tokenizer: Any, sentencepiece_model: Path) -> Any:
    """Return a copy of an NLLB tokenizer whose languages have the ids that the model's weights were trained with.

    Where transformers reads only the sentencepiece model, it gives the languages no ids, or ids too high by one.
    """
    from transformers import NllbTokenizer

    description = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    piece_count = _piece_count(sentencepiece_model)
    pieces = {piece: number for piece, number in description["vocab"].items() if number < piece_count}
    languages = _language_numbers(tokenizer.mask_token, piece_count)
    merges = [tuple(merge) for merge in description["merges"]]
    complete = NllbTokenizer(vocab={**pieces, **languages}, merges=merges)
    complete.backend_tokenizer.normalizer = tokenizer.backend_tokenizer.normalizer
    return complete


def _piece_count(sentencepiece_model: Path) -> int:
    """Return how many token ids come before the languages."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(sentencepiece_model))
    return int(processor.get_piece_size()) + 1  # fairseq, which trained the model, adds <pad>


def _language_numbers(mask_token: str, first: int) -> dict[str, int]:
    """Return the token ids of NLLB's languages, from `first` on, and of the mask, which comes behind them."""
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    return {token: number for number, token in enumerate([*FAIRSEQ_LANGUAGE_CODES, mask_token], first)}


def knows(tokenizer: Any, code: str) -> bool:
    """Return whether a FLORES code is a token; the tokenizer silently maps other codes to <unk>."""
    return bool(tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id)


def encode(tokenizer: Any, texts: Sequence[str], codes: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, with the marker of its language. codes: the texts' languages in FLORES."""
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
        """Translate texts into English in one batch, at most `max_tokens` tokens each. ids: what `encode` returned."""
        import torch

        batch = self.tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt").to(self._model.device)
        with torch.inference_mode():
            english_ids = self._model.generate(
                **batch,
                forced_bos_token_id=self.tokenizer.convert_tokens_to_ids(ENGLISH),
                max_new_tokens=self._max_tokens,
                do_sample=False,
                num_beams=1,
            )
        texts: list[str] = self.tokenizer.batch_decode(english_ids, skip_special_tokens=True)
        return texts


def folder_identity(model: str) -> Mapping[str, object]:
    """Return what identifies a model that was converted for CTranslate2: the hashes of its folder's files by name.

    Raises ModelError for a folder without model.bin, which was not converted.
    """
    if not (Path(model) / "model.bin").is_file():
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
        """Load a folder of CTranslate2's converter, `options.model`.

        Raises ModelError where it was not converted, DamagedModel where a file changed since it was hashed, while its
        size and times did not.
        """
        import ctranslate2

        folder_identity(options.model)  # raises for a folder that was not converted
        damaged = changed_unseen(converted_files(options.model))
        if damaged:
            raise DamagedModel(damaged)
        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """Translate texts greedily into English, at most `max_tokens` tokens each. ids: what `encode` returned."""
        pieces = [self.tokenizer.convert_ids_to_tokens(text_ids) for text_ids in ids]
        english = [[ENGLISH]] * len(pieces)  # NLLB's marker of the language, which begins a translation
        translations = self._translator.translate_batch(
            pieces, target_prefix=english, beam_size=1, max_decoding_length=self._max_tokens
        )
        best_pieces = [translation.hypotheses[0] for translation in translations]
        english_ids = [self.tokenizer.convert_tokens_to_ids(text_pieces) for text_pieces in best_pieces]
        texts: list[str] = self.tokenizer.batch_decode(english_ids, skip_special_tokens=True)
        return texts


class EncodedText(NamedTuple):
    """The token ids of a text to translate, or None and the reason why it is not translated."""

    ids: list[int] | None
    reason: str = ""


class NeuralTranslator:
    """NLLB, in transformers or CTranslate2, with fastText's language identification; both are loaded at first use."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._in_use = threading.Lock()  # tokenizers are not thread-safe

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts. Reasons: `no_words`, `already_english`, `unknown_language`, `input_too_long`.

        Raises ModelError and IdentifierError where the models cannot be loaded.
        """
        with self._in_use:
            return self._translate(texts)

    def _translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts in one batch; the caller holds the lock. Texts that are not translated get a reason."""
        encoded_texts = self._encoded_texts(texts)
        id_lists = [encoded.ids for encoded in encoded_texts if encoded.ids is not None]
        translations = iter(self._translations(id_lists))
        results = []
        for encoded in encoded_texts:
            if encoded.ids is None:
                results.append(ToolResult(None, encoded.reason))
            else:
                results.append(ToolResult(next(translations)))
        return results

    def _translations(self, id_lists: Sequence[list[int]]) -> list[str]:
        """Return the translation of each text, by its token ids; without texts the model is not run."""
        return self._checkpoint.translate(id_lists) if id_lists else []

    def _encoded_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Return the token ids of each text, or the reason why it is not translated."""
        tokenizer = self._checkpoint.tokenizer
        languages = self._identifier.identify(texts)
        encoded_texts = []
        for text, language in zip(texts, languages, strict=True):
            try:
                ids = self._encoded(text, language.label, tokenizer)
                encoded_texts.append(EncodedText(ids))
            except NoResult as error:
                encoded_texts.append(EncodedText(None, error.reason))
        return encoded_texts

    def _encoded(self, text: str, label: str, tokenizer: Any) -> list[int]:
        """Return the token ids of a text in a language, by fastText's label such as "de".

        Raises NoResult where it is not translated: it has no words, is English already, is in a language that the model
        does not know, or is too long.
        """
        if not has_letter(text):
            raise NoResult("no_words")
        if label == ENGLISH_LABEL:
            raise NoResult("already_english")
        code = flores_code(label)
        if code is None or not knows(tokenizer, code):
            raise NoResult("unknown_language")
        [ids] = encode(tokenizer, [text], [code])
        if len(ids) > self._options.max_input_tokens:
            raise NoResult("input_too_long")
        return ids

    def wants(self, text: str) -> str | None:
        """Return `foreign_chunk` where the text has a foreign chunk between English ones. Raises OverBudget."""
        for _ in foreign_chunks(text, self._identifier):
            return "foreign_chunk"
        return None

    def identity(self) -> Mapping[str, object]:
        """Return what determines translations: the weights, the identifier's file and the limits."""
        is_converted = self._options.backend == "ctranslate2"
        weights = folder_identity(self._options.model) if is_converted else self._options.weights_identity()
        limits = determining(self._options, "max_input_tokens", "max_output_tokens")
        return {**weights, "identifier": self._identifier.identity(), **limits}

    @cached_property
    def _checkpoint(self) -> Nllb | Int8:
        checkpoint_class = Int8 if self._options.backend == "ctranslate2" else Nllb
        return checkpoint_class(self._options, self._options.max_output_tokens)
