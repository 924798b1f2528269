"""The sensor that notices shard files which were added, changed or removed."""

import json
from collections.abc import Mapping

import dagster as dg

from assets.plan import Plan
from assets.raw_shards import KEY as RAW_SHARDS
from assets.shard_list import KEY as SHARD_LIST
from resources.instance import keep_partitions
from toolformer_dag.shards import ShardFile, partitions, shard_files

Stamps = Mapping[str, list[tuple[str, int, int]]]


def shard_sensor(plan: Plan) -> dg.SensorDefinition:
    """Keeps the partitions those of the files, and asks for the partitions whose files are new or changed.

    The cursor holds every partition's files with size and time of change. What comes after raw_shards is run by the
    automation of the settings, or by a person.
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
        now = stamps(partitions(shard_files(plan.settings)))
        before: Stamps = json.loads(context.cursor or "{}")
        gone = keep_partitions(context.instance, now)
        changed = [name for name in now if json.loads(json.dumps(now[name])) != before.get(name)]
        requests = [_request(name, now) for name in changed]
        if changed or gone:
            requests.append(dg.RunRequest(asset_selection=[SHARD_LIST]))
        return dg.SensorResult(requests, cursor=json.dumps(now))

    return notice


def stamps(files: Mapping[str, tuple[ShardFile, ...]]) -> Stamps:
    """Name, bytes and time of change of every partition's files; a file that is not there yet is left out."""
    return {
        name: [
            (file.name, file.path.stat().st_size, file.path.stat().st_mtime_ns)
            for file in files[name]
            if file.path.exists()
        ]
        for name in files
    }


def _request(name: str, now: Stamps) -> dg.RunRequest:
    key = f"{name}-{hash_of(now[name])}"
    return dg.RunRequest(run_key=key, partition_key=name, asset_selection=[RAW_SHARDS])


def hash_of(stamp: list[tuple[str, int, int]]) -> str:
    """A run is requested once per content of the stamp."""
    from toolformer_dag.fingerprint import fingerprint

    return fingerprint([list(entry) for entry in stamp])
