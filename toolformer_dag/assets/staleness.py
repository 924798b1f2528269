"""What is out of date, by the records in the lake alone; what Dagster learns of the lake and of the shard files."""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, Output, asset_key
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, counts_table, last_materialization
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.identity import fingerprint

VERSION = "dagster/data_version"
CODE = "dagster/code_version"
READ = "dagster/input_data_version/"
READ_EVENT = "dagster/input_event_pointer/"
"""Tags of a materialization: its versions, and for each input its version and the event that had it. Dagster takes an
input for a new one where either is lacking."""
NO_EVENT = "NULL"
"""The value of READ_EVENT where the event does not matter: Dagster compares those of partitions alone."""
OUT_OF_DATE = "out of date"
"""The code version told of what is stored and out of date: it equals no asset's, so that the page shows it unsynced."""


def stale_assets(outputs: Sequence[Output]) -> dict[str, Reasons]:
    """Return every missing or stale asset, upstream first, and why.

    An asset whose inputs alone are stale counts as fresh until they land with other content, as in the UI.
    """
    gc.disable()  # the records of 100,000 parts hold no circle, and looking for one took a third of the time
    try:
        by_name = {output.name: output.reasons() for output in outputs}
    finally:
        gc.enable()
    return {name: reasons for name, reasons in by_name.items() if reasons}


def tell_dagster(outputs: Sequence[Output], instance: dg.DagsterInstance) -> None:
    """Let the page mark what `stale_assets` lists and nothing else, whoever made what the lake holds.

    Dagster knows the runs of its own home alone: a lake that was moved, or that another home filled, looks unsynced or
    missing. `outputs`: upstream first. Call `observe` before, so that the shard files are known.
    """
    versions: dict[str, str] = {}
    shards = last_materialization(instance, SHARDS)
    if shards is not None:
        versions[SHARD_LIST] = _tags(shards)[VERSION]
    for output in outputs:
        version = output.version()
        if version is None:
            continue
        versions[output.name] = version
        key = asset_key(output.name)
        state = {VERSION: version, CODE: output.code_version}
        read = read_versions(output, versions)
        if is_known(instance, key, state, read):
            continue
        if output.reasons():
            last = last_materialization(instance, key)
            if last is not None:  # the page marks it, for what has changed; what comes after it stays as it is
                versions[output.name] = _tags(last).get(VERSION, version)
                continue
            state[CODE] = OUT_OF_DATE
        tell_state(instance, output, state | read)


def read_versions(output: Output, versions: Mapping[str, str]) -> dict[str, str]:
    """Return the tags by which Dagster knows of which versions of its inputs an output was made.

    `versions`: by name; inputs that are not in it have no tag.
    """
    read = {}
    for name in output.depends_on:
        if name in versions:
            read[f"{READ}{name}"] = versions[name]
    return read


def tell_state(
    instance: dg.DagsterInstance, output: Output, tags: Mapping[str, str], shown: Mapping[str, Any] | None = None
) -> None:
    """Report a materialization without a run. `shown`: its metadata.

    Without `shown` the page goes on to show what it showed of the same rows, and how their checks ended.
    """
    key = asset_key(output.name)
    events = {name.replace(READ, READ_EVENT, 1): NO_EVENT for name in tags if name.startswith(READ)}
    last = last_materialization(instance, key)
    same_rows = last is not None and _tags(last).get(VERSION) == tags[VERSION]
    if shown is None:
        shown = {**last.metadata, UNCHANGED: True} if last is not None and same_rows else {}
    instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=shown, tags={**tags, **events}))
    for name in output.checks if same_rows else ():
        record = instance.get_latest_asset_check_evaluation_record(dg.AssetCheckKey(key, name))
        evaluation = record.evaluation if record is not None else None
        if evaluation is not None:  # none where the run ended before the check
            instance.report_runless_asset_event(
                dg.AssetCheckEvaluation(
                    asset_key=key,
                    check_name=name,
                    passed=evaluation.passed,
                    metadata=evaluation.metadata,
                    severity=evaluation.severity,
                    description=evaluation.description,
                    blocking=evaluation.blocking,
                )
            )


def is_known(
    instance: dg.DagsterInstance,
    key: dg.AssetKey,
    state: Mapping[str, str],
    read: Mapping[str, str] | None = None,
) -> bool:
    """Return whether Dagster learned last that an asset has the tags of `state`.

    `read`: the tags of all its inputs too, and of no other; None where these do not count.
    """
    last = last_materialization(instance, key)
    if last is None or not state.items() <= _tags(last).items():
        return False
    last_read = {name: value for name, value in _tags(last).items() if name.startswith(READ)}
    return read is None or last_read == read


def _tags(materialization: dg.AssetMaterialization) -> Mapping[str, str]:
    return materialization.tags or {}


def with_descendants(outputs: Sequence[Output], names: Iterable[str]) -> list[str]:
    """Return `names` and everything that depends on them, in order, and the prepared tools that they call."""
    chosen = set(names)
    for output in outputs:  # in order: what a name depends on stands before it
        if chosen & set(output.depends_on):
            chosen.add(output.name)
    called = {
        name
        for output in outputs
        if output.name in chosen
        for name in output.depends_on
        if name.endswith("/prepared_tool")
    }
    return [output.name for output in outputs if output.name in chosen | called]


SHARD_LIST = "ccnet/shard_list"
SHARDS = asset_key(SHARD_LIST)


def shard_list(plan: Plan) -> dg.AssetsDefinition:
    """Return the asset of the shard files; another version whenever a file comes, goes or changes."""

    @dg.asset(
        key=SHARDS,
        group_name="ccnet",
        code_version="1",
        kinds={"python"},
        owners=OWNERS,
        description="The shard files: names, sizes and times of change. The sensor `shard_files` looks at them.",
    )
    def files() -> dg.MaterializeResult:
        stamps = plan.fresh().stamps
        sizes = {name: stamp.get("bytes", 0) for name, stamp in stamps.items()}
        return dg.MaterializeResult(
            data_version=dg.DataVersion(fingerprint(stamps)),
            metadata={ROWS: len(stamps), "bytes": dg.MetadataValue.md(counts_table("shard", sizes, "bytes"))},
        )

    return files


def observe(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Tell Dagster which shard files there are, where they changed since it last learned; return whether they did."""
    now = {VERSION: fingerprint(plan.fresh().stamps)}
    if is_known(instance, SHARDS, now):
        return False
    instance.report_runless_asset_event(dg.AssetMaterialization(SHARDS, tags=now))
    return True
