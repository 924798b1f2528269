"""Outputs that Dagster believes in and is wrong about: cut short, removed, replaced, short of lost calls, or old."""

from collections.abc import Mapping
from pathlib import Path

import dagster as dg

from resources.made import Output
from toolformer_dag.checkpoints import checkpoint_folder
from toolformer_dag.evaluation.accuracy_tables import ACCURACY, OUTCOMES, PERPLEXITY
from toolformer_dag.settings.settings import Settings
from toolformer_dag.shards import partitions, shard_files
from toolformer_dag.stages import tool_results
from toolformer_dag.stages.rejections import decode
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.table import Table
from toolformer_dag.storage.warehouse import outdated
from toolformer_dag.storage.warehouse_sources import STAGES
from toolformer_dag.tools.tool import LOST
from toolformer_dag.training.training_report import read_report

MEASUREMENTS = {ACCURACY: (ACCURACY, OUTCOMES), PERPLEXITY: (PERPLEXITY,)}
"""The tables of each asset of evaluation; the first holds the rows of which the asset tells the version."""


def lost_outputs(settings: Settings, made: Mapping[Output, str]) -> dict[Output, str]:
    """Those of `made` that are not whole, with the reason. Sizes and footers are looked at, not every byte.

    `made`: outputs with the data version of their last run. The lake may hold other rows: those of another instance, or
    of a run that was killed before Dagster knew of them. Results of a tool are not whole while they lack calls that
    were lost: a time limit or a connection may hold next time. The warehouse is not whole when rejections or a tau_f
    changed and the rows did not.
    """
    lake = Lake(settings.paths.lake)
    found = {(key, part): _loss(settings, lake, key, part, version) for (key, part), version in made.items()}
    return {output: reason for output, reason in found.items() if reason}


def _loss(settings: Settings, lake: Lake, key: dg.AssetKey, partition: str | None, version: str) -> str | None:
    if key.path[0] == "warehouse":
        lanes = [lane for lane, section in settings.tools.items() if section.enabled]
        return outdated(lake, lanes, list(partitions(shard_files(settings))), settings.paths.warehouse)
    if key.path[-1].endswith("_checkpoint"):
        return _checkpoint_loss(checkpoint_folder(settings, key.path[-1]), version)
    known = dict.fromkeys(_tables(key)[:1], version)
    losses = (_table_loss(lake.table(name), partition or WHOLE, known.get(name)) for name in _tables(key))
    return next((loss for loss in losses if loss), None)


def _checkpoint_loss(folder: Path, version: str) -> str | None:
    report = read_report(folder)
    if report is None:
        return f"{folder} is gone or not whole"
    return None if report.fingerprint == version else f"{folder} holds another model than the last run made"


def _tables(key: dg.AssetKey) -> tuple[str, ...]:
    name = key.to_user_string()
    return (name,) if key.path[-1] in STAGES else MEASUREMENTS.get(name, ())


def _table_loss(table: Table, partition: str, version: str | None) -> str | None:
    try:
        table.files(partition)
        if version not in (None, table.pointer(partition).data_version):
            return "the lake holds other rows than the last run made"
        return _lost_calls(table, partition) if table.name.endswith(f"/{tool_results.STAGE}") else None
    except StorageError as error:
        return str(error).partition(";")[0]


def _lost_calls(table: Table, partition: str) -> str | None:
    reasons = {rejected["reason"] for rejected in decode(table.record(partition))}
    lost = sorted(reason for reason in reasons if reason.startswith(LOST))
    return f"calls were lost ({', '.join(lost)}) and are tried again" if lost else None
