"""Measure what a shard more costs where a lake is judged, merged and copied: filtered_calls, C*, the warehouse.

    python -m benchmarks.added_shard [--shards 10 40 160] [--work FOLDER]

Shards of 100,000 generated calls each, 50,000 per lane (see warehouse_millions), no limit on the examples. A lake of N
shards is brought up to date, one shard is added, and every stage runs again: CPU-seconds and seconds on the clock of a
process of its own, bytes read and written through files, memory at the peak beyond that of an idle process. Exponents
as in `benchmarks.scale`. Stages that ask a model are not covered: they compute the rows of the added shard.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.scale import exponent
from benchmarks.warehouse_millions import outputs, publish_shard
from toolformer_dag.evaluation.evaluated_tables import all_tables
from toolformer_dag.lake.warehouse import build
from toolformer_dag.pipeline.stage import TableOutput
from toolformer_dag.pipeline.update import update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.pipeline.workers import Workers, in_process

CALLS = 50_000
"""Scored calls of a shard and lane."""
RULES: Mapping[str, object] = {"constant": 0.5, "by chance": "{by_chance=0.1}"}
"""How the calculator's threshold is chosen."""
FILTERED, CORPUS, WAREHOUSE = "calculator/filtered_calls", "training/augmented_corpus", "warehouse"
STEPS = (FILTERED, "calendar/filtered_calls", CORPUS, WAREHOUSE)
UNLIMITED = "training.examples_per_tool=1000000000"
Figures = dict[str, float]


def step(folder: Path, name: str, rule: str) -> Figures:
    """Bring a table, or the warehouse, up to date in this process and return what that cost."""
    tables = _tables(folder, rule)
    worker = Worker(next(iter(tables.values())).plan)
    if name == CORPUS:
        worker.tokens()
    before = _spent()
    if name == WAREHOUSE:
        plan = worker.plan
        build(plan.lake, all_tables(list(tables.values())), plan.lane_names, folder / "warehouse.duckdb")
    else:
        update(worker, Workers(worker, tables, in_process), tables[name], lambda done, total: None)
    return {key: value - before[key] for key, value in _spent().items()}


def _tables(folder: Path, rule: str) -> dict[str, TableOutput]:
    return outputs(folder, RULES[rule], UNLIMITED)


def _spent() -> Figures:
    with Path("/proc/self/io").open() as file:
        moved = {key: int(value) / 2**20 for key, value in (line.split(": ") for line in file)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {
        "CPU-s": time.process_time(),
        "s": time.perf_counter(),
        "MiB read": moved["rchar"],
        "MiB written": moved["wchar"],
        "MiB of memory": peak,
    }


def in_a_process(folder: Path, name: str, rule: str) -> Figures:
    """Run `step` in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.added_shard", "--step", name, rule, str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env={**os.environ})
    return dict(json.loads(done.stdout.splitlines()[-1]))


def added(folder: Path, shards: int) -> dict[str, Figures]:
    """Bring a lake of `shards` shards up to date, add one, and return what each step then costs."""
    tables = _tables(folder, "constant")
    for shard in range(shards):
        publish_shard(tables, shard, CALLS)
    for name in STEPS:
        in_a_process(folder, name, "constant")
    publish_shard(tables, shards, CALLS)
    found = {name: in_a_process(folder, name, "constant") for name in STEPS}
    in_a_process(folder, FILTERED, "by chance")
    publish_shard(tables, shards + 1, CALLS)
    return found | {f"{FILTERED} by chance": in_a_process(folder, FILTERED, "by chance")}


def main() -> None:
    """Print a line per step and number of shards, then the exponents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, nargs="+", default=[10, 40, 160])
    parser.add_argument("--work", type=Path)
    given = parser.parse_args()
    if given.step:
        name, rule, folder = given.step
        print(json.dumps(step(Path(folder), name, rule)))
        return
    found = {shards: _measured(shards, given.work) for shards in given.shards}
    for name in found[given.shards[0]] if len(found) > 1 else ():
        costs = [found[shards][name] for shards in given.shards]
        grown = (f"{unit} {exponent(given.shards, [cost[unit] for cost in costs]):.2f}" for unit in costs[0])
        print(f"{name} grows with the power: {', '.join(grown)}", flush=True)


def _measured(shards: int, work: Path | None) -> dict[str, Figures]:
    with TemporaryDirectory(dir=work) as folder:
        figures = added(Path(folder), shards)
        shutil.rmtree(folder, ignore_errors=True)
        Path(folder).mkdir()
    for name, cost in figures.items():
        told = ", ".join(f"{value:,.2f} {unit}" for unit, value in cost.items())
        print(f"{shards:>5} shards and one more, {name}: {told}", flush=True)
    return figures


if __name__ == "__main__":
    main()
