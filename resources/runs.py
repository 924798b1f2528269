"""Running what is stale, lowest first, until nothing is: what Dagster's own command line has no command for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.execution.plan.objects import StepFailureData

from resources.spent import Spent
from resources.staleness import StaleAsset, stale_assets

NOT_RUN = "not run: an asset before it failed"
INTERRUPTED = "DagsterExecutionInterruptedError"
Wanted = Callable[[dg.AssetKey], bool]


@dataclass
class Outcome:
    """What ran and what it cost, and what failed with which error."""

    ran: list[StaleAsset] = field(default_factory=list)
    failed: dict[StaleAsset, str] = field(default_factory=dict)
    costs: dict[StaleAsset, Spent] = field(default_factory=dict)

    @property
    def spent(self) -> Spent:
        """What everything that ran cost together."""
        return sum(self.costs.values(), Spent())


@dataclass(frozen=True, slots=True)
class Batch:
    """Assets that one Dagster run materializes: of one partition, or unpartitioned."""

    partition: str | None
    assets: tuple[StaleAsset, ...]


def bring_up_to_date(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    wanted: Wanted = lambda key: True,
    announce: Callable[[Batch], None] = lambda batch: None,
    look: Callable[[], list[StaleAsset]] | None = None,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Materializes the lowest stale assets, looks again, and stops when nothing wanted is stale.

    What lands with unchanged content leaves everything after it fresh. A failed asset is not tried twice, and what
    depends on it is left; the other lanes go on. `look`: how what is stale is found, where Dagster alone cannot tell.
    `tags`: of every run.
    """
    outcome = Outcome()
    graph = definitions.resolve_asset_graph()
    look = look or (lambda: stale_assets(definitions, instance))
    while batches := _next_batches(graph, _open(graph, look(), wanted, outcome)):
        for batch in batches:
            runnable = Batch(batch.partition, tuple(_open(graph, batch.assets, wanted, outcome)))
            if runnable.assets:
                announce(runnable)
                _run(definitions, instance, runnable, outcome, tags)
    return outcome


def _open(graph: AssetGraph, stale: Sequence[StaleAsset], wanted: Wanted, outcome: Outcome) -> list[StaleAsset]:
    """Those that are wanted, did not run yet, and wait for nothing that failed."""
    done = {str(asset) for asset in (*outcome.ran, *outcome.failed)}
    return [
        asset
        for asset in stale
        if wanted(asset.key)
        and str(asset) not in done
        and not any(_feeds(graph, lost, asset) for lost in outcome.failed)
    ]


def _next_batches(graph: AssetGraph, stale: Sequence[StaleAsset]) -> list[Batch]:
    """Stale assets with nothing stale above them, and missing ones whose inputs all run before them in any case."""
    chosen: list[StaleAsset] = []
    for asset in stale:
        above = [other for other in stale if _feeds(graph, other, asset)]
        if not above or (asset.missing and _parents_run(graph, asset, above, chosen)):
            chosen.append(asset)
    return list(_batches(graph, chosen))


def _parents_run(
    graph: AssetGraph, asset: StaleAsset, above: Sequence[StaleAsset], chosen: Sequence[StaleAsset]
) -> bool:
    """A fresh parent below something stale may turn stale when that lands: then it is too early for `asset`."""
    parents = graph.get(asset.key).parent_keys
    direct = [other for other in above if other.key in parents]
    doubtful = [
        parent
        for parent in parents - {other.key for other in direct}
        if any(other.key in graph.get_ancestor_asset_keys(parent) for other in above)
    ]
    return all(other in chosen for other in direct) and not doubtful


def _feeds(graph: AssetGraph, other: StaleAsset, asset: StaleAsset) -> bool:
    same_rows = asset.partition is None or other.partition in (None, asset.partition)
    return same_rows and other.key in graph.get_ancestor_asset_keys(asset.key)


def _batches(graph: AssetGraph, chosen: Sequence[StaleAsset]) -> Iterator[Batch]:
    """Unpartitioned sources, then every partition, then what is made of all partitions."""
    partitioned = {asset.key for asset in chosen if asset.partition}

    def place(asset: StaleAsset) -> tuple[int, str]:
        if asset.partition:
            return 1, asset.partition
        return (2 if graph.get_ancestor_asset_keys(asset.key) & partitioned else 0), ""

    for (_, partition), assets in groupby(sorted(chosen, key=place), key=place):
        yield Batch(partition or None, tuple(assets))


def _run(
    definitions: dg.Definitions, instance: dg.DagsterInstance, batch: Batch, outcome: Outcome, tags: Mapping[str, str]
) -> None:
    job = definitions.resolve_implicit_job_def_def_for_assets([asset.key for asset in batch.assets])
    if job is None:
        raise LookupError(f"no job runs {', '.join(map(str, batch.assets))}; reload the definitions")
    result = job.execute_in_process(
        instance=instance,
        partition_key=batch.partition,
        asset_selection=[asset.key for asset in batch.assets],
        raise_on_error=False,
        tags=tags,
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )
    landed = {event.asset_key: event.materialization for event in result.get_asset_materialization_events()}
    errors = {event.step_key: event.step_failure_data for event in result.all_events if event.is_step_failure}
    if any(failure.error and failure.error.cls_name == INTERRUPTED for failure in errors.values()):
        raise KeyboardInterrupt  # Dagster files a signal under failed steps and would let the next run begin
    for asset in batch.assets:
        failure = errors.get(asset.key.to_python_identifier())
        if failure is not None:
            outcome.failed[asset] = _reason(failure)
        elif asset.key in landed:
            outcome.ran.append(asset)
            outcome.costs[asset] = Spent.of(landed[asset.key].metadata)
        else:
            outcome.failed[asset] = NOT_RUN


def _reason(failure: StepFailureData) -> str:
    """The message of the error itself; its traceback stands in the run's log, which the UI shows."""
    error = failure.error
    while error is not None and error.cause is not None:
        error = error.cause
    return error.message.strip() if error else failure.error_display_string
