"""Where chunks are computed, as `[execution]` says: this process, a pool of local processes, or a Ray cluster."""

import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from toolformer_dag.model.weights import is_small
from toolformer_dag.pipeline.chunks import Ended, InProcess, Tables, Task, Workers
from toolformer_dag.pipeline.spending import Spent
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import LocalProcesses
from toolformer_dag.settings.sections import Settings

QUOTA = Path("/sys/fs/cgroup/cpu.max")


def workers_of(worker: Worker, tables: Tables) -> Workers:
    """Return the workers that the settings name; processes and actors start with the first chunks.

    Raises ClusterError where the cluster cannot be reached.
    """
    if worker.plan.settings.execution.engine == "ray":
        from toolformer_dag.pipeline.ray_actors import RayActors

        return RayActors(worker)
    count = worker_count(worker.plan.settings)
    return InProcess(worker, tables) if count == 1 else LocalProcesses(worker, count)


class OnDemand:
    """Decides with the first chunk how many workers there are: a run that has nothing to compute starts none."""

    def __init__(self, worker: Worker, tables: Tables) -> None:
        self._worker, self._tables = worker, tables
        self._workers: Workers | None = None
        self._before = Spent()

    @property
    def spent(self) -> Spent:
        """Return what was spent here and by other processes."""
        return self._worker.spent() + self._before + (self._workers.spent if self._workers else Spent())

    def map_chunks(self, tasks: Iterable[Task]) -> Ended:
        """See Workers."""
        waiting = iter(tasks)
        for first in waiting:
            self._workers = self._workers or workers_of(self._worker, self._tables)
            yield from self._workers.map_chunks(chain((first,), waiting))

    def close(self) -> None:
        """End the workers and let go of their models."""
        if self._workers is not None:
            self._workers.close()
            self._before += self._workers.spent
            self._workers = None


def worker_count(settings: Settings) -> int:
    """Return `execution.workers`, else one per GPU, or one per core for a model that computes on one thread, else 1."""
    if settings.execution.workers is not None:
        return settings.execution.workers
    import torch

    if settings.model.device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.cuda.device_count()
    return cores() if settings.model.device in ("auto", "cpu") and is_small(settings.model) else 1


def cores() -> int:
    """Return the cores this process may use: hardware threads of one core count once, a container's share is kept."""
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
