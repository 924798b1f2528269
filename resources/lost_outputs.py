"""Outputs that Dagster believes in and that are damaged or gone: cut short by a power loss, or removed by somebody."""

from collections.abc import Iterable

import dagster as dg

from resources.staleness import Output
from toolformer_dag.checkpoints import checkpoint_folder
from toolformer_dag.settings import Settings
from toolformer_dag.stages.publish import WHOLE
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import STAGES


def lost_outputs(settings: Settings, outputs: Iterable[Output]) -> dict[Output, str]:
    """Those of `outputs` that are not whole, with the reason. Sizes and footers are looked at, not every byte."""
    lake = Lake(settings.paths.lake)
    found = {output: _loss(settings, lake, *output) for output in outputs}
    return {output: reason for output, reason in found.items() if reason}


def _loss(settings: Settings, lake: Lake, key: dg.AssetKey, partition: str | None) -> str | None:
    if key.path[-1] in STAGES and key.path[0] != "warehouse":
        return _table_loss(lake, key.to_user_string(), partition or WHOLE)
    if key.path[0] == "warehouse":
        return None if settings.paths.warehouse.is_file() else f"{settings.paths.warehouse} is gone"
    folder = checkpoint_folder(settings, key.path[-1])
    if key.path[-1].endswith("_checkpoint") and not folder.is_dir():
        return f"{folder} is gone"
    return None


def _table_loss(lake: Lake, table: str, partition: str) -> str | None:
    try:
        lake.table(table).files(partition)
    except StorageError as error:
        return str(error).partition(";")[0]
    return None
