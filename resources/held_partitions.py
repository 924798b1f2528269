"""The shard partitions of the instance: one list for everybody, which no run loses while it goes on."""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dagster as dg

from toolformer_dag.errors import UserError
from toolformer_dag.storage.lock import locked

FEW = 5  # partitions that are named one by one


class ShardsInUse(UserError):
    """A run over other shards is going on."""

    def __init__(self, held: Collection[str], wanted: Collection[str]) -> None:
        super().__init__(
            f"the list of shards is in use: a run over {_named(held)} is going on, this one wants {_named(wanted)}; "
            "wait for its end or stop it, or keep the other corpus in a folder of its own, with its own toolformer.toml"
        )


@contextmanager
def held_partitions(instance: dg.DagsterInstance, wanted: Collection[str]) -> Iterator[list[str]]:
    """Makes the instance's shard partitions those of `wanted` and keeps them so inside the block.

    Yields the names that are no longer among them. Several processes may hold the same list; raises ShardsInUse where
    one holds another list.
    """
    folder = Path(instance.root_directory)
    with ExitStack() as holding:
        with locked(folder / "shards-entry.lock"):  # one at a time compares, changes and begins to hold
            gone = _made(instance, set(wanted), folder / "shards.lock")
            holding.enter_context(locked(folder / "shards.lock", shared=True))
        yield gone


def keep_partitions(instance: dg.DagsterInstance, wanted: Collection[str]) -> list[str]:
    """Makes them those of `wanted`; returns the names that are no longer among them. Raises ShardsInUse."""
    with held_partitions(instance, wanted) as gone:
        return gone


def _made(instance: dg.DagsterInstance, wanted: set[str], lock: Path) -> list[str]:
    there = set(instance.get_dynamic_partitions("shards"))
    if there == wanted:
        return []
    with locked(lock, wait=False) as unheld:
        if not unheld:
            raise ShardsInUse(there, wanted)
        for name in there - wanted:
            instance.delete_dynamic_partition("shards", name)
        if new := sorted(wanted - there):
            instance.add_dynamic_partitions("shards", new)
    return sorted(there - wanted)


def _named(names: Collection[str]) -> str:
    shown = sorted(names)[:FEW]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
