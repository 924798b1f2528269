"""How long a changed threshold takes over a lane of a million scored calls: the filter, then the SQL views.

python -m benchmarks.filter_million [--calls 1000000] [--work FOLDER]
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.filtered_calls import filtered_calls
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import build, query
from toolformer_dag.tools.registry import load_tool
from toolformer_dag.tools.runner import ToolLimits

SHARDS = 10
CALLS_PER_TEXT = 20
RUNS = 3
QUERIES = (
    "FROM filter_statistics",
    "FROM funnel",
    "SELECT count(*) FROM kept_at(0.8)",
)


def scored_calls(shard: int, calls: int) -> pl.DataFrame:
    """`calls` made rows of loss_deltas: 20 per text, 5 positions with 4 samples each, about 4 % with delta >= 0.5."""
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
            "input": [f"{one} / {other}" for one, other in random.integers(0, 5000, (calls, 2))],
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
    filled = frame.with_columns(tool=pl.lit("calculator"), reason=pl.lit(None, pl.String))
    return filled.select(columns("loss_deltas").names()).cast(dict(columns("loss_deltas")))


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of wall time, and of processor time over all threads, which other work on the machine does not change."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s {self.processor:6.2f} CPU-s "


def best_of(work: Callable[[], object], runs: int = RUNS) -> Cost:
    """The fastest of several runs."""
    costs = []
    for _ in range(runs):
        wall, processor = time.perf_counter(), time.process_time()
        work()
        costs.append(Cost(time.perf_counter() - wall, time.process_time() - processor))
    return min(costs, key=lambda cost: cost.wall)


def make(lake: Lake, shards: Sequence[str], calls: int) -> None:
    """Publishes the scored calls."""
    for number, shard in enumerate(shards):
        lake.table("calculator/loss_deltas").publish(
            shard, [scored_calls(number, calls // SHARDS)], {"tool": "calculator"}
        )


def measure(folder: Path, calls: int) -> None:
    """Makes the lane and prints a line per step."""
    lake, database, tool = Lake(folder / "lake"), folder / "warehouse.duckdb", load_tool("calculator", {})
    shards = [f"en_head_{shard:04d}" for shard in range(SHARDS)]
    make(lake, shards, calls)
    taus = iter(np.linspace(0.5, 0.9, RUNS))

    def refilter() -> None:
        lane = Lane(tool, tau_s=0.0, k=20, m=10, tau_f=float(next(taus)), limits=ToolLimits())
        print(f"  kept {filtered_calls(lake, lane, shards, examples_per_tool=25_000).rows:,} at {lane.tau_f:.2f}")

    costs = [best_of(refilter)]
    print(f"{costs[0]}  filtered_calls over {calls:,} scored calls")
    print(f"{best_of(lambda: build(lake, [tool.key], shards, database))}  warehouse built anew")
    for sql in QUERIES:
        costs.append(best_of(partial(query, database, sql)))
        print(f"{costs[-1]}  {sql}")
    total = Cost(sum(cost.wall for cost in costs), sum(cost.processor for cost in costs))
    print(f"{total}  filter and views together (at most 2 s wanted)")


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
