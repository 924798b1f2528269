"""How many processes share the work of a run where the settings leave it open."""

import os
from pathlib import Path

from toolformer_dag.checkpoints import model_name
from toolformer_dag.model.weights import SMALL, parameters
from toolformer_dag.settings.sections import Model
from toolformer_dag.settings.settings import Settings

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def worker_count(settings: Settings) -> int:
    """`execution.workers`, else one per GPU, or one per core for a model that computes on one thread, else one."""
    return settings.execution.workers or _fitting(settings.model)


def _fitting(model: Model) -> int:
    import torch

    if model.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    on_cpu = model.device in ("auto", "cpu")
    return cores() if on_cpu and 0 < parameters(Path(model_name(model))) < SMALL else 1


def cores() -> int:
    """Cores that this process may use; hardware threads of one core count once, and a container's share is kept."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    return max(1, min(len({_core(cpu) for cpu in allowed}), _quota()))


def _core(cpu: int) -> str:
    """The hardware threads that share the core of one of them."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return file.read_text() if file.is_file() else str(cpu)


def _quota() -> int:
    """Whole cores that a container's limit leaves; a large number where there is none."""
    share, _, period = QUOTA.read_text().partition(" ") if QUOTA.is_file() else ("max", "", "")
    return 1_000_000 if share == "max" else int(share) // int(period)
