"""The asset graph, one file per stage, named after the stage; every asset calls one function of the library."""

import dagster as dg

from assets.accuracy import accuracy
from assets.augmented_corpus import augmented_corpus
from assets.automation import automated
from assets.filtered_calls import filtered_calls
from assets.finetuned_checkpoint import CHECKPOINTS, checkpoint
from assets.heuristic_subset import heuristic_subset
from assets.loss_deltas import loss_deltas
from assets.perplexity import perplexity
from assets.plan import Plan
from assets.prepared_tool import prepared_tool, prepares
from assets.raw_shards import raw_shards
from assets.scored_candidates import scored_candidates
from assets.shard_list import shard_list
from assets.swapped_results import swapped_results
from assets.tool_results import tool_results
from assets.warehouse import warehouse_tables
from toolformer_dag.lane import Lane


def graph(plan: Plan) -> list[dg.AssetsDefinition]:
    """Shards, a lane per tool, and what is made of all lanes."""
    assets = [shard_list(plan), raw_shards(plan), augmented_corpus(plan), warehouse_tables(plan)]
    assets += [*(checkpoint(plan, name) for name in CHECKPOINTS), accuracy(plan), perplexity(plan)]
    assets += [asset for lane in plan.lanes for asset in lane_assets(plan, lane)]
    return automated(assets) if plan.settings.execution.automation else assets


def lane_assets(plan: Plan, lane: Lane) -> list[dg.AssetsDefinition]:
    """From the texts that a tool wants to its kept calls."""
    stages = (heuristic_subset, scored_candidates, tool_results, loss_deltas, swapped_results, filtered_calls)
    prepared = [prepared_tool(lane)] if prepares(lane.tool) else []
    return [*(stage(plan, lane) for stage in stages), *prepared]
