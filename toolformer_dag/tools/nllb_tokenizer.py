"""NLLB's tokenizer: its languages and their tokens, also where a folder has only the sentencepiece model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolformer_dag.model.sentencepieces import sentencepiece_file
from toolformer_dag.model.weights import ModelError
from toolformer_dag.tools.foreign_text import ENGLISH
from toolformer_dag.tools.options import PretrainedOptions, load_tokenizer


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

    They follow the pieces, and <mask> comes last. transformers leaves them out, or puts them behind <mask>, where every
    language has the id of the next one.
    """
    from sentencepiece import SentencePieceProcessor
    from transformers import NllbTokenizer
    from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

    first = SentencePieceProcessor(model_file=str(file)).get_piece_size() + 1  # fairseq adds <pad>
    read = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    pieces = {piece: number for piece, number in read["vocab"].items() if number < first}
    behind = {code: first + number for number, code in enumerate([*FAIRSEQ_LANGUAGE_CODES, tokenizer.mask_token])}
    whole = NllbTokenizer(vocab={**pieces, **behind}, merges=[tuple(merge) for merge in read["merges"]])
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
