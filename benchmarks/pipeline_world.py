"""A small synthetic world for whole runs: a folder with settings and shards, run in this process."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from toolformer_dag.cli.project import Project
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import PROMPTS, SMALL_MODEL
from toolformer_dag.synthetic.web import write_shards

MEASURED = ("seconds", "cost")
SETTINGS = """
[corpus]
shards = ["web/*.json.gz"]
[model]
name = "model"
[tools.calculator]
tau_f = 0.1
prompt = "calculator.txt"
[tools.calendar]
tau_f = 0.1
[tools.machine_translation]
tau_f = 0.1
[execution]
chunk_texts = 8
workers = 1
"""


@dataclass(frozen=True, slots=True)
class RunCost:
    """The cost of a run without finetuning and evaluation."""

    seconds: float
    tokens: int
    calls: int
    assets: int


@dataclass(frozen=True, slots=True)
class PipelineWorld:
    """The folder of a toolformer.toml with its own Dagster instance."""

    folder: Path

    @staticmethod
    def make(folder: Path, documents: int, shards: int = 2) -> "PipelineWorld":
        """Create a world before its first run; its model and prompt are copies that may be changed."""
        folder.mkdir(parents=True)
        (folder / "toolformer.toml").write_text(SETTINGS)
        shutil.copytree(SMALL_MODEL, folder / "model")
        shutil.copy(PROMPTS / "calculator.txt", folder)
        write_shards(folder / "web", shards, documents, seed=1)
        return PipelineWorld(folder)

    def copy(self, folder: Path) -> "PipelineWorld":
        """Copy the world to another folder."""
        return PipelineWorld(shutil.copytree(self.folder, folder))

    def run(self, *overrides: str) -> RunCost:
        """Bring everything up to date but training and evaluation. Raises RunError."""
        begin = time.perf_counter()
        report = self.project(*overrides).run(training=False)
        report.raise_for_failures()
        return RunCost(time.perf_counter() - begin, report.tokens, report.calls, len(report.ran))

    def project(self, *overrides: str) -> Project:
        """Load the settings and open the instance."""
        os.environ["DAGSTER_HOME"] = str(self.folder / ".dagster")
        return Project.of(load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides))

    def tables(self, *overrides: str) -> dict[str, pl.DataFrame]:
        """Return the rows of every part of every table, without columns that measure time."""
        return {
            f"{output.name}[{part}]": output.table.read(part).drop(MEASURED, strict=False)
            for output in table_outputs(self.project(*overrides).plan)
            for part in output.table.parts()
        }

    def must_equal(self, other: "PipelineWorld", *overrides: str) -> None:
        """Fail where another world has other rows. `overrides`: those with which this one ran."""
        rows, expected = self.tables(*overrides), other.tables()
        others = [name for name in expected if not expected[name].equals(rows[name])]
        assert not others and rows.keys() == expected.keys(), f"other rows: {others}"
