"""kill -9 at random instants of a run, again and again: nothing may be lost, and little may be paid for twice.

python -m benchmarks.kills [--kills 50] [--documents 40] [--seed 0] [--work FOLDER]

A run of the line is started and killed after a random time until it comes to its end by itself; its tables are compared
with those of an undisturbed run, and it begins from nothing, until so many kills were made. Times are drawn between the
moment at which the line has been loaded and the undisturbed run's end, so every stage is met. Finetuning and evaluation
are left out. Counted is every request that the model or a tool has answered, in killed processes too; what a kill cuts
off in the middle is the chunk that each may cost. Exit status 1 where a table differs or where more was paid for than
5 % plus a chunk per kill.
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

from benchmarks.line_world import LineWorld

ALLOWED = 1.05


@dataclass(frozen=True, slots=True)
class Paid:
    """Tokens and calls by chunk, over all processes of one line."""

    tokens: tuple[int, ...]
    calls: tuple[int, ...]

    @staticmethod
    def read(counts: Path) -> "Paid":
        lines = [line.split() for line in counts.read_text().splitlines()] if counts.exists() else []
        found = {kind: tuple(int(number) for one, number in lines if one == kind) for kind in ("tokens", "calls")}
        return Paid(**found)

    def allowed(self, kills: int) -> "tuple[float, float]":
        """The most that `kills` kills may make of this undisturbed run's tokens and calls."""
        tokens, calls = (ALLOWED * sum(kind) + kills * max(kind) for kind in (self.tokens, self.calls))
        return tokens, calls


@dataclass
class Tally:
    """What the kills met, how many lines came to their end, and what was wrong with them."""

    stages: Counter[str] = field(default_factory=Counter)
    lines: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def kills(self) -> int:
        """Made so far."""
        return self.stages.total()


def start(world: LineWorld, counts: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own; returns when the line has been loaded."""
    environment = os.environ | {"DAGSTER_HOME": str(world.folder / ".dagster")}
    command = [sys.executable, "-m", "benchmarks.counted_run", str(world.folder), str(counts)]
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # the line's first words: it has loaded
    return child


def finish(child: subprocess.Popen[bytes]) -> None:
    """Waits; raises where the run failed."""
    _, errors = child.communicate()
    if child.returncode:
        raise RuntimeError(errors.decode())


def killed(child: subprocess.Popen[bytes], seconds: float) -> bool:
    """Kills after `seconds`; False where the run came to its end before."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()
        return True
    finish(child)
    return False


def stage_of(world: LineWorld) -> str:
    """The step that was under way when the newest run was killed, or `between` two steps."""
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
    """Prints a row per line of runs that came to its end."""
    draw, tally = random.Random(seed), Tally()
    whole = LineWorld.make(folder / "whole", documents)
    child, begin = start(whole, folder / "whole.counts"), time.perf_counter()
    finish(child)
    seconds, paid, tables = time.perf_counter() - begin, Paid.read(folder / "whole.counts"), whole.tables()
    print(f"undisturbed: {seconds:.1f} s, {sum(paid.tokens):,} tokens, {sum(paid.calls):,} tool calls", flush=True)
    while (before := tally.kills) < kills:
        name = str(tally.lines)
        world, counts = LineWorld.make(folder / name, documents), folder / f"{name}.counts"
        while tally.kills < kills and killed(start(world, counts), draw.uniform(0, seconds)):
            tally.stages[stage_of(world)] += 1
        finish(start(world, counts))
        tally.lines += 1
        tally.wrong += compared(name, tables, world, paid, Paid.read(counts), tally.kills - before)
    return tally


def compared(
    name: str, tables: Mapping[str, pl.DataFrame], world: LineWorld, whole: Paid, paid: Paid, kills: int
) -> list[str]:
    """What differs from the undisturbed run, beyond what `kills` kills may cost; prints the figures."""
    found = world.tables()
    differing = {key for key in tables.keys() & found.keys() if not tables[key].equals(found[key])}
    differing |= tables.keys() ^ found.keys()
    extra = sum(paid.tokens) / sum(whole.tokens) - 1
    print(f"line {name}: {kills} kills, {extra:+.1%} tokens, {len(differing)} tables differ", flush=True)
    wrong = [f"line {name}: {key} differs" for key in sorted(differing)]
    for kind, spent, allowed in zip(("tokens", "calls"), (paid.tokens, paid.calls), whole.allowed(kills), strict=True):
        if sum(spent) > allowed:
            wrong.append(f"line {name}: {sum(spent):,} {kind} after {kills} kills, allowed {allowed:,.0f}")
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
