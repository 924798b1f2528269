"""Make heuristic_subset for a project that starts from another: the texts without a kept call of the tool so far."""

from dataclasses import replace

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    TEXT_KEY,
    ByShard,
    InputsFinder,
    PartRows,
    RejectionCounts,
    TableOutput,
    build_versions_finder,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import heuristic_subset


def reads(plan: Plan, lane: Lane) -> tuple[str, ...]:
    """Return the whole names of the tables that are read from the project that this one starts from.

    Both are tables of the same tool: its texts, then its kept calls.
    """
    assert plan.previous_plan is not None
    earlier_lane_key = plan.previous_plan.get_lane_of_tool(lane.tool).key
    return (f"{earlier_lane_key}/heuristic_subset", f"{earlier_lane_key}/filtered_calls")


def inputs(output: TableOutput) -> InputsFinder:
    """Return a function from a shard to the versions of its texts and kept calls, by the tables' whole names."""
    lake = output.plan.lake
    return build_versions_finder({table_name: lake.get_table(table_name) for table_name in output.depends_on})


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the texts of a shard in which the project that this one starts from kept no call of the tool.

    Calls are sought only there. The other texts are left out, and counted as rejected with the reason kept_before.
    """
    # The tables that the function `reads` of this module returns, in its order.
    texts_table_name, kept_calls_table_name = output.depends_on
    lake = output.plan.lake
    earlier_texts = lake.get_table(texts_table_name).read_part(shard)
    kept_calls = lake.get_table(kept_calls_table_name).read_part(shard)

    left_over_texts = earlier_texts.join(kept_calls, on=TEXT_KEY, how="anti", maintain_order="left")
    rejection_counts = RejectionCounts({(shard, "kept_before"): earlier_texts.height - left_over_texts.height})

    # In the earlier project, the column `tool` had the name of its own lane (a tool with its settings).
    text_rows = left_over_texts.with_columns(tool=pl.lit(output.lane.key))
    return PartRows([text_rows], rejection_counts)


STAGE = replace(
    heuristic_subset.STAGE,
    description="The texts that a tool wants and in which the project that it starts from kept no call of it.",
    collect_settings=lambda plan, lane: {},
    reads=reads,
    inputs=inputs,
    kinds=frozenset({"polars", "parquet"}),
    row_maker=ByShard(rows),
)
