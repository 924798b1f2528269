"""The sensor that notices shard files which were added, changed or removed."""

from collections.abc import Sequence

import dagster as dg

from assets.plan import Plan
from assets.raw_shards import KEY as RAW_SHARDS
from assets.shard_list import KEY as SHARD_LIST
from assets.shard_list import list_version
from resources.changed_shards import unread_shards
from resources.held_partitions import ShardsInUse, keep_partitions
from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.shards import ShardFile, partitions, paths_by_name, shard_files
from toolformer_dag.stages import raw_shards
from toolformer_dag.storage.lake import Lake


def shard_sensor(plan: Plan) -> dg.SensorDefinition:
    """Keeps the partitions those of the files, and asks for what is new, changed or gone; nothing where all is read.

    A request is made once per content and reading, so a file that cannot be read is not tried again until it changes.
    The cursor holds the list of files that was asked for last. What comes after is run by the automation of the
    settings, or by a person.
    """

    @dg.sensor(
        name="shard_files",
        asset_selection=dg.AssetSelection.assets(RAW_SHARDS, SHARD_LIST),
        minimum_interval_seconds=plan.settings.execution.sensor_seconds,
        default_status=(
            dg.DefaultSensorStatus.RUNNING if plan.settings.execution.automation else dg.DefaultSensorStatus.STOPPED
        ),
        description="Requests ccnet/raw_shards for every partition whose shard files are new or changed.",
    )
    def notice(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        files = partitions(shard_files(plan.settings))
        try:
            keep_partitions(context.instance, files)
        except ShardsInUse as error:  # looked at again at the next tick
            return dg.SensorResult(skip_reason=str(error), cursor=context.cursor)
        unread = unread_shards(Lake(plan.settings.paths.lake), files)
        requests = [_request(context.instance, name, files[name]) for name in unread]
        version = list_version(files)
        if version not in (context.cursor, _listed(context.instance)):
            requests.append(dg.RunRequest(asset_selection=[SHARD_LIST]))
        return dg.SensorResult(requests, cursor=version)

    return notice


def _request(instance: dg.DagsterInstance, name: str, files: Sequence[ShardFile]) -> dg.RunRequest:
    """One per name, bytes and time of change of the partition's files, and per time that they were read.

    A file that is not there yet is left out. Dagster drops a key that it has seen, where the lake is lost too.
    """
    stamp = fingerprint(raw_shards.inputs(paths_by_name(files)))
    run_key = f"{name}-{stamp}-{_last_read(instance, name)}"
    return dg.RunRequest(run_key=run_key, partition_key=name, asset_selection=[RAW_SHARDS])


def _last_read(instance: dg.DagsterInstance, partition: str) -> int:
    """The number of the event; 0 where there is none."""
    wanted = dg.AssetRecordsFilter(RAW_SHARDS, asset_partitions=[partition])
    records = instance.fetch_materializations(wanted, limit=1).records
    return records[0].storage_id if records else 0


def _listed(instance: dg.DagsterInstance) -> str | None:
    """The version of the list that was materialized last."""
    event = instance.get_latest_materialization_event(SHARD_LIST)
    made = event.asset_materialization if event else None
    return made.tags.get("dagster/data_version") if made and made.tags else None
