"""Translate into English with NLLB, in transformers or as int8 in CTranslate2, and the options for both."""

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from toolformer_dag.files import find_silently_changed_file
from toolformer_dag.identity import file_hash
from toolformer_dag.model.sentencepieces import find_sentencepiece_file
from toolformer_dag.model.weights import DamagedModel, ModelError
from toolformer_dag.settings.setting_types import AsBefore, select_determining_settings
from toolformer_dag.tools.foreign_text import iter_foreign_chunks
from toolformer_dag.tools.language_identifier import (
    ENGLISH_FLORES_CODE,
    ENGLISH_LABEL,
    Identifier,
    has_letter,
    to_flores_code,
)
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
        tokenizer = _add_language_tokens(tokenizer, sentencepiece_model)

    # From a folder without tokenizer files, transformers builds a tokenizer without words.
    if not _knows_english(tokenizer):
        raise ModelError(
            f"the tokenizer of {options.model!r} knows no English words or lacks {ENGLISH_FLORES_CODE}; "
            "add the tokenizer.json of an NLLB checkpoint to the folder"
        )

    return tokenizer


def _knows_english(tokenizer: Any) -> bool:
    """Return whether a tokenizer has English words and the marker of English."""
    token_ids = tokenizer("A sentence of English words.", add_special_tokens=False).input_ids
    known_ids = set(token_ids) - {tokenizer.unk_token_id}  # <unk> stands for unknown words
    knows_words = len(known_ids) > 0
    return knows_words and knows_language(tokenizer, ENGLISH_FLORES_CODE)


def _add_language_tokens(tokenizer: Any, sentencepiece_model: Path) -> Any:
    """Copy an NLLB tokenizer, and give its languages the token IDs with which the model was trained.

    If transformers reads only the sentencepiece model, it gives the languages no IDs, or IDs too high by one.

    Args:
        tokenizer: The tokenizer of transformers.
        sentencepiece_model: The file from which it was read.
    """
    from transformers import NllbTokenizer

    backend = tokenizer.backend_tokenizer
    description = json.loads(backend.to_str())["model"]

    # The weights' order of token IDs: pieces of words, then languages, then the mask.
    piece_count = _count_sentencepiece_tokens(sentencepiece_model)
    vocabulary = {piece: token_id for piece, token_id in description["vocab"].items() if token_id < piece_count}
    vocabulary |= _build_language_ids(tokenizer.mask_token, first_id=piece_count)

    merges = [tuple(merge) for merge in description["merges"]]
    complete_tokenizer = NllbTokenizer(vocab=vocabulary, merges=merges)
    # The normalizer is neither in the vocabulary nor in the merges.
    complete_tokenizer.backend_tokenizer.normalizer = backend.normalizer

    return complete_tokenizer


def _count_sentencepiece_tokens(sentencepiece_model: Path) -> int:
    """Return how many token IDs of an NLLB model come before those of the languages."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(sentencepiece_model))
    return int(processor.get_piece_size()) + 1  # fairseq, which trained the model, adds <pad>


def _build_language_ids(mask_token: str, first_id: int) -> dict[str, int]:
    """Return the token IDs of NLLB's languages, numbered from `first_id`, and of the mask, which follows them."""
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    tokens = [*FAIRSEQ_LANGUAGE_CODES, mask_token]
    return {token: token_id for token_id, token in enumerate(tokens, first_id)}


def knows_language(tokenizer: Any, flores_code: str) -> bool:
    """Return whether an NLLB tokenizer has a token for a language, such as `deu_Latn` for German.

    It silently maps the codes of other languages to <unk>.
    """
    token_id = tokenizer.convert_tokens_to_ids(flores_code)
    return bool(token_id != tokenizer.unk_token_id)


def encode_texts(tokenizer: Any, texts: Sequence[str], flores_codes: Sequence[str]) -> list[list[int]]:
    """Tokenize texts, each with the marker of its language.

    Args:
        tokenizer: An NLLB tokenizer. Its language is changed.
        texts: The texts.
        flores_codes: The FLORES code of each text's language, such as `deu_Latn`.

    Returns:
        The token IDs of each text.
    """
    token_id_lists = []
    for text, code in zip(texts, flores_codes, strict=True):
        tokenizer.src_lang = code
        encoding = tokenizer(text)
        token_id_lists.append(encoding.input_ids)
    return token_id_lists


class Nllb:
    """NLLB in transformers, decoded greedily, so that a translation does not depend on the batch."""

    def __init__(self, options: PretrainedOptions, max_output_tokens: int) -> None:
        self.tokenizer = load_nllb_tokenizer(options)
        self._model = load_model("AutoModelForSeq2SeqLM", options)
        self._max_output_tokens = max_output_tokens

    def translate_token_ids(self, token_id_lists: Sequence[list[int]]) -> list[str]:
        """Translate texts into English in one batch.

        Args:
            token_id_lists: The token IDs of each text (see `encode_texts`).

        Returns:
            The translations, in order. Each has at most `max_output_tokens` tokens.
        """
        import torch

        padded_batch = self.tokenizer.pad({"input_ids": list(token_id_lists)}, return_tensors="pt")
        batch = padded_batch.to(self._model.device)

        english_marker_id = self.tokenizer.convert_tokens_to_ids(ENGLISH_FLORES_CODE)
        with torch.inference_mode():
            english_token_ids = self._model.generate(
                **batch,
                forced_bos_token_id=english_marker_id,  # the translation begins with the marker of English
                max_new_tokens=self._max_output_tokens,
                do_sample=False,
                num_beams=1,
            )

        translations: list[str] = self.tokenizer.batch_decode(english_token_ids, skip_special_tokens=True)
        return translations


def build_converted_identity(model_folder: str) -> Mapping[str, object]:
    """Hash the files of a model that was converted for CTranslate2, to identify it in fingerprints.

    Args:
        model_folder: The folder that the converter wrote.

    Returns:
        The hash of each file by its name, and the dtype of the weights.

    Raises:
        ModelError: The folder has no model.bin, so the model was not converted.
    """
    if not (Path(model_folder) / "model.bin").is_file():
        raise ModelError(
            f"{model_folder!r} holds no model.bin; "
            "convert a checkpoint with `ct2-transformers-converter --quantization int8 "
            "--copy_files tokenizer.json tokenizer_config.json` and set `model` to its output folder"
        )
    hash_by_name = {file.name: file_hash(file) for file in list_converted_files(model_folder)}
    return {"model": hash_by_name, "dtype": "int8"}


def list_converted_files(model_folder: str) -> list[Path]:
    """Return the files of a model that was converted for CTranslate2, sorted: all that determine its results."""
    return sorted(Path(model_folder).glob("*.*"))


class Int8:
    """NLLB as int8 in CTranslate2, on the CPU or, with `device = "cuda"`, on a GPU."""

    def __init__(self, options: PretrainedOptions, max_output_tokens: int) -> None:
        """Load a model from a folder that CTranslate2's converter wrote, `options.model`.

        Raises:
            ModelError: The folder was not written by the converter.
            DamagedModel: A file is damaged.
        """
        import ctranslate2

        build_converted_identity(options.model)  # raises ModelError for a folder that was not converted

        damaged_file = find_silently_changed_file(list_converted_files(options.model))
        if damaged_file:
            raise DamagedModel(damaged_file)

        self.tokenizer = load_nllb_tokenizer(options)
        self._translator = ctranslate2.Translator(options.model, device=options.device, compute_type="int8")
        self._max_output_tokens = max_output_tokens

    def translate_token_ids(self, token_id_lists: Sequence[list[int]]) -> list[str]:
        """Translate texts greedily into English.

        Args:
            token_id_lists: The token IDs of each text (see `encode_texts`).

        Returns:
            The translations, in order. Each has at most `max_output_tokens` tokens.
        """
        token_lists = [self.tokenizer.convert_ids_to_tokens(token_ids) for token_ids in token_id_lists]

        # Each translation begins with the marker of English.
        english_markers = [[ENGLISH_FLORES_CODE]] * len(token_lists)
        translations = self._translator.translate_batch(
            token_lists, target_prefix=english_markers, beam_size=1, max_decoding_length=self._max_output_tokens
        )

        return [self._decode_translation(translation.hypotheses[0]) for translation in translations]

    def _decode_translation(self, tokens: list[str]) -> str:
        """Return the text of a translation from its tokens."""
        token_ids = self.tokenizer.convert_tokens_to_ids(tokens)
        [text] = self.tokenizer.batch_decode([token_ids], skip_special_tokens=True)
        return str(text)


class EncodedText(NamedTuple):
    """The token IDs of a text to translate, or None and the reason why it is not translated."""

    token_ids: list[int] | None
    reason: str = ""


def _require_language_code(text: str, language_label: str, tokenizer: Any) -> str:
    """Return the FLORES code of the language of a text, such as "deu_Latn", if the text can be translated.

    Args:
        text: The text.
        language_label: fastText's label of its language, such as "de".
        tokenizer: The tokenizer of the translation model.

    Raises:
        NoResult: The text has no words or is in English, or the tokenizer does not know its language.
    """
    if not has_letter(text):
        raise NoResult("no_words")
    if language_label == ENGLISH_LABEL:
        raise NoResult("already_english")

    code = to_flores_code(language_label)
    if code is None or not knows_language(tokenizer, code):
        raise NoResult("unknown_language")

    return code


class NeuralTranslator:
    """NLLB, in transformers or CTranslate2, with fastText's language identification; both are loaded at first use."""

    def __init__(self, options: TranslationOptions) -> None:
        self._options = options
        self._identifier = Identifier(options.identifier)
        self._lock = threading.Lock()  # tokenizers are not thread-safe

    def translate_texts(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts into English. Safe for several threads.

        Returns:
            A translation per text, or a reason: `no_words`, `already_english`, `unknown_language` or `input_too_long`.

        Raises:
            ModelError: The translation model cannot be loaded.
            IdentifierError: fastText's model cannot be loaded.
        """
        with self._lock:
            return self._translate_batch(texts)

    def _translate_batch(self, texts: Sequence[str]) -> list[ToolResult]:
        """Translate texts in one batch, while the caller holds the lock.

        Returns:
            A translation per text, or the reason why the text is not translated.
        """
        encoded_texts = self._encode_texts(texts)

        # Only some of the texts can be translated.
        token_id_lists = [encoded.token_ids for encoded in encoded_texts if encoded.token_ids is not None]
        translations = iter(self._translate_token_ids(token_id_lists))

        results = []
        for encoded in encoded_texts:
            if encoded.token_ids is None:
                result = ToolResult(None, encoded.reason)
            else:
                result = ToolResult(next(translations))
            results.append(result)

        return results

    def _translate_token_ids(self, token_id_lists: Sequence[list[int]]) -> list[str]:
        """Return the translation of each text from its token IDs. Without any text the model is not run."""
        if not token_id_lists:
            return []
        return self._translation_model.translate_token_ids(token_id_lists)

    def _encode_texts(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokenize texts in the language that is identified for each.

        Returns:
            The token IDs of each text, or the reason why it is not translated.
        """
        tokenizer = self._translation_model.tokenizer
        languages = self._identifier.identify_languages(texts)

        encoded_texts = []
        for text, language in zip(texts, languages, strict=True):
            try:
                token_ids = self._encode_text(text, language.label, tokenizer)
            except NoResult as error:
                encoded_texts.append(EncodedText(None, error.reason))
            else:
                encoded_texts.append(EncodedText(token_ids))

        return encoded_texts

    def _encode_text(self, text: str, language_label: str, tokenizer: Any) -> list[int]:
        """Tokenize a text, with the marker of its language.

        Args:
            text: The text.
            language_label: fastText's label of its language, such as "de".
            tokenizer: The tokenizer of the translation model.

        Returns:
            The token IDs.

        Raises:
            NoResult: The text is not translated: it has no words, is too long or in English, or its language is
                unknown to the model.
        """
        flores_code = _require_language_code(text, language_label, tokenizer)
        [token_ids] = encode_texts(tokenizer, [text], [flores_code])
        if len(token_ids) > self._options.max_input_tokens:
            raise NoResult("input_too_long")
        return token_ids

    def find_selection_reason(self, text: str) -> str | None:
        """Return "foreign_chunk" if a text has a foreign chunk between English ones, else None.

        A chunk is ten tokens of a paragraph. A foreign one may be worth translating.

        Raises:
            OverBudget: The text costs too much work.
            IdentifierError: fastText's model cannot be loaded.
        """
        for _ in iter_foreign_chunks(text, self._identifier):  # the first one is enough
            return "foreign_chunk"
        return None

    def build_identity(self) -> Mapping[str, object]:
        """Return what determines translations: the weights, the identifier's file and the limits."""
        if self._options.backend == "ctranslate2":
            weights_identity = build_converted_identity(self._options.model)
        else:
            weights_identity = self._options.build_weights_identity()

        limits = select_determining_settings(self._options, "max_input_tokens", "max_output_tokens")
        return {**weights_identity, "identifier": self._identifier.compute_file_hash(), **limits}

    @cached_property
    def _translation_model(self) -> Nllb | Int8:
        """The model that translates, which is loaded when it is first used."""
        checkpoint_class = Int8 if self._options.backend == "ctranslate2" else Nllb
        return checkpoint_class(self._options, self._options.max_output_tokens)
