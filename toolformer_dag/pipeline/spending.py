"""What a run spent on the model and the tools.

It is written down while it is spent, so that a killed run's share is not lost:

<ledger>/<random>   one file per process: tokens and calls so far; a run's ledger has a folder of them for each process
                    that runs steps

What each step spent, also one that failed, is a row in the lake, which the warehouse shows as `costs`.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

import polars as pl

from toolformer_dag.files import WriteError
from toolformer_dag.lake.record import record
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.setting_types import ASSET_GROUPS

NO_TOKENS = ("passes", "decoding_steps")
"""What the engine counts beside tokens."""
WRITE_EVERY_SECONDS = 0.5
WIDTH = 64
"""Bytes of a file: overwritten in place, so that a full disk takes no figure away."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens that went through the model, and tool calls that were made. Finetuning and evaluation count none."""

    tokens: int = 0
    calls: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(self.tokens + other.tokens, self.calls + other.calls)

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens went through the model, {self.calls:,} tool calls were made"


def token_count(counts: Mapping[str, int]) -> int:
    """Sum the engine's counts that are tokens."""
    return sum(count for kind, count in counts.items() if kind not in NO_TOKENS)


class Ledger:
    """The part of a ledger that this process writes; others write into the same `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / uuid4().hex

    @contextmanager
    def kept(self, spent: Callable[[], Spent]) -> Iterator[None]:
        """Write down what `spent` returns, twice a second while the block runs and at its end. Raises WriteError."""
        self._write(spent())
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(spent, done), daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()
            watch.join()
            self._write(spent())

    def _watch(self, spent: Callable[[], Spent], done: threading.Event) -> None:
        while not done.wait(WRITE_EVERY_SECONDS):
            with suppress(WriteError):  # told at the end of the block
                self._write(spent())

    def _write(self, spent: Spent) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.pwrite(descriptor, f"{spent.tokens} {spent.calls}".ljust(WIDTH).encode(), 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise WriteError(self._file, error) from error


def read_spent(ledger: Path) -> Spent:
    """Return what all processes that write into a ledger have spent so far; nothing is removed."""
    try:
        return _sum(ledger)
    except FileNotFoundError:  # nothing yet, or taken by somebody who asked
        return Spent()


COSTS = "warehouse/costs"
"""The lake's table of costs; a part per asset, so that an asset's next row rewrites no other's."""
COST_COLUMNS = {
    "run": (pl.String(), "id of the run, as Dagster shows it"),
    "ended": (pl.Datetime("us", "UTC"), "when the step ended"),
    "stage": (pl.String(), "name of the stage, checkpoint or measurement"),
    "tool": (pl.String(), "key of the lane; null for what belongs to no lane"),
    "seconds": (pl.Float64(), "wall time of the step"),
    "tokens": (
        pl.Int64(),
        "tokens that went through the model; of a checkpoint those of its training examples, times the epochs; of "
        "accuracy those that were written",
    ),
    "calls": (pl.Int64(), "tool calls that were made"),
    "computed": (pl.Int64(), "rows of all kinds that were computed; null outside of the stages"),
    "reused": (pl.Int64(), "rows of all kinds that an earlier run had computed; null outside of the stages"),
    "failed": (
        pl.Boolean(),
        "whether the step failed or was interrupted, whose tokens are counted in the stages alone; null in rows of "
        "earlier releases",
    ),
}
"""Name -> (type, meaning)."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step of a run cost; see COST_COLUMNS."""

    seconds: float
    tokens: int = 0
    calls: int = 0
    computed: int | None = None
    reused: int | None = None
    failed: bool = False


def add_cost(lake: Lake, run: str, asset: str, cost: StepCost) -> None:
    """Add a row to the costs of an asset, such as "calculator/loss_deltas". Raises WriteError.

    Not covered: what a killed step spent, which the next report of `run` tells.
    """
    group, _, stage = asset.rpartition("/")
    tool = None if group in ASSET_GROUPS else group
    row = {"run": run, "ended": datetime.now(UTC), "stage": stage, "tool": tool, **asdict(cost)}
    schema = {name: kind for name, (kind, _) in COST_COLUMNS.items()}
    added = pl.DataFrame([row], schema=schema)

    def with_it(before: pl.DataFrame | None) -> pl.DataFrame:
        # parts of an earlier release may lack a column
        return added if before is None else pl.concat([pl.DataFrame(schema=schema), before, added], how="diagonal")

    lake.table(COSTS).revise(asset, with_it, lambda: record({}, {}, stage="costs", tool=None))


def take_spent(ledger: Path) -> Spent:
    """Return what all processes of a run spent, and remove the ledger: of several who ask, one gets it."""
    mine = ledger.with_name(f".{ledger.name}.{uuid4().hex}")
    try:
        ledger.rename(mine)
    except FileNotFoundError:
        return Spent()
    total = _sum(mine)
    shutil.rmtree(mine)
    return total


def _sum(ledger: Path) -> Spent:
    return sum((_sum(path) if path.is_dir() else _read(path) for path in ledger.iterdir()), Spent())


def _read(file: Path) -> Spent:
    with suppress(ValueError):  # killed before its first figure
        tokens, calls = map(int, file.read_text("ascii").split())
        return Spent(tokens, calls)
    return Spent()
