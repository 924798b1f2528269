"""Why an asset is stale, field by field: its record in the lake against what the settings say now."""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from assets.plan import Plan
from toolformer_dag.lane import Lane
from toolformer_dag.stages import filtered_calls, loss_deltas, scored_candidates, swapped_results, tool_results
from toolformer_dag.storage.drift import drift
from toolformer_dag.storage.lake import Lake

STAGES: Mapping[str, Callable[[Plan, Lane], Mapping[str, Any]]] = {
    "scored_candidates": lambda plan, lane: scored_candidates.settings(lane, plan.model, plan.sampling),
    "tool_results": lambda plan, lane: tool_results.settings(lane),
    "loss_deltas": lambda plan, lane: loss_deltas.settings(lane, plan.model),
    "swapped_results": lambda plan, lane: swapped_results.settings(
        lane, plan.model, plan.settings.evaluation.swapped_calls
    ),
    "filtered_calls": lambda plan, lane: filtered_calls.settings(lane, plan.settings.training.examples_per_tool),
}


def changed_fields(plan: Plan, lake: Lake, key: dg.AssetKey, partition: str | None) -> list[str]:
    """`settings.tau_f: 0.5 -> 0.8` for every field that changed since the stored rows were made.

    Empty for rows that were never made, and for the stages that are no lane's; Dagster's causes remain for those.
    """
    lane = next((lane for lane in plan.lanes if lane.key == key.path[0]), None)
    table = lake.table(key.to_user_string())
    stored = partition or "all"
    if lane is None or key.path[-1] not in STAGES or not table.has(stored):
        return []
    record = table.record(stored)
    now = {"settings": STAGES[key.path[-1]](plan, lane), "inputs": record["inputs"]}
    return [str(change) for change in drift(record, now)]
