"""Optimise with Muon and AdamW, and average the weights."""

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.swa_utils import AveragedModel
from transformers import GPTJForCausalLM

MUON_DECAY = 0.01  # of the weights, times the learning rate


def optimisers(model: GPTJForCausalLM, muon_rate: float, adam_rate: float) -> tuple[Optimizer, ...]:
    """Return Muon for the matrices and AdamW for the rest; the bias of the output, which stays 0, is in neither."""
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and "wte" not in name}
    others = [p for name, p in model.named_parameters() if name not in matrices and name != "lm_head.bias"]
    muon = Muon(list(matrices.values()), muon_rate, weight_decay=MUON_DECAY, adjust_lr_fn="original")
    return muon, AdamW(others, adam_rate, betas=(0.9, 0.95), weight_decay=0.0)


def averaged(model: nn.Module, power: float) -> AveragedModel:
    """Return the average of the weights with polynomial decay (Shamir and Zhang 2013), which each step updates.

    Weights after step t count like t (t + 1) ... (t + power - 1); their mean age is 1 / (power + 2) of all steps so
    far, however long the run will be.
    """

    def mean(average: Tensor, weights: Tensor, steps: Tensor | int) -> Tensor:
        return torch.lerp(average, weights, float((power + 1) / (power + steps + 1)))

    return AveragedModel(model, avg_fn=mean)
