"""What is stale, as the UI sees it, and in which order it is made fresh."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

from resources.made import Made, Output, last_made


@dataclass(frozen=True, slots=True)
class StaleAsset:
    """An asset (of one partition) that is missing or stale, and why."""

    key: dg.AssetKey
    partition: str | None
    missing: bool
    causes: tuple[str, ...]

    def __str__(self) -> str:
        return self.key.to_user_string() + (f"[{self.partition}]" if self.partition else "")


def stale_assets(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    shards: Collection[str],
    unseen: Callable[[Mapping[Output, str]], Mapping[Output, str]] = lambda made: {},
) -> list[StaleAsset]:
    """Every missing or stale asset in topological order.

    An asset whose inputs alone are stale counts as fresh until they land with other content: what Dagster's resolver
    reports is direct staleness, hop by hop. Its rules are applied here to what a few queries read, where it asks
    several times per output; what read a partition that went is stale at once. `shards`: the partitions to look at.
    `unseen`: finds among the fresh ones, given with the data version of their last run, those that Dagster is wrong
    about, each with the reason. Partitions are fewer than 100 (`MAX_PARTITIONS`): beyond, Dagster notes something else.
    """
    graph, partitions = definitions.resolve_asset_graph(), sorted(instance.get_dynamic_partitions("shards"))
    made = last_made(instance, graph)
    outputs = list(_materializable(graph, shards))
    causes = {output: tuple(_causes(graph, made, output, partitions)) for output in outputs if output in made}
    wrong = unseen({output: made[output].version for output, found in causes.items() if not found})
    reasons = causes | {output: (reason,) for output, reason in wrong.items()}
    return [
        StaleAsset(*output, missing=output not in made, causes=reasons.get(output, ()))
        for output in outputs
        if output not in made or reasons[output]
    ]


def _materializable(graph: AssetGraph, shards: Collection[str]) -> Iterator[Output]:
    for key in graph.toposorted_asset_keys:
        if graph.get(key).is_partitioned:
            yield from ((key, name) for name in sorted(shards))
        else:
            yield key, None


def _causes(graph: AssetGraph, made: Mapping[Output, Made], output: Output, partitions: Sequence[str]) -> Iterator[str]:
    """Why an output that was made is no longer what its code would make of its inputs."""
    node, mine = graph.get(output[0]), made[output]
    if node.code_version not in (None, mine.code_version):
        yield "has a new code version"
    for key in sorted(mine.inputs.keys() - node.parent_keys):
        yield f"removed dependency on {key.to_user_string()}"
    for key in sorted(node.parent_keys):
        if key not in mine.inputs:
            yield f"has a new dependency on {key.to_user_string()}"
        elif _version_read(graph, made, key, output, partitions) not in (None, mine.inputs[key]):
            yield f"has a new dependency data version: {key.to_user_string()}"


def _version_read(
    graph: AssetGraph, made: Mapping[Output, Made], key: dg.AssetKey, by: Output, partitions: Sequence[str]
) -> str | None:
    """The version of an input as Dagster would note it in a run of now; None where it notes none."""
    if not graph.get(key).is_partitioned:
        return made[key, None].version if (key, None) in made else None
    versions = (made[key, name].version for name in ([by[1]] if by[1] else partitions) if (key, name) in made)
    return sha256("".join(versions).encode()).hexdigest()
