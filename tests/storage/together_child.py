"""One of several processes that write the same rows, partition and warehouse at once. Arguments: lake, seed."""

import sys
from pathlib import Path

import polars as pl

from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import build

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
lake = Lake(folder)
store = lake.rows("calculator/losses", {"model": "m"}, ("key",), {"key": pl.Int64, "value": pl.Int64})
scored = {
    **dict.fromkeys(columns("loss_deltas").names()),
    "tool": "calculator",
    "digest": "d",
    "segment": 0,
    "sample": 0,
}
for step in range(10):
    keys = [seed * 20 + step, step]  # the second is written by every process
    store.append(pl.DataFrame({"key": keys, "value": [7 * key for key in keys]}))
    rows = [{**scored, "shard": "both", "position": i, "delta": float(step)} for i in range(5)]
    frame = pl.DataFrame(rows, schema=columns("loss_deltas"))
    lake.table("calculator/loss_deltas").publish("both", [frame], {"tool": "calculator"})
    own = frame.with_columns(pl.lit(f"own {seed}").alias("shard"))
    lake.table("calculator/loss_deltas").publish(f"own {seed}", [own], {"tool": "calculator"})
    build(lake, ["calculator"], ["both", "own 0", "own 1"], folder / "warehouse.duckdb")
