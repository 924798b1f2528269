"""Bits per byte: how well a model knows a text, whatever its tokenizer."""

import math
from collections.abc import Iterator, Sequence

import torch

from toolformer_dag.language_model.load import LanguageModel

WINDOW = 512


@torch.inference_mode()
def bits_per_byte(language_model: LanguageModel, texts: Sequence[str]) -> float:
    """Of all texts together; each is read in windows of WINDOW tokens, every window from a fresh beginning.

    Raises ValueError where the texts hold no byte.
    """
    size = sum(len(text.encode()) for text in texts)
    if not size:
        raise ValueError("bits per byte of no text; give texts that hold something")
    return sum(_nats(language_model, window) for window in _windows(language_model, texts)) / math.log(2) / size


def _windows(language_model: LanguageModel, texts: Sequence[str]) -> Iterator[list[int]]:
    for text in texts:
        ids = language_model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        yield from (ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW))


def _nats(language_model: LanguageModel, window: list[int]) -> float:
    begin = language_model.encoding.bos or [window[0]]
    ids = torch.tensor([begin + window], device=language_model.device)
    rows = language_model.model(ids).logits[0, len(begin) - 1 : -1].float().log_softmax(-1)
    return -float(rows.gather(1, ids[0, len(begin) :, None]).sum())
