"""What is out of date, by the records in the lake alone; what Dagster learns of the lake and of the shard files.

Dagster knows an asset by its last materialization, whose tags hold versions. Where somebody else made what the lake
holds, such as another home or the command line, a materialization without a run tells it so.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, AssetDeclaration, asset_key
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, counts_table, last_materialization
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.identity import fingerprint

VERSION = "dagster/data_version"
"""The tag of a materialization with the version of its content."""
CODE = "dagster/code_version"
"""The tag of a materialization with the version of the settings that it was made with."""
READ = "dagster/input_data_version/"
"""What the tag with the version of an input begins with; the name of the input follows."""
READ_EVENT = "dagster/input_event_pointer/"
"""The same of the event that had this version. Dagster takes an input for a new one where either tag is lacking."""
NO_EVENT = "NULL"
"""The value of READ_EVENT where the event does not matter: Dagster compares those of partitions alone."""
OUT_OF_DATE = "out of date"
"""The code version told of what is stored and out of date: it equals no asset's, so that the page shows it unsynced."""


def stale_assets(outputs: Sequence[AssetDeclaration]) -> dict[str, Reasons]:
    """Return every missing or stale asset, upstream first, and why.

    An asset whose inputs alone are stale counts as fresh until they land with other content, as in the UI.
    """
    gc.disable()  # the records of 100,000 parts hold no circle, and looking for one took a third of the time
    try:
        reasons_by_name = {output.name: output.reasons() for output in outputs}
    finally:
        gc.enable()
    return {name: reasons for name, reasons in reasons_by_name.items() if reasons}


def tell_dagster(outputs: Sequence[AssetDeclaration], instance: dg.DagsterInstance) -> None:
    """Let the page mark what `stale_assets` lists and nothing else, whoever made what the lake holds.

    Dagster knows the runs of its own home alone: a lake that was moved, or that another home filled, looks unsynced or
    missing. `outputs`: upstream first. Call `observe` before, so that the shard files are known.
    """
    versions: dict[str, str] = {}
    shards = last_materialization(instance, SHARDS)
    if shards is not None:
        versions[SHARD_LIST] = _tags(shards)[VERSION]
    for output in outputs:
        stored_version = output.version()
        if stored_version is None:
            continue
        versions[output.name] = stored_version
        state = {VERSION: stored_version, CODE: output.code_version}
        read = read_versions(output, versions)
        if is_known(instance, asset_key(output.name), state, read):
            continue
        if output.reasons():
            last = last_materialization(instance, asset_key(output.name))
            if last is not None:  # the page marks it, for what has changed; what comes after it stays as it is
                versions[output.name] = _tags(last).get(VERSION, stored_version)
                continue
            state[CODE] = OUT_OF_DATE
        tell_state(instance, output, state | read)


def read_versions(output: AssetDeclaration, versions: Mapping[str, str]) -> dict[str, str]:
    """Return the tags by which Dagster knows of which versions of its inputs an output was made.

    `versions`: by name; inputs that are not in it have no tag.
    """
    read = {}
    for name in output.depends_on:
        if name in versions:
            read[f"{READ}{name}"] = versions[name]
    return read


def tell_state(
    instance: dg.DagsterInstance,
    output: AssetDeclaration,
    tags: Mapping[str, str],
    shown: Mapping[str, Any] | None = None,
) -> None:
    """Report a materialization without a run.

    - `tags`: its VERSION and CODE, and those of `read_versions`
    - `shown`: its metadata. Without it the page goes on to show what it showed of the same rows, and how their checks
      ended
    """
    key = asset_key(output.name)
    events = {name.replace(READ, READ_EVENT, 1): NO_EVENT for name in tags if name.startswith(READ)}
    last = last_materialization(instance, key)
    has_same_rows = last is not None and _tags(last).get(VERSION) == tags[VERSION]
    if shown is None:
        shown = {**last.metadata, UNCHANGED: True} if last is not None and has_same_rows else {}
    instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=shown, tags={**tags, **events}))
    if has_same_rows:
        for check_name in output.checks:
            _tell_check_again(instance, dg.AssetCheckKey(key, check_name))


def _tell_check_again(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> None:
    """Report how a check ended last, for the materialization that was reported since; nothing where it never ended."""
    record = instance.get_latest_asset_check_evaluation_record(check)
    evaluation = record.evaluation if record is not None else None
    if evaluation is None:  # the run ended before the check
        return
    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=check.asset_key,
            check_name=check.name,
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
    """Return whether the last materialization that Dagster knows of an asset has these tags.

    - `state`: tags that it must have, beside others
    - `read`: tags that `read_versions` returns, of which it must have exactly these; None where they do not count
    """
    last = last_materialization(instance, key)
    if last is None:
        return False
    tags = _tags(last)
    has_state = state.items() <= tags.items()
    last_read = {name: value for name, value in tags.items() if name.startswith(READ)}
    return has_state and (read is None or last_read == read)


def _tags(materialization: dg.AssetMaterialization) -> Mapping[str, str]:
    """Return the tags of a materialization, which has none without versions."""
    return materialization.tags or {}


def with_descendants(outputs: Sequence[AssetDeclaration], names: Iterable[str]) -> list[str]:
    """Return `names` and everything that depends on them, in order, and the prepared tools that they call.

    `outputs`: all assets, each after those that it depends on.
    """
    chosen = set(names)
    for output in outputs:
        if chosen & set(output.depends_on):
            chosen.add(output.name)
    called: set[str] = set()
    for output in outputs:
        if output.name in chosen:
            called.update(name for name in output.depends_on if name.endswith("/prepared_tool"))
    return [output.name for output in outputs if output.name in chosen | called]


SHARD_LIST = "ccnet/shard_list"
"""The asset of the shard files, which lie outside of the lake."""
SHARDS = asset_key(SHARD_LIST)


def shard_list(plan: Plan) -> dg.AssetsDefinition:
    """Return the asset of the shard files, which has another version whenever a file comes, goes or changes."""

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
    state = {VERSION: fingerprint(plan.fresh().stamps)}
    if is_known(instance, SHARDS, state):
        return False
    instance.report_runless_asset_event(dg.AssetMaterialization(SHARDS, tags=state))
    return True
