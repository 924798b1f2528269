"""A small world for the whole line: a folder with settings and a web, run in this process."""

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from resources.line import Line
from resources.spent import Spent
from toolformer_dag.settings.load import load_settings
from toolformer_dag.storage.lake import Lake
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
class Cost:
    """What bringing the line up to date took; finetuning and evaluation are left out."""

    seconds: float
    spent: Spent
    assets: int


@dataclass(frozen=True, slots=True)
class LineWorld:
    """The folder of a toolformer.toml, with an instance of its own."""

    folder: Path

    @staticmethod
    def make(folder: Path, documents: int, shards: int = 2) -> "LineWorld":
        """Before anything ran; the model and a prompt are copies, to be changed."""
        folder.mkdir(parents=True)
        (folder / "toolformer.toml").write_text(SETTINGS)
        shutil.copytree(SMALL_MODEL, folder / "model")
        shutil.copy(PROMPTS / "calculator.txt", folder)
        write_shards(folder / "web", shards, documents, seed=1)
        return LineWorld(folder)

    def copy(self, folder: Path) -> "LineWorld":
        """The same world in another folder."""
        return LineWorld(shutil.copytree(self.folder, folder))

    def run(self, *overrides: str) -> Cost:
        """Brings everything up to date but training and evaluation. Raises RunError."""
        os.environ["DAGSTER_HOME"] = str(self.folder / ".dagster")
        begin = time.perf_counter()
        line = Line.of(load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides))
        outcome = line.bring_up_to_date(training=False)
        line.raise_for(outcome)
        return Cost(time.perf_counter() - begin, outcome.spent, len(outcome.ran))

    def tables(self) -> dict[str, pl.DataFrame]:
        """Rows of every table and partition, without what measures time."""
        lake = Lake(self.folder / "lake")
        names = [
            str(path.parent.relative_to(self.folder / "lake")) for path in (self.folder / "lake").glob("*/*/parts")
        ]
        return {
            f"{name}[{partition}]": lake.table(name).read(partition).drop(MEASURED, strict=False)
            for name in names
            for partition in lake.table(name).partitions()
        }
