"""Optimise with Muon and AdamW, share gradients between processes, and average the weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from toolformer_dag.files import UserError
from toolformer_dag.model.loading import fast_dtype

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
MUON_DECAY = 0.01  # of the weights, times the learning rate


class MuonAdamW:
    """Run both optimisers behind one `step`; `tensors` returns their whole state for a checkpoint."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float) -> None:
        self.muon_rate, self.adam_rate = muon_rate, adam_rate
        matrices = {n: p for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith("embedding")}
        self.matrices = matrices
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in matrices.items()}
        others = [p for n, p in model.named_parameters() if n not in matrices]
        self.adam = torch.optim.AdamW(others, adam_rate, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Update the weights at `factor` times the learning rates, and clear the gradients."""
        for name, parameter in self.matrices.items():
            assert parameter.grad is not None
            update = muon_update(parameter.grad, self.momentum[name])
            parameter.mul_(1 - self.muon_rate * factor * MUON_DECAY).add_(update, alpha=-self.muon_rate * factor)
            parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        self.adam.zero_grad()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by name: momentum of Muon, both moments and the step counts of AdamW."""
        adam = self.adam.state_dict()["state"]
        return {f"muon.{name}": tensor for name, tensor in self.momentum.items()} | {
            f"adam.{index}.{key}": tensor for index, state in adam.items() for key, tensor in state.items()
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state that `tensors` returned."""
        for name, momentum in self.momentum.items():
            momentum.copy_(tensors[f"muon.{name}"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = tensor
        self.adam.load_state_dict(self.adam.state_dict() | {"state": state})


def muon_update(gradient: Tensor, momentum: Tensor, beta: float = 0.95) -> Tensor:
    """Return an orthogonal update and keep the Nesterov momentum in place; a stacked q, k, v is three matrices."""
    momentum.lerp_(gradient, 1 - beta)
    direction = gradient.lerp(momentum, beta)
    rows, columns = direction.shape
    parts: Iterable[Tensor] = direction.chunk(3) if rows == 3 * columns else (direction,)
    return torch.cat([orthogonal(part) * max(1, part.shape[0] / part.shape[1]) ** 0.5 for part in parts])


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest (semi-)orthogonal matrix; its singular values are between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).to(fast_dtype())
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (torch.adjoint(x) if tall else x).to(matrix.dtype)


PATIENCE_S = 180.0  # a step takes a second; the first waits for the other process to start


@dataclass(frozen=True)
class SharedGradients:
    """Share a buffer (lanes, parameters + 1) between processes: each lane's flat gradients, then its loss."""

    buffer: Tensor
    barrier: Any

    def put(self, lane: int, model: nn.Module, loss: float) -> None:
        """Store the model's gradients as those of the lane, and clear them."""
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
        self.buffer[lane] = torch.cat([*flat, torch.tensor([loss])])
        model.zero_grad()

    def add_up(self, model: nn.Module) -> float:
        """Wait for all lanes, set every gradient of the model to their mean and return the mean loss.

        Raises UserError.
        """
        self._wait()
        mean = self.buffer.mean(0)
        self._wait()
        parameters = list(model.parameters())
        for parameter, part in zip(parameters, torch.split(mean[:-1], [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).clone()
        return float(mean[-1])

    def _wait(self) -> None:
        try:
            self.barrier.wait(PATIENCE_S)
        except BrokenBarrierError as error:
            raise UserError("a process of the training run has ended or hangs; start again, it resumes") from error


class WeightAverage:
    """Average the weights with polynomial decay (Shamir and Zhang 2013).

    Weights after step t count like t (t + 1) ... (t + power - 1); their mean age is 1 / (power + 2) of all steps so
    far, however long the run will be.
    """

    def __init__(self, model: nn.Module, power: float) -> None:
        self.power = power
        self.tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}

    @torch.no_grad()
    def add(self, model: nn.Module, step: int) -> None:
        """Include the weights after `step` steps, counted from 1; the first call replaces the initial weights."""
        share = (self.power + 1) / (self.power + step)
        for name, tensor in model.state_dict().items():
            self.tensors[name].lerp_(tensor, share)
