"""How many workers a cluster has room for, and what each of them reserves, whatever starts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small_model
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings


class ClusterError(UserError):
    """There is no cluster, or none at the address, or no worker fits in it. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many workers a cluster gets, and what each of them reserves.

    Attributes:
        worker_count: The number of workers.
        cpus_per_worker: The number of cores that each worker reserves.
        gpus_per_worker: The number of GPUs that each worker reserves.
    """

    worker_count: int
    cpus_per_worker: int
    gpus_per_worker: int


def compute_share(
    node_resources: Sequence[Mapping[str, float]], settings: Settings, cluster_name: str = "Ray cluster"
) -> Share:
    """Compute how many workers a cluster gets, and how many cores and GPUs each of them reserves.

    Args:
        node_resources: For each machine that is alive, how many cores ("CPU") and GPUs ("GPU") it has.
        settings: The settings of the run. `execution.workers` limits the number of workers.
        cluster_name: The name of the cluster in error messages.

    Raises:
        ClusterError: No machine has a core, or there are GPUs, but on no machine as many as a model needs.
    """
    gpu_group_count = _count_gpu_groups(node_resources, settings, cluster_name)
    cores_per_machine = _list_machine_cores(node_resources)
    if not cores_per_machine:
        raise ClusterError(
            f"execution.engine: no machine of the {cluster_name} offers a core; start one that does "
            "(docs: Several machines)"
        )

    largest_share = _compute_largest_share(settings.model, cores_per_machine, gpu_group_count)
    max_workers = settings.execution.workers or largest_share.worker_count
    return replace(largest_share, worker_count=min(max_workers, largest_share.worker_count))


def _list_machine_cores(node_resources: Sequence[Mapping[str, float]]) -> list[int]:
    """List how many cores each machine has. Machines without a whole core are left out."""
    cores_by_machine = (node.get("CPU", 0) for node in node_resources)
    return [int(core_count) for core_count in cores_by_machine if core_count >= 1]


def _compute_largest_share(model: ModelSettings, cores_per_machine: Sequence[int], gpu_group_count: int) -> Share:
    """Compute how many workers a cluster has room for, and what each of them reserves.

    On GPUs, there is one worker per copy of the model that fits. Otherwise, there is one worker per core for a small
    model, and one per machine for any other.

    Args:
        model: The model that each worker loads.
        cores_per_machine: How many cores each machine has.
        gpu_group_count: How many copies of the model fit on the GPUs.
    """
    may_use_gpus = model.device in ("auto", "cuda") and not model.url
    if may_use_gpus and gpu_group_count > 0:
        return Share(worker_count=gpu_group_count, cpus_per_worker=1, gpus_per_worker=model.gpus_per_model)

    if is_small_model(model):
        return Share(worker_count=sum(cores_per_machine), cpus_per_worker=1, gpus_per_worker=0)

    # One worker per machine. Each reserves as many cores as the smallest machine has.
    return Share(worker_count=len(cores_per_machine), cpus_per_worker=min(cores_per_machine), gpus_per_worker=0)


def _count_gpu_groups(node_resources: Sequence[Mapping[str, float]], settings: Settings, cluster_name: str) -> int:
    """Count how many copies of the model fit on the GPUs of all machines. Each copy needs all its GPUs on one machine.

    Args:
        node_resources: For each machine that is alive, how many cores ("CPU") and GPUs ("GPU") it has.
        settings: The settings of the run.
        cluster_name: The name of the cluster in error messages.

    Raises:
        ClusterError: There are GPUs, but on no machine as many as a copy of the model needs.
    """
    model = settings.model
    gpus_per_machine = [int(node.get("GPU", 0)) for node in node_resources]

    most_gpus = max(gpus_per_machine, default=0)
    if 0 < most_gpus < model.gpus_per_model:
        raise ClusterError(
            f"model.{model.engine} asks for {model.gpus_per_model} GPUs per model: no machine of the {cluster_name} "
            "has so many"
        )
    return sum(gpu_count // model.gpus_per_model for gpu_count in gpus_per_machine)
