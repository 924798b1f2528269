"""Outputs that Dagster believes in and is wrong about: cut short, removed, short of lost calls, or old copies."""

from collections.abc import Iterable

import dagster as dg

from resources.staleness import Output
from toolformer_dag.checkpoints import checkpoint_folder
from toolformer_dag.evaluation.results import ACCURACY, OUTCOMES, PERPLEXITY
from toolformer_dag.settings import Settings
from toolformer_dag.stages import tool_results
from toolformer_dag.stages.publish import WHOLE
from toolformer_dag.stages.rejections import decode
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.table import Table
from toolformer_dag.storage.warehouse import outdated
from toolformer_dag.storage.warehouse_sources import STAGES
from toolformer_dag.tools.tool import LOST

MEASUREMENTS = {ACCURACY: (ACCURACY, OUTCOMES), PERPLEXITY: (PERPLEXITY,)}
"""The tables of each asset of evaluation."""


def lost_outputs(settings: Settings, outputs: Iterable[Output]) -> dict[Output, str]:
    """Those of `outputs` that are not whole, with the reason. Sizes and footers are looked at, not every byte.

    Results of a tool are not whole while they lack calls that were lost: a time limit or a connection may hold next
    time. The warehouse is not whole when rejections or a tau_f changed and the rows did not.
    """
    lake = Lake(settings.paths.lake)
    found = {output: _loss(settings, lake, *output) for output in outputs}
    return {output: reason for output, reason in found.items() if reason}


def _loss(settings: Settings, lake: Lake, key: dg.AssetKey, partition: str | None) -> str | None:
    if key.path[0] == "warehouse":
        return outdated(lake, settings.paths.warehouse)
    if key.path[-1].endswith("_checkpoint"):
        folder = checkpoint_folder(settings, key.path[-1])
        return None if folder.is_dir() else f"{folder} is gone"
    losses = (_table_loss(lake.table(name), partition or WHOLE) for name in _tables(key))
    return next((loss for loss in losses if loss), None)


def _tables(key: dg.AssetKey) -> tuple[str, ...]:
    name = key.to_user_string()
    return (name,) if key.path[-1] in STAGES else MEASUREMENTS.get(name, ())


def _table_loss(table: Table, partition: str) -> str | None:
    try:
        table.files(partition)
        return _lost_calls(table, partition) if table.name.endswith(f"/{tool_results.STAGE}") else None
    except StorageError as error:
        return str(error).partition(";")[0]


def _lost_calls(table: Table, partition: str) -> str | None:
    reasons = {rejected["reason"] for rejected in decode(table.record(partition))}
    lost = sorted(reason for reason in reasons if reason.startswith(LOST))
    return f"calls were lost ({', '.join(lost)}) and are tried again" if lost else None
