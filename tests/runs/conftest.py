"""A project in a folder: shards, two lanes, a small model made on the spot, run once; tests change copies."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for each other on more

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from polars.testing import assert_frame_equal

import assets.plots
from assets.outputs import BY_HAND, SHOWN
from tests.conftest import Once
from tests.worlds import make_model, write_shard
from toolformer_dag.cli.project import Project, RunReport
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings

MEASURED = ("seconds", "cost")
DOT = b"\x89PNG\r\n\x1a\n"
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
class World:
    """A folder with toolformer.toml in it."""

    folder: Path

    @property
    def lake(self) -> Lake:
        return Lake(self.folder / "lake")

    def settings(self, *overrides: str) -> Settings:
        return load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides)

    def project(self, *overrides: str) -> Project:
        return Project.of(self.settings(*overrides))

    def stale(self, *overrides: str) -> list[str]:
        return [one.name for one in self.project(*overrides).stale()]

    def reasons(self, *overrides: str) -> dict[str, tuple[str, ...]]:
        """Return why each stale asset is stale, as `stale --why` prints it."""
        return {one.name: one.reasons.lines for one in self.project(*overrides).stale()}

    def run(self, *overrides: str, training: bool = False, sink=lambda step: None) -> RunReport:
        """Bring everything up to date; fail where an asset fails."""
        report = self.project(*overrides).run(training, sink)
        report.raise_for_failures()
        return report

    def sql(self, sql: str) -> list[tuple[object, ...]]:
        return query(self.folder / "lake" / "toolformer.duckdb", sql).rows()

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all rows of all lanes and of C*, without what measures time."""
        found = table_outputs(self.project().plan)
        return {
            f"{output.name} {part}": output.table.read(part).drop(MEASURED, strict=False)
            for output in found
            for part in output.table.parts()
        }

    def edit(self, old: str, new: str) -> None:
        """Change toolformer.toml as a person would."""
        file = self.folder / "toolformer.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def figures(self, name: str) -> Mapping[str, dg.MetadataValue]:
        """Return the metadata of an asset's last materialization."""
        event = dg.DagsterInstance.get().get_latest_materialization_event(dg.AssetKey(name.split("/")))
        assert event is not None and event.asset_materialization is not None
        return event.asset_materialization.metadata


def free(report: RunReport) -> bool:
    """Return whether a run asked neither the model nor a tool."""
    return (report.tokens, report.calls) == (0, 0)


def apart_from_tables(names: list[str]) -> list[str]:
    """Leave out the paper's tables, which run wherever the warehouse changes."""
    return [name for name in names if name not in SHOWN]


def by_machine(names: list[str]) -> list[str]:
    """Leave out what a person decides: training and evaluation."""
    return [name for name in names if name not in BY_HAND]


def assert_same(one: Mapping[str, pl.DataFrame], other: Mapping[str, pl.DataFrame]) -> None:
    """Compare row for row; numbers out of another batch may differ in their last bits."""
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert_frame_equal(table, other[name], rel_tol=1e-4, abs_tol=1e-5)


def new_world(folder: Path, model: Path) -> World:
    """Lay out a world in which nothing ran yet."""
    (folder / "toolformer.toml").write_text(SETTINGS)
    (folder / "sums_tool.py").write_text(SUMS)
    (folder / "calculator.txt").write_text(PROMPT.format("Calculator"))
    (folder / "sums.txt").write_text(PROMPT.format("Search"))
    shutil.copytree(model, folder / "model")
    for name in ("one", "two"):
        write_shard(folder / "web", name)
    return World(folder)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots of the runs here are one dot: `made` has them drawn, and tests/test_plots.py looks at each."""
    monkeypatch.setattr(assets.plots, "png", lambda chart: DOT)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "a")


@pytest.fixture(scope="session")
def made(once: Once, model: Path) -> World:
    """A world in which everything has run once, training and evaluation too. Not to be changed."""

    def run(folder: Path) -> None:
        folder.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DAGSTER_HOME", str(folder / ".dagster"))
            new_world(folder, model).run(training=True)

    return World(once("made-runs", run))


@pytest.fixture
def world(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy of `made`, to be changed."""
    shutil.copytree(made.folder, tmp_path / "world")
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "world" / ".dagster"))
    return World(tmp_path / "world")


@pytest.fixture
def fresh(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which nothing ran yet. Asked for after `world`, its instance is the one in use."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(folder / ".dagster"))
    return new_world(folder, model)
