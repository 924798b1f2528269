"""Worlds for a suite that speaks as a user does: settings, the command line, SQL and Dagster's own interface.

Nothing here and in tests.worlds knows how the package is built inside, so the same tests hold before and after its
inside changes. Figures that were measured once lie in JSON files beside the tests. Write them anew, after a wanted
change, with

    WRITE_CONTRACT=1 OMP_NUM_THREADS=1 pytest tests/contract

(one process: without -n), and read the difference before it is committed.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for each other on more
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder that is missing is told without asking the hub

import dagster as dg
import duckdb
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.command_line import Done, cli
from tests.conftest import Once
from tests.worlds import WorldFolder, copy_world, lay_out, make_model

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
WRITE = bool(os.environ.get("WRITE_CONTRACT"))
STAGES = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "swapped_results", "filtered_calls")
BY_HAND = {
    "training/finetuned_checkpoint",
    "training/baseline_checkpoint",
    "evaluation/accuracy",
    "evaluation/perplexity",
}
"""What `stale --run` leaves to `run`."""
IGNORED = "ccnet/shard_list"
ASSET = re.compile(r"^[A-Za-z_0-9]+/[a-z_0-9]+")
SPENT = re.compile(r"([\d,]+) tokens went through the model, ([\d,]+) tool calls were made")
MEASURED = ("seconds", "cost")
"""Columns that hold time: no two runs agree in them."""
PUBLIC = (
    "documents",
    "texts",
    "candidates",
    "tool_results",
    "loss_deltas",
    "swapped_results",
    "filtered_calls",
    "augmented_corpus",
    "rejections",
    "lanes",
)


@dataclass(frozen=True)
class Spent:
    """Tokens that went through the model, and calls of tools."""

    tokens: int
    calls: int


NOTHING = Spent(0, 0)


@dataclass(frozen=True)
class World(WorldFolder):
    """A world that is asked as a user asks."""

    @property
    def warehouse(self) -> Path:
        return self.folder / "lake" / "toolformer.duckdb"

    @property
    def environment(self) -> dict[str, str]:
        own = {"TOOLFORMER_CONFIG": "toolformer.toml", "DAGSTER_HOME": ".dagster"}
        return {name: str(self.folder / path) for name, path in own.items()}

    def cli(self, *arguments: str, stdin: str = "") -> Done:
        """Runs a command in this process, as if the process were a new one."""
        with _in(self.folder, self.environment):
            return cli(*arguments, stdin=stdin)

    def ok(self, *arguments: str, stdin: str = "") -> str:
        """Runs a command that must end well and returns what it printed."""
        done = self.cli(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stale(self, *options: str) -> set[str]:
        """Names the stale assets, without partitions."""
        return names(self.ok("stale", *options))

    def run(self, *options: str) -> Spent:
        """Runs everything; returns what the last line tells."""
        return spent_of(self.ok("run", *options))

    def mend(self, *options: str) -> Spent:
        """Runs `stale --run`; returns what Dagster's events tell."""
        since = time.time()
        self.ok("stale", "--run", *options)
        return self.spent_since(since)

    @contextmanager
    def instance(self) -> Iterator[dg.DagsterInstance]:
        with _in(self.folder, self.environment), dg.DagsterInstance.get() as instance:
            yield instance

    def spent_since(self, moment: float) -> Spent:
        with self.instance() as instance:
            landed = [event for key in instance.get_asset_keys() for event in _landed(instance, key, moment)]
        return Spent(
            sum(_figure(event, "tokens through the model") for event in landed),
            sum(_figure(event, "tool calls") for event in landed),
        )

    def materialized(self) -> set[str]:
        """Names what has landed at least once."""
        with self.instance() as instance:
            keys = instance.get_asset_keys()
            return {key.to_user_string() for key in keys if instance.get_latest_materialization_event(key)} - {IGNORED}

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(self.warehouse, read_only=True) as connection:
            return connection.execute(query).fetchall()

    def tables(self) -> dict[str, pl.DataFrame]:
        """Reads every public table, without what measures time, in an order that does not depend on the last bits."""
        with duckdb.connect(self.warehouse, read_only=True) as connection:
            return {name: _ordered(connection.table(name).pl()) for name in PUBLIC}


@contextmanager
def _in(folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Stands in a folder with these variables; forgets the tool and the paths of other worlds, and then its own."""
    path = list(sys.path)
    sys.path[:] = [place for place in path if not (Path(place) / "sums_tool.py").exists()]
    sys.modules.pop("sums_tool", None)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name in [name for name in os.environ if name.startswith("TOOLFORMER__")]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            yield
    finally:
        sys.path[:] = path
        sys.modules.pop("sums_tool", None)


def names(printed: str) -> set[str]:
    """Finds the assets in what `stale` prints."""
    return {match.group() for line in printed.splitlines() if (match := ASSET.match(line))} - {IGNORED}


def spent_of(printed: str) -> Spent:
    """Reads the last line of `run`."""
    if match := SPENT.search(printed):
        return Spent(*(int(figure.replace(",", "")) for figure in match.groups()))
    assert "nothing ran" in printed, printed
    return NOTHING


def _landed(instance: dg.DagsterInstance, key: dg.AssetKey, moment: float) -> list[dg.AssetMaterialization]:
    found = instance.fetch_materializations(dg.AssetRecordsFilter(asset_key=key, after_timestamp=moment), limit=1000)
    return [record.asset_materialization for record in found.records if record.asset_materialization]


def _figure(event: dg.AssetMaterialization, name: str) -> int:
    value = event.metadata.get(name)
    return int(value.value or 0) if value is not None else 0


def _ordered(rows: pl.DataFrame) -> pl.DataFrame:
    """Sorts by what is exact first; columns by name, lists as text."""
    rows = rows.drop(*MEASURED, strict=False).select(sorted(set(rows.columns) - set(MEASURED)))
    nested = [name for name, kind in rows.schema.items() if kind.is_nested()]
    rows = rows.with_columns(pl.col(name).cast(pl.List(pl.String)).list.join(", ") for name in nested)
    exact = [name for name, kind in rows.schema.items() if not kind.is_float()]
    return rows.sort(*exact, *(name for name in rows.columns if name not in exact), nulls_last=True)


def assert_same(one: Mapping[str, pl.DataFrame], other: Mapping[str, pl.DataFrame]) -> None:
    """Compares row for row; numbers out of another batch may differ in their last bits."""
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert table.height == other[name].height, name
        assert_frame_equal(table, other[name], rel_tol=1e-4, abs_tol=1e-4)


class Expected:
    """Figures in a JSON file; with $WRITE_CONTRACT they are taken from what is found."""

    def __init__(self, name: str) -> None:
        self.file = HERE / f"{name}.json"

    def of(self, key: str, found: Any) -> Any:
        known = json.loads(self.file.read_text()) if self.file.exists() else {}
        if WRITE:
            known[key] = json.loads(json.dumps(found))
            self.file.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        return known[key]


@pytest.fixture(scope="session")
def other_model(once: Once) -> Path:
    return once("model-b", lambda folder: make_model(folder, seed=1))


@pytest.fixture(scope="session")
def made(made_folder: Path) -> World:
    """A world in which everything has run once, training and evaluation too. Not to be changed."""
    return World(made_folder)


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy of `made`, to be changed."""
    return World(copy_world(made.folder, tmp_path / "world"))


@pytest.fixture
def fresh(tmp_path: Path, model: Path) -> World:
    """A world in which nothing ran yet."""
    return World(lay_out(tmp_path / "fresh", model))
