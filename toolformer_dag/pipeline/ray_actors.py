"""Workers of a Ray cluster: actors with warm models on the machines of the cluster, behind the interface of chunks.

The cluster is the user's (`ray start`); every machine has this package and sees the lake, the shards and the model
under the same paths. Ray is an extra, `ray`, and is imported when the first chunk is computed.
"""

import logging
import socket
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small
from toolformer_dag.pipeline.chunks import Ended, Task
from toolformer_dag.pipeline.spending import Ledger, Spent
from toolformer_dag.pipeline.stage import Work
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.worker_pool import ChunkServer, Failure, WorkerDied, WorkerNeverStarted, WorkerPool
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class ClusterError(UserError):
    """No Ray, no cluster at the address, or a cluster in which no worker fits; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many actors a cluster gets, and what each of them reserves."""

    count: int
    cpus: int
    gpus: int


@dataclass(eq=False)
class RayActor:
    """An actor with the answer that it owes; `spent`: what it has told so far.

    `started`: an answer that it gives, or fails to give, once it found a machine.
    """

    handle: Any
    started: Any
    answer: Any = None
    spent: Spent = field(default_factory=Spent)


class RayActors(WorkerPool[RayActor]):
    """Actors of the cluster at `execution.address`.

    What they spend is written down by this process when a chunk ends: a chunk that dies is not counted. Raises
    ClusterError.
    """

    def __init__(self, worker: Worker) -> None:
        self._ray, self._connected = _connected(worker.plan.settings.execution.address)
        self._here = worker
        self._share = self._fitting()
        super().__init__(self._share.count)
        self._ledger = Ledger(worker.ledger) if worker.ledger is not None else None
        self._told: list[RayActor] = []

    def map_chunks(self, tasks: "Iterable[Task]") -> Ended:
        """See Workers."""
        if self._ledger is None:
            yield from super().map_chunks(tasks)
        else:
            with self._ledger.kept(lambda: sum((actor.spent for actor in list(self._told)), Spent())):
                yield from super().map_chunks(tasks)

    def close(self) -> None:
        """End every actor and leave the cluster, and let go of the model of this process."""
        super().close()
        self._here.release()
        if self._connected:
            self._ray.shutdown()

    def _fitting(self) -> Share:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return share_of(alive, self._here.plan.settings)

    def _start(self) -> RayActor:
        share = self._share
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        handle = self._ray.remote(**options)(ChunkActor).remote(self._here.plan.settings)
        self._told.append(RayActor(handle, handle.started.remote()))
        return self._told[-1]

    def _is_alive(self, worker: RayActor) -> bool:
        return True  # that it died is heard when it is given a task, which another one then gets

    def _send(self, worker: RayActor, task: Task) -> None:
        worker.answer = worker.handle.answer.remote(task)

    def _answered(self, busy: list[RayActor]) -> list[RayActor]:
        found, _ = self._ray.wait([worker.answer for worker in busy], timeout=1.0)
        return [worker for worker in busy if worker.answer in found] or self._without_machine(busy)

    def _without_machine(self, busy: list[RayActor]) -> list[RayActor]:
        """Return those that wait to start and are more than fit: a machine was lost after they were asked for."""
        started, _ = self._ray.wait([worker.started for worker in busy], num_returns=len(busy), timeout=0)
        waiting = [worker for worker in busy if worker.started not in started]
        if not waiting:
            return []
        self._count = min(self._count, self._fitting().count)
        return waiting[: max(0, len(busy) + len(self._idle) - self._count)]

    def _answer(self, worker: RayActor) -> Work | Failure:
        begun, _ = self._ray.wait([worker.answer, worker.started], timeout=0)
        if not begun:
            raise WorkerNeverStarted
        try:
            answer, worker.spent = self._ray.get(worker.answer)
        except self._ray.exceptions.RayActorError as error:
            self._count = min(self._count, self._fitting().count)
            raise WorkerDied(" ".join(str(error).split())) from None
        found: Work | Failure = answer
        return found

    def _kill(self, worker: RayActor) -> None:
        self._ray.kill(worker.handle)


class ChunkActor:
    """The actor: computes chunks on a machine of the cluster."""

    def __init__(self, settings: Settings) -> None:
        self._server = ChunkServer(settings, None)

    def started(self) -> None:
        """Tell that a machine was found."""

    def answer(self, task: Task) -> tuple[Work | Failure, Spent]:
        """Return what the chunk cost, and what this actor has spent in all."""
        answer = self._server.answer(task)
        worker = self._server.worker
        return answer, worker.spent() if worker is not None else Spent()


def share_of(nodes: "list[Mapping[str, float]]", settings: Settings) -> Share:
    """Return the actors for a cluster whose machines have these resources (`CPU`, `GPU`).

    One per GPU; without any, one per core for a small model and one per machine, with all its cores, for a large one.
    `execution.workers` sets a smaller number. Raises ClusterError where no machine has a core.
    """
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    if not cores:
        raise ClusterError("execution.engine: no machine of the Ray cluster offers a core; start one with --num-cpus")
    if gpus and settings.model.device in ("auto", "cuda"):
        share = Share(gpus, 1, 1)
    elif is_small(settings.model):
        share = Share(sum(cores), 1, 0)
    else:
        share = Share(len(cores), min(cores), 0)
    return Share(min(settings.execution.workers or share.count, share.count), share.cpus, share.gpus)


def _connected(address: str) -> tuple[Any, bool]:
    """Return Ray, connected, and whether the connection is this call's own."""
    if find_spec("ray") is None:
        raise ClusterError("execution.engine = 'ray' needs Ray: pip install -c constraints.txt -e '.[ray]'")
    import ray

    if ray.is_initialized():
        return ray, False
    try:
        if address != "auto":
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"execution.address: no Ray cluster answers at {address!r} ({' '.join(str(error).split())}); start one "
            "with `ray start --head`, name the address of another, or set execution.engine = 'local'"
        ) from error
    return ray, True


def _reach(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
