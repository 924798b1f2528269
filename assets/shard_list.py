"""ccnet/shard_list: the shard files as they are now, so that a new file shows in the lineage page."""

import dagster as dg

from assets.declaration import OWNERS, asset_key
from assets.metadata import ROWS, counts_table
from assets.outputs import SHARD_LIST
from assets.staleness import VERSION, is_known
from toolformer_dag.identity import fingerprint
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.shards import stamps

KEY = asset_key(SHARD_LIST)


def shard_list(plan: Plan) -> dg.AssetsDefinition:
    """Return the asset of the shard files; another version whenever a file comes, goes or changes."""

    @dg.asset(
        key=KEY,
        group_name="ccnet",
        code_version="1",
        kinds={"python"},
        owners=OWNERS,
        description="The shard files: names, sizes and times of change. The sensor `shard_files` looks at them.",
    )
    def files() -> dg.MaterializeResult:
        found = stamps(plan.fresh().shards)
        sizes = {name: stamp.get("bytes", 0) for name, stamp in found.items()}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(fingerprint(found)),
            metadata={ROWS: len(found), "bytes": dg.MetadataValue.md(counts_table("shard", sizes, "bytes"))},
        )

    return files


def observe(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Tell Dagster which shard files there are, where they changed since it was told; return whether they did."""
    now = {VERSION: fingerprint(stamps(plan.fresh().shards))}
    if is_known(instance, KEY, now):
        return False
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, tags=now))
    return True
