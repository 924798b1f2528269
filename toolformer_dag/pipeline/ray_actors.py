"""Workers of a Ray cluster: actors with warm models on the machines of the cluster, behind the interface of chunks.

The cluster is the user's (`ray start`); every machine has this package and sees the lake, the shards and the model
under the same paths. Ray is an extra, `ray`, and is imported when the first chunk is computed.
"""

import logging
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small
from toolformer_dag.pipeline.chunks import Answer, NoPlace, Task, Workers
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import ChunkServer
from toolformer_dag.settings.sections import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

PATIENCE_SECONDS, STARTS = 20.0, 10
"""How long an actor may wait for a machine, and how often it is started anew where that machine was lost."""


class ClusterError(UserError):
    """No Ray, no cluster at the address, or a cluster in which no worker fits; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many actors a cluster gets, and what each of them reserves."""

    count: int
    cpus: int
    gpus: int


class RayActors(Workers):
    """Actors of the cluster at `execution.address`: a chunk that dies with its actor is not counted.

    Raises ClusterError.
    """

    def __init__(self, worker: Worker) -> None:
        self._ray, self._connected = _connected(worker.plan.settings.execution.address)
        self._share = share_of([node["Resources"] for node in self._ray.nodes() if node["Alive"]], worker.plan.settings)
        super().__init__(worker, self._share.count)
        self.deaths = (self._ray.exceptions.RayActorError,)

    def close(self) -> None:
        """End every actor and leave the cluster, and let go of the model of this process."""
        super().close()
        if self._connected:
            self._ray.shutdown()

    def _start(self) -> Any:
        options = {"num_cpus": self._share.cpus, "num_gpus": self._share.gpus, "max_restarts": 0}
        actor = self._ray.remote(scheduling_strategy="SPREAD", **options)(ChunkServer)
        for _ in range(STARTS):
            handle = actor.remote(self._here.plan.settings)
            try:
                self._ray.get(handle.started.remote(), timeout=PATIENCE_SECONDS)
                return handle
            except self._ray.exceptions.GetTimeoutError:
                self._ray.kill(handle)
                break
            except self.deaths:  # on a machine that was lost, which Ray notices after a while
                continue
        raise NoPlace("no machine of the Ray cluster has room for an actor any more")

    def _send(self, worker: Any, task: Task) -> "Future[Answer]":
        future: Future[Answer] = worker.answer.remote(task).future()
        return future

    def _kill(self, worker: Any) -> str:
        self._ray.kill(worker)
        return ""


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
