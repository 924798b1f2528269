"""NLLB-200 (Costa-jussà et al. 2022) through transformers. Its published weights are CC-BY-NC."""

from collections.abc import Sequence
from typing import Any

from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.tools.machine_translation.languages import ENGLISH
from toolformer_dag.tools.pretrained import PretrainedOptions, load_model, load_tokenizer


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
