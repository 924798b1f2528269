"""ccnet/shard_list: which shards there are, so that a removed one is noticed by what is made of all of them."""

from collections.abc import Mapping

import dagster as dg

from assets.metadata import counts_table
from assets.plan import OWNERS, Plan
from resources.held_partitions import keep_partitions
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.shards import ShardFile, partitions, shard_files

KEY = dg.AssetKey(["ccnet", "shard_list"])


def shard_list(plan: Plan) -> dg.AssetsDefinition:
    """Its code version is the list itself, read when the definitions are loaded."""
    files = partitions(shard_files(plan.settings))

    @dg.asset(
        key=KEY,
        group_name="ccnet",
        code_version=list_version(files),
        kinds={"python"},
        owners=OWNERS,
        description="The shard files and their partitions; a partition without a file leaves every table.",
    )
    def names(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
        gone = keep_partitions(context.instance, files)
        counts = {name: len(files[name]) for name in files}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(list_version(files)),
            metadata={
                "dagster/row_count": len(files),
                "files": dg.MetadataValue.md(counts_table("partition", counts)),
                "removed": ", ".join(gone) or "none",
            },
        )

    return names


def list_version(files: Mapping[str, tuple[ShardFile, ...]]) -> str:
    """Another one whenever a file comes or goes."""
    return fingerprint({name: [file.name for file in files[name]] for name in files})
