"""One of several processes that write the same rows, parts and warehouse at once. Arguments: lake, seed."""

import sys
from pathlib import Path

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.lake.table import Lake
from toolformer_dag.lake.warehouse_building import build_warehouse
from toolformer_dag.method.call_warehouse import CallWarehouse
from toolformer_dag.pipeline.loss_deltas import STAGE
from toolformer_dag.pipeline.stages import build_warehouse_tables, list_table_outputs
from toolformer_dag.settings.settings_file import load_settings

folder = Path(sys.argv[1])
seed = int(sys.argv[2])
lake = Lake(folder)
file = folder / f"{seed}.toml"
file.write_text("[tools.calculator]")
tables = build_warehouse_tables(list_table_outputs(Plan.from_settings(load_settings(file, environment={}))))
store = lake.open_row_store("calculator/losses", {"model": "m"}, ("key",), {"key": pl.Int64(), "value": pl.Int64()})
schema = STAGE.schema
scored = {**dict.fromkeys(schema.names()), "tool": "calculator", "digest": "d", "segment": 0, "sample": 0}


def record() -> dict[str, object]:
    """Say as much as the warehouse reads."""
    return {"stage": "loss_deltas", "tool": "calculator", "settings": {}}


for step in range(10):
    keys = [seed * 20 + step, step]  # the second is written by every process
    store.append_rows(pl.DataFrame({"key": keys, "value": [7 * key for key in keys]}))
    rows = [{**scored, "shard": "both", "position": i, "delta": float(step)} for i in range(5)]
    frame = pl.DataFrame(rows, schema=schema)
    lake.get_table("calculator/loss_deltas").publish("both", [frame], record)
    own = frame.with_columns(pl.lit(f"own {seed}").alias("shard"))
    lake.get_table("calculator/loss_deltas").publish(f"own {seed}", [own], record)
    build_warehouse(lake, CallWarehouse(tables, {"calculator": "Calculator"}), folder / "warehouse.duckdb")
