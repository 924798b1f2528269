"""What is stale, as the UI sees it, and in which order it is made fresh."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest


@dataclass(frozen=True, slots=True)
class StaleAsset:
    """An asset (of one partition) that is missing or stale, and why."""

    key: dg.AssetKey
    partition: str | None
    missing: bool
    causes: tuple[str, ...]

    def __str__(self) -> str:
        return self.key.to_user_string() + (f"[{self.partition}]" if self.partition else "")


Output = tuple[dg.AssetKey, str | None]
"""An asset and its partition."""


def stale_assets(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    shards: Collection[str],
    unseen: Callable[[Mapping[Output, str]], Mapping[Output, str]] = lambda made: {},
) -> list[StaleAsset]:
    """Every missing or stale asset in topological order.

    An asset whose inputs alone are stale counts as fresh until they land with other content: what Dagster's resolver
    reports is direct staleness, hop by hop. The resolver is private to Dagster; the tests of this module would notice
    another shape. `shards`: the partitions to look at. `unseen`: finds among the fresh ones, given with the data
    version of their last run, those that Dagster is wrong about, each with the reason.
    """
    graph = definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = {output: _look(resolver, *output) for output in _materializable(graph, shards)}
    fresh = [output for output, stale in found.items() if stale is None]
    wrong = unseen({output: resolver.get_current_data_version(*output).value for output in fresh})
    looked = (stale or _wrong(output, wrong.get(output)) for output, stale in found.items())
    return [stale for stale in looked if stale is not None]


def _wrong(output: Output, reason: str | None) -> StaleAsset | None:
    return None if reason is None else StaleAsset(*output, missing=False, causes=(reason,))


def _materializable(graph: AssetGraph, shards: Collection[str]) -> Iterator[Output]:
    for key in graph.toposorted_asset_keys:
        if not graph.get(key).is_materializable:
            continue
        if graph.get(key).is_partitioned:
            yield from ((key, name) for name in sorted(shards))
        else:
            yield key, None


def _look(resolver: CachingStaleStatusResolver, key: dg.AssetKey, partition: str | None) -> StaleAsset | None:
    status = resolver.get_status(key, partition)
    if status == StaleStatus.FRESH:
        return None
    causes = resolver.get_stale_causes(key, partition)
    reasons = tuple(f"{cause.reason}" + (f": {cause.dependency}" if cause.dependency else "") for cause in causes)
    return StaleAsset(key, partition, status == StaleStatus.MISSING, reasons)
