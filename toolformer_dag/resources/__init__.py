"""The Dagster resources: the lake, and the workers that compute."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_configured_executor
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.resources.live_runs import (
    HOME_TAG,
    RUN_FOLDER_TAG,
    get_or_create_home_name,
    get_run_folder,
    hold_run_lock,
)
from toolformer_dag.traces.trace_stages import build_trace_tables

DAGSTER_RESOURCE_NAMES = {"lake": "toolformer_lake", "compute": "toolformer_compute"}
"""The name of each resource in Dagster, where another project may have a `lake` too, by its name in assets."""


class LakeResource(dg.ConfigurableResource[Lake]):
    """The Dagster resource that gives assets the lake, which holds all tables and computed rows.

    Attributes:
        root: The folder of the lake, or its URL in an object store.
        copies: The folder on this machine for copies of files of an object store.
        steps_apart: Whether each step may run in a process of its own.
        suffix: The end of the names of the tables that belong to a later round. Empty for the first round.
    """

    root: str
    copies: str = ""
    steps_apart: bool = False
    suffix: str = ""

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Lake]:
        """Yield the lake to assets. Meanwhile the run is marked as alive, so that a killed run can be recognized."""
        lake = Lake.at(self.root, Path(self.copies), self.suffix)

        # Without a lasting instance of Dagster, nobody looks for killed runs.
        instance = context.instance
        run = context.run
        if instance is None or run is None or instance.is_ephemeral:
            yield lake
            return

        # Several DAGSTER_HOMEs may share their runs. Only the one with this name may end the run if it was killed.
        if HOME_TAG not in run.tags:
            instance.add_run_tags(run.run_id, {HOME_TAG: get_or_create_home_name(instance)})

        with self._mark_as_alive(instance, run):
            yield lake

    def _mark_as_alive(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> AbstractContextManager[None]:
        """Return a context that marks a run as alive by holding the lock of its folder.

        If something else marks the run, the context does nothing.
        """
        if self._is_marked_elsewhere(run):
            return nullcontext()
        return hold_run_lock(get_run_folder(instance, run))

    def _is_marked_elsewhere(self, run: dg.DagsterRun) -> bool:
        """Return whether the command that started the run marks it, or the run may outlive this process."""
        is_marked_by_command = RUN_FOLDER_TAG in run.tags
        return is_marked_by_command or self.steps_apart


@dataclass(frozen=True, slots=True)
class Compute:
    """Everything that assets need to compute rows.

    Attributes:
        worker: Holds what this process has loaded, such as models.
        workers: The processes that compute chunks of work.
        tables_by_name: The tables of the plan, by name.
    """

    worker: Worker
    workers: Workers
    tables_by_name: Mapping[str, TableOutput]


def list_computed_tables(plan: Plan) -> list[TableOutput]:
    """Return every table that stages compute: those of the corpus, and those of recorded conversations."""
    return [*list_table_outputs(plan), *build_trace_tables(plan)]


def build_compute_resource(plan: Plan) -> dg.ResourceDefinition:
    """Return the Dagster resource `compute`: a `Compute` with worker processes that live as long as a run."""

    @dg.resource(description="Workers with warm models, one per GPU; `[execution]` says how many, and where.")
    def compute(_: dg.InitResourceContext) -> Iterator[Compute]:
        """Yield what computes the rows of `plan`, given to the function around this one. Close it after the run."""
        worker = Worker(plan)
        tables_by_name = {output.name: output for output in list_computed_tables(plan)}

        # Tables are not sent to worker processes, which call `list_computed_tables` themselves.
        build_executor = partial(build_configured_executor, list_computed_tables)
        workers = Workers(worker, tables_by_name, build_executor)
        try:
            yield Compute(worker, workers, tables_by_name)
        finally:
            workers.close()

    return compute
