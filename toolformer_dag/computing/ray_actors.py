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
    TablesBuilder,
    Task,
    Whereabouts,
)
from toolformer_dag.computing.cluster_shares import ClusterError, Share, compute_share
from toolformer_dag.settings.sections import Settings


def build_ray_executor(settings: Settings, build_tables: TablesBuilder) -> Executor:
    """Build an executor that computes on the Ray cluster at `execution.address`. Its workers are actors (processes).

    Its `count_workers` counts anew at each call, because machines come and go. It raises ClusterError once no machine
    is left.

    Args:
        settings: The settings of the run.
        build_tables: Builds the tables of a plan. Each worker calls it for itself.

    Raises:
        ClusterError: There is no cluster, or no worker fits in it.
    """
    ray = _connect_to_cluster(settings.execution.address)
    worker_share = _compute_worker_share(ray, settings)
    actor_class = _build_actor_class(ray, worker_share)
    return Executor(
        count_workers=lambda: _compute_worker_share(ray, settings).worker_count,
        start_worker=partial(_start_actor, ray, actor_class, (settings, build_tables)),
        death_exceptions=(ray.exceptions.RayActorError,),
        is_machine_lost=partial(_is_machine_lost, ray),
    )


def _build_actor_class(ray: Any, share: Share) -> Any:
    """Build the class whose instances are workers of the cluster, which Ray calls actors.

    Args:
        ray: The module `ray`, connected to the cluster.
        share: The number of cores and GPUs that each worker reserves.
    """
    to_actor_class = ray.remote(
        scheduling_strategy="SPREAD",
        num_cpus=share.cpus_per_worker,
        num_gpus=share.gpus_per_worker,
        max_restarts=0,  # with restarts, the death of a process could not be told from the loss of a machine
    )
    return to_actor_class(ChunkServer)


def _compute_worker_share(ray: Any, settings: Settings) -> Share:
    """Compute how many workers fit on the machines that are alive now, and how many cores and GPUs each reserves.

    Raises:
        ClusterError: No worker fits on any of them.
    """
    node_resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return compute_share(node_resources, settings)


def _start_actor(ray: Any, actor_class: Any, server_arguments: tuple[Settings, TablesBuilder]) -> ChunkWorker:
    """Start an actor, which is a worker process, on a machine that Ray chooses.

    Args:
        ray: The module `ray`, connected to the cluster.
        actor_class: The class of the actor: a ChunkServer as Ray wraps it.
        server_arguments: The arguments of ChunkServer.
    """
    handle = actor_class.remote(*server_arguments)
    # Runs `_get_whereabouts` in the new process: its answer shows that the process has started, and where.
    start_future: Future[Whereabouts] = handle.__ray_call__.remote(_get_whereabouts).future()
    return Actor(ray, handle, start_future)


def _is_machine_lost(ray: Any, worker: ChunkWorker, death: Exception) -> bool:
    """Return whether an actor (a worker process of a Ray cluster) died because its machine was lost.

    Args:
        ray: The module `ray`, connected to the cluster.
        worker: The actor, which has started before.
        death: The exception by which its death was noticed.
    """
    # Ray cannot reach the actor, and does not know whether it is alive: its machine counts as lost.
    if isinstance(death, ray.exceptions.ActorUnavailableError):
        return True

    alive_machines = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return worker.start_future.result().machine_id not in alive_machines


def _get_whereabouts(server: ChunkServer) -> Whereabouts:
    """Return on which machine an actor runs. This is called in the process of the actor.

    Its name for people consists of the process id and the host: "4711 on node7".

    Args:
        server: The object that the actor wraps. It is not used.
    """
    import ray

    machine_id = ray.get_runtime_context().get_node_id()
    return Whereabouts(machine_id, display_name=f"{os.getpid()} on {socket.gethostname()}")


@dataclass(frozen=True, slots=True)
class Actor:
    """A worker process on a machine of a Ray cluster. See the protocol ChunkWorker for its methods.

    Attributes:
        ray: The module `ray`, which is imported only when it is needed.
        handle: Ray's handle of the process, which runs a ChunkServer.
        start_future: Done when the process has started, or has died before.
    """

    ray: Any
    handle: Any
    start_future: Future[Whereabouts]

    def __str__(self) -> str:
        return f"actor {self.start_future.result().display_name}"

    def submit(self, task: Task) -> "Future[ChunkAnswer]":
        """See ChunkWorker."""
        future: Future[ChunkAnswer] = self.handle.answer.remote(task).future()
        return future

    def kill(self) -> None:
        """See ChunkWorker."""
        self.ray.kill(self.handle)


def _connect_to_cluster(address: str) -> Any:
    """Import Ray, connect it to a cluster until this process ends, and return the module.

    Args:
        address: The setting `execution.address`: "auto" for a cluster on this machine, or a host and port.

    Raises:
        ClusterError: Ray is not installed, or no cluster answers.
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
    """Check that something listens at an address. Otherwise, Ray would try to connect for minutes.

    Args:
        address: "HOST:PORT" or "ray://HOST:PORT".

    Raises:
        OSError: Nothing listens there.
        ValueError: The address has another form.
    """
    url, _, port = address.rpartition(":")
    host = url.removeprefix("ray://")
    socket.create_connection((host, int(port)), timeout=10).close()
