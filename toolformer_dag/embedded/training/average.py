"""A running mean of the weights: what a run exports in place of the last weights, which the last batches have moved."""

import torch
from torch import nn


class WeightAverage:
    """Weights after step t count like t (t + 1) ... (t + power - 1): polynomial decay (Shamir and Zhang 2013).

    Their mean age is 1 / (power + 2) of all steps so far, whatever the run's length is going to be.
    """

    def __init__(self, model: nn.Module, power: float) -> None:
        self.power = power
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Take in the weights after `step` steps, counted from 1; the first replace what was there."""
        share = (self.power + 1) / (self.power + step)
        for name, tensor in model.state_dict().items():
            self.tensors[name].lerp_(tensor, share)
