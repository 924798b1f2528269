"""Held-out perplexity inside the Trainer: over tokens, not the mean of batch means that it reports by itself."""

import math
from typing import Any

import torch

from toolformer_dag.training.collate import IGNORED


def row_losses(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """[rows, 2]: the summed loss in nats and the number of predicted tokens, so that logits need not be kept."""
    scores = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1].float()
    targets = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.stack([losses.view_as(targets).sum(-1), (targets != IGNORED).sum(-1)], -1)


def token_perplexity(evaluated: Any) -> dict[str, float]:
    """Perplexity over all held-out tokens; infinite where no float holds it, so that no such checkpoint is the best."""
    loss, tokens = evaluated.predictions.sum(0, dtype="float64")
    try:
        return {"perplexity": math.exp(loss / tokens)}
    except OverflowError:
        return {"perplexity": math.inf}
