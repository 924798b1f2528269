"""Automation runs what changed hop by hop, stops where the output is unchanged, and leaves training alone."""

import dagster as dg
import pytest

from resources.runs import bring_up_to_date, materialize
from resources.staleness import stale_assets
from toolformer_dag.definitions import build_definitions
from toolformer_dag.settings.load import load_settings

ON = "execution.automation=true"


class Daemon:
    """Evaluates the conditions of the real graph tick by tick and runs what they ask for."""

    def __init__(self, world) -> None:
        self._world = world
        self._cursor = None
        self._instance = world.line(ON).instance

    def tick(self, *overrides: str) -> list[str]:
        settings = load_settings(self._world.folder / "toolformer.toml", environment={}, overrides=(ON, *overrides))
        definitions = build_definitions(settings)
        found = dg.evaluate_automation_conditions(definitions, self._instance, cursor=self._cursor)
        self._cursor = found.cursor
        keys = [key for key in definitions.resolve_asset_graph().toposorted_asset_keys if found.get_num_requested(key)]
        outcome = bring_up_to_date(
            definitions.resolve_asset_graph(),
            look=lambda: stale_assets(definitions, self._instance, ["one", "two"]),
            run=lambda batches: (materialize(definitions, self._instance, batch) for batch in batches),
            wanted=lambda key: key in keys,
        )
        assert not outcome.failed
        return sorted(key.to_user_string() for key in keys)


@pytest.fixture
def daemon(world) -> Daemon:
    return Daemon(world)


def test_a_change_runs_hop_by_hop_and_training_stays_by_hand(world, daemon):
    [(middle,)] = world.sql("select median(delta) from filtered_calls where tool = 'calculator'")
    change = f"tools.calculator.tau_f={middle}"
    assert daemon.tick() == []
    assert daemon.tick(change) == ["calculator/filtered_calls"]
    assert "training/augmented_corpus" in daemon.tick(change)
    while asked := daemon.tick(change):
        assert asked == ["warehouse/loss_deltas"]
    assert {str(asset) for asset in world.line(change).stale()} == {
        "training/baseline_checkpoint",
        "training/finetuned_checkpoint",
        "evaluation/perplexity",
    }


def test_it_stops_where_the_same_rows_come_out(world, daemon):
    [(smallest,)] = world.sql("select min(delta) from filtered_calls where tool = 'calculator'")
    change = f"tools.calculator.tau_f={smallest / 2}"
    assert daemon.tick() == []
    assert daemon.tick(change) == ["calculator/filtered_calls"]
    assert daemon.tick(change) == []
