"""Time the warehouse over millions of scored calls: a changed threshold, building the file, every view and macro.

python -m benchmarks.warehouse_millions [--calls 10000000] [--work FOLDER]
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Stage, TableOutput
from toolformer_dag.computing.update import update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.evaluation.evaluated_tables import all_tables
from toolformer_dag.lake.table import Table
from toolformer_dag.lake.warehouse import build, query
from toolformer_dag.pipeline import loss_deltas
from toolformer_dag.pipeline.stages import table_outputs
from toolformer_dag.settings.settings_file import load_settings

SHARDS = 10
CALLS_PER_TEXT = 20
RUNS = 3
LANES = ("calculator", "calendar")
TEXT = "Of the {:,} people who were asked, more than half had never heard of it; the others said what they say. "
QUERIES = (
    "SELECT count(*) FROM kept_at(0.8)",
    "SELECT tool, count(*) FROM kept_at(-100) GROUP BY tool",
    "SELECT tool, count(*), avg(delta) FROM loss_deltas GROUP BY tool",
    "SELECT count(*) FROM eligible",
    "SELECT count(*) FROM places",
    "SELECT count(*) FROM calls",
    "SELECT before, call, after FROM calls WHERE kept ORDER BY delta DESC LIMIT 10",
    "SELECT domain, count(*) FILTER (kept) / count(*) AS share FROM calls GROUP BY domain ORDER BY share DESC LIMIT 10",
    "SELECT * FROM calls WHERE distance BETWEEN -0.001 AND 0.001 ORDER BY abs(distance) LIMIT 100",
    "FROM filter_statistics",
    "FROM swapped_statistics",
    "FROM curve_statistics",
    "FROM chance_thresholds",
    "SELECT count(*) FROM chance_rates",
    "FROM control_sizes",
    "FROM loss_floors",
    "FROM thresholds",
    "FROM funnel",
    "FROM offset_statistics",
)
SWAPPED_TEXTS = 800
"""Of each shard and lane, ten times the default: 16,000 calls, of which 4,000 have their place's best delta."""


def scored_calls(lane: str, shard: int, calls: int) -> pl.DataFrame:
    """Generate rows of loss_deltas: 5 positions with 4 samples per text, about 4 % with delta >= 0.5."""
    random = np.random.default_rng([shard, LANES.index(lane)])
    number = np.arange(calls)
    delta = random.gumbel(-0.6, 0.35, calls)
    loss = random.gamma(3, 1, calls)
    text = pl.Series(number // CALLS_PER_TEXT)
    return shaped(
        pl.DataFrame(
            {
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
        ).with_columns(
            tool=pl.lit(lane),
            shard=pl.lit(f"en_head_{shard:04d}"),
            digest=pl.lit(f"sha1:{shard:04d}") + text.cast(pl.String).str.zfill(28),
            delta_is_bound=pl.lit(False),
            reason=pl.lit(None, pl.String),
            ahead=pl.lit(None, pl.List(pl.String)),
        ),
        loss_deltas.STAGE,
    )


def shaped(frame: pl.DataFrame, stage: Stage) -> pl.DataFrame:
    """Return the columns of a stage; null where `frame` has none."""
    whole = pl.concat(
        [stage.schema.to_frame(), frame.select(set(frame.columns) & set(stage.schema))], how="diagonal_relaxed"
    )
    return whole.select(stage.schema.names()).cast(dict(stage.schema))


@dataclass(frozen=True, slots=True)
class BuildTime:
    """Seconds of wall time and of processor time over all threads; other load does not affect the latter."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s {self.processor:6.2f} CPU-s "


def best_of(work: Callable[[], object], runs: int = RUNS) -> BuildTime:
    """Return the cost of the fastest of several runs."""
    costs = []
    for _ in range(runs):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        costs.append(BuildTime(time.perf_counter() - wall, time.process_time() - processor))
    return min(costs, key=lambda cost: cost.wall)


def outputs(folder: Path, tau_f: object, *more: str) -> dict[str, TableOutput]:
    """Return the tables of a plan, by name. `more`: settings that are overridden."""
    settings = (f"tools.calculator.tau_f={tau_f}", "tools.calendar.tau_f=0.5", "corpus.shards=['web/*.json.gz']", *more)
    (folder / "toolformer.toml").write_text("".join(f"[tools.{lane}]\n" for lane in LANES))
    found = table_outputs(Plan.of(load_settings(folder / "toolformer.toml", environment={}, overrides=settings)))
    return {output.name: output for output in found}


def publish_calls(tables: dict[str, TableOutput], calls: int) -> None:
    """Publish `calls` scored calls with their documents, texts, samples and control."""
    for shard in range(SHARDS):
        publish_shard(tables, shard, calls // SHARDS // len(LANES))


def publish_shard(tables: Mapping[str, TableOutput], shard: int, calls: int) -> None:
    """Publish a shard with `calls` scored calls of each lane, and write an empty file of its name."""
    part = f"en_head_{shard:04d}"
    web = next(iter(tables.values())).plan.settings.root / "web"
    web.mkdir(exist_ok=True)
    (web / f"{part}.json.gz").touch()
    for lane in LANES:
        rows = scored_calls(lane, shard, calls)
        texts = rows.select("tool", "shard", "digest", "segment").unique(maintain_order=True)
        swapped = rows.head(SWAPPED_TEXTS * CALLS_PER_TEXT).with_columns(pl.col("delta") - 2, swap=pl.lit(0))
        published = {
            "loss_deltas": rows,
            "swapped_results": swapped,
            "heuristic_subset": texts.with_columns(text_digest="digest", text=pl.lit(TEXT), offset=pl.lit(0)),
            "scored_candidates": rows.with_columns(body="input"),
        }
        for name, frame in published.items():
            _publish(tables[f"{lane}/{name}"].table, part, shaped(frame, tables[f"{lane}/{name}"].stage), lane)
    named = texts.select("shard", "digest").with_columns(
        text=pl.concat_str(pl.lit(TEXT * 5), "digest"), domain=pl.format("site{}.example", pl.int_range(pl.len()) % 700)
    )
    documents = tables["ccnet/raw_shards"]
    _publish(documents.table, part, shaped(named, documents.stage), None)


def _publish(table: Table, part: str, rows: pl.DataFrame, lane: str | None) -> None:
    record = {"stage": table.name.rpartition("/")[2], "tool": lane, "settings": {}, "inputs": {}}
    table.publish(part, [rows], lambda: record)


def refilter(folder: Path, lane: str, taus: Iterator[object]) -> None:
    """Run filtered_calls of a lane with the next threshold."""
    tau = next(taus)
    some = outputs(folder, tau)
    output = some[f"{lane}/filtered_calls"]
    worker = Worker(output.plan)
    report = update(worker, Workers(worker, some, in_process), output, lambda done, total: None)
    print(f"  kept {sum(report.rows.values()):,} at {tau}")


def measure(folder: Path, calls: int, queries: Sequence[str] = QUERIES) -> None:
    """Publish the scored calls and print a line per step."""
    tables, database = outputs(folder, 0.5), folder / "warehouse.duckdb"
    publish_calls(tables, calls)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = next(iter(tables.values())).plan
    refilter(folder, "calendar", iter((0.5,)))
    by_chance = iter(f"{{by_chance={level}}}" for level in (0.05, 0.06, 0.07))
    print(f"{best_of(partial(refilter, folder, 'calculator', by_chance))}  filtered_calls with a threshold by chance")
    cost = best_of(partial(refilter, folder, "calculator", iter((0.9, 0.7, 0.5))))
    print(f"{cost}  filtered_calls over {calls // 2:,} scored calls")
    declared = all_tables(list(tables.values()))
    cost = best_of(lambda: build(plan.lake, declared, plan.lane_names, database))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = database.stat().st_size / 2**20
    print(
        f"{cost}  warehouse rebuilt: {size:,.0f} MiB; process {grown / 2**20:.1f} GiB before, {peak / 2**20:.1f} after"
    )
    for sql in queries:
        print(f"{best_of(partial(query, database, sql))}  {sql}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000_000)
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        measure(options.work, options.calls)
        return
    with TemporaryDirectory() as folder:
        measure(Path(folder), options.calls)


if __name__ == "__main__":
    main()
