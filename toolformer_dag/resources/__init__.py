"""The Dagster resources: the lake, and the workers that compute."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, executor_of
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.resources.live_runs import FOLDER, HOME, alive, home_name, run_folder

RESOURCES = {"lake": "toolformer_lake", "compute": "toolformer_compute"}
"""The names by which Dagster knows them; another project may have a `lake` of its own."""


class LakeResource(dg.ConfigurableResource[Lake]):
    """The lake at `root`: a folder, or a place in an object store with `copies` of it in a folder of this machine."""

    root: str
    copies: str = ""
    steps_apart: bool = False
    suffix: str = ""

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Lake]:
        """Give assets the lake itself; the run is marked as alive meanwhile, so that a killed one can be recognized.

        With `steps_apart` this is the process of a single step, whose end is not the run's.
        """
        lake = Lake.at(self.root, Path(self.copies), self.suffix)
        instance, run = context.instance, context.run
        if instance is None or run is None or instance.is_ephemeral:
            yield lake
            return
        if HOME not in run.tags:
            instance.add_run_tags(run.run_id, {HOME: home_name(instance)})
        others = self.steps_apart or FOLDER in run.tags  # a command holds the lock itself
        with nullcontext() if others else alive(run_folder(instance, run)):
            yield lake


@dataclass(frozen=True, slots=True)
class Compute:
    """`worker`: the means of this process; `workers`: where chunks are computed; `tables`: the plan's, by name."""

    worker: Worker
    workers: Workers
    tables: Mapping[str, TableOutput]


def compute_resource(plan: Plan) -> dg.ResourceDefinition:
    """Return the resource whose workers live as long as a run."""

    @dg.resource(description="Workers with warm models, one per GPU; `[execution]` says how many, and where.")
    def compute(_: dg.InitResourceContext) -> Iterator[Compute]:
        worker, tables = Worker(plan), {output.name: output for output in table_outputs(plan)}
        workers = Workers(worker, tables, partial(executor_of, table_outputs))
        try:
            yield Compute(worker, workers, tables)
        finally:
            workers.close()

    return compute
