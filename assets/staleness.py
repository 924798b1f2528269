"""What is out of date, by the records in the lake alone: Dagster's history may be of another lake, and is told."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dagster as dg

from assets.outputs import BY_HAND, Output
from assets.tables import asset_key
from toolformer_dag.pipeline.update import Reasons

VERSION, CODE, READ = "dagster/data_version", "dagster/code_version", "dagster/input_data_version/"
"""Tags of a materialization."""


@dataclass(frozen=True, slots=True)
class StaleAsset:
    """An asset that is missing or out of date, and why."""

    name: str
    reasons: Reasons

    @property
    def by_hand(self) -> bool:
        """Whether the second job makes it."""
        return self.name in BY_HAND


def stale_assets(outputs: Sequence[Output]) -> list[StaleAsset]:
    """Return every missing or stale asset, upstream first.

    An asset whose inputs alone are stale counts as fresh until they land with other content, as in the UI.
    """
    found = (StaleAsset(output.name, output.reasons()) for output in outputs)
    return [one for one in found if one.reasons]


def tell_dagster(outputs: Sequence[Output], instance: dg.DagsterInstance) -> None:
    """Let the UI show what the lake holds, where another instance made it, or a run over another lake came since."""
    versions = {output.name: output.version() for output in outputs}
    for output in outputs:
        event = instance.get_latest_materialization_event(asset_key(output.name))
        known = (event.asset_materialization.tags if event and event.asset_materialization else None) or {}
        told = {VERSION: versions[output.name] or "", CODE: output.code_version}
        if not told[VERSION] or output.reasons() or {name: known.get(name) for name in told} == told:
            continue
        read = {f"{READ}{name}": versions.get(name) or "" for name in output.depends_on}
        made = dg.AssetMaterialization(
            asset_key(output.name), tags=told | {name: one for name, one in read.items() if one}
        )
        instance.report_runless_asset_event(made)


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
