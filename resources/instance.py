"""The Dagster instance that the command line and the UI share, and the partitions that stand in it."""

import os
import shutil
from collections.abc import Collection
from pathlib import Path

import dagster as dg

SHARDS = dg.DynamicPartitionsDefinition(name="shards")
DEFAULTS = Path(__file__).with_name("dagster.yaml")


def home(root: Path) -> Path:
    """$DAGSTER_HOME, or `.dagster` beside toolformer.toml, made ready on first use."""
    folder = Path(os.environ.setdefault("DAGSTER_HOME", str(root / ".dagster"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "dagster.yaml").exists():
        shutil.copy(DEFAULTS, folder / "dagster.yaml")
    return folder


def shared_instance(root: Path) -> dg.DagsterInstance:
    """The instance of `home(root)`; runs of the command line show in the UI and the other way round."""
    home(root)
    return dg.DagsterInstance.get()


def keep_partitions(instance: dg.DagsterInstance, wanted: Collection[str]) -> list[str]:
    """Makes the instance's shard partitions those of `wanted`; returns the names that are no longer among them."""
    there = set(instance.get_dynamic_partitions("shards"))
    gone = sorted(there - set(wanted))
    for name in gone:
        instance.delete_dynamic_partition("shards", name)
    new = sorted(set(wanted) - there)
    if new:
        instance.add_dynamic_partitions("shards", new)
    return gone
