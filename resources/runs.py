"""Running what is stale, lowest first, until nothing is: what Dagster's own command line has no command for."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.execution.plan.objects import StepFailureData

from resources.batches import Batch, next_batches, waiting_for_nothing
from resources.spent import Spent
from resources.staleness import StaleAsset

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

    def add(self, other: "Outcome") -> None:
        """Takes in what ran and failed elsewhere."""
        self.ran += other.ran
        self.failed |= other.failed
        self.costs |= other.costs


Run = Callable[[Sequence[Batch]], Iterable[Outcome]]
"""Runs batches that do not wait for each other; gives the outcome of each when it ends."""


def bring_up_to_date(
    graph: AssetGraph,
    look: Callable[[], list[StaleAsset]],
    run: Run,
    wanted: Wanted = lambda key: True,
) -> Outcome:
    """Runs the lowest stale assets, looks again, and stops when nothing wanted is stale.

    What lands with unchanged content leaves everything after it fresh. A failed asset is not tried twice, and what
    depends on it is left; the other lanes go on. `look`: what is stale, upstream first.
    """
    outcome = Outcome()
    while levels := next_batches(graph, _open(graph, look(), wanted, outcome)):
        for level in levels:
            left = [Batch(batch.partition, tuple(_open(graph, batch.assets, wanted, outcome))) for batch in level]
            for ended in run([batch for batch in left if batch.assets]):
                outcome.add(ended)
    return outcome


def _open(graph: AssetGraph, stale: Sequence[StaleAsset], wanted: Wanted, outcome: Outcome) -> list[StaleAsset]:
    """Those that are wanted, did not run yet, and wait for nothing that failed."""
    done = {str(asset) for asset in (*outcome.ran, *outcome.failed)}
    open_ = [asset for asset in stale if wanted(asset.key) and str(asset) not in done]
    return waiting_for_nothing(graph, open_, outcome.failed)


def materialize(
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    batch: Batch,
    tags: Mapping[str, str] = MappingProxyType({}),
) -> Outcome:
    """Runs a batch in this process. `tags`: of the run. Raises KeyboardInterrupt where a signal ended it."""
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
    return _outcome(batch, result)


def _outcome(batch: Batch, result: dg.ExecuteInProcessResult) -> Outcome:
    landed = {event.asset_key: event.materialization for event in result.get_asset_materialization_events()}
    errors = {event.step_key: event.step_failure_data for event in result.all_events if event.is_step_failure}
    if any(failure.error and failure.error.cls_name == INTERRUPTED for failure in errors.values()):
        raise KeyboardInterrupt  # Dagster files a signal under failed steps and would let the next run begin
    outcome = Outcome()
    for asset in batch.assets:
        failure = errors.get(asset.key.to_python_identifier())
        if failure is not None:
            outcome.failed[asset] = _reason(failure)
        elif asset.key in landed:
            outcome.ran.append(asset)
            outcome.costs[asset] = Spent.of(landed[asset.key].metadata)
        else:
            outcome.failed[asset] = NOT_RUN
    return outcome


def _reason(failure: StepFailureData) -> str:
    """What the asset raised, without Dagster's wrapping; its traceback stands in the run's log, which the UI shows."""
    error = failure.error
    while error is not None and error.cause is not None and (error.cls_name or "").startswith("Dagster"):
        error = error.cause
    if error is None:
        return failure.error_display_string
    return re.sub(r"^toolformer_dag\.[\w.]+: ", "", error.message.strip())
