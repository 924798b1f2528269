"""A threshold by chance in a run: it depends on the control, says what it chose, and goes back for free."""

import re

import pytest
from dagster import AssetKey

from tests.command_line import cli
from toolformer_dag.assets.metadata import UNCHANGED
from toolformer_dag.definitions import definitions_of
from toolformer_dag.pipeline.chance import kept_nothing

FILTER, CONTROL = "calculator/filtered_calls", "calculator/swapped_results"
BY_CHANCE = "tools.calculator.tau_f={ by_chance = 0.9 }"


def test_the_filter_depends_on_the_control_only_with_a_threshold_by_chance(world):
    def upstream(*overrides):
        graph = definitions_of(world.project(*overrides).plan).resolve_asset_graph()
        return AssetKey(CONTROL.split("/")) in graph.get(AssetKey(FILTER.split("/"))).parent_keys

    assert upstream(BY_CHANCE) and not upstream()
    assert "settings.tau_f.by_chance: (absent) -> 0.9" in world.reasons(BY_CHANCE)[FILTER]


@pytest.mark.long
def test_a_run_says_what_it_chose_by_chance_and_why_a_lane_keeps_no_call_and_it_stands_in_tables_and_metadata(world):
    options = [part for change in (BY_CHANCE, "tools.sums.tau_f=50") for part in ("--set", change)]
    done = cli("stale", "--run", "--config", str(world.folder / "toolformer.toml"), *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(FILTER)]
    assert re.fullmatch(FILTER + r": [\d,]+ rows in [\d.]+ s", lines[0])
    [(rule, verdict, tau_f)] = world.sql(
        "select by_chance, verdict, tau_f from filter_rules join lanes using (tool) where tool = 'calculator'"
    )
    level = f"select tau_f, kept from chance_thresholds where tool = 'calculator' and by_chance = {rule}"
    [(threshold, kept)] = world.sql(level)
    assert (rule, tau_f) == (0.9, threshold)
    assert world.sql("select count(*) from filtered_calls where tool = 'calculator'") == [(kept,)]
    assert world.figures("tables/table_3")[UNCHANGED].value is True  # and it shows what it showed
    assert world.figures("tables/table_3")["plot"].value.startswith("![plot]")
    assert world.figures("tables/table_2")[UNCHANGED].value is False
    assert ("keeps" in world.figures(FILTER)["threshold"].value) == (verdict == "certified")
    [(places, best)] = world.sql("select count(*), max(delta) from places where tool = 'sums'")
    [by_chance] = world.sql(
        "select by_chance, by_chance_low, by_chance_high from swapped_statistics where tool = 'sums' and tau_f = 50"
    )
    assert f"sums: no call is kept at tau_f = 50. Of {places} places the best gains {best:.3f}" in done.stderr
    assert "0 at 50 (by chance {}, 95 %: {}-{})".format(*by_chance) in done.stderr


def test_a_threshold_that_is_reached_nowhere_keeps_nothing_and_says_so(world):
    unreached = "tools.calculator.tau_f={ by_chance = 0.000001 }"
    report = world.update(unreached, "tools.sums.tau_f=50")[FILTER]
    assert report.rejections["no_threshold"] > 0 and sum(report.rows.values()) == 0
    [calculator, sums, told] = kept_nothing(world.project(unreached, "tools.sums.tau_f=50").plan)
    assert calculator.startswith("calculator: no call is kept. Of ") and sums.startswith("sums: no call is kept at")
    assert "nothing to finetune on. Lower tau_f" in told


def test_a_lane_without_a_judged_call_says_at_which_stage_its_calls_ended(world):
    change = "tools.calculator.tau_s=0.999999"
    world.update(change)
    [told] = kept_nothing(world.project(change).plan)
    [(texts,)] = world.sql("select count(*) from texts where tool = 'calculator'")
    assert told.startswith(f"calculator: no call is kept, for no call was proposed for {texts} texts; lower tau_s (")
    assert f"no_position {texts})" in told and 'sql "from funnel"' in told
