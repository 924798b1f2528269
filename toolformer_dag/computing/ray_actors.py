"""Workers of a Ray cluster: actors with warm models on the machines of the cluster, as chunks.py has workers.

The cluster is the user's (`ray start`); every machine has this package and sees the lake, the shards and the model
under the same paths. Ray is an extra, `ray`, and is imported when the first chunk is computed.
"""

import logging
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from toolformer_dag.computing.chunks import Answer, ChunkServer, ChunkWorker, Executor, TablesOf, Task
from toolformer_dag.computing.cluster_shares import ClusterError, Share, share_of
from toolformer_dag.settings.sections import Settings


def ray_executor(settings: Settings, tables_of: TablesOf) -> Executor:
    """Return the actors of the cluster at `execution.address`, as many as its machines of the moment have room for.

    Ray does not restart them: while it may, it tells the death of a process as it tells the loss of a machine.
    Raises ClusterError, `count` of the executor too where no machine is left.
    """
    ray = _connected(settings.execution.address)

    def share() -> Share:
        return share_of([node["Resources"] for node in ray.nodes() if node["Alive"]], settings)

    first = share()
    options = {"num_cpus": first.cpus, "num_gpus": first.gpus, "max_restarts": 0}
    actor = ray.remote(scheduling_strategy="SPREAD", **options)(ChunkServer)

    def start() -> ChunkWorker:
        handle = actor.remote(settings, tables_of)
        return Actor(ray, handle, handle.__ray_call__.remote(_whereabouts).future())

    def lost(worker: ChunkWorker, died: Exception) -> bool:
        """Ray has no word of the process's end, as its machine is gone, or knows that the machine is."""
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return isinstance(died, ray.exceptions.ActorUnavailableError) or worker.started.result()[0] not in alive

    return Executor(lambda: share().count, start, (ray.exceptions.RayActorError,), lost)


def _whereabouts(server: ChunkServer) -> tuple[str, str]:
    """Return the id of the machine on which an actor runs, and its process id and machine for people."""
    import ray

    return ray.get_runtime_context().get_node_id(), f"{os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Actor:
    """A worker on a machine of the cluster."""

    ray: Any
    handle: Any
    started: Future[Any]

    def __str__(self) -> str:
        return f"actor {self.started.result()[1]}"

    def submit(self, task: Task) -> "Future[Answer]":
        """See ChunkWorker."""
        future: Future[Answer] = self.handle.answer.remote(task).future()
        return future

    def kill(self) -> None:
        """See ChunkWorker."""
        self.ray.kill(self.handle)


def _connected(address: str) -> Any:
    """Return Ray, connected until this process ends."""
    if find_spec("ray") is None:
        raise ClusterError("execution.engine = 'ray' needs Ray: pip install -c constraints.txt -e '.[ray]'")
    import ray

    try:
        if address != "auto":
            _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"execution.address: no Ray cluster answers at {address!r} ({' '.join(str(error).split())}); start one "
            "with `ray start --head`, name the address of another, or set execution.engine = 'local'"
        ) from error
    return ray


def _reach(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
