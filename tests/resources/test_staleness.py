"""What is stale agrees with Dagster's own resolver, which asks the instance several times per output."""

from collections.abc import Mapping
from hashlib import sha256

import dagster as dg
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleCause, StaleStatus
from dagster._core.loader import LoadingContextForTest

from resources.batches import Batch
from resources.held_partitions import keep_partitions
from resources.instance import SHARDS
from resources.runs import bring_up_to_date, materialize
from resources.staleness import StaleAsset, stale_assets

DEPS = {
    "raw": [],
    "list": [],
    "counted": ["raw"],
    "scored": ["counted", "list"],
    "kept": ["scored", "list"],
    "trained": ["kept", "raw"],
}
PARTITIONED = ("raw", "counted", "scored")


def graph_of(code: Mapping[str, int], deps: Mapping[str, list[str]]) -> dg.Definitions:
    """An asset's rows change with every second version of its code."""

    def asset(name: str) -> dg.AssetsDefinition:
        @dg.asset(
            name=name,
            deps=deps[name],
            code_version=str(code[name]),
            partitions_def=SHARDS if name in PARTITIONED else None,
        )
        def body() -> dg.MaterializeResult:
            content = f"{name} {code[name] // 2}"
            return dg.MaterializeResult(data_version=dg.DataVersion(sha256(content.encode()).hexdigest()))

        return body

    return dg.Definitions([asset(name) for name in deps])


def _reason(cause: StaleCause) -> str:
    """Names the input, once."""
    name = cause.dependency.asset_key.to_user_string() if cause.dependency else ""
    return cause.reason if cause.reason.endswith(name) else f"{cause.reason}: {name}"


def by_the_resolver(definitions: dg.Definitions, instance: dg.DagsterInstance, shards: list[str]) -> list[StaleAsset]:
    graph = definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    found = []
    for key in graph.toposorted_asset_keys:
        for partition in sorted(shards) if graph.get(key).is_partitioned else [None]:
            status = resolver.get_status(key, partition)
            reasons = {_reason(cause) for cause in resolver.get_stale_causes(key, partition)}
            if status != StaleStatus.FRESH:
                found.append(StaleAsset(key, partition, status == StaleStatus.MISSING, tuple(sorted(reasons))))
    return found


def found(definitions: dg.Definitions, instance: dg.DagsterInstance, shards: list[str]) -> list[StaleAsset]:
    return [
        StaleAsset(one.key, one.partition, one.missing, tuple(sorted(one.causes)))
        for one in stale_assets(definitions, instance, shards)
    ]


def run_what_is_stale(definitions: dg.Definitions, instance: dg.DagsterInstance, shards: list[str]) -> None:
    bring_up_to_date(
        definitions.resolve_asset_graph(),
        look=lambda: stale_assets(definitions, instance, shards),
        run=lambda batches: (materialize(definitions, instance, batch) for batch in batches),
    )


STEPS = [
    ("up",),
    ("code", "kept"),  # the same rows come out of the first change of each, other rows of the second
    ("up",),
    ("code", "kept"),
    ("run", "kept", None),
    ("code", "raw"),
    ("code", "raw"),
    ("run", "raw", "a"),  # counted[a] reads other rows now, counted[b] not yet
    ("up",),
    ("shards", ["a", "b", "c"]),
    ("run", "raw", "c"),
    ("up",),
    ("deps", {**DEPS, "scored": ["list"]}),
    ("deps", {**DEPS, "scored": ["raw", "counted", "list"]}),
    ("up",),
    ("code", "list"),
    ("code", "list"),
    ("run", "list", None),
]


def test_what_read_a_partition_that_went_is_stale_at_once():
    """Dagster's resolver looks at new events alone."""
    definitions = graph_of(dict.fromkeys(DEPS, 0), DEPS)
    with dg.DagsterInstance.ephemeral() as instance:
        keep_partitions(instance, ["a", "b"])
        run_what_is_stale(definitions, instance, ["a", "b"])
        keep_partitions(instance, ["a"])
        assert [str(one) for one in found(definitions, instance, ["a"])] == ["kept", "trained"]
        run_what_is_stale(definitions, instance, ["a"])
        assert found(definitions, instance, ["a"]) == []


def test_it_agrees_with_dagsters_own_resolver():
    code, deps, shards, seen = dict.fromkeys(DEPS, 0), DEPS, ["a", "b"], []
    with dg.DagsterInstance.ephemeral() as instance:
        keep_partitions(instance, shards)
        for step in STEPS:
            match step:
                case ("code", name):
                    code[name] += 1
                case ("deps", other):
                    deps = other
                case ("shards", other):
                    keep_partitions(instance, shards := other)
                case ("run", name, partition):
                    one = StaleAsset(dg.AssetKey(name), partition, missing=False, causes=())
                    materialize(graph_of(code, deps), instance, Batch(partition, (one,)))
                case ("up",):
                    run_what_is_stale(graph_of(code, deps), instance, shards)
            definitions = graph_of(code, deps)
            assert found(definitions, instance, shards) == by_the_resolver(definitions, instance, shards), step
            seen.append(found(definitions, instance, shards))
    assert [] in seen and len(set(map(str, seen))) > 10
