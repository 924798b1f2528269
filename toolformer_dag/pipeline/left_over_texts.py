"""Make heuristic_subset for a project that starts from another: the texts without a kept call of the tool so far."""

from dataclasses import replace

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import TEXT_KEY, ByShard, InputsOf, PartRows, Rejected, TableOutput, versions
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import heuristic_subset


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: texts and kept calls of the project that this one starts from."""
    assert plan.start is not None
    earlier_lane = plan.start.lane_of(lane.tool).key
    return (f"{earlier_lane}/heuristic_subset", f"{earlier_lane}/filtered_calls")


def inputs(output: TableOutput) -> InputsOf:
    """Return a function from a shard to the versions of its texts and kept calls, by the tables' whole names."""
    return versions({name: output.plan.lake.table(name) for name in output.depends_on})


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the texts of a shard in which the earlier project kept no call. Rejected: kept_before."""
    texts_name, kept_name = output.depends_on  # in the order of `reads`
    lake = output.plan.lake
    texts = lake.table(texts_name).read(shard)
    kept_calls = lake.table(kept_name).read(shard)
    left_over = texts.join(kept_calls, on=TEXT_KEY, how="anti", maintain_order="left")
    rejected = Rejected({(shard, "kept_before"): texts.height - left_over.height})
    return PartRows([left_over.with_columns(tool=pl.lit(output.lane.key))], rejected)


STAGE = replace(
    heuristic_subset.STAGE,
    description="The texts that a tool wants and in which the project that it starts from kept no call of it.",
    settings=lambda plan, lane: {},
    reads=reads,
    inputs=inputs,
    kinds=frozenset({"polars", "parquet"}),
    make=ByShard(rows),
)
