"""The whole line in a folder: made shards, two lanes, a small model made on the spot, run once; tests change copies."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from resources.line import Line
from resources.spent import Spent
from tests.stages.conftest import make_model, write_shard
from toolformer_dag.settings.load import load_settings
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import query

LANES = ("calculator", "sums")
MEASURED = ("seconds", "cost")
PROMPT = "Call.\nInput: 1 and 2 make 3 .\nOutput: 1 and 2 make [{}(1+2)] 3 .\n"
SETTINGS = """
profile = "tests"
[profiles.tests]
[corpus]
shards = ["web/*.json.gz"]
segment_tokens = 40
[model]
name = "model"
device = "cpu"
[sampling]
max_call_tokens = 12
[tools.calculator]
prompt = "calculator.txt"
tau_s = 0.1
k = 2
m = 3
tau_f = 0.0
[tools.sums]
use = "sums_tool:Sums"
prompt = "sums.txt"
tau_s = 0.1
k = 2
m = 6
tau_f = 0.0
[training]
max_steps = 1
eval_steps = 1
batch_size = 2
sequence_length = 64
[evaluation]
questions = 1
[execution]
workers = 1
[decoding]
max_new_tokens = 4
"""
SUMS = '''
"""A tool of one's own: the sum of the numbers in a call."""

import re

from toolformer_dag.tools.options import ToolOptions
from toolformer_dag.tools.tool import Tool, ToolDefaults, ToolResult


class SumsOptions(ToolOptions):
    edition: int = 1
    shortest: int = 0


class Sums(Tool):
    name, version, defaults, Options = "Search", "1", ToolDefaults(0.1, 2, 6, 0.0), SumsOptions

    def keeps(self, text, offset, input):
        return len(input) >= self.options.shortest

    def run(self, calls):
        return [ToolResult(str(self.options.edition * sum(map(int, re.findall("[0-9]+", c.input))))) for c in calls]
'''


@dataclass(frozen=True)
class Ran:
    """What was brought up to date, and what each of it cost."""

    assets: list[str]
    costs: Mapping[str, Spent]

    @property
    def spent(self) -> Spent:
        return sum(self.costs.values(), Spent())

    def stages(self) -> set[str]:
        """Names without partitions."""
        return {asset.partition("[")[0] for asset in self.assets}


@dataclass(frozen=True)
class World:
    """A folder with toolformer.toml in it."""

    folder: Path

    def line(self, *overrides: str) -> Line:
        return Line.of(load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides))

    def stale(self, *overrides: str) -> list[str]:
        return sorted(map(str, self.line(*overrides).stale()))

    def run(self, *overrides: str, training: bool = False) -> Ran:
        line = self.line(*overrides)
        outcome = line.bring_up_to_date(training=training)
        line.raise_for(outcome)
        return Ran(list(map(str, outcome.ran)), {str(asset): cost for asset, cost in outcome.costs.items()})

    def sql(self, sql: str) -> list[tuple[object, ...]]:
        return query(self.folder / "lake" / "toolformer.duckdb", sql).rows()

    def tables(self) -> Mapping[str, pl.DataFrame]:
        """All rows of all lanes and of C*, without what measures time."""
        lake = Lake(self.folder / "lake")
        names = [
            str(path.parent.relative_to(self.folder / "lake")) for path in (self.folder / "lake").glob("*/*/parts")
        ]
        tables = {name: lake.table(name) for name in names if not name.startswith("evaluation/")}
        return {
            f"{name}[{partition}]": table.read(partition).drop(MEASURED, strict=False)
            for name, table in tables.items()
            for partition in table.partitions()
        }

    def edit(self, old: str, new: str) -> None:
        """Changes toolformer.toml as a person would."""
        file = self.folder / "toolformer.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


def assert_same(one: Mapping[str, pl.DataFrame], other: Mapping[str, pl.DataFrame]) -> None:
    """Row for row; numbers out of another batch may differ in their last bits."""
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert_frame_equal(table, other[name], rel_tol=1e-4, abs_tol=1e-5)


def new_world(folder: Path, model: Path) -> World:
    """Before anything ran."""
    (folder / "toolformer.toml").write_text(SETTINGS)
    (folder / "sums_tool.py").write_text(SUMS)
    (folder / "calculator.txt").write_text(PROMPT.format("Calculator"))
    (folder / "sums.txt").write_text(PROMPT.format("Search"))
    shutil.copytree(model, folder / "model")
    for name in ("one", "two"):
        write_shard(folder / "web", name)
    return World(folder)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, model: Path) -> World:
    """A world in which everything has run once, training and evaluation too."""
    world = new_world(tmp_path_factory.mktemp("line"), model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(world.folder / ".dagster"))
        world.run(training=True)
    return world


@pytest.fixture
def world(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy of `made`, to be changed."""
    shutil.copytree(made.folder, tmp_path / "line")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "line" / ".dagster"))
    return World(tmp_path / "line")


@pytest.fixture
def fresh(tmp_path: Path, model: Path) -> World:
    """A world in which nothing ran yet; its instance is $DAGSTER_HOME's as long as that names another one."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    return new_world(folder, model)
