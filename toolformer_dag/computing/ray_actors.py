"""Workers of a Ray cluster: actors with loaded models on the machines of the cluster; see ChunkWorker in chunks.py.

The cluster is the user's (`ray start`); every machine has this package and sees the lake, the shards and the model
under the same paths. Ray is an extra, `ray`, and is imported when the first chunk is computed.
"""

import logging
import os
import socket
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from toolformer_dag.computing.chunks import (
    ChunkAnswer,
    ChunkServer,
    ChunkWorker,
    Executor,
    TablesOf,
    Task,
    Whereabouts,
)
from toolformer_dag.computing.cluster_shares import ClusterError, Share, compute_share
from toolformer_dag.settings.sections import Settings


def build_ray_executor(settings: Settings, tables_of: TablesOf) -> Executor:
    """Return what starts and watches workers on the Ray cluster at `execution.address`: actors, processes of it.

    Raises ClusterError where there is no cluster or no room; `Executor.count` raises it too, once no machine is left.
    """
    ray = _connect(settings.execution.address)
    actor_class = _build_actor_class(ray, _compute_worker_share(ray, settings))
    return Executor(
        count=lambda: _compute_worker_share(ray, settings).count,  # counted anew at each call: machines come and go
        start=partial(_start_actor, ray, actor_class, (settings, tables_of)),
        deaths=(ray.exceptions.RayActorError,),
        lost=partial(_is_machine_lost, ray),
    )


def _build_actor_class(ray: Any, share: Share) -> Any:
    """Return the class whose instances are workers of the cluster, each with its share of cores and GPUs."""
    as_actor = ray.remote(
        scheduling_strategy="SPREAD",
        num_cpus=share.cpus,
        num_gpus=share.gpus,
        max_restarts=0,  # with restarts, Ray tells the death of a process just as it tells the loss of a machine
    )
    return as_actor(ChunkServer)


def _compute_worker_share(ray: Any, settings: Settings) -> Share:
    """Return how many workers the machines alive now have room for, with the cores and GPUs of each.

    Raises ClusterError.
    """
    return compute_share([node["Resources"] for node in ray.nodes() if node["Alive"]], settings)


def _start_actor(ray: Any, actor_class: Any, arguments: tuple[Settings, TablesOf]) -> ChunkWorker:
    """Begin an actor with a ChunkServer of these arguments; Ray chooses the machine."""
    handle = actor_class.remote(*arguments)
    started: Future[Whereabouts] = handle.__ray_call__.remote(_get_whereabouts).future()
    return Actor(ray, handle, started)


def _is_machine_lost(ray: Any, worker: ChunkWorker, death: Exception) -> bool:
    """Return whether an actor (a worker process of a Ray cluster) died because its machine was lost."""
    if isinstance(death, ray.exceptions.ActorUnavailableError):
        return True
    alive_machines = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return worker.started.result().machine not in alive_machines


def _get_whereabouts(server: ChunkServer) -> Whereabouts:
    """Return where an actor runs; called in its process. The name is the process id and the host."""
    import ray

    machine = ray.get_runtime_context().get_node_id()
    return Whereabouts(machine, name=f"{os.getpid()} on {socket.gethostname()}")


@dataclass(frozen=True, slots=True)
class Actor:
    """A worker on a machine of the cluster.

    - `ray`: the module, which is imported late
    - `handle`: Ray's handle of the actor, a ChunkServer
    - `started`: see ChunkWorker
    """

    ray: Any
    handle: Any
    started: Future[Whereabouts]

    def __str__(self) -> str:
        return f"actor {self.started.result().name}"

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """See ChunkWorker."""
        future: Future[ChunkAnswer] = self.handle.answer.remote(task).future()
        return future

    def kill(self) -> None:
        """See ChunkWorker."""
        self.ray.kill(self.handle)


def _connect(address: str) -> Any:
    """Import Ray, connect it to the cluster at `address` until this process ends, and return the module.

    Raises ClusterError where Ray is not installed or no cluster answers.
    """
    if find_spec("ray") is None:
        raise ClusterError("execution.engine = 'ray' needs Ray: pip install -c constraints.txt -e '.[ray]'")
    import ray

    try:
        if address != "auto":
            _check_reachable(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(
            f"execution.address: no Ray cluster answers at {address!r} ({' '.join(str(error).split())}); start one "
            "with `ray start --head`, name the address of another, or set execution.engine = 'local'"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Raise OSError where nothing listens at HOST:PORT, and ValueError for another form; Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.removeprefix("ray://"), int(port)), timeout=10).close()
