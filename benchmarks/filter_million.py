"""Time a changed threshold on a lane of a million scored calls: the filter, then the SQL views.

python -m benchmarks.filter_million [--calls 1000000] [--work FOLDER]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from toolformer_dag.lake.warehouse import build, query
from toolformer_dag.pipeline import loss_deltas, swapped_results
from toolformer_dag.pipeline.chunks import InProcess
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import Stage, TableOutput
from toolformer_dag.pipeline.stages import table_outputs, warehouse_tables
from toolformer_dag.pipeline.update import update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.settings_file import load_settings

SHARDS = 10
CALLS_PER_TEXT = 20
RUNS = 3
RECORD = {"stage": "loss_deltas", "tool": "calculator", "settings": {}, "inputs": {}}
QUERIES = (
    "FROM filter_statistics",
    "FROM funnel",
    "SELECT count(*) FROM kept_at(0.8)",
    "FROM swapped_statistics",
    "FROM chance_thresholds",
)
SWAPPED_TEXTS = 1600
"""Of each shard, twenty times the default: 32,000 calls in 10 shards of which 8,000 have their place's best delta."""


def scored_calls(shard: int, calls: int) -> pl.DataFrame:
    """Generate rows of loss_deltas: 5 positions with 4 samples per text, about 4 % with delta >= 0.5."""
    random = np.random.default_rng(shard)
    number = np.arange(calls)
    delta = random.gumbel(-0.6, 0.35, calls)
    loss = random.gamma(3, 1, calls)
    frame = pl.DataFrame(
        {
            "shard": [f"en_head_{shard:04d}"] * calls,
            "digest": [f"sha1:{shard:04d}{text:028x}" for text in number // CALLS_PER_TEXT],
            "segment": number // CALLS_PER_TEXT % 2,
            "position": number % CALLS_PER_TEXT // 4 * 17,
            "sample": number % 4,
            "char_offset": number % CALLS_PER_TEXT // 4 * 60,
            "input": [f"{first} / {second}" for first, second in random.integers(0, 5000, (calls, 2))],
            "result": random.integers(0, 5000, calls).astype(str),
            "p_api": random.random(calls),
            "loss_empty": loss,
            "loss_call": loss + 0.2,
            "loss_result": loss - delta,
            "loss_minus": loss,
            "loss_plus": loss - delta,
            "delta": delta,
        }
    )
    absent = {name: pl.lit(None, pl.String) for name in ("reason", "ahead")}
    return shaped(frame.with_columns(**absent, tool=pl.lit("calculator")), loss_deltas.STAGE)


def shaped(frame: pl.DataFrame, stage: Stage) -> pl.DataFrame:
    """Return the columns of a stage."""
    return frame.select(stage.schema.names()).cast(dict(stage.schema))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of wall time and of processor time over all threads; other load does not affect the latter."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s {self.processor:6.2f} CPU-s "


def best_of(work: Callable[[], object], runs: int = RUNS) -> StepCost:
    """Return the cost of the fastest of several runs."""
    costs = []
    for _ in range(runs):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        costs.append(StepCost(time.perf_counter() - wall, time.process_time() - processor))
    return min(costs, key=lambda cost: cost.wall)


def outputs(folder: Path, tau_f: object) -> dict[str, TableOutput]:
    """Return the tables of a plan with one lane, by name."""
    settings = (f"tools.calculator.tau_f={tau_f}",)
    (folder / "toolformer.toml").write_text("[tools.calculator]\n")
    found = table_outputs(Plan.of(load_settings(folder / "toolformer.toml", environment={}, overrides=settings)))
    return {output.name: output for output in found}


def measure(folder: Path, calls: int) -> None:
    """Publish the scored calls and print a line per step."""
    tables, database = outputs(folder, 0.5), folder / "warehouse.duckdb"
    for shard in range(SHARDS):
        rows = scored_calls(shard, calls // SHARDS)
        tables["calculator/loss_deltas"].table.publish(f"en_head_{shard:04d}", [rows], lambda: RECORD)
        subset = tables["calculator/heuristic_subset"]
        texts = rows.select("tool", "shard", "digest", "segment").unique().with_columns(text_digest="digest")
        whole = pl.concat([subset.stage.schema.to_frame(), texts], how="diagonal")
        subset.table.publish(f"en_head_{shard:04d}", [whole], lambda: RECORD | {"stage": "heuristic_subset"})
        swapped = rows.head(SWAPPED_TEXTS * CALLS_PER_TEXT).with_columns(pl.col("delta") - 2, swap=pl.lit(0))
        control = shaped(swapped, swapped_results.STAGE)
        tables["calculator/swapped_results"].table.publish(f"en_head_{shard:04d}", [control], lambda: RECORD)

    def refilter(taus: Iterator[object]) -> None:
        tau = next(taus)
        some = outputs(folder, tau)
        worker = Worker(some["calculator/filtered_calls"].plan)
        report = update(worker, InProcess(worker, some), some["calculator/filtered_calls"], lambda done, total: None)
        print(f"  kept {sum(report.rows.values()):,} at {tau}")

    by_chance = best_of(partial(refilter, iter(f"{{by_chance={level}}}" for level in (0.05, 0.06, 0.07))))
    print(f"{by_chance}  filtered_calls with a threshold by chance")
    costs = [best_of(partial(refilter, iter((0.5, 0.7, 0.9))))]
    print(f"{costs[0]}  filtered_calls over {calls:,} scored calls")
    lake, declared = tables["calculator/loss_deltas"].plan.lake, warehouse_tables(list(tables.values()))
    print(f"{best_of(lambda: build(lake, declared, ['calculator'], database))}  warehouse rebuilt")
    for sql in QUERIES:
        costs.append(best_of(partial(query, database, sql)))
        print(f"{costs[-1]}  {sql}")
    total = StepCost(sum(cost.wall for cost in costs), sum(cost.processor for cost in costs))
    print(f"{total}  filter and views together (goal: at most 2 s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work:
        measure(options.work, options.calls)
        return
    with TemporaryDirectory() as folder:
        measure(Path(folder), options.calls)


if __name__ == "__main__":
    main()
