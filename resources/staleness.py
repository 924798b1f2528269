"""What is stale, as the UI sees it, and in which order it is made fresh."""

from collections.abc import Collection, Iterator
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


def stale_assets(
    definitions: dg.Definitions, instance: dg.DagsterInstance, changed_sources: Collection[tuple[dg.AssetKey, str]] = ()
) -> list[StaleAsset]:
    """Every missing or stale asset in topological order.

    An asset whose inputs alone are stale counts as fresh until they land with other content: what Dagster's resolver
    reports is direct staleness, hop by hop. The resolver is private to Dagster; the tests of this module would notice
    another shape. `changed_sources`: partitions whose files changed, which Dagster cannot see.
    """
    graph = definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = []
    for key, partition in _materializable(graph, instance):
        stale = _look(resolver, key, partition)
        if stale is None and (key, partition) in changed_sources:
            stale = StaleAsset(key, partition, False, ("its shard file changed",))
        found.append(stale)
    return [stale for stale in found if stale is not None]


def _materializable(graph: AssetGraph, instance: dg.DagsterInstance) -> Iterator[tuple[dg.AssetKey, str | None]]:
    for key in graph.toposorted_asset_keys:
        if not graph.get(key).is_materializable:
            continue
        if graph.get(key).is_partitioned:
            yield from ((key, name) for name in sorted(instance.get_dynamic_partitions("shards")))
        else:
            yield key, None


def _look(resolver: CachingStaleStatusResolver, key: dg.AssetKey, partition: str | None) -> StaleAsset | None:
    status = resolver.get_status(key, partition)
    if status == StaleStatus.FRESH:
        return None
    causes = resolver.get_stale_causes(key, partition)
    reasons = tuple(f"{cause.reason}" + (f": {cause.dependency}" if cause.dependency else "") for cause in causes)
    return StaleAsset(key, partition, status == StaleStatus.MISSING, reasons)
