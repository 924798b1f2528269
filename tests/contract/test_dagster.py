"""What Dagster loads: the assets of the default settings, what each tells of itself, and how light loading is."""

import itertools

import dagster as dg
import pytest

from tests.contract.conftest import IGNORED, REPOSITORY, Expected, World

ASSETS = Expected("assets")


@pytest.fixture(scope="module")
def specs() -> dict[str, dg.AssetSpec]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLFORMER_CONFIG", str(REPOSITORY / "toolformer.toml"))
        from toolformer_dag.definitions import defs

        loaded = defs() if callable(defs) else defs
        found = {spec.key.to_user_string(): spec for spec in loaded.resolve_all_asset_specs()}
    return {name: spec for name, spec in found.items() if name != IGNORED}


def test_the_default_settings_give_these_assets_in_these_groups(specs):
    groups = {name: spec.group_name for name, spec in specs.items()}
    expected = ASSETS.of("groups", groups)
    assert {name: groups.get(name) for name in expected} == expected


def test_every_asset_tells_what_it_is(specs):
    for name in ASSETS.of("groups", {name: spec.group_name for name, spec in specs.items()}):
        spec = specs[name]
        assert spec.description, name
        assert spec.owners, name
        assert spec.kinds, name
        assert spec.code_version, name


def test_the_stages_of_a_lane_hang_together(specs):
    chain = ("heuristic_subset", "scored_candidates", "tool_results", "loss_deltas", "filtered_calls")
    above: dict[str, set[str]] = {}
    for name, spec in specs.items():
        direct = {dep.asset_key.to_user_string() for dep in spec.deps}
        above[name] = direct
    for before, after in itertools.pairwise(chain):
        assert f"calculator/{before}" in _ancestors(above, f"calculator/{after}")
    lanes = {name.partition("/")[0] for name in specs if name.endswith("/filtered_calls")}
    assert {f"{lane}/filtered_calls" for lane in lanes} <= _ancestors(above, "training/augmented_corpus")
    assert "training/augmented_corpus" in _ancestors(above, "training/finetuned_checkpoint")
    assert "training/finetuned_checkpoint" in _ancestors(above, "evaluation/accuracy")
    assert "ccnet/raw_shards" in _ancestors(above, "calculator/heuristic_subset")


def _ancestors(above: dict[str, set[str]], name: str) -> set[str]:
    found: set[str] = set()
    open_ = [name]
    while open_:
        new = above.get(open_.pop(), set()) - found
        found |= new
        open_ += new
    return found


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
