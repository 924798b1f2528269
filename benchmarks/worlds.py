"""A small project that runs and faults are tried on, in this process and in processes of their own."""

import json
import math
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import polars as pl
import time_machine
import torch  # noqa: F401 - loaded once, for every run that is forked from here
from polars.testing import assert_frame_equal

import toolformer_dag.model.engine  # noqa: F401
from toolformer_dag import identity
from toolformer_dag.cli.project import Project
from toolformer_dag.exports.verify_project import verify_project_files
from toolformer_dag.files import UserError
from toolformer_dag.pipeline.merging import HELDOUT, HELDOUT_SHARE, TRAIN, choose_split
from toolformer_dag.pipeline.stages import list_table_outputs
from toolformer_dag.settings.settings_file import load_settings
from toolformer_dag.synthetic import PROMPT_FOLDER, SMALL_MODEL_FOLDER
from toolformer_dag.synthetic.web import encode_stored_gzip, iter_web_records

MEASURED = ("seconds", "cost")
SETTINGS = """
[paths]
lake = "disk/lake"
warehouse = "disk/lake/toolformer.duckdb"
[corpus]
shards = ["web/*"]
[model]
name = "model"
[tools.calculator]
tau_f = -1.0
prompt = "calculator.txt"
[tools.wiki_search]
tau_f = -1.0
prompt = "embedded"
index_folder = "disk/indexes"
[training]
max_steps = 1
min_texts = 1
eval_steps = 1
batch_size = 2
[evaluation]
questions = 1
[decoding]
max_new_tokens = 4
[execution]
chunk_texts = 4
workers = 1
"""
KINDS = {
    "published rows": "disk/lake/*/*/files/*/*.parquet",
    "rejected lines": "disk/lake/ccnet/rejected_lines/files/*/*.parquet",
    "manifests": "disk/lake/table-manifests/*/*.jsonl",
    "computed rows": "disk/lake/*/*/*/*.parquet",
    "identities": "disk/lake/*/*/*/identity.json",
    "checkpoints": "disk/lake/training/*/model/*",
    "warehouse": "disk/lake/toolformer.duckdb",
    "indexes": "disk/indexes/*-v?/*",
    "data set": "disk/lake/dataset/**/*",
}
SEAL = {"seal of the warehouse": "disk/lake/.toolformer.duckdb.seal"}
"""For this file `verify` names the warehouse."""
GIVEN = {
    "exports": "export/**/*",
    "shards, gzip": "web/*.gz",
    "shards, zstd": "web/*.zst",
    "base model": "model/[cmt]*",
}
"""What lies outside of what runs write: taken away, or given by the user."""
NOT_AGAIN = 3600.0
"""Seconds after which a run counts as hanging."""
Tables = Mapping[str, pl.DataFrame]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: `error` where it failed, and the tokens that it and killed runs before it had spent.

    `unexpected`: the error is none that a user should see.
    """

    error: str | None
    tokens: int
    unexpected: bool = False


@dataclass(frozen=True, slots=True)
class World:
    """The folder of a toolformer.toml; everything that runs write but Dagster's history lies in `disk`."""

    folder: Path

    @staticmethod
    def make(folder: Path, documents: int) -> "World":
        """Lay out a world in which nothing ran yet."""
        folder.mkdir(parents=True)
        (folder / "toolformer.toml").write_text(SETTINGS)
        shutil.copytree(SMALL_MODEL_FOLDER, folder / "model")
        shutil.copy(PROMPT_FOLDER / "calculator.txt", folder)
        (folder / "web").mkdir()
        pages = [json.dumps(page) + "\n" for page in _pages(documents)]
        for number in range(2):
            packed = encode_stored_gzip("".join(pages[number::2]).encode())
            (folder / "web" / f"en_head_{number:04}.json.gz").write_bytes(packed)
        (folder / "disk").mkdir()
        return World(folder)

    def copy(self, folder: Path) -> "World":
        """Copy the world, with what ran in it, to another folder."""
        return World(shutil.copytree(self.folder, folder))

    def project(self, *overrides: str) -> Project:
        """Load the settings and open the instance, for this process."""
        os.environ["DAGSTER_HOME"] = str(self.folder / ".dagster")
        return Project.from_settings(
            load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides)
        )

    def run(self, *overrides: str, training: bool = False) -> Ended:
        """Run in this process; an error that the command line would show is returned."""
        try:
            report = self.project(*overrides).run_rounds(training)
        except UserError as error:
            return Ended(str(error), 0)
        told = "\n".join(f"{name}: {reason}" for name, reason in report.failure_by_asset.items())
        return Ended(told or None, (report.spending + report.unfinished_spending).tokens)

    def start(self, *overrides: str, clock: timedelta = timedelta(0)) -> "ForkServerProcess":
        """Start a run in a process group of its own, in which Python's clock is off by `clock`."""
        (self.folder / "ended.json").unlink(missing_ok=True)
        process = FORKS.Process(target=_alone, args=(self.folder, overrides, clock))
        process.start()
        return process

    def ended(self) -> Ended:
        """Return how the last started run ended. Raises FileNotFoundError for one that was killed."""
        return Ended(**json.loads((self.folder / "ended.json").read_text()))

    def finish(self) -> Ended:
        """Start a run and wait for it."""
        process = self.start()
        process.join(NOT_AGAIN)
        return self.ended()

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all rows of all tables without what measures time; nothing damaged is read."""
        return {
            f"{output.name} {part}": output.table.read_part(part).drop(MEASURED, strict=False)
            for output in list_table_outputs(self.project().plan)
            for part in output.table.list_part_names()
        }

    def files(self, kind: str) -> list[Path]:
        """Return the files of a kind that hold something."""
        found = self.folder.glob((KINDS | SEAL | GIVEN)[kind])
        return sorted(path for path in found if path.is_file() and path.stat().st_size)

    def named(self) -> set[Path]:
        """Return the files that `verify` names."""
        return {one.path for one in verify_project_files(self.project().plan).damaged_files}


def differing(one: Tables, other: Tables) -> list[str]:
    """Return the names of tables that differ by more than the rounding of another batch."""
    names = [*(one.keys() ^ other.keys())]
    for name in one.keys() & other.keys():
        try:
            assert_frame_equal(one[name], other[name], rel_tol=1e-4, abs_tol=1e-5)
        except AssertionError:
            names.append(name)
    return sorted(names)


def flip(file: Path, draw: random.Random) -> None:
    """Flip one bit in place."""
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


@contextmanager
def unseen(*files: Path) -> Iterator[None]:
    """Give files their times and what was remembered of them back in the end."""
    known = {file: (file.stat(), identity.read_remembered_hashes(file)) for file in files}
    yield
    for file, (status, hashes) in known.items():
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        identity.remember_hashes(file, hashes)


def rot(file: Path, draw: random.Random) -> None:
    """Flip one bit as a disk does that gives back other bits: what was remembered of the file stays."""
    with unseen(file):
        flip(file, draw)


def _pages(documents: int) -> list[dict[str, Any]]:
    """Return pages of the small web, HELDOUT_SHARE of them held out, at least one: without any, nothing is trained."""

    def of(split: str, count: int) -> Iterator[dict[str, Any]]:
        drawn = iter_web_records(0, "corpus", sys.maxsize)
        return islice((page for page in drawn if choose_split(page["raw_content"]) == split), count)

    held = math.ceil(HELDOUT_SHARE * documents)
    return [*of(HELDOUT, held), *of(TRAIN, documents - held)]


def _alone(folder: Path, overrides: tuple[str, ...], clock: timedelta) -> None:
    os.setsid()
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        with time_machine.travel(datetime.now(UTC) + clock) if clock else nullcontext():
            ended = World(folder).run(*overrides)
    except Exception as error:  # noqa: BLE001 - told as what nobody should see
        ended = Ended(f"{type(error).__name__}: {error}", 0, unexpected=True)
    (folder / "ended.json").write_text(json.dumps({name: getattr(ended, name) for name in Ended.__slots__}))


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
