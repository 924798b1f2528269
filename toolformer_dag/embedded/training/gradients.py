"""Micro-batches dealt out to processes, and their gradients added up in shared memory.

Whoever is free takes the next lane: a process that other programs slow down does not hold up the step. The sum is taken
lane by lane, so it does not depend on who took which.
"""

from dataclasses import dataclass
from multiprocessing.context import BaseContext
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn

from toolformer_dag.errors import UserError

PATIENCE_S = 180.0  # a step takes a second; the first waits for the other process to start


class WorkerLost(UserError):
    """Another process of the run has ended."""


@dataclass(frozen=True)
class SharedGradients:
    """`buffer` (lanes, parameters + 1) holds the flat gradients of each lane and behind them its loss."""

    buffer: Tensor
    taken: Any  # a counter of lanes taken since the run began, shared between processes
    barrier: Any
    lanes: int

    @classmethod
    def make(cls, context: BaseContext, lanes: int, parameters: int, processes: int) -> "SharedGradients":
        """For so many processes of `context`."""
        buffer = torch.zeros(lanes, parameters + 1)
        buffer.untyped_storage().share_memory_()
        return cls(buffer, context.Value("q", 0), context.Barrier(processes), lanes)

    def take(self, step: int) -> int | None:
        """The next lane of a step that nobody has taken; `step` counts from the beginning of this run."""
        with self.taken.get_lock():
            lane = int(self.taken.value) - step * self.lanes
            if lane >= self.lanes:
                return None
            self.taken.value += 1
            return lane

    def put(self, lane: int, model: nn.Module, loss: float) -> None:
        """Store the model's gradients as those of the lane, and clear them."""
        parameters = list(model.parameters())
        flat = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
        self.buffer[lane] = torch.cat([*flat, torch.tensor([loss])])
        model.zero_grad()

    def add_up(self, model: nn.Module) -> float:
        """When all lanes are in: every gradient of the model becomes their mean; returns the mean of the losses."""
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
            raise WorkerLost("a process of the training run has ended or hangs; start again, it resumes") from error
