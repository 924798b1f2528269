"""Measure the cost of work, and the machine's peak rates."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Cost:
    """Seconds of processor time (wall-clock on a GPU), and the peak memory of the process so far in MB."""

    seconds: float = 0.0
    memory: float = 0.0


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """Measure the cost of the block; the result is complete after it."""
    cost = Cost()
    begin = _now(device)
    yield cost
    cost.seconds = _now(device) - begin
    cost.memory = peak_memory(device)


def peak_memory(device: torch.device) -> float:
    """Return the most memory in MB so far: what torch allocated on a GPU, else what the process held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def product_rate(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """Measure operations per second of a plain matrix product [rows, width] x [width, 4 width]."""
    a, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, width), (width, 4 * width)))
    return 2 * rows * width * 4 * width / _seconds_each(lambda: a @ b, device)


def copy_rate(device: torch.device, size: int = 1 << 28) -> float:
    """Measure bytes read and written per second when a large tensor is copied."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds_each(lambda: target.copy_(source), device)


def _seconds_each(work: Callable[[], object], device: torch.device) -> float:
    work()
    repeats, begin = 0, _now(device)
    while (elapsed := _now(device) - begin) < 0.5:
        work()
        repeats += 1
    return elapsed / repeats


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
