"""The Dagster instance that the command line and the UI share."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

import dagster as dg
from upath import UPath

from toolformer_dag.errors import UserError
from toolformer_dag.storage.files import write_whole
from toolformer_dag.storage.lock import locked

SHARDS = dg.DynamicPartitionsDefinition(name="shards")
DEFAULTS = Path(__file__).with_name("dagster.yaml")


class NoShards(UserError):
    """The instance of a run is not the one that the command line and the UI share."""


def shard_names(instance: dg.DagsterInstance) -> list[str]:
    """The partitions that the instance knows, sorted. Raises NoShards, before a table is emptied for want of them."""
    found = sorted(instance.get_dynamic_partitions(SHARDS.name or ""))
    if not found:
        raise NoShards(
            "this Dagster instance knows no shards; set DAGSTER_HOME to the .dagster beside toolformer.toml, or run "
            "`toolformer-dag run` first"
        )
    return found


def home(root: Path) -> Path:
    """$DAGSTER_HOME, or `.dagster` beside toolformer.toml, made ready on first use."""
    folder = Path(os.environ.get("DAGSTER_HOME") or root / ".dagster").absolute()
    os.environ["DAGSTER_HOME"] = str(folder)  # Dagster takes no relative path
    with _alone(folder):
        if not (folder / "dagster.yaml").exists():
            write_whole(UPath(folder / "dagster.yaml"), DEFAULTS.read_bytes())
    return folder


def shared_instance(root: Path) -> dg.DagsterInstance:
    """The instance of `home(root)`; runs of the command line show in the UI and the other way round."""
    with _alone(home(root)):  # two first openings at once would each make Dagster's databases
        return dg.DagsterInstance.get()


def set_pool_slots(instance: dg.DagsterInstance, pool: str, count: int) -> None:
    """How many steps of the pool run at the same time."""
    with _alone(Path(instance.root_directory)):  # of two that size a new pool at once, Dagster fails one
        instance.event_log_storage.set_concurrency_slots(pool, count)


def _alone(folder: Path) -> AbstractContextManager[bool]:
    return locked(folder / "instance.lock")
