"""Changed thresholds cost what they ask for and nothing else, and give what a run from nothing gives."""

import pytest

from resources.spent import Spent
from tests.line.conftest import assert_same

AFTER_FILTER = {"training/augmented_corpus", "warehouse/loss_deltas"}
CANDIDATES = ["calculator/scored_candidates[one]", "calculator/scored_candidates[two]"]


def test_tau_f_makes_its_filter_stale_and_asks_no_model_and_no_tool(world):
    [(middle,)] = world.sql("select median(delta) from filtered_calls where tool = 'calculator'")
    change = f"tools.calculator.tau_f={middle}"
    line = world.line(change)
    [filtered] = line.stale()
    assert str(filtered) == "calculator/filtered_calls"
    assert f"settings.tau_f: 0.0 -> {middle}" in line.why(filtered)
    ran = world.run(change)
    assert ran.assets[0] == "calculator/filtered_calls"
    assert set(ran.assets) == {"calculator/filtered_calls", *AFTER_FILTER}
    assert ran.spent == Spent(tokens=0, calls=0)
    assert world.sql(f"select count(*) from filtered_calls where tool = 'calculator' and delta < {middle}") == [(0,)]


def test_tau_f_that_keeps_the_same_rows_runs_its_filter_and_the_copy_for_sql(world):
    [(smallest,)] = world.sql("select min(delta) from filtered_calls where tool = 'calculator'")
    before = world.tables()
    change = f"tools.calculator.tau_f={smallest / 2}"
    ran = world.run(change)
    assert ran.assets == ["calculator/filtered_calls", "warehouse/loss_deltas"]
    assert ran.spent == Spent(tokens=0, calls=0)
    assert world.sql("select tau_f from lanes where tool = 'calculator'") == [(smallest / 2,)]
    assert world.run(change).assets == []
    after = world.tables()
    name = "calculator/filtered_calls[all]"
    assert after[name].drop("tau_f").equals(before[name].drop("tau_f"))


def test_more_samples_are_paid_for_alone_and_fewer_cost_nothing(world, fresh, monkeypatch):
    more = ("tools.calculator.k=3", "tools.calculator.m=4", "tools.calculator.tau_s=0.05")
    assert world.stale(*more) == CANDIDATES
    before = world.tables()
    ran = world.run(*more)
    assert {stage.split("/")[0] for stage in ran.stages()} == {"calculator", "training", "warehouse"}
    after = world.tables()
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    whole = fresh.run(*more)
    assert_same(after, fresh.tables())
    assert 0 < ran.spent.tokens < 0.6 * whole.spent.tokens
    assert fresh.run().spent == Spent(tokens=0, calls=0)
    assert_same(fresh.tables(), before)


@pytest.mark.parametrize("change", ["tools.calculator.m=2", "tools.calculator.k=1", "tools.calculator.tau_s=0.4"])
def test_each_threshold_makes_its_own_stage_stale(world, change):
    assert world.stale(change) == CANDIDATES
