"""Trying a model on a few tokens before anything is built on how it behaves."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolformer_dag.language_model.attention import UnsupportedAttentionError
from toolformer_dag.language_model.errors import ModelError
from toolformer_dag.language_model.memory import is_out_of_memory

TRIAL = (7, 3, 5, 2, 9, 4, 8, 6, 1)
OTHER_END = (*TRIAL[:4], 1, 9, 2, 7, 3)
OWN_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Of the largest logit: the model's own operations round nearly alike."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest logit: what another order of summation explains. A missing part of attention is off by more."""
UNFIT = (UnsupportedAttentionError, AttributeError, TypeError, KeyError, IndexError, ValueError, RuntimeError)


@torch.no_grad()  # what a model keeps of a pass (rotary tables) must serve training too
def check_causal(model: Any) -> None:
    """Raises ModelError for a model that looks ahead (BERT and its like, which load as causal ones)."""
    # of the same length, for an expert is chosen by a hair, and another length rounds otherwise
    expected, found = own_logits(model, TRIAL)[:4], own_logits(model, OTHER_END)[:4]
    if bool((expected - found).abs().max() > OWN_TOLERANCES[model.dtype] * expected.abs().max()):  # false for NaN
        raise ModelError(
            f"{type(model).__name__} reads what comes after a token; take a causal model (some are with "
            "is_decoder = true in config.json)"
        )


def own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """The model's own logits [tokens, vocabulary] in float32, nothing taken over and nothing cached."""
    logits: Tensor = model(torch.tensor([tokens], device=model.device)).logits[0].float()
    return logits


def tried(way: Callable[[], Tensor]) -> Tensor | None:
    """None where the model does not fit this way; running out of memory says nothing about that, and is raised."""
    try:
        return way()
    except UNFIT as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        return None


def agrees(expected: Tensor, found: Tensor | None, tolerance: float) -> bool:
    """Of two tables of logits; `tolerance` is a share of the largest expected."""
    return found is not None and bool((expected - found).abs().max() <= tolerance * expected.abs().max())
