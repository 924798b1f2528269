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
from toolformer_dag.computing.workers import Workers, executor_of
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.resources.live_runs import FOLDER, HOME, alive, home_name, run_folder
from toolformer_dag.traces.trace_stages import trace_tables

RESOURCES = {"lake": "toolformer_lake", "compute": "toolformer_compute"}
"""Name of a resource in assets -> its name in Dagster, where another project may have a `lake` too."""


class LakeResource(dg.ConfigurableResource[Lake]):
    """The lake.

    - `root`: a folder, or a place in an object store
    - `copies`: the folder of this machine with copies of files of an object store
    - `steps_apart`: whether each step may run in a process of its own
    - `suffix`: ends the names of the tables of a later round; empty for most
    """

    root: str
    copies: str = ""
    steps_apart: bool = False
    suffix: str = ""

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Lake]:
        """Yield the lake to assets; meanwhile the run is marked as alive, so that a killed run can be recognized."""
        lake = Lake.at(self.root, Path(self.copies), self.suffix)
        instance = context.instance
        run = context.run
        if instance is None or run is None or instance.is_ephemeral:
            yield lake
            return
        if HOME not in run.tags:  # only the DAGSTER_HOME of this name may later end the run as killed
            instance.add_run_tags(run.run_id, {HOME: home_name(instance)})
        with self._mark_as_alive(instance, run):  # holds the lock of the run's folder, unless its command does
            yield lake

    def _mark_as_alive(self, instance: dg.DagsterInstance, run: dg.DagsterRun) -> AbstractContextManager[None]:
        """Return a context in which the run is marked as alive, unless something else marks it."""
        return nullcontext() if self._is_marked_elsewhere(run) else alive(run_folder(instance, run))

    def _is_marked_elsewhere(self, run: dg.DagsterRun) -> bool:
        """Return whether the command that started the run marks it, or the run may outlive this process."""
        command_marks_it = FOLDER in run.tags
        return command_marks_it or self.steps_apart


@dataclass(frozen=True, slots=True)
class Compute:
    """What computes rows.

    - `worker`: holds what this process has loaded, such as models
    - `workers`: the processes that compute chunks
    - `tables`: the tables of the plan, by name
    """

    worker: Worker
    workers: Workers
    tables: Mapping[str, TableOutput]


def list_computed_tables(plan: Plan) -> list[TableOutput]:
    """Return every table that stages make: those of the corpus, and those of recorded conversations."""
    return [*list_table_outputs(plan), *trace_tables(plan)]


def build_compute_resource(plan: Plan) -> dg.ResourceDefinition:
    """Return the resource `compute`: what this process has loaded, and workers that live as long as a run."""

    @dg.resource(description="Workers with warm models, one per GPU; `[execution]` says how many, and where.")
    def compute(_: dg.InitResourceContext) -> Iterator[Compute]:
        worker = Worker(plan)
        tables = {output.name: output for output in list_computed_tables(plan)}
        # Worker processes call `list_computed_tables` themselves: tables are not sent to them.
        workers = Workers(worker, tables, partial(executor_of, list_computed_tables))
        try:
            yield Compute(worker, workers, tables)
        finally:
            workers.close()

    return compute
