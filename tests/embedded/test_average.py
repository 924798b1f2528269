"""The running mean of the weights against its definition."""

import math

import pytest
import torch
from torch import nn

from embedded_model.optimizer import WeightAverage


@pytest.mark.parametrize("power", [0, 1, 2, 6])
@pytest.mark.parametrize("steps", [1, 2, 30])
def test_the_average_is_the_mean_with_polynomial_weights(power: int, steps: int) -> None:
    torch.manual_seed(steps)
    model = nn.Linear(3, 2).double()
    average = WeightAverage(model, power)
    seen = []
    for step in range(1, steps + 1):
        nn.init.normal_(model.weight)
        average.add(model, step)
        seen.append(model.weight.detach().clone())
    counts = [math.prod(range(step, step + power)) for step in range(1, steps + 1)]
    mean = torch.stack([count * weight for count, weight in zip(counts, seen, strict=True)]).sum(0) / sum(counts)
    torch.testing.assert_close(average.tensors["weight"], mean)
