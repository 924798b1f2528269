"""What the last run of each output noted in the instance, read in a few queries."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import dagster as dg
from dagster._core.definitions.assets.graph.asset_graph import AssetGraph
from dagster._core.definitions.data_version import DataProvenance, extract_data_version_from_entry

Output = tuple[dg.AssetKey, str | None]
"""An asset and its partition."""
EVENTS = 500  # at a time: a query of SQLite takes a limited number of values


@dataclass(frozen=True, slots=True)
class Made:
    """Versions of the rows, of the code that made them, and of what it was made from."""

    version: str
    code_version: str | None
    inputs: Mapping[dg.AssetKey, str]

    @staticmethod
    def of(entry: dg.EventLogEntry) -> "Made":
        """Of a materialization's event."""
        provenance = DataProvenance.from_tags(entry.tags or {})
        inputs = {key: version.value for key, version in provenance.input_data_versions.items()} if provenance else {}
        version = extract_data_version_from_entry(entry)
        return Made(version.value if version else "", provenance.code_version if provenance else None, inputs)


def last_made(instance: dg.DagsterInstance, graph: AssetGraph) -> dict[Output, Made]:
    """Of every output that was ever made; those of partitions that are gone are among them."""
    whole = [key for key in graph.materializable_asset_keys if not graph.get(key).is_partitioned]
    found: dict[Output, Made] = {}
    for record in instance.get_asset_records(whole):
        if (event := record.asset_entry.last_materialization_record) is not None:
            found[record.asset_entry.asset_key, None] = Made.of(event.event_log_entry)
    for key in graph.materializable_asset_keys - set(whole):
        found |= {(key, event.partition_key): Made.of(event.event_log_entry) for event in _last_events(instance, key)}
    return found


def _last_events(instance: dg.DagsterInstance, key: dg.AssetKey) -> Iterator[dg.EventLogRecord]:
    """The last materialization of each partition."""
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    last = list(instance.event_log_storage.get_latest_storage_id_by_partition(key, kind).values())
    for first in range(0, len(last), EVENTS):
        wanted = dg.AssetRecordsFilter(asset_key=key, storage_ids=last[first : first + EVENTS])
        yield from instance.fetch_materializations(wanted, limit=EVENTS).records
