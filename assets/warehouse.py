"""warehouse/loss_deltas: the DuckDB file that people query, rebuilt beside the old one and renamed over it."""

import dagster as dg

from assets.augmented_corpus import KEY as CORPUS
from assets.metadata import counts_table
from assets.plan import OWNERS, Plan
from assets.raw_shards import KEY as RAW_SHARDS
from assets.shard_list import KEY as SHARD_LIST
from resources.instance import shard_names
from resources.warehouse import WarehouseResource
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse_sources import LANE_STAGES


def warehouse_tables(plan: Plan) -> dg.AssetsDefinition:
    """All tables of the lake in one file, with the views of storage/views.sql."""
    lanes = [lane.key for lane in plan.lanes]

    @dg.asset(
        key=["warehouse", "loss_deltas"],
        group_name="warehouse",
        deps=[SHARD_LIST, RAW_SHARDS, CORPUS, *(dg.AssetKey([lane, stage]) for lane in lanes for stage in LANE_STAGES)],
        code_version=fingerprint({"lanes": lanes, "tables": 3}),
        kinds={"duckdb"},
        owners=OWNERS,
        description="Every scored call in one DuckDB file: loss_deltas, the other tables, the views.",
    )
    def tables(
        context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake], warehouse: WarehouseResource
    ) -> dg.MaterializeResult:
        shards = shard_names(context.instance)
        rows = warehouse.build(lake, lanes, shards)
        return dg.MaterializeResult(
            data_version=dg.DataVersion(fingerprint({"run": context.run.run_id})),
            metadata={
                "dagster/row_count": rows.get("loss_deltas", 0),
                "rows": dg.MetadataValue.md(counts_table("table", rows)),
                "file": dg.MetadataValue.path(warehouse.database),
            },
        )

    return tables
