"""How many workers a cluster has room for, and what each of them reserves, whatever starts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings


class ClusterError(UserError):
    """No cluster, none at the address, or one in which no worker fits; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many workers a cluster gets (`count`), and the cores and GPUs that each of them reserves."""

    count: int
    cpus: int
    gpus: int


def compute_share(nodes: Sequence[Mapping[str, float]], settings: Settings, cluster: str = "Ray cluster") -> Share:
    """Return how many workers a cluster gets, and what each reserves; `execution.workers` limits their number.

    nodes: the resources of each machine that is alive, as numbers under `CPU` and `GPU`.
    cluster: what it is called in errors.

    Raises ClusterError where no machine has a core, or as many GPUs as a model takes.
    """
    gpu_groups = _count_gpu_groups(nodes, settings, cluster)
    cores = _list_machine_cores(nodes)
    if not cores:
        raise ClusterError(
            f"execution.engine: no machine of the {cluster} offers a core; start one that does (docs: Several machines)"
        )
    share = _compute_largest_share(settings.model, cores, gpu_groups)
    most = settings.execution.workers or share.count
    return replace(share, count=min(most, share.count))


def _list_machine_cores(nodes: Sequence[Mapping[str, float]]) -> list[int]:
    """Return the cores of each machine that has any."""
    cores_of_machines = (node.get("CPU", 0) for node in nodes)
    return [int(cores) for cores in cores_of_machines if cores >= 1]


def _compute_largest_share(model: ModelSettings, cores: Sequence[int], gpu_groups: int) -> Share:
    """Return the most workers for a model: one per group of GPUs; else one per core for a small model, or per machine.

    cores: of each machine. gpu_groups: how many models fit on the GPUs.
    """
    uses_gpus = gpu_groups > 0 and model.device in ("auto", "cuda") and not model.url
    if uses_gpus:
        return Share(count=gpu_groups, cpus=1, gpus=model.gpus)
    if is_small(model):
        return Share(count=sum(cores), cpus=1, gpus=0)
    return Share(count=len(cores), cpus=min(cores), gpus=0)


def _count_gpu_groups(nodes: Sequence[Mapping[str, float]], settings: Settings, cluster: str) -> int:
    """Return how many models fit on the GPUs of all machines; the GPUs of a model are on one machine.

    Raises ClusterError where there are GPUs, but on no machine as many as a model takes.
    """
    model = settings.model
    gpus_of_machines = [int(node.get("GPU", 0)) for node in nodes]
    if 0 < max(gpus_of_machines, default=0) < model.gpus:
        raise ClusterError(
            f"model.{model.engine} asks for {model.gpus} GPUs per model: no machine of the {cluster} has so many"
        )
    return sum(gpus // model.gpus for gpus in gpus_of_machines)
