"""What is out of date: by the records in the lake, and by Dagster's own rules over its last materializations."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from assets.outputs import BY_HAND, Output, Reasons
from assets.tables import asset_key

VERSION, CODE, READ = "dagster/data_version", "dagster/code_version", "dagster/input_data_version/"
"""Tags of a materialization."""


@dataclass(frozen=True, slots=True)
class StaleAsset:
    """An asset that is missing or out of date, and why. `since`: the event of its last materialization, 0 for none."""

    name: str
    reasons: Reasons
    since: int

    @property
    def by_hand(self) -> bool:
        """Whether the second job makes it."""
        return self.name in BY_HAND


def stale_assets(outputs: Sequence[Output], instance: dg.DagsterInstance) -> list[StaleAsset]:
    """Return every missing or stale asset, upstream first.

    An asset whose inputs alone are stale counts as fresh until they land with other content, as in the UI. The lake is
    asked too: it may have lost rows, or hold rows of another instance.
    """
    last = {output.name: _last(instance, output.name) for output in outputs}
    found = []
    for output in outputs:
        since, tags = last[output.name]
        reasons = output.reasons() or Reasons(tuple(_by_dagster(output, tags, last)))
        if reasons:
            found.append(StaleAsset(output.name, reasons, since))
    return found


def with_descendants(outputs: Sequence[Output], names: Iterable[str]) -> list[str]:
    """Return `names` and everything that depends on them, in order."""
    chosen = set(names)
    for output in outputs:  # in order: what a name depends on stands before it
        if chosen & set(output.depends_on):
            chosen.add(output.name)
    return [output.name for output in outputs if output.name in chosen]


Tags = Mapping[str, str]


def _last(instance: dg.DagsterInstance, name: str) -> tuple[int, Tags]:
    """The last materialization: number of its event, and tags."""
    records = instance.fetch_materializations(asset_key(name), limit=1).records
    if not records or (made := records[0].asset_materialization) is None:
        return 0, {}
    return records[0].storage_id, made.tags or {}


def _by_dagster(output: Output, tags: Tags, last: Mapping[str, tuple[int, Tags]]) -> Iterator[str]:
    """Why the UI shows an asset as unsynced although its record in the lake says otherwise."""
    if not tags:
        yield "never materialized in this Dagster instance"
        return
    if tags.get(CODE) != output.code_version:
        yield "has a new code version"
    stored = output.version()
    if stored is not None and tags.get(VERSION) != stored:
        yield "the lake holds other rows than the last run made"
    for name in output.depends_on:
        read, now = tags.get(READ + name), last[name][1].get(VERSION) if name in last else None
        if now is not None and read != now:
            yield f"has a new version of {name}"
