"""A project in a folder: shards, two lanes, a small model made on the spot, run once; tests change copies."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small only wait for each other on more

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.worlds import WorldFolder, copy_world, lay_out
from toolformer_dag.cli.project import Project, RunReport
from toolformer_dag.computing.spending import Spent
from toolformer_dag.computing.update import TableReport, update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_in_process_executor
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings

MEASURED = ("seconds", "cost")


@dataclass(frozen=True)
class World(WorldFolder):
    """A world whose inside is asked too."""

    @property
    def lake(self) -> Lake:
        return Lake(self.folder / "lake")

    def settings(self, *overrides: str) -> Settings:
        return load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides)

    def project(self, *overrides: str) -> Project:
        return Project.from_settings(self.settings(*overrides))

    def stale(self, *overrides: str) -> list[str]:
        return list(self.project(*overrides).list_stale_assets())

    def reasons(self, *overrides: str) -> dict[str, tuple[str, ...]]:
        """Return why each stale asset is stale, as `stale --why` prints it."""
        return {name: reasons.lines for name, reasons in self.project(*overrides).list_stale_assets().items()}

    def run(self, *overrides: str, training: bool = False, sink=lambda step: None) -> RunReport:
        """Bring everything up to date; fail where an asset fails."""
        report = self.project(*overrides).run_rounds(training, sink)
        report.raise_for_failures()
        return report

    def update(self, *overrides: str) -> Mapping[str, TableReport]:
        """Bring every table up to date without Dagster; return the reports of those that something changed for."""
        plan = self.project(*overrides).plan
        tables = {output.name: output for output in list_table_outputs(plan)}
        worker = Worker(plan)
        lent = Workers(worker, tables, build_in_process_executor)
        reports = [update_table(worker, lent, output, lambda done, total: None) for output in tables.values()]
        return {report.name: report for report in reports if not report.is_unchanged}

    def sql(self, sql: str) -> list[tuple[object, ...]]:
        return query(self.folder / "lake" / "toolformer.duckdb", sql).rows()

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all rows of all lanes and of C*, without what measures time."""
        found = list_table_outputs(self.project().plan)
        return {
            f"{output.name} {part}": output.table.read_part(part).drop(MEASURED, strict=False)
            for output in found
            for part in output.table.list_part_names()
        }

    def last(self, name: str) -> dg.AssetMaterialization:
        """Return an asset's last materialization."""
        event = dg.DagsterInstance.get().get_latest_materialization_event(dg.AssetKey(name.split("/")))
        assert event is not None and event.asset_materialization is not None
        return event.asset_materialization

    def figures(self, name: str) -> Mapping[str, dg.MetadataValue]:
        """Return the metadata of an asset's last materialization."""
        return self.last(name).metadata

    def told(self, name: str) -> tuple[str, str]:
        """Return the data version and the code version that Dagster was told of an asset last."""
        tags = self.last(name).tags or {}
        return tags["dagster/data_version"], tags["dagster/code_version"]


def ended(command: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for a command that succeeds; return what it printed, and what it said beside."""
    out, told = command.communicate()
    assert command.returncode == 0, out + told
    return out, told


def spent(printed: str) -> tuple[int, int]:
    """Return the tokens and calls that `run` has printed last; 0 where nothing ran."""
    found = re.search(r"([\d,]+) tokens went through the model, ([\d,]+) tool calls were made", printed)
    tokens, calls = found.groups() if found else ("0", "0")
    return int(tokens.replace(",", "")), int(calls.replace(",", ""))


ALL_SPENT = "select sum(tokens)::bigint, sum(calls)::bigint from costs"
"""What `run` prints as spent: of one run after another, the sum."""


def free(report: RunReport) -> bool:
    """Return whether a run asked neither the model nor a tool."""
    return report.spending == Spent()


BY_HAND = (
    "training/baseline_checkpoint",
    "training/finetuned_checkpoint",
    "evaluation/accuracy",
    "evaluation/perplexity",
)
"""Assets that only a person makes: checkpoints and measurements."""


def by_machine(names: list[str]) -> list[str]:
    """Leave out what a person decides: training and evaluation."""
    return [name for name in names if name not in BY_HAND]


def assert_same(one: Mapping[str, pl.DataFrame], other: Mapping[str, pl.DataFrame]) -> None:
    """Compare row for row; numbers out of another batch may differ in their last bits."""
    assert one.keys() == other.keys()
    for name, table in one.items():
        assert_frame_equal(table, other[name], rel_tol=1e-4, abs_tol=1e-5)


@pytest.fixture(scope="session")
def made(made_folder: Path) -> World:
    """A world in which everything has run once, training and evaluation too. Not to be changed."""
    return World(made_folder)


@pytest.fixture
def world(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A copy of `made`, to be changed."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "world" / ".dagster"))
    return World(copy_world(made.folder, tmp_path / "world"))


@pytest.fixture
def fresh(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which nothing ran yet. Asked for after `world`, its instance is the one in use."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "fresh" / ".dagster"))
    return World(lay_out(tmp_path / "fresh", model))
