"""How many threads a model's arithmetic gets on a CPU."""

from typing import Any

import torch

SMALL = 20_000_000
"""Parameters under which threads wait for each other longer than they compute: at 2 million, two threads did about
a quarter of what one did."""


def fit_threads(model: Any) -> None:
    """One thread for a small model on a CPU, for the whole process; larger models keep torch's choice."""
    parameters = sum(weight.numel() for weight in model.parameters())
    if model.device.type == "cpu" and parameters < SMALL:
        torch.set_num_threads(1)
