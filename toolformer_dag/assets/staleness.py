"""What is out of date, by the records in the lake alone; what Dagster learns of the lake and of the shard files."""

import gc
from collections.abc import Iterable, Mapping, Sequence

import dagster as dg

from toolformer_dag.assets.declaration import OWNERS, Output, asset_key
from toolformer_dag.assets.metadata import ROWS, counts_table, last_materialization
from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.update import Reasons
from toolformer_dag.identity import fingerprint

VERSION, CODE, READ = "dagster/data_version", "dagster/code_version", "dagster/input_data_version/"
"""Tags of a materialization."""


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
    """Let the UI show what the lake holds, where another instance made it, or a run over another lake came since."""
    versions = {output.name: version for output in outputs if (version := output.version())}
    for output in outputs:
        key, state = asset_key(output.name), {VERSION: versions.get(output.name, ""), CODE: output.code_version}
        if output.name not in versions or is_known(instance, key, state) or output.reasons():
            continue
        read = {f"{READ}{name}": versions[name] for name in output.depends_on if name in versions}
        instance.report_runless_asset_event(dg.AssetMaterialization(key, tags={**state, **read}))


def is_known(instance: dg.DagsterInstance, key: dg.AssetKey, tags: Mapping[str, str]) -> bool:
    """Return whether Dagster learned last that an asset is in the state of these tags."""
    made = last_materialization(instance, key)
    return made is not None and tags.items() <= (made.tags or {}).items()


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
