"""Find out what is out of date, by the records in the lake alone, and report the lake's state to Dagster.

What another Dagster home or the command line has made is reported as a materialization without a run.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, AssetDeclaration, asset_key
from toolformer_dag.assets.metadata import ROWS, UNCHANGED, find_last_materialization, format_counts_table
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.identity import fingerprint

VERSION = "dagster/data_version"
"""The tag of a materialization with the version of its content."""
CODE = "dagster/code_version"
"""The tag of a materialization with the version of the settings that it was made with."""
READ = "dagster/input_data_version/"
"""Begins the tag with the version of an input; the name of the input follows."""
READ_EVENT = "dagster/input_event_pointer/"
"""Begins the tag with the event of this version. Dagster takes an input for a new one if either tag is missing."""
NO_EVENT = "NULL"
"""The value of READ_EVENT for any event: Dagster compares events of partitions only."""
OUT_OF_DATE = "out of date"
"""The reported code version of a stored asset that is out of date: it equals none, so the page shows it unsynced."""


def list_stale_assets(outputs: Sequence[AssetDeclaration]) -> dict[str, Reasons]:
    """Find all assets that are missing or out of date.

    An asset with stale inputs counts as fresh until these inputs get another content, as in Dagster's UI.

    Returns:
        The reasons by the name of the asset, in the order of `outputs`.
    """
    gc.disable()  # the records of 100,000 parts hold no reference cycles; looking for some took a third of the time
    try:
        reasons_by_name = {output.name: output.reasons() for output in outputs}
    finally:
        gc.enable()
    return {name: reasons for name, reasons in reasons_by_name.items() if reasons}


def tell_dagster(outputs: Sequence[AssetDeclaration], instance: dg.DagsterInstance) -> None:
    """Report the stored assets to Dagster, so that its page marks the same assets as `list_stale_assets`.

    Call `observe` first, so that Dagster knows the shard files.

    Args:
        outputs: All assets, each after its dependencies.
    """
    # Asset name -> the version that Dagster knows of it; first only of the list of shard files, an input of the others.
    versions = _read_shard_list_version(instance)
    for output in outputs:
        stored_version = output.version()
        if stored_version is not None:
            versions[output.name] = _report_stored(instance, output, stored_version, versions)


def _report_stored(
    instance: dg.DagsterInstance, output: AssetDeclaration, stored_version: str, input_versions: Mapping[str, str]
) -> str:
    """Report a stored asset to Dagster, unless Dagster knows it already.

    Args:
        input_versions: The versions of the assets that it depends on, by name.

    Returns:
        The version that Dagster's page shows from now on: the stored version, or, for an asset that is out of
        date, the version that Dagster saw last.
    """
    tags = {VERSION: stored_version, CODE: output.code_version}
    input_tags = build_input_version_tags(output, input_versions)

    if is_known(instance, asset_key(output.name), tags, input_tags):
        return stored_version

    is_out_of_date = bool(output.reasons())
    if is_out_of_date:
        return _report_out_of_date(instance, output, stored_version, input_tags)

    report_materialization(instance, output, tags | input_tags)
    return stored_version


def _report_out_of_date(
    instance: dg.DagsterInstance, output: AssetDeclaration, stored_version: str, input_tags: Mapping[str, str]
) -> str:
    """Make Dagster's page show an asset as out of date.

    If Dagster knows the asset, nothing is reported: the page keeps its last version, and shows it as stale. A
    new asset is reported with its stored version, and with a code version that no asset has.

    Returns:
        The version that the page shows.
    """
    last = find_last_materialization(instance, asset_key(output.name))
    if last is not None:
        return _get_tags(last).get(VERSION, stored_version)

    tags = {VERSION: stored_version, CODE: OUT_OF_DATE}
    report_materialization(instance, output, {**tags, **input_tags})
    return stored_version


def _read_shard_list_version(instance: dg.DagsterInstance) -> dict[str, str]:
    """Return {SHARD_LIST: its version} as Dagster knows it; empty if Dagster knows none."""
    last = find_last_materialization(instance, SHARDS)
    return {} if last is None else {SHARD_LIST: _get_tags(last)[VERSION]}


def build_input_version_tags(output: AssetDeclaration, versions: Mapping[str, str]) -> dict[str, str]:
    """Build the tags that tell Dagster from which versions of its inputs an asset was made.

    Args:
        versions: The known versions by the name of the asset. Other inputs get no tag.
    """
    tags = {}
    for name in output.depends_on:
        if name in versions:
            tags[f"{READ}{name}"] = versions[name]
    return tags


def report_materialization(
    instance: dg.DagsterInstance,
    output: AssetDeclaration,
    tags: Mapping[str, str],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Report to Dagster that an asset was made, although no run of this Dagster instance made it.

    If the last materialization has the same version, it has the same rows. Then the results of its checks are
    reported again.

    Args:
        tags: The tags VERSION and CODE, and the tags of `build_input_version_tags`.
        metadata: What the page shows. None to repeat what it shows already, if that describes the same rows.
    """
    key = asset_key(output.name)
    last_of_same_rows = _find_materialization_of_version(instance, key, tags[VERSION])

    if metadata is None:
        metadata = _repeat_metadata(last_of_same_rows)

    all_tags = {**tags, **_build_event_tags(tags)}
    instance.report_runless_asset_event(dg.AssetMaterialization(key, metadata=metadata, tags=all_tags))

    if last_of_same_rows is not None:
        # Without this the page would show no checks of the new materialization.
        for check_name in output.checks:
            _report_check_again(instance, dg.AssetCheckKey(key, check_name))


def _repeat_metadata(last: dg.AssetMaterialization | None) -> dict[str, Any]:
    """Return the metadata of a materialization, marked UNCHANGED; empty for None."""
    return {} if last is None else {**last.metadata, UNCHANGED: True}


def _find_materialization_of_version(
    instance: dg.DagsterInstance, key: dg.AssetKey, version: str
) -> dg.AssetMaterialization | None:
    """Return the last materialization that Dagster knows of an asset if it has this version, else None."""
    last = find_last_materialization(instance, key)
    return last if last is not None and _get_tags(last).get(VERSION) == version else None


def _build_event_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return a tag READ_EVENT for each tag READ: Dagster wants both of each input, and ignores the value."""
    event_tags = {}
    for tag in tags:
        if tag.startswith(READ):
            input_name = tag.removeprefix(READ)
            event_tags[f"{READ_EVENT}{input_name}"] = NO_EVENT
    return event_tags


def _report_check_again(instance: dg.DagsterInstance, check: dg.AssetCheckKey) -> None:
    """Report the last result of a check for the newest materialization. Do nothing if the check never ended."""
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
    tags: Mapping[str, str],
    input_tags: Mapping[str, str] | None = None,
) -> bool:
    """Check whether the last materialization that Dagster knows of an asset has certain tags.

    Args:
        tags: The tags that it must have, among others.
        input_tags: Exactly the tags that it must have for the versions of its inputs. None if these do not matter.
    """
    last = find_last_materialization(instance, key)
    if last is None:
        return False

    has_tags = tags.items() <= _get_tags(last).items()
    has_input_tags = input_tags is None or _select_input_tags(last) == input_tags
    return has_tags and has_input_tags


def _select_input_tags(materialization: dg.AssetMaterialization) -> dict[str, str]:
    """Return the tags of a materialization that hold versions of inputs."""
    return {tag: value for tag, value in _get_tags(materialization).items() if tag.startswith(READ)}


def _get_tags(materialization: dg.AssetMaterialization) -> Mapping[str, str]:
    """Return the tags of a materialization; empty if it has none."""
    return materialization.tags or {}


def with_descendants(outputs: Sequence[AssetDeclaration], names: Iterable[str]) -> list[str]:
    """Add to some assets everything that depends on them, and the prepared tools that all these need.

    A prepared tool is what a tool makes before its first call, such as an index. Without it no call can be made.

    Args:
        outputs: All assets, each after its dependencies.
        names: The names of the assets to begin with.

    Returns:
        The names of the assets in the order of `outputs`.
    """
    chosen_names = set(names)
    for output in outputs:  # one pass is enough: what an output depends on was looked at before
        if chosen_names & set(output.depends_on):
            chosen_names.add(output.name)

    chosen = [output for output in outputs if output.name in chosen_names]
    wanted_names = chosen_names | _select_prepared_tools(chosen)
    return [output.name for output in outputs if output.name in wanted_names]


def _select_prepared_tools(outputs: Sequence[AssetDeclaration]) -> set[str]:
    """Return the names of the prepared tools that assets depend on."""
    names = {name for output in outputs for name in output.depends_on}
    return {name for name in names if name.endswith("/prepared_tool")}


SHARD_LIST = "ccnet/shard_list"
"""The asset of the shard files, which lie outside of the lake."""
SHARDS = asset_key(SHARD_LIST)


def shard_list(plan: Plan) -> dg.AssetsDefinition:
    """Return the asset of the shard files, whose version changes whenever a file comes, goes or changes."""

    @dg.asset(
        key=SHARDS,
        group_name="ccnet",
        code_version="1",
        kinds={"python"},
        owners=OWNERS,
        description="The shard files: names, sizes and times of change. The sensor `shard_files` looks at them.",
    )
    def files() -> dg.MaterializeResult:
        return _build_shard_list_result(plan.fresh())

    return files


def _build_shard_list_result(plan: Plan) -> dg.MaterializeResult:
    """Return the version of the shard files, their number and their sizes."""
    stamps = plan.stamps  # looks at every file
    sizes = {name: stamp.get("bytes", 0) for name, stamp in stamps.items()}
    size_table = format_counts_table("shard", sizes, "bytes")
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fingerprint(stamps)),
        metadata={ROWS: len(stamps), "bytes": dg.MetadataValue.md(size_table)},
    )


def observe(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Report the shard files to Dagster if they changed since it last learned of them; return whether they did."""
    state = {VERSION: fingerprint(plan.fresh().stamps)}
    if is_known(instance, SHARDS, state):
        return False
    instance.report_runless_asset_event(dg.AssetMaterialization(SHARDS, tags=state))
    return True
