"""Finding what is stale: a few queries for all outputs against Dagster's resolver, which asks per output.

python -m benchmarks.stale [--shards 30]

A shard holds two documents. Everything is brought up to date first; then both look by turns, five times each.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from benchmarks.line_world import LineWorld
from resources.line import Line
from resources.staleness import stale_assets
from toolformer_dag.settings.load import load_settings

LOOKS = 5


def by_the_resolver(line: Line) -> int:
    """How many outputs are not fresh."""
    graph = line.definitions.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(line.instance, graph, LoadingContextForTest(line.instance))
    parts = {key: list(line.shards) if graph.get(key).is_partitioned else [None] for key in graph.get_all_asset_keys()}
    return sum(resolver.get_status(key, part) != StaleStatus.FRESH for key in parts for part in parts[key])


def by_queries(line: Line) -> int:
    """The same, as the command line finds it."""
    return len(stale_assets(line.definitions, line.instance, line.shards))


def seconds(look: Callable[[], int]) -> float:
    """Of one look."""
    begin = time.perf_counter()
    look()
    return time.perf_counter() - begin


def main() -> None:
    """Prints a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, default=30)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        world = LineWorld.make(Path(folder) / "world", 2 * arguments.shards, arguments.shards)
        world.run()
        line = Line.of(load_settings(world.folder / "toolformer.toml", environment={}))
        found = [(seconds(lambda: by_the_resolver(line)), seconds(lambda: by_queries(line))) for _ in range(LOOKS)]
        assert by_the_resolver(line) == by_queries(line)
        resolver, queries = (median(times) for times in zip(*found, strict=True))
        print(f"resolver {resolver:.2f} s, queries {queries:.2f} s: {resolver / queries:.1f} times")


if __name__ == "__main__":
    main()
