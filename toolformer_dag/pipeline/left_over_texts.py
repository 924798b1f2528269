"""heuristic_subset of a project that starts from another: the texts in which that one kept no call of the tool."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import TEXT_KEY, InputsOf, PartRows, TableOutput, counted, versions
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE, Table
from toolformer_dag.pipeline import heuristic_subset
from toolformer_dag.pipeline.filtered_calls import FILTER_RULE, REPEATED


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the tables that are read: texts and kept calls of the project that this one starts from."""
    return tuple(f"{_before(plan, lane)}/{name}" for name in ("heuristic_subset", "filtered_calls"))


def _before(plan: Plan, lane: Lane) -> str:
    assert plan.start is not None
    return plan.start.lane_of(lane.tool).key


def _rule(output: TableOutput) -> Table:
    return output.plan.lake.table(f"{_before(output.plan, output.lane)}/{FILTER_RULE}")


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's texts and kept calls, and which documents counted elsewhere."""
    before = versions({name: output.plan.lake.table(name) for name in output.depends_on})
    pointer = _rule(output).whole_pointer(WHOLE)
    repeated = pointer.record[REPEATED] if pointer else {}

    def of(shard: str) -> Mapping[str, Any]:
        return {**before(shard), REPEATED: repeated.get(shard)}

    return of


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Leave out the texts with kept calls, and documents that counted in another shard.

    Rejected: kept_before, duplicate_document.
    """
    texts, kept = (output.plan.lake.table(name).read(shard) for name in output.depends_on)
    repeated = _rule(output).scan([WHOLE]).filter(pl.col("shard") == shard).select("digest").collect()
    marked = texts.join(
        kept.select(TEXT_KEY).unique().with_columns(kept=True), on=TEXT_KEY, how="left", maintain_order="left"
    )
    reason = (
        pl.when("kept")
        .then(pl.lit("kept_before"))
        .when(pl.col("digest").is_in(repeated["digest"].implode()))
        .then(pl.lit("duplicate_document"))
    )
    told = marked.with_columns(reason=reason, tool=pl.lit(output.lane.key))
    left = told.filter(pl.col("reason").is_null()).select(output.stage.schema.names())
    return PartRows([left], counted(told))


STAGE = replace(
    heuristic_subset.STAGE,
    description="The texts that a tool wants and in which the project that it starts from kept no call of it.",
    settings=lambda plan, lane: {},
    reads=reads,
    inputs=inputs,
    kinds=frozenset({"polars", "parquet"}),
    shard_rows=rows,
)
