"""filtered_calls: the calls that stay at tau_f (paper, section 2, "Filtering API Calls"). All of it is SQL."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.report import Clock, StageReport
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.sql import in_memory, rows, run_file

STAGE = "filtered_calls"


def settings(lane: Lane, examples_per_tool: int) -> dict[str, Any]:
    """What determines the rows beside the scored calls."""
    return {"tau_f": lane.tau_f, "examples_per_tool": examples_per_tool}


def filtered_calls(lake: Lake, lane: Lane, partitions: Sequence[str], *, examples_per_tool: int) -> StageReport:
    """Decides over the scored calls of all `partitions` of a lane; see filtered_calls.sql for the rules.

    Every scored call is kept or counted: below_tau_f, not_best_at_position, duplicate_document, beyond_examples, or the
    reason it had in loss_deltas. Another tau_f that keeps the same calls gives the same data version. Raises
    MissingPartition, DamagedPartition.
    """
    clock = Clock()
    scored = lake.table(f"{lane.key}/loss_deltas")
    versions = {partition: scored.pointer(partition).data_version for partition in partitions}
    files = [file for partition in partitions for file in scored.files(partition)]
    kept, rejected = _decided(lane, files, examples_per_tool) if files else (columns(STAGE).to_frame(), pl.DataFrame())
    counts = Counter({(shard, reason): count for shard, reason, count in rejected.iter_rows()})
    output = Output(lake, STAGE, lane.key, WHOLE, lane.key)
    made, inputs = settings(lane, examples_per_tool), {"loss_deltas": versions}
    return output.publish([kept], made, inputs, counts, clock, volatile=("tau_f",))


def _decided(lane: Lane, files: list[str], examples: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Kept calls, and (shard, reason, count) of the others."""
    with in_memory() as connection:
        parameters = {"files": files, "tau_f": lane.tau_f, "examples": examples}
        run_file(connection, __package__, "filtered_calls.sql", parameters)
        kept = rows(connection, "FROM kept").with_columns(tau_f=pl.lit(lane.tau_f, pl.Float64))
        return kept.select(columns(STAGE).names()).cast(columns(STAGE)), rows(connection, "FROM rejected")
