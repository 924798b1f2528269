"""ccnet/raw_shards: the documents of CCNet shards, and the lines that were refused."""

import dagster as dg

from assets.checks import specs, unique_keys
from assets.metadata import result
from assets.plan import OWNERS, Plan
from assets.progress import progress
from resources.instance import SHARDS
from toolformer_dag.shards import partitions, paths_by_name, shard_files, write_small_web
from toolformer_dag.stages import raw_shards as stage
from toolformer_dag.storage.lake import Lake

KEY = dg.AssetKey(["ccnet", "raw_shards"])
READER = "6"  # raised by hand when the same file would give other rows


def raw_shards(plan: Plan) -> dg.AssetsDefinition:
    """A row per document of a shard file; the text of everything that follows."""

    @dg.asset(
        key=KEY,
        group_name="ccnet",
        partitions_def=SHARDS,
        code_version=READER,
        kinds={"python", "parquet"},
        owners=OWNERS,
        check_specs=specs(KEY, "unique_keys"),
        description="Documents of CCNet shards, with the date their URL tells; a refused line is counted by reason.",
    )
    def documents(context: dg.AssetExecutionContext, lake: dg.ResourceParam[Lake]) -> dg.MaterializeResult:
        partition = context.partition_key
        if not plan.settings.corpus.shards:
            write_small_web(plan.settings)
        files = partitions(shard_files(plan.settings)).get(partition)
        if files is None:
            raise dg.Failure(f"partition {partition!r} has no shard file any more; run `toolformer-dag run` to drop it")
        report = stage.raw_shards(lake, partition, paths_by_name(files), progress=progress(context))
        rows = lake.table("ccnet/raw_shards").scan([partition])
        return result(report, rows, [unique_keys(rows, stage.STAGE)])

    return documents
