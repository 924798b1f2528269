"""Find out what is out of date, by the records in the lake alone, and report the lake's state to Dagster.

What another Dagster home or the command line has made is reported as a materialization without a run.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg

from toolformer_dag.assets.declaration import ASSET_OWNERS, AssetDeclaration, build_asset_key
from toolformer_dag.assets.metadata import (
    ROW_COUNT_LABEL,
    UNCHANGED_LABEL,
    find_last_materialization,
    format_counts_table,
)
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.reasons import Reasons
from toolformer_dag.identity import fingerprint

VERSION_TAG = "dagster/data_version"
"""The tag of a materialization with the version of its content."""
CODE_VERSION_TAG = "dagster/code_version"
"""The tag of a materialization with the version of the settings that it was made with."""
INPUT_VERSION_TAG_PREFIX = "dagster/input_data_version/"
"""Begins the tag with the version of an input; the name of the input follows."""
INPUT_EVENT_TAG_PREFIX = "dagster/input_event_pointer/"
"""Begins the tag with the event of this version. Dagster takes an input for a new one if either tag is missing."""
NO_EVENT_POINTER = "NULL"
"""The value of a tag with INPUT_EVENT_TAG_PREFIX, for any event: Dagster compares events of partitions only."""
OUT_OF_DATE_CODE_VERSION = "out of date"
"""The reported code version of a stored asset that is out of date: it equals none, so the page shows it unsynced."""


def find_stale_assets(outputs: Sequence[AssetDeclaration]) -> dict[str, Reasons]:
    """Find all assets that are missing or out of date.

    As in Dagster's UI, an asset with stale inputs counts as fresh until these inputs get another content.

    Returns:
        The reasons by the name of the asset, in the order of `outputs`.
    """
    # The records of 100,000 parts hold no reference cycles, and searching them for some took a third of the time.
    gc.disable()
    try:
        reasons_by_name = {output.name: output.find_reasons() for output in outputs}
    finally:
        gc.enable()
    return {name: reasons for name, reasons in reasons_by_name.items() if reasons}


def report_stored_assets(outputs: Sequence[AssetDeclaration], instance: dg.DagsterInstance) -> None:
    """Report the stored assets to Dagster, so that its page marks the same assets as `find_stale_assets` finds.

    Call `report_shard_files` first, so that Dagster knows the shard files, which are inputs too.

    Args:
        outputs: All assets, each after its dependencies.
        instance: The Dagster instance.
    """
    # The version that Dagster knows of each asset. At first only that of the list of shard files is known.
    version_by_asset = _read_known_shard_list_version(instance)
    for output in outputs:
        stored_version = output.get_version()
        if stored_version is not None:
            shown_version = _report_stored_asset(instance, output, stored_version, version_by_asset)
            version_by_asset[output.name] = shown_version


def _report_stored_asset(
    instance: dg.DagsterInstance, output: AssetDeclaration, stored_version: str, version_by_asset: Mapping[str, str]
) -> str:
    """Report a stored asset to Dagster, unless Dagster knows it already.

    Args:
        instance: The Dagster instance.
        output: The asset.
        stored_version: The version of what is stored.
        version_by_asset: The versions of the assets that it depends on, by name.

    Returns:
        The version that Dagster's page shows from now on: the stored version, or, for an asset that is out of date, the
        version that the page showed before.
    """
    tags = {VERSION_TAG: stored_version, CODE_VERSION_TAG: output.code_version}
    input_tags = build_input_version_tags(output, version_by_asset)

    if is_known_to_dagster(instance, build_asset_key(output.name), tags, input_tags):
        return stored_version

    is_out_of_date = bool(output.find_reasons())
    if is_out_of_date:
        return _report_stale_asset(instance, output, stored_version, input_tags)

    report_materialization(instance, output, tags | input_tags)
    return stored_version


def _report_stale_asset(
    instance: dg.DagsterInstance, output: AssetDeclaration, stored_version: str, input_tags: Mapping[str, str]
) -> str:
    """Make Dagster's page show a stored asset as out of date.

    If Dagster knows the asset, nothing is reported: the page keeps its last version, and shows it as stale. A new
    asset is reported with its stored version. In place of the code version (that of its settings) it gets one that no
    asset has, which the page marks.

    Args:
        instance: The Dagster instance.
        output: The asset.
        stored_version: The version of what is stored.
        input_tags: The tags with the versions of its inputs.

    Returns:
        The version that the page shows.
    """
    last_materialization = find_last_materialization(instance, build_asset_key(output.name))
    if last_materialization is not None:
        return _get_tags(last_materialization).get(VERSION_TAG, stored_version)

    version_tags = {VERSION_TAG: stored_version, CODE_VERSION_TAG: OUT_OF_DATE_CODE_VERSION}
    report_materialization(instance, output, {**version_tags, **input_tags})
    return stored_version


def _read_known_shard_list_version(instance: dg.DagsterInstance) -> dict[str, str]:
    """Return the version of the list of shard files that Dagster knows, by the name of its asset; perhaps empty."""
    last_materialization = find_last_materialization(instance, SHARD_LIST_KEY)
    if last_materialization is None:
        return {}
    return {SHARD_LIST_ASSET: _get_tags(last_materialization)[VERSION_TAG]}


def build_input_version_tags(output: AssetDeclaration, version_by_asset: Mapping[str, str]) -> dict[str, str]:
    """Build the tags that tell Dagster from which versions of its inputs an asset was made.

    Args:
        output: The asset.
        version_by_asset: The known versions, by the name of the input. Inputs without a known version get no tag.
    """
    tags = {}
    for name in output.depends_on:
        if name in version_by_asset:
            tags[f"{INPUT_VERSION_TAG_PREFIX}{name}"] = version_by_asset[name]
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
        instance: The Dagster instance.
        output: The asset.
        tags: The tags VERSION_TAG and CODE_VERSION_TAG, and those of `build_input_version_tags`.
        metadata: What the page shows. None to repeat what it shows already, if that describes the same rows.
    """
    asset_key = build_asset_key(output.name)
    last_of_same_rows = _find_last_materialization_with_version(instance, asset_key, tags[VERSION_TAG])
    if metadata is None:
        metadata = _build_repeated_metadata(last_of_same_rows)

    all_tags = {**tags, **_build_input_event_tags(tags)}
    materialization = dg.AssetMaterialization(asset_key, metadata=metadata, tags=all_tags)
    instance.report_runless_asset_event(materialization)

    if last_of_same_rows is not None:
        # Without this the page would show no checks of the new materialization.
        for check_name in output.promise_by_check:
            _repeat_check_evaluation(instance, dg.AssetCheckKey(asset_key, check_name))


def _build_repeated_metadata(last_materialization: dg.AssetMaterialization | None) -> dict[str, Any]:
    """Return the metadata of a materialization again, marked as unchanged. Empty without a materialization."""
    if last_materialization is None:
        return {}
    return {**last_materialization.metadata, UNCHANGED_LABEL: True}


def _find_last_materialization_with_version(
    instance: dg.DagsterInstance, asset_key: dg.AssetKey, version: str
) -> dg.AssetMaterialization | None:
    """Return the last materialization that Dagster knows of an asset, or None if it has another version."""
    last_materialization = find_last_materialization(instance, asset_key)
    if last_materialization is None:
        return None
    has_version = _get_tags(last_materialization).get(VERSION_TAG) == version
    return last_materialization if has_version else None


def _build_input_event_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Build the second tag that Dagster wants of each input: besides the version, the event that made this version.

    Without it Dagster takes the input for a new one. Its value is the same for all inputs, because Dagster does not
    compare it here (see NO_EVENT_POINTER).

    Example:
        {"dagster/input_data_version/calculator/loss_deltas": "7f"} gives
        {"dagster/input_event_pointer/calculator/loss_deltas": "NULL"}. Other tags give none.
    """
    event_tags = {}
    for tag in tags:
        if tag.startswith(INPUT_VERSION_TAG_PREFIX):
            input_name = tag.removeprefix(INPUT_VERSION_TAG_PREFIX)
            event_tags[f"{INPUT_EVENT_TAG_PREFIX}{input_name}"] = NO_EVENT_POINTER
    return event_tags


def _repeat_check_evaluation(instance: dg.DagsterInstance, check_key: dg.AssetCheckKey) -> None:
    """Report the last result of an asset's check again, so that the page shows it for the newest materialization too.

    Call this only if the rows are the same as before. Nothing is reported if the check never ended.
    """
    record = instance.get_latest_asset_check_evaluation_record(check_key)
    evaluation = record.evaluation if record is not None else None
    if evaluation is None:  # the run ended before the check
        return

    instance.report_runless_asset_event(
        dg.AssetCheckEvaluation(
            asset_key=check_key.asset_key,
            check_name=check_key.name,
            passed=evaluation.passed,
            metadata=evaluation.metadata,
            severity=evaluation.severity,
            description=evaluation.description,
            blocking=evaluation.blocking,
        )
    )


def is_known_to_dagster(
    instance: dg.DagsterInstance,
    asset_key: dg.AssetKey,
    required_tags: Mapping[str, str],
    input_tags: Mapping[str, str] | None = None,
) -> bool:
    """Check whether the last materialization that Dagster knows of an asset has certain tags.

    Args:
        instance: The Dagster instance.
        asset_key: The asset.
        required_tags: The tags that it must have, among others.
        input_tags: Exactly the tags that it must have for the versions of its inputs. None if these do not matter.
    """
    last_materialization = find_last_materialization(instance, asset_key)
    if last_materialization is None:
        return False

    has_required_tags = required_tags.items() <= _get_tags(last_materialization).items()
    has_input_tags = input_tags is None or _select_input_tags(last_materialization) == input_tags
    return has_required_tags and has_input_tags


def _select_input_tags(materialization: dg.AssetMaterialization) -> dict[str, str]:
    """Return the tags of a materialization that hold versions of inputs."""
    return {tag: value for tag, value in _get_tags(materialization).items() if tag.startswith(INPUT_VERSION_TAG_PREFIX)}


def _get_tags(materialization: dg.AssetMaterialization) -> Mapping[str, str]:
    """Return the tags of a materialization. Empty if it has none."""
    return materialization.tags or {}


def list_with_descendants(outputs: Sequence[AssetDeclaration], start_names: Iterable[str]) -> list[str]:
    """Return the names of some assets, of everything that depends on them, and of the prepared tools they all need.

    A prepared tool is the asset of what a tool makes before its first call, such as an index. Without it no call can
    be made.

    Args:
        outputs: All assets, each after its dependencies.
        start_names: The names of the assets to begin with.

    Returns:
        The names, in the order of `outputs`.
    """
    chosen_names = set(start_names)
    for output in outputs:  # one pass is enough, because the dependencies of an asset come before it
        if chosen_names & set(output.depends_on):
            chosen_names.add(output.name)

    chosen_outputs = [output for output in outputs if output.name in chosen_names]
    wanted_names = chosen_names | _collect_prepared_tool_names(chosen_outputs)
    return [output.name for output in outputs if output.name in wanted_names]


def _collect_prepared_tool_names(outputs: Sequence[AssetDeclaration]) -> set[str]:
    """Return the names of the prepared tools that some assets depend on, such as "wiki_search/prepared_tool"."""
    input_names = {name for output in outputs for name in output.depends_on}
    return {name for name in input_names if name.endswith("/prepared_tool")}


SHARD_LIST_ASSET = "ccnet/shard_list"
"""The asset of the shard files, which lie outside of the lake."""
SHARD_LIST_KEY = build_asset_key(SHARD_LIST_ASSET)


def build_shard_list_asset(plan: Plan) -> dg.AssetsDefinition:
    """Return the Dagster asset of the list of shard files. Its version changes whenever a file comes, goes or changes.

    The shard files are the files of the corpus. They lie outside of the lake, and other programs write them.
    """

    @dg.asset(
        key=SHARD_LIST_KEY,
        group_name="ccnet",
        code_version="1",
        kinds={"python"},
        owners=ASSET_OWNERS,
        description="The shard files: names, sizes and times of change. The sensor `shard_files` looks at them.",
    )
    def files() -> dg.MaterializeResult:
        return _build_shard_list_result(plan.copy_without_cache())

    return files


def _build_shard_list_result(plan: Plan) -> dg.MaterializeResult:
    """Return the version of the shard files, and what their page shows: their number and their sizes in bytes."""
    stamp_by_shard = plan.stamp_by_shard  # looks at every file
    size_by_shard = {name: stamp.get("bytes", 0) for name, stamp in stamp_by_shard.items()}
    size_table = format_counts_table("shard", size_by_shard, "bytes")
    return dg.MaterializeResult(
        data_version=dg.DataVersion(fingerprint(stamp_by_shard)),
        metadata={ROW_COUNT_LABEL: len(stamp_by_shard), "bytes": dg.MetadataValue.md(size_table)},
    )


def report_shard_files(instance: dg.DagsterInstance, plan: Plan) -> bool:
    """Report the shard files (those of the corpus) to Dagster if they have changed since it last learned of them.

    Dagster then shows what was made from older ones as out of date.

    Returns:
        Whether they have changed, or were not known at all.
    """
    current_stamps = plan.copy_without_cache().stamp_by_shard  # looks at the files again
    tags = {VERSION_TAG: fingerprint(current_stamps)}
    if is_known_to_dagster(instance, SHARD_LIST_KEY, tags):
        return False
    instance.report_runless_asset_event(dg.AssetMaterialization(SHARD_LIST_KEY, tags=tags))
    return True
