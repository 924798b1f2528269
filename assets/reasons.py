"""Why an asset is stale, field by field: its record beside the data against what the settings and inputs are now."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg

from assets.accuracy import accuracy_settings
from assets.finetuned_checkpoint import CHECKPOINTS, checkpoint_versions, training_texts
from assets.heuristic_subset import cut_of
from assets.perplexity import perplexity_settings
from assets.plan import Plan
from toolformer_dag.checkpoints import checkpoint_folder
from toolformer_dag.lane import Lane
from toolformer_dag.shards import partitions, paths_by_name, shard_files
from toolformer_dag.stages import (
    augmented_corpus,
    filtered_calls,
    heuristic_subset,
    loss_deltas,
    raw_shards,
    scored_candidates,
    swapped_results,
    tool_results,
)
from toolformer_dag.stages.cut import Cut
from toolformer_dag.storage.drift import ABSENT, drift
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.training.training_report import RECORD
from toolformer_dag.training.training_run import TrainingSettings, run_identity

Record = Mapping[str, Any]
NOTHING = "no stored setting and no version of an input differs"

LANE_STAGES: Mapping[str, Callable[[Plan, Lane], Record]] = {
    "heuristic_subset": lambda plan, lane: heuristic_subset.settings(
        lane, cut_of(plan, lane), plan.settings.corpus.texts_per_shard
    ),
    "scored_candidates": lambda plan, lane: scored_candidates.settings(lane, plan.model, plan.sampling),
    "tool_results": lambda plan, lane: tool_results.settings(lane),
    "loss_deltas": lambda plan, lane: loss_deltas.settings(lane, plan.model),
    "swapped_results": lambda plan, lane: swapped_results.settings(
        lane, plan.model, plan.settings.evaluation.swapped_texts
    ),
    "filtered_calls": lambda plan, lane: filtered_calls.settings(lane, plan.settings.training.examples_per_tool),
}

MEASURED: Mapping[str, Callable[[Plan], Record]] = {"accuracy": accuracy_settings, "perplexity": perplexity_settings}


def changed_fields(plan: Plan, lake: Lake, key: dg.AssetKey, partition: str | None) -> list[str]:
    """`settings.tau_f: 0.5 -> 0.8` for every field that changed since the output was made.

    Empty where there is no record: never made, lost, or an asset that keeps none (the warehouse, the list of shards,
    what a tool prepares).
    """
    before = _checkpoint_record(plan, key) if key.path[-1] in CHECKPOINTS else _table_record(lake, key, partition)
    if before is None:
        return []
    now = _now(plan, lake, key, partition, before)
    return [] if now is None else [str(change) for change in drift(before, now)] or [NOTHING]


def _table_record(lake: Lake, key: dg.AssetKey, partition: str | None) -> Record | None:
    try:
        return lake.table(key.to_user_string()).record(partition or WHOLE)
    except StorageError:  # nothing to compare with; what is lost is told beside
        return None


def _checkpoint_record(plan: Plan, key: dg.AssetKey) -> Record | None:
    file = checkpoint_folder(plan.settings, key.path[-1]) / RECORD
    return _trained_with(json.loads(file.read_text("utf-8"))) if file.is_file() else None


def _trained_with(run: Record) -> Record:
    """The identity of a finetuning run in the form of a record."""
    return {
        "settings": {**run["settings"], "base": run["base"]},
        "inputs": {"texts": run["texts"], "heldout": run["heldout"]},
    }


def _now(plan: Plan, lake: Lake, key: dg.AssetKey, partition: str | None, before: Record) -> Record | None:
    lane = next((lane for lane in plan.lanes if lane.key == key.path[0]), None)
    inputs = _inputs(plan, lake, key, partition, before.get("inputs", {}))
    if lane is not None and key.path[-1] in LANE_STAGES:
        return {"settings": LANE_STAGES[key.path[-1]](plan, lane), "inputs": inputs}
    if key.path[-1] == raw_shards.STAGE:
        shards = paths_by_name(partitions(shard_files(plan.settings)).get(partition or "", ()))
        return {"settings": raw_shards.settings(shards), "inputs": raw_shards.inputs(shards)}
    if key.path[-1] == augmented_corpus.STAGE:
        cut = Cut(plan.settings.corpus.segment_tokens, lambda texts: [], plan.model)
        return {
            "settings": augmented_corpus.settings(plan.lanes, cut),
            "inputs": inputs,
        }
    if key.path[-1] in CHECKPOINTS:
        return _training_now(plan, lake, key.path[-1])
    if key.path[-1] in MEASURED:
        return {"settings": MEASURED[key.path[-1]](plan), "inputs": checkpoint_versions(plan)}
    return None


def _training_now(plan: Plan, lake: Lake, name: str) -> Record | None:
    try:
        texts = training_texts(plan, lake, name)
    except StorageError:  # C* is lost, which is told beside
        return None
    return _trained_with(run_identity(plan.settings.model, *texts, TrainingSettings.of(plan.settings.training)))


def _inputs(plan: Plan, lake: Lake, key: dg.AssetKey, partition: str | None, before: Record) -> dict[str, Any]:
    """Versions of the same inputs now: one, or one per partition."""
    everything = partitions(shard_files(plan.settings))
    return {
        name: {one: _version(lake, key, name, one) for one in everything}
        if isinstance(value, Mapping)
        else _version(lake, key, name, partition or WHOLE)
        for name, value in before.items()
    }


def _version(lake: Lake, key: dg.AssetKey, name: str, partition: str) -> str:
    group = "ccnet" if name == raw_shards.STAGE else key.path[0]
    try:
        return lake.table(name if "/" in name else f"{group}/{name}").pointer(partition).data_version
    except StorageError:
        return ABSENT
