"""How many workers a cluster has room for, and what each of them reserves, whatever starts them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolformer_dag.files import UserError
from toolformer_dag.model.weights import is_small
from toolformer_dag.settings.sections import Settings


class ClusterError(UserError):
    """No cluster, none at the address, or one in which no worker fits; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Share:
    """How many workers a cluster gets, and what each of them reserves."""

    count: int
    cpus: int
    gpus: int


def share_of(nodes: Sequence[Mapping[str, float]], settings: Settings, cluster: str = "Ray cluster") -> Share:
    """Return the workers for a cluster whose machines have these resources (`CPU`, `GPU`).

    One per GPU, or per group of GPUs of a machine that a model is spread over; without any, one per core for a small
    model and one per machine, with all its cores, for a large one. `execution.workers` sets a smaller number. Raises
    ClusterError where no machine has a core, or as many GPUs as a model takes.
    """
    cores = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    model, groups = settings.model, _groups_of_gpus(nodes, settings, cluster)
    if not cores:
        raise ClusterError(
            f"execution.engine: no machine of the {cluster} offers a core; start one that does (docs: Several machines)"
        )
    if groups and model.device in ("auto", "cuda") and not model.url:
        share = Share(groups, 1, model.gpus)
    elif is_small(settings.model):
        share = Share(sum(cores), 1, 0)
    else:
        share = Share(len(cores), min(cores), 0)
    return Share(min(settings.execution.workers or share.count, share.count), share.cpus, share.gpus)


def _groups_of_gpus(nodes: Sequence[Mapping[str, float]], settings: Settings, cluster: str) -> int:
    """Return how many groups of a model's GPUs on one machine there are; a machine with fewer has none."""
    model, gpus = settings.model, [int(node.get("GPU", 0)) for node in nodes]
    if 0 < max(gpus, default=0) < model.gpus:
        raise ClusterError(
            f"model.{model.engine} asks for {model.gpus} GPUs per model: no machine of the {cluster} has so many"
        )
    return sum(count // model.gpus for count in gpus)
