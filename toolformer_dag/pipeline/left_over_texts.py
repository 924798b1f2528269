"""heuristic_subset of a project that starts from another: the texts in which that one kept no call of the tool."""

from dataclasses import replace

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import TEXT_KEY, ByShard, InputsOf, PartRows, Rejected, TableOutput, versions
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import heuristic_subset


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: texts and kept calls of the project that this one starts from."""
    assert plan.start is not None
    before = plan.start.lane_of(lane.tool).key
    return (f"{before}/heuristic_subset", f"{before}/filtered_calls")


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's texts and kept calls, by the tables' whole names."""
    return versions({name: output.plan.lake.table(name) for name in output.depends_on})


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Leave out the texts with kept calls. Rejected: kept_before."""
    texts, kept = (output.plan.lake.table(name).read(shard) for name in output.depends_on)
    left = texts.join(kept, on=TEXT_KEY, how="anti", maintain_order="left").with_columns(tool=pl.lit(output.lane.key))
    return PartRows([left], Rejected({(shard, "kept_before"): texts.height - left.height}))


STAGE = replace(
    heuristic_subset.STAGE,
    description="The texts that a tool wants and in which the project that it starts from kept no call of it.",
    settings=lambda plan, lane: {},
    reads=reads,
    inputs=inputs,
    kinds=frozenset({"polars", "parquet"}),
    make=ByShard(rows),
)
