"""One lane in a folder, without Dagster: shards of sums, the real calculator, the small model of tests.worlds."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.worlds import BASE, PROMPT, write_shard
from toolformer_dag.computing import workers as workers_of_settings
from toolformer_dag.computing.chunks import OneProcess, Task, ThisProcess, WorkerError
from toolformer_dag.computing.plan import Lane, Plan, Role, load_lanes
from toolformer_dag.computing.reasons import NEVER_MADE, find_differences
from toolformer_dag.computing.stage import TEXT_KEY, ClaimedKeys, Column, PartRows, Stage, StaleInput, TableOutput
from toolformer_dag.computing.update import ProgressCallback, TableReport, update_table, withdraw_shard
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import (
    Executor,
    ExecutorBuilder,
    TablesByName,
    Workers,
    build_in_process_executor,
    choose_worker_count,
)
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline import removed_documents
from toolformer_dag.pipeline.stages import build_warehouse_tables, list_table_outputs
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.settings_file import load_settings

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.settings.model_settings import ModelSettings

__all__ = [
    "NEVER_MADE",
    "TEXT_KEY",
    "ClaimedKeys",
    "Column",
    "Lane",
    "OneProcess",
    "Stage",
    "StaleInput",
    "TableOutput",
    "TableReport",
    "Task",
    "ThisProcess",
    "Worker",
    "WorkerError",
    "Workers",
    "build_in_process_executor",
    "build_warehouse_tables",
    "choose_worker_count",
    "executor_of",
    "find_differences",
    "local_processes",
    "withdraw_shard",
]
"""What tests take from here, so that a rebuild of the inside changes one file."""
SETTINGS = f"""{BASE}
segment_tokens = 36
[tools.calculator]
prompt = "calculator.txt"
tau_s = 0.1
k = 3
m = 4
tau_f = 0.05
look_ahead = false
[training]
examples_per_tool = 1000
[evaluation]
swapped_texts = 3
[execution]
workers = 1
chunk_texts = 4
chunk_calls = 4
"""
MEASURED = ("seconds", "cost")
RAW_SHARDS = "raw_shards"
SCREENED = "screened_documents"
REMOVED = "removed_documents"


def executor_of(worker: Worker, tables: TablesByName) -> Executor:
    """Return the executor that the settings name."""
    return workers_of_settings.build_configured_executor(list_table_outputs, worker, tables)


def local_processes(count: int, worker: Worker, tables: TablesByName) -> Executor:
    """Return processes of this machine."""
    return workers_of_settings.build_local_processes_executor(count, list_table_outputs, worker, tables)


LANE = ("tau_s", "k", "m", "tau_f", "look_ahead")
Reports = Mapping[str, TableReport]


def engine_of(model: "ModelSettings") -> "Engine":
    """Load a model once for all tests."""
    return _engine(model.model_dump_json())


@lru_cache(maxsize=8)
def _engine(written: str) -> "Engine":
    from toolformer_dag.model.engine import Engine
    from toolformer_dag.model.loading import load_model
    from toolformer_dag.settings.model_settings import ModelSettings

    model = ModelSettings.model_validate_json(written)
    return Engine(load_model(model), token_budget=model.token_budget)


class CountingWorker(Worker):
    """Counts how often an engine was asked for."""

    engines = 0

    def engine(self, role: Role) -> "Engine":
        """Return the shared engine."""
        self.engines += 1
        return engine_of(self.plan.get_model_settings(role))


def silent(done: int, total: int) -> None:
    """Show no progress."""


@dataclass
class Line:
    """A folder with toolformer.toml in it. `adapt` changes the lane; `worker` is that of the last update."""

    folder: Path
    values: dict[str, object] = field(default_factory=dict)
    adapt: Callable[[Lane], Lane] = lambda lane: lane
    worker: CountingWorker | None = None

    @staticmethod
    def new(folder: Path, model: Path, shards: Sequence[str]) -> "Line":
        """Write settings, prompt, model and shards; run nothing."""
        (folder / "toolformer.toml").write_text(SETTINGS)
        (folder / "calculator.txt").write_text(PROMPT.format("Calculator"))
        shutil.copytree(model, folder / "model")
        for name in shards:
            write_shard(folder / "web", name)
        return Line(folder)

    @property
    def lake(self) -> Lake:
        return Lake(self.folder / "lake")

    @property
    def web(self) -> Path:
        return self.folder / "web"

    def set(self, **values: object) -> None:
        """Override settings: `k=5` of the lane, others with their path, as in `execution__chunk_texts=1`."""
        paths = {name: f"tools.calculator.{name}" if name in LANE else name.replace("__", ".") for name in values}
        self.values |= {paths[name]: value for name, value in values.items()}

    def plan(self) -> Plan:
        """Read the settings as they are now."""
        overrides = [f"{path}={value}" for path, value in self.values.items()]
        plan = Plan.from_settings(load_settings(self.folder / "toolformer.toml", environment={}, overrides=overrides))
        return replace(plan, lanes=tuple(map(self.adapt, plan.lanes)))

    def outputs(self) -> dict[str, TableOutput]:
        """Return the tables by the name of their stage."""
        return {output.stage.name: output for output in list_table_outputs(self.plan())}

    def output(self, stage: str) -> TableOutput:
        """Return the table of a stage."""
        return self.outputs()[stage]

    def update(
        self,
        *stages: str,
        executor_of: ExecutorBuilder = build_in_process_executor,
        progress: ProgressCallback = silent,
    ) -> Reports:
        """Bring the tables of these stages up to date, in this order, or all; return the reports by stage."""
        outputs = self.outputs()
        names = list(stages or self.outputs())
        if RAW_SHARDS in stages and SCREENED not in stages:  # all others read which documents are removed
            names[names.index(RAW_SHARDS) + 1 : 0] = [SCREENED, REMOVED]
        with self.lent(outputs, executor_of) as (worker, workers):
            shown = {name: progress if name in (stages or names) else silent for name in names}
            return {name: update_table(worker, workers, outputs[name], shown[name]) for name in names}

    @contextmanager
    def lent(
        self, outputs: Mapping[str, TableOutput], executor_of: ExecutorBuilder = build_in_process_executor
    ) -> Iterator[tuple[CountingWorker, Workers]]:
        """Lend a worker and the workers of a run over these tables, and end them."""
        self.worker = CountingWorker(next(iter(outputs.values())).plan)
        workers = Workers(self.worker, {output.name: output for output in outputs.values()}, executor_of)
        try:
            yield self.worker, workers
        finally:
            workers.close()

    @property
    def engines(self) -> int:
        """Return how often the last update asked for an engine."""
        return self.worker.engines if self.worker else 0

    def read(self, stage: str) -> pl.DataFrame:
        """Return all rows of a table without what measures time."""
        table = self.output(stage).table
        return pl.concat([table.read_part(part) for part in table.list_part_names()]).drop(MEASURED, strict=False)

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all rows of all tables, by table and part, without what measures time."""
        return {
            f"{output.name}[{part}]": output.table.read_part(part).drop(MEASURED, strict=False)
            for output in self.outputs().values()
            for part in output.table.list_part_names()
        }


def assert_same(one: Line, other: Line) -> None:
    """Compare row for row; a loss may differ in its last bits, because it went through the model in another batch."""
    rows = one.tables()
    others = other.tables()
    assert rows.keys() == others.keys()
    for name, frame in rows.items():
        assert_frame_equal(frame, others[name], abs_tol=1e-5)


def cost(reports: Reports, kind: str) -> tuple[int, int]:
    """Return (computed, reused) of one kind, over all tables."""
    works = [report.work for report in reports.values()]
    return sum(work.computed_rows_by_kind[kind] for work in works), sum(
        work.reused_rows_by_kind[kind] for work in works
    )


def tokens(reports: Reports) -> int:
    """Return the tokens that went through the model."""
    return sum(sum(report.work.tokens_by_kind.values()) for report in reports.values())


def computed(reports: Reports) -> int:
    """Return the rows of all kinds that were computed."""
    return sum(report.computed_row_count for report in reports.values())


def hand_made(
    folder: Path,
    *tools: str,
    shards: Sequence[str] = ("one",),
    model: Path | None = None,
    sections: Mapping[str, object] | None = None,
    **lane: object,
) -> dict[str, TableOutput]:
    """Return the tables of lanes whose inputs a test publishes by hand, by name; `lane`: values of each lane."""
    (folder / "web").mkdir(parents=True, exist_ok=True)
    for shard in shards:
        (folder / "web" / f"{shard}.jsonl").touch()
    written = {"tools": dict.fromkeys(tools, lane), "paths": {"lake": folder / "lake"}, **(sections or {})}
    written["corpus"] = {"shards": [f"web/{shard}.jsonl" for shard in shards]}
    if model is not None:
        written["model"] = {"name": str(model)}
    settings = Settings.model_validate({"root": folder, **written})
    plan = Plan(
        settings, tuple(load_lanes(settings)), {"name": "none"}, Lake.from_settings(settings.paths), {"name": "none"}
    )
    return {output.name: output for output in list_table_outputs(plan)}


def update_one(outputs: Mapping[str, TableOutput], name: str) -> TableReport:
    """Bring one table up to date in this process."""
    worker = Worker(outputs[name].plan)
    workers = Workers(worker, outputs, build_in_process_executor)
    if removed_documents.TABLE_NAME in outputs[name].depends_on:
        for before in (removed_documents.SCREENED_TABLE_NAME, removed_documents.TABLE_NAME):
            update_table(worker, workers, outputs[before], silent)
    return update_table(worker, workers, outputs[name], silent)


def frame_of(output: TableOutput, rows: Sequence[Mapping[str, object]]) -> pl.DataFrame:
    """Return rows with all columns of a table; null where a row lacks one."""
    empty = dict.fromkeys(output.stage.schema.names())
    return pl.DataFrame([{**empty, **row} for row in rows], schema=output.stage.schema)


def publish(output: TableOutput, part: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Publish rows by hand."""
    output.publish(part, PartRows([frame_of(output, rows)]))


def warehouse(outputs: Mapping[str, TableOutput], name: str = "w") -> Path:
    """Build the warehouse over the tables."""
    plan = next(iter(outputs.values())).plan
    file = plan.settings.root / f"{name}.duckdb"
    build_warehouse(
        plan.lake, CallWarehouse(build_warehouse_tables(list(outputs.values())), plan.tool_name_by_lane_key), file
    )
    return file


NewLine = Callable[..., Line]


@pytest.fixture(scope="session")
def new_line(tmp_path_factory: pytest.TempPathFactory, model: Path) -> NewLine:
    """Return what makes lines in which nothing ran, over the shards named, the same every time."""

    def make(*shards: str) -> Line:
        return Line.new(tmp_path_factory.mktemp("line"), model, shards or ("one",))

    return make


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, new_line: NewLine) -> NewLine:
    """Return what copies a line over the shards named, in which everything ran once."""
    made: dict[tuple[str, ...], Line] = {}

    def copy(*shards: str) -> Line:
        names = shards or ("one",)
        if names not in made:
            made[names] = new_line(*names)
            made[names].update()
        folder = tmp_path_factory.mktemp("copy") / "line"
        shutil.copytree(made[names].folder, folder)
        return Line(folder)

    return copy
