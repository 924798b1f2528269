"""What each asset tells of itself, before it is made and after."""

import dagster as dg
import pytest

from tests.contract.conftest import IGNORED, REPOSITORY, World


@pytest.fixture(scope="module")
def specs() -> dict[str, dg.AssetSpec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CONFIG", str(REPOSITORY / "toolformer.toml"))
        from toolformer_dag.definitions import defs

        loaded = defs() if callable(defs) else defs
        found = {spec.key.to_user_string(): spec for spec in loaded.resolve_all_asset_specs()}
    return {name: spec for name, spec in found.items() if name != IGNORED}


def test_every_asset_tells_what_it_is(specs):
    for name, spec in specs.items():
        assert spec.description, name
        assert spec.owners, name
        assert spec.kinds, name
        assert spec.code_version, name


def test_a_lane_of_ones_own_is_a_lane_like_the_others(made: World):
    landed = made.materialized()
    assert {name.partition("/")[2] for name in landed if name.startswith("sums/")} == {
        name.partition("/")[2] for name in landed if name.startswith("calculator/")
    }


def test_materializations_tell_rows_tokens_and_calls(made: World):
    with made.instance() as instance:
        event = instance.get_latest_materialization_event(dg.AssetKey(["sums", "loss_deltas"]))
    told = event.asset_materialization.metadata
    for name in ("dagster/row_count", "tokens through the model", "tool calls", "seconds", "computed"):
        assert name in told
