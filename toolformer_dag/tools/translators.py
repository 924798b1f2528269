"""Translate into English with NLLB, in transformers or as int8 in CTranslate2, and the options for both."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from toolformer_dag.files import find_changed_unseen
from toolformer_dag.identity import file_hash
from toolformer_dag.model.sentencepieces import find_sentencepiece_file
from toolformer_dag.model.weights import DamagedModel, ModelError
from toolformer_dag.settings.setting_types import AsBefore, determining
from toolformer_dag.tools.foreign_text import iter_foreign_chunks
from toolformer_dag.tools.language_identifier import ENGLISH, ENGLISH_LABEL, Identifier, has_letter, to_flores_code
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
    """Load the tokenizer of an NLLB translation model.

    Raises:
        ModelError: The tokenizer knows no English words, or cannot be loaded.
    """
    tokenizer = load_tokenizer("NllbTokenizer", options)
    sentencepiece_model = find_sentencepiece_file(options.model, options.revision)
    if sentencepiece_model is not None:
        tokenizer = _with_languages(tokenizer, sentencepiece_model)

    if not _knows_english(tokenizer):  # transformers builds such a one from a folder without tokenizer files
        raise ModelError(
            f"the tokenizer of {options.model!r} knows no English words or lacks {ENGLISH}; add the tokenizer.json of "
            "an NLLB checkpoint to the folder"
        )

    return tokenizer


def _knows_english(tokenizer: Any) -> bool:
    """Return whether a tokenizer has English words and the marker of English."""
    ids = tokenizer("A sentence of English words.", add_special_tokens=False).input_ids
    knows_words = not set(ids) <= {tokenizer.unk_token_id}
    return knows_words and knows_language(tokenizer, ENGLISH)


def _with_languages(tokenizer: Any, sentencepiece_model: Path) -> Any:
    """Copy an NLLB tokenizer, and give its languages the token IDs with which the model was trained."""
    # If transformers reads only the sentencepiece model, it gives the languages no ids, or ids too high by one.
    from transformers import NllbTokenizer

    backend = tokenizer.backend_tokenizer
    description = json.loads(backend.to_str())["model"]

    # The weights' order of ids: pieces of words, then languages, then the mask.
    piece_count = _count_pieces(sentencepiece_model)
    vocabulary = {piece: token_id for piece, token_id in description["vocab"].items() if token_id < piece_count}
    vocabulary |= _build_language_ids(tokenizer.mask_token, first_id=piece_count)

    merges = [tuple(merge) for merge in description["merges"]]
    complete = NllbTokenizer(vocab=vocabulary, merges=merges)
    complete.backend_tokenizer.normalizer = backend.normalizer  # which is neither in the vocabulary nor in the merges

    return complete


def _count_pieces(sentencepiece_model: Path) -> int:
    """Return how many token ids come before the languages."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(sentencepiece_model))
    return int(processor.get_piece_size()) + 1  # fairseq, which trained the model, adds <pad>


def _build_language_ids(mask_token: str, first_id: int) -> dict[str, int]:
    """Return the token ids of NLLB's languages and of the mask, which follows them."""
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    tokens = [*FAIRSEQ_LANGUAGE_CODES, mask_token]
    return {token: token_id for token_id, token in enumerate(tokens, first_id)}


def knows_language(tokenizer: Any, code: str) -> bool:
    """Return whether a FLORES code is a token; the tokenizer silently maps other codes to <unk>."""
    return bool(tokenizer.convert_tokens_to_ids(code) != tokenizer.unk_token_id)


def encode(tokenizer: Any, texts: Sequence[str], codes: Sequence[str]) -> list[list[int]]:
    """Tokenize texts, each with the marker of its language.

    Args:
        tokenizer: An NLLB tokenizer.
        codes: The FLORES code of each text's language.

    Returns:
        The token IDs of each text.
    """
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
        """Translate texts into English in one batch.

        Args:
            ids: The token IDs of each text (see `encode`).

        Returns:
            The translations. Each has at most `max_tokens` tokens.
        """
        import torch

        batch = self.tokenizer.pad({"input_ids": list(ids)}, return_tensors="pt").to(self._model.device)

        english_marker = self.tokenizer.convert_tokens_to_ids(ENGLISH)
        with torch.inference_mode():
            english_ids = self._model.generate(
                **batch,
                forced_bos_token_id=english_marker,
                max_new_tokens=self._max_tokens,
                do_sample=False,
                num_beams=1,
            )

        texts: list[str] = self.tokenizer.batch_decode(english_ids, skip_special_tokens=True)
        return texts


def build_folder_identity(model: str) -> Mapping[str, object]:
    """Hash the files of a model that was converted for CTranslate2, to identify it.

    Raises:
        ModelError: The folder has no model.bin, so the model was not converted.
    """
    if not (Path(model) / "model.bin").is_file():
        raise ModelError(
            f"{model!r} holds no model.bin; convert a checkpoint with `ct2-transformers-converter --quantization int8 "
            "--copy_files tokenizer.json tokenizer_config.json` and set `model` to its output folder"
        )
    return {"model": {file.name: file_hash(file) for file in list_converted_files(model)}, "dtype": "int8"}


def list_converted_files(model: str) -> list[Path]:
    """Return the files that determine the results of a converted folder."""
    return sorted(Path(model).glob("*.*"))


class Int8:
    """NLLB as int8 in CTranslate2, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_tokens: int) -> None:
        """Load a model from a folder that CTranslate2's converter wrote, `options.model`.

        Raises:
            ModelError: The folder was not written by the converter.
            DamagedModel: A file is damaged.
        """
        import ctranslate2

        build_folder_identity(options.model)  # raises for a folder that was not converted

        damaged = find_changed_unseen(list_converted_files(options.model))
        if damaged:
            raise DamagedModel(damaged)

        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_tokens = max_tokens

    def translate(self, ids: Sequence[list[int]]) -> list[str]:
        """Translate texts greedily into English.

        Args:
            ids: The token IDs of each text (see `encode`).

        Returns:
            The translations. Each has at most `max_tokens` tokens.
        """
        pieces = [self.tokenizer.convert_ids_to_tokens(text_ids) for text_ids in ids]
        english_markers = [[ENGLISH]] * len(pieces)  # which begin the translations
        translations = self._translator.translate_batch(
            pieces, target_prefix=english_markers, beam_size=1, max_decoding_length=self._max_tokens
        )

        return [self._decode_translation(translation.hypotheses[0]) for translation in translations]

    def _decode_translation(self, pieces: list[str]) -> str:
        """Return the text of a translation."""
        ids = self.tokenizer.convert_tokens_to_ids(pieces)
        [text] = self.tokenizer.batch_decode([ids], skip_special_tokens=True)
        return str(text)


class EncodedText(NamedTuple):
    """The token ids of a text to translate, or None and the reason why it is not translated."""

    ids: list[int] | None
    reason: str = ""


def _require_language_code(text: str, label: str, tokenizer: Any) -> str:
    """Find the FLORES code of the language of a text, such as "deu_Latn".

    Args:
        label: fastText's label of its language, such as "de".
        tokenizer: The tokenizer of the translation model.

    Raises:
        NoResult: The text has no words or is in English, or the tokenizer does not know its language.
    """
    if not has_letter(text):
        raise NoResult("no_words")
    if label == ENGLISH_LABEL:
        raise NoResult("already_english")

    code = to_flores_code(label)
    if code is None or not knows_language(tokenizer, code):
        raise NoResult("unknown_language")

    return code


class NeuralTranslator:
    """NLLB, in transformers or CTranslate2, with fastText's language identification; both are loaded at first use."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._in_use = threading.Lock()  # tokenizers are not thread-safe

    def translate(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts. Reasons: `no_words`, `already_english`, `unknown_language`, `input_too_long`.

        Raises ModelError and IdentifierError if the models cannot be loaded.
        """
        with self._in_use:
            return self._translate_batch(texts)

    def _translate_batch(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts in one batch, while the caller holds the lock.

        Returns:
            A translation per text, or the reason why the text is not translated.
        """
        encoded_texts = self._encode_texts(texts)
        id_lists = [encoded.ids for encoded in encoded_texts if encoded.ids is not None]
        translations = iter(self._translate_id_lists(id_lists))

        results = []
        for encoded in encoded_texts:
            if encoded.ids is None:
                result = ToolResult(None, encoded.reason)
            else:
                result = ToolResult(next(translations))
            results.append(result)

        return results

    def _translate_id_lists(self, id_lists: Sequence[list[int]]) -> list[str]:
        """Return the translation of each text, by its token ids; without texts the model is not run."""
        if not id_lists:
            return []
        return self._checkpoint.translate(id_lists)

    def _encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokenize texts in the language that is identified for each.

        Returns:
            The token IDs of each text, or the reason why it is not translated.
        """
        tokenizer = self._checkpoint.tokenizer
        languages = self._identifier.identify(texts)

        encoded_texts = []
        for text, language in zip(texts, languages, strict=True):
            try:
                ids = self._encode_text(text, language.label, tokenizer)
                encoded_texts.append(EncodedText(ids))
            except NoResult as error:
                encoded_texts.append(EncodedText(None, error.reason))

        return encoded_texts

    def _encode_text(self, text: str, label: str, tokenizer: Any) -> list[int]:
        """Tokenize a text.

        Args:
            label: fastText's label of its language, such as "de".
            tokenizer: The tokenizer of the translation model.

        Raises:
            NoResult: The text is not translated, for the given reason.
        """
        code = _require_language_code(text, label, tokenizer)
        [ids] = encode(tokenizer, [text], [code])
        if len(ids) > self._options.max_input_tokens:
            raise NoResult("input_too_long")
        return ids

    def wants(self, text: str) -> str | None:
        """Return `foreign_chunk` if the text has a foreign chunk between English ones, else None. Raises OverBudget."""
        for _ in iter_foreign_chunks(text, self._identifier):
            return "foreign_chunk"
        return None

    def identity(self) -> Mapping[str, object]:
        """Return what determines translations: the weights, the identifier's file and the limits."""
        is_converted = self._options.backend == "ctranslate2"
        weights = build_folder_identity(self._options.model) if is_converted else self._options.build_weights_identity()
        limits = determining(self._options, "max_input_tokens", "max_output_tokens")
        return {**weights, "identifier": self._identifier.identity(), **limits}

    @cached_property
    def _checkpoint(self) -> Nllb | Int8:
        checkpoint_class = Int8 if self._options.backend == "ctranslate2" else Nllb
        return checkpoint_class(self._options, self._options.max_output_tokens)
