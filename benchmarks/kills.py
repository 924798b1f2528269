"""Kill runs with SIGKILL at random times: no result may be lost, and little may be computed twice.

python -m benchmarks.kills [--kills 50] [--documents 40] [--seed 0] [--work FOLDER]

A run is started and killed after a random time, again and again, until it finishes. Its tables are compared with the
tables of an undisturbed run. Then a new world starts, until the number of kills is reached. Kill times are uniform
between loading and the end of an undisturbed run, so kills reach every stage. Finetuning and evaluation are not run.

Every finished request of the model or a tool counts, also in killed processes. The exit status is 1 where a table
differs, or where more tokens or calls were needed than 5 % plus a chunk per kill.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import dagster as dg
import polars as pl

from benchmarks.pipeline_world import PipelineWorld

ALLOWED = 1.05


@dataclass(frozen=True, slots=True)
class CountedWork:
    """Tokens and calls by chunk, over all processes of a world."""

    tokens: tuple[int, ...]
    calls: tuple[int, ...]

    @staticmethod
    def read(counts: Path) -> "CountedWork":
        lines = [line.split() for line in counts.read_text().splitlines()] if counts.exists() else []
        found = {kind: tuple(int(number) for name, number in lines if name == kind) for kind in ("tokens", "calls")}
        return CountedWork(**found)

    def allowed(self, kills: int) -> "tuple[float, float]":
        """Return the tokens and calls that a world with `kills` kills may need, from this undisturbed run's."""
        tokens, calls = (ALLOWED * sum(kind) + kills * max(kind) for kind in (self.tokens, self.calls))
        return tokens, calls


@dataclass
class Tally:
    """The stages that were killed, the number of finished worlds, and their errors."""

    stages: Counter[str] = field(default_factory=Counter)
    worlds: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Return the number of kills so far."""
        return self.stages.total()


def start(world: PipelineWorld, counts: Path) -> subprocess.Popen[bytes]:
    """Start a run in a new process; return when it has loaded."""
    environment = os.environ | {"DAGSTER_HOME": str(world.folder / ".dagster")}
    command = [sys.executable, "-m", "benchmarks.counted_run", str(world.folder), str(counts)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # printed after loading
    return child


def finish(child: subprocess.Popen[bytes]) -> None:
    """Wait for the run. Raises RuntimeError where it failed."""
    _, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(errors.decode())


def killed(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Kill the run after `seconds`; return False where it finished before."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()
        return True
    finish(child)
    return False


def stage_of(world: PipelineWorld) -> str:
    """Return the step that the newest run was in when it was killed, or `between`."""
    os.environ["DAGSTER_HOME"] = str(world.folder / ".dagster")
    with dg.DagsterInstance.get() as instance:
        runs = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]), limit=1)
        if not runs:
            return "between"
        started, ended = (_steps(instance, runs[0], kind) for kind in ("STEP_START", "STEP_SUCCESS"))
        return next((step.split("__")[-1] for step in started if step not in ended), "between")


def _steps(instance: dg.DagsterInstance, run: dg.DagsterRun, kind: str) -> list[str]:
    logs = instance.all_logs(run.run_id, of_type=dg.DagsterEventType(kind))
    return [entry.step_key or "" for entry in logs]


def measure(folder: Path, kills: int, documents: int, seed: int) -> Tally:
    """Kill and restart runs until `kills` kills; print a row per finished world."""
    draw, tally = random.Random(seed), Tally()
    whole = PipelineWorld.make(folder / "whole", documents)
    child, begin = start(whole, folder / "whole.counts"), time.perf_counter()
    finish(child)
    seconds, work, tables = time.perf_counter() - begin, CountedWork.read(folder / "whole.counts"), whole.tables()
    print(f"undisturbed: {seconds:.1f} s, {sum(work.tokens):,} tokens, {sum(work.calls):,} tool calls", flush=True)
    while (before := tally.kills) < kills:
        name = str(tally.worlds)
        world, counts = PipelineWorld.make(folder / name, documents), folder / f"{name}.counts"
        while tally.kills < kills and killed(start(world, counts), draw.uniform(0, seconds)):
            tally.stages[stage_of(world)] += 1
        finish(start(world, counts))
        tally.worlds += 1
        tally.wrong += compared(name, tables, world, work, CountedWork.read(counts), tally.kills - before)
    return tally


def compared(
    name: str,
    tables: Mapping[str, pl.DataFrame],
    world: PipelineWorld,
    whole: CountedWork,
    work: CountedWork,
    kills: int,
) -> list[str]:
    """Return the differences from the undisturbed run, beyond the allowance for `kills` kills; print the figures."""
    found = world.tables()
    differing = {key for key in tables.keys() & found.keys() if not tables[key].equals(found[key])}
    differing |= tables.keys() ^ found.keys()
    extra = sum(work.tokens) / sum(whole.tokens) - 1
    print(f"world {name}: {kills} kills, {extra:+.1%} tokens, {len(differing)} tables differ", flush=True)
    wrong = [f"world {name}: {key} differs" for key in sorted(differing)]
    for kind, needed, allowed in zip(("tokens", "calls"), (work.tokens, work.calls), whole.allowed(kills), strict=True):
        if sum(needed) > allowed:
            wrong.append(f"world {name}: {sum(needed):,} {kind} after {kills} kills, allowed {allowed:,.0f}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--documents", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder that does not exist yet; default: a temporary one")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        tally = measure(options.work or Path(temporary), options.kills, options.documents, options.seed)
    print(
        "\n".join((f"{tally.kills} kills met: {dict(tally.stages.most_common())}", *(tally.wrong or ["nothing wrong"])))
    )
    sys.exit(1 if tally.wrong else 0)


if __name__ == "__main__":
    main()
