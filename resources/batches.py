"""Which stale assets run next, and which of them together."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from dagster import AssetKey
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph

from resources.staleness import StaleAsset


@dataclass(frozen=True, slots=True)
class Batch:
    """Assets that one Dagster run materializes: of one partition, or unpartitioned."""

    partition: str | None
    assets: tuple[StaleAsset, ...]


def next_batches(graph: AssetGraph, stale: Sequence[StaleAsset]) -> list[list[Batch]]:
    """Stale assets with nothing stale above them, and missing ones whose inputs all run before them in any case.

    The batches of one list do not wait for each other; the lists do.
    """
    chosen: list[StaleAsset] = []
    for asset in stale:
        above = [other for other in stale if _feeds(graph, other, asset)]
        if not above or (asset.missing and _parents_run(graph, asset, above, chosen)):
            chosen.append(asset)
    return list(_batches(graph, chosen))


def waiting_for_nothing(
    graph: AssetGraph, assets: Sequence[StaleAsset], failed: Collection[StaleAsset]
) -> list[StaleAsset]:
    """Those of `assets` that depend on nothing that failed."""
    return [asset for asset in assets if not any(_feeds(graph, lost, asset) for lost in failed)]


def _parents_run(
    graph: AssetGraph, asset: StaleAsset, above: Sequence[StaleAsset], chosen: Sequence[StaleAsset]
) -> bool:
    """Fresh rows of a parent may turn stale when something stale above them lands: then it is too early for `asset`."""
    parents = graph.get(asset.key).parent_keys
    direct = [other for other in above if other.key in parents]
    running = {(other.key, other.partition) for other in direct}
    changing = {
        (parent, _rows_below(graph, parent, other, asset))
        for parent in parents
        for other in above
        if other.key in graph.get_ancestor_asset_keys(parent)
    }
    return all(other in chosen for other in direct) and changing <= running


def _rows_below(graph: AssetGraph, parent: AssetKey, other: StaleAsset, asset: StaleAsset) -> str | None:
    """The partition of `parent` that `other` feeds and `asset` reads; None: all of them, or it has none."""
    return (other.partition or asset.partition) if graph.get(parent).partitions_def else None


def _feeds(graph: AssetGraph, other: StaleAsset, asset: StaleAsset) -> bool:
    same_rows = asset.partition is None or other.partition in (None, asset.partition)
    return same_rows and other.key in graph.get_ancestor_asset_keys(asset.key)


def _batches(graph: AssetGraph, chosen: Sequence[StaleAsset]) -> Iterator[list[Batch]]:
    """Unpartitioned sources, then all partitions, then what is made of all partitions."""
    partitioned = {asset.key for asset in chosen if asset.partition}

    def place(asset: StaleAsset) -> int:
        if asset.partition:
            return 1
        return 2 if graph.get_ancestor_asset_keys(asset.key) & partitioned else 0

    def name(asset: StaleAsset) -> str:
        return asset.partition or ""

    for _, level in groupby(sorted(chosen, key=place), key=place):
        groups = groupby(sorted(level, key=name), key=name)
        yield [Batch(partition or None, tuple(assets)) for partition, assets in groups]
