"""Running what is stale: the lowest first, and no further than something changed."""

from collections.abc import Mapping
from hashlib import sha256

import dagster as dg
import pytest

from resources.batches import Batch
from resources.held_partitions import keep_partitions
from resources.instance import SHARDS
from resources.runs import Outcome, bring_up_to_date, materialize
from resources.staleness import StaleAsset, stale_assets

Values = dict[str, str]


def graph_of(values: Mapping[str, str]) -> dg.Definitions:
    """shards -> counted -> kept -> trained: `kept` is unpartitioned, its content is `values["kept"]` rounded down."""

    def asset(name: str, deps: list[str], partitioned: bool, content: str) -> dg.AssetsDefinition:
        @dg.asset(
            name=name,
            deps=deps,
            code_version=values[name],
            partitions_def=SHARDS if partitioned else None,
        )
        def body() -> dg.MaterializeResult:
            if values[name] == "broken":
                raise ValueError("the tool is down")
            return dg.MaterializeResult(data_version=dg.DataVersion(sha256(content.encode()).hexdigest()))

        return body

    return dg.Definitions(
        [
            asset("raw", [], True, values["raw"]),
            asset("counted", ["raw"], True, values["counted"]),
            asset("kept", ["counted"], False, values["kept"].split(".")[0]),
            asset("trained", ["kept"], False, values["trained"]),
            asset("other_lane", ["raw"], True, values["other_lane"]),
        ]
    )


FIRST = {"raw": "1", "counted": "1", "kept": "1.0", "trained": "1", "other_lane": "1"}


@pytest.fixture
def instance():
    with dg.DagsterInstance.ephemeral() as instance:
        keep_partitions(instance, ["a", "b"])
        yield instance


def brought(instance: dg.DagsterInstance, values: Mapping[str, str]) -> Outcome:
    definitions, shards = graph_of(values), instance.get_dynamic_partitions("shards")
    return bring_up_to_date(
        definitions.resolve_asset_graph(),
        look=lambda: stale_assets(definitions, instance, shards),
        run=lambda batches: (materialize(definitions, instance, batch) for batch in batches),
    )


def ran(instance: dg.DagsterInstance, values: Mapping[str, str]) -> list[str]:
    return [str(asset) for asset in brought(instance, values).ran]


def stale_of(values: Values, instance: dg.DagsterInstance, shards: list[str], *names: str) -> list[StaleAsset]:
    found = stale_assets(graph_of(values), instance, shards)
    return [asset for asset in found if asset.partition and asset.key.to_user_string() in names]


def test_first_run_makes_everything_once_and_a_second_one_nothing(instance):
    assert sorted(ran(instance, FIRST)) == [
        "counted[a]", "counted[b]", "kept", "other_lane[a]", "other_lane[b]", "raw[a]", "raw[b]", "trained",
    ]  # fmt: skip
    assert ran(instance, FIRST) == []


def test_change_stops_where_the_content_stays_the_same(instance):
    ran(instance, FIRST)
    assert ran(instance, FIRST | {"kept": "1.5"}) == ["kept"]
    assert ran(instance, FIRST | {"kept": "2.0"}) == ["kept", "trained"]


def test_new_partition_alone_is_missing(instance):
    ran(instance, FIRST)
    keep_partitions(instance, ["a", "b", "c"])
    stale = [str(asset) for asset in stale_assets(graph_of(FIRST), instance, ["a", "b", "c"])]
    assert sorted(stale) == ["counted[c]", "other_lane[c]", "raw[c]"]
    assert ran(instance, FIRST)[-1] == "kept"


def test_what_was_never_made_waits_for_all_rows_that_a_change_above_may_reach(instance):
    """A run that was killed and goes on under another threshold: `kept` of the old rows of `a` would be wrong."""
    keep_partitions(instance, ["a"])
    changed = FIRST | {"raw": "2"}
    materialize(graph_of(FIRST), instance, Batch("a", tuple(stale_of(FIRST, instance, ["a"], "raw", "counted"))))
    keep_partitions(instance, ["a", "b"])
    order = ran(instance, changed)
    assert order.index("kept") > max(order.index("counted[a]"), order.index("counted[b]"))
    assert stale_assets(graph_of(changed), instance, ["a", "b"]) == []


def test_failed_lane_leaves_the_others_going(instance):
    outcome = brought(instance, FIRST | {"counted": "broken"})
    assert sorted(map(str, outcome.ran)) == ["other_lane[a]", "other_lane[b]", "raw[a]", "raw[b]"]
    assert "the tool is down" in next(reason for asset, reason in outcome.failed.items() if str(asset) == "counted[a]")
    assert sorted(ran(instance, FIRST)) == ["counted[a]", "counted[b]", "kept", "trained"]


def test_causes_say_what_changed(instance):
    ran(instance, FIRST)
    [kept] = stale_assets(graph_of(FIRST | {"kept": "2.0"}), instance, ["a", "b"])
    assert str(kept) == "kept"
    assert "code version" in kept.causes[0]
