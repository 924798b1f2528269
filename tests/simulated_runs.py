"""Schedules of small runs over one lake in the simulated machine room, and what has to hold after each.

python -m tests.simulated_runs --seeds 10000 [--first 0]     # one again: --seeds 1 --first SEED

A schedule has up to three phases. In each, up to three runs bring the same three tables up to date at once, beside
readers, `clean` and `verify`; processes are killed, and operations fail. Between phases shards and settings change. No
reader and no `verify` may see anything wrong, and no phase loses a computed row. At the end a run without faults has to
give the tables of an undisturbed one, a second has nothing to do, and no row that a run has noted is lost.
"""

import argparse
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import polars as pl

from tests.simulation import Crashed, Disk, Objects, Process, Simulation
from toolformer_dag.computing.reasons import find_differences
from toolformer_dag.computing.spending import COSTS_TABLE, StepCost, add_cost
from toolformer_dag.computing.stage import ByChunk, ByPart, Chunk, Column, PartRows, Planned, Stage, TableOutput, Work
from toolformer_dag.computing.stored_rows import claim_keys
from toolformer_dag.computing.update import TableReport, update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_in_process_executor
from toolformer_dag.files import StorageError, UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.cleaning import clean_lake
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake, MissingPart
from toolformer_dag.lake.verification import iter_checked_files

INT = pl.Int64()
KEY = Column(INT, "a number of the shard")
VALUE = Column(INT, "its square times k")
STORED = {"key": INT, "value": INT}
FACTORS = (1, 2)
"""The values of the setting k."""
GRACE = timedelta(hours=24)


def numbers(worker: Worker, output: TableOutput, part: str) -> PartRows:
    return PartRows([pl.DataFrame({"key": output.plan.shards_by_name[part].rows}, schema={"key": INT})])


def values(worker: Worker, output: TableOutput) -> RowStore:
    return worker.open_row_store("sim/values", {"k": output.plan.k}, ("key",), STORED)


def chunks(worker: Worker, output: TableOutput, part: str, claimed: Any) -> Planned:
    store = values(worker, output)
    keys = output.plan.lake.get_table("sim/numbers").read_part(part)
    missing = claim_keys(claimed, store.name, store.find_missing_keys(keys))
    return Planned([Chunk(one.height, one) for one in missing.iter_slices(1)], Work())


def compute(worker: Worker, output: TableOutput, keys: pl.DataFrame) -> Work:
    values(worker, output).append_rows(keys.with_columns(value=pl.col("key") ** 2 * output.plan.k))
    return Work(computed_rows_by_kind=Counter(texts=keys.height))


def squares(worker: Worker, output: TableOutput, part: str) -> PartRows:
    store = values(worker, output)
    keys = output.plan.lake.get_table("sim/numbers").read_part(part)
    found = keys.join(store.read_stored_rows(keys), on="key", how="left", maintain_order="left")
    if found["value"].null_count():
        raise StorageError("rows were damaged while they were read; run again")
    return PartRows([found], store_names=[store.name])


def sums(worker: Worker, output: TableOutput, part: str) -> PartRows:
    table = output.plan.lake.get_table("sim/squares")
    rows = [(one, table.read_part(one)["value"].sum()) for one in table.list_part_names()]
    return PartRows([pl.DataFrame(rows, schema={"shard": pl.String(), "value": INT}, orient="row")])


STAGES = (
    Stage(
        "numbers",
        "",
        {"key": KEY},
        ("key",),
        lambda plan, lane: {},
        inputs=lambda output: lambda part: {"content": list(output.plan.shards_by_name[part].rows)},
        group="sim",
        row_maker=ByPart(numbers),
    ),
    Stage(
        "squares",
        "",
        {"key": KEY, "value": VALUE},
        ("key",),
        lambda plan, lane: {"k": plan.k},
        reads=("sim/numbers",),
        group="sim",
        row_maker=ByChunk(chunks, compute, squares),
    ),
    Stage(
        "sums",
        "",
        {"shard": Column(pl.String(), "shard"), "value": VALUE},
        ("shard",),
        lambda plan, lane: {},
        reads=("sim/squares",),
        group="sim",
        is_sharded=False,
        row_maker=ByPart(sums),
    ),
)


class Wrong(AssertionError):
    """What a schedule has to give and did not."""


@dataclass
class Schedule:
    """`history`: the contents that each shard has had; `noted`: rows that runs know to be written."""

    sim: Simulation
    folder: Path
    objects: Objects | None
    shards: dict[str, Sequence[int]]
    k: int = 1
    history: dict[str, list[Sequence[int]]] = field(default_factory=dict)
    noted: set[tuple[str, str]] = field(default_factory=set)
    machines: int = 0

    def lake(self) -> Lake:
        """Return the lake as a new process sees it."""
        root = self.folder / f"machine-{self.machines}"
        self.machines += 1
        if self.objects:
            return Lake(root, self.objects.storage(root))
        (self.folder / "lake").mkdir(exist_ok=True)
        root.symlink_to("lake")
        return Lake(root, Disk(self.sim, root))

    def plan(self, k: int) -> Any:
        """Return as much of a plan as bringing up to date asks for, with the lake as a new process sees it."""
        limits = SimpleNamespace(execution=SimpleNamespace(chunk_hours=1.0, most_tokens=None))
        shards = {name: SimpleNamespace(location=name, rows=rows) for name, rows in self.shards.items()}
        return SimpleNamespace(
            lake=self.lake(), shards_by_name=shards, k=k, add_round_suffix=str, lanes=(), settings=limits
        )

    def update(self, name: str, k: int, claims: bool) -> list[TableReport]:
        """Bring the tables up to date in a new process."""
        plan = self.plan(k)
        reports = []
        lake = plan.lake
        outputs = [TableOutput(stage, plan) for stage in STAGES]
        worker = Worker(plan)
        lent = Workers(worker, {output.name: output for output in outputs}, build_in_process_executor)
        for output in outputs:
            with lake.storage.hold_claim("gpu", lambda holder: None) if claims else nullcontext():
                reports.append(update_table(worker, lent, output, lambda done, total: None))
            lake.storage.write_beside(lambda output=output: self._note(lake, name, output.name))
        lake.storage.wait_for_background_write()
        return reports

    def _note(self, lake: Lake, run: str, name: str) -> None:
        add_cost(lake, run, name, StepCost(0.0))
        self.noted.add((run, name))

    def look(self) -> None:
        """Read the squares; those of a part were all made with one k, of one content of the shard."""
        table = self.lake().get_table("sim/squares")
        for part in table.list_part_names():
            with suppress(MissingPart):
                rows = table.read_part(part).rows()
                allowed = [[(n, n * n * k) for n in keys] for k in FACTORS for keys in self.history[part]]
                if rows not in allowed:
                    raise Wrong(f"a reader saw {rows} in {part}")

    def whole(self, cleaned: bool) -> None:
        """Nothing is out of date and no row is lacking, as after every run that ended well.

        `clean` asks whether rows are in use, then removes them: a run that opens them in between computes them again.
        """
        plan = self.plan(self.k)
        for output in (TableOutput(stage, plan) for stage in STAGES):
            if found := find_differences(output):
                raise Wrong(f"after a run {output.name} is out of date: {found.lines}")
            if isinstance(output.stage.row_maker, ByChunk) and not cleaned:
                keys = pl.DataFrame({"key": [n for keys in self.shards.values() for n in keys]}, schema={"key": INT})
                if lost := values(Worker(plan), output).find_missing_keys(keys).rows():
                    raise Wrong(f"computed rows are lost: {lost}")

    def stored(self) -> set[tuple[int, int]]:
        """Return the computed rows that are there: k and the number."""
        lake = self.lake()
        asked = pl.DataFrame({"key": range(12)}, schema={"key": INT})
        found = set()
        for k in FACTORS:
            store = RowStore(lake.storage, f"sim/values/{fingerprint({'k': k})}", ["key"], pl.Schema(STORED))
            found |= {(k, key) for key, _ in store.read_stored_rows(asked).rows()}
        return found

    def verify(self) -> None:
        """Nothing is damaged."""
        if bad := [one for one in iter_checked_files(self.lake()) if one.reason is not None]:
            raise Wrong(f"verify names {bad}")

    def clean(self) -> None:
        """Remove what nothing needs."""
        clean_lake(self.lake(), GRACE, dry_run=False)

    def again(self, work: Callable[[], None]) -> None:
        """Do it a few times."""
        for _ in range(3):
            work()
            self.sim.wait(lambda: False, self.sim.draw.expovariate(0.2))


def played(seed: int, folder: Path) -> Simulation:
    """Play a schedule. Raises Wrong, Endless, and whatever a run should not have raised."""
    sim = Simulation(seed)
    with sim.in_place():
        draw = sim.draw
        names = [f"shard {number}" for number in range(draw.randint(1, 3))]
        shards = {name: _numbers(sim) for name in names}
        made = Schedule(sim, folder, Objects(sim) if draw.random() < 0.5 else None, shards)
        for number in range(draw.randint(1, 3)):
            for name, content in made.shards.items():
                made.history.setdefault(name, []).append(content)
            _phase(made, number)
            sim.now += draw.choice((0, 60, 30 * 3600))
            _changed(made)
        _checked(made)
    return sim


def _numbers(sim: Simulation) -> Sequence[int]:
    return sorted(sim.draw.sample(range(12), sim.draw.randint(0, 6)))


def _changed(made: Schedule) -> None:
    """Change what the next phase is about."""
    draw = made.sim.draw
    made.k = draw.choice(FACTORS)
    if draw.random() < 0.5:
        made.shards[f"shard {draw.randrange(4)}"] = _numbers(made.sim)
    if draw.random() < 0.3 and len(made.shards) > 1:
        del made.shards[draw.choice(sorted(made.shards))]
    for name, content in made.shards.items():
        made.history.setdefault(name, []).append(content)


def _phase(made: Schedule, number: int) -> None:
    """Let processes work at once; what they may not raise is raised here."""
    sim = made.sim
    draw = made.sim.draw
    tasks = []
    factors = FACTORS if draw.random() < 0.2 else (made.k,)
    claims = draw.random() < 0.5
    asked = [draw.choice(factors) for _ in range(draw.randint(1, 3))]
    work = [lambda process, k=k: made.update(process.name, k, claims) for k in asked]
    besides = [one for one in (made.look, made.verify, made.clean) if draw.random() < 0.5]
    work += [lambda process, one=one: made.again(one) for one in besides]
    rate = draw.choice((0.0, 0.0, 0.01, 0.1))
    before = _alone(sim, made.stored)
    for at, one in enumerate(work):
        crash_at = draw.randint(1, 150) if draw.random() < 0.5 else 0
        process = Process(f"{number}.{at}", crash_at, rate, draw.choice((0.0, 0.0, -5.0, 5.0, 3600.0)))
        tasks.append(sim.spawn(process, lambda one=one, process=process: one(process)))
    sim.run()
    for task in tasks:
        if task.error is not None and not isinstance(task.error, Crashed):
            expected = isinstance(task.error, UserError) and (task.process.faults or len(factors) > 1)
            if not expected:
                raise task.error
    if made.clean not in besides and (lost := before - _alone(sim, made.stored)):
        raise Wrong(f"computed rows are lost: {lost}")
    if len(factors) == 1 and any(task.error is None for task in tasks[: len(asked)]):
        _alone(sim, lambda: made.whole(made.clean in besides))


def _checked(made: Schedule) -> None:
    """Compare what a run without faults makes of it with the tables of an undisturbed one."""
    sim = made.sim
    reports = [_alone(sim, lambda number=number: made.update(f"last {number}", made.k, True)) for number in range(2)]
    if any(not report.is_unchanged for report in reports[1]):
        raise Wrong(f"a second run did {[report.updated for report in reports[1]]}")
    _alone(sim, made.verify)
    found = _alone(sim, lambda: dict(_tables(made.lake())))
    squared = {name: [(n, n * n * made.k) for n in keys] for name, keys in made.shards.items()}
    expected = {f"sim/numbers {name}": [(n,) for n in keys] for name, keys in made.shards.items()}
    expected |= {f"sim/squares {name}": rows for name, rows in squared.items()}
    expected["sim/sums all"] = sorted((name, sum(value for _, value in rows)) for name, rows in squared.items())
    notes = [
        (row[0], name.removeprefix(f"{COSTS_TABLE} "))
        for name in list(found)
        if COSTS_TABLE in name
        for row in found.pop(name)
    ]
    if found != expected:
        raise Wrong(f"the tables are {found}, not {expected}")
    if lost := made.noted - set(notes):
        raise Wrong(f"lost: {sorted(lost)}")
    if len(notes) > len(set(notes)):
        raise Wrong(f"twice: {notes}")


def _alone(sim: Simulation, work: Callable[[], Any]) -> Any:
    task = sim.spawn(Process("last"), work)
    sim.run()
    if task.error is not None:
        raise task.error
    return task.value


def _tables(lake: Lake) -> Iterator[tuple[str, list[tuple[Any, ...]]]]:
    for name in (*(f"sim/{stage.name}" for stage in STAGES), COSTS_TABLE):
        for part in lake.get_table(name).list_part_names():
            yield f"{name} {part}", lake.get_table(name).read_part(part).rows()


def replayed(seed: int, root: Path) -> tuple[str, int]:
    """Play a seed in a folder of its own; return the hash of what happened and the number of steps."""
    folder = root / str(seed)
    folder.mkdir()
    try:
        sim = played(seed, folder)
    except BaseException as error:
        error.add_note(f"again: python -m tests.simulated_runs --seeds 1 --first {seed}")
        raise
    finally:
        shutil.rmtree(folder)
    return sim.trace.hexdigest(), sim.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order in which sets are gone through is a part of a schedule
        command = [sys.executable, "-m", "tests.simulated_runs", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    failed = 0
    began = time.monotonic()
    steps = 0
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with TemporaryDirectory(dir=memory) as root:
        for seed in range(options.first, options.first + options.seeds):
            try:
                steps += replayed(seed, Path(root))[1]
            except Exception as error:
                failed += 1
                sys.stderr.write(f"seed {seed}: {type(error).__name__}: {error}\n    {error.__notes__[-1]}\n")
                if options.seeds == 1:
                    raise
    seconds = time.monotonic() - began
    sys.stderr.write(f"{options.seeds} schedules, {steps:,} steps in {seconds:.0f} s, {failed} failed\n")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
