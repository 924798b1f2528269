"""A threshold by chance in a run: it depends on the control, says what it chose, and goes back for free."""

from dagster import AssetKey
from typer.testing import CliRunner

from tests.runs.conftest import by_machine, free
from toolformer_dag.cli import app
from toolformer_dag.definitions import definitions_of

FILTER, CONTROL = "calculator/filtered_calls", "calculator/swapped_results"
BY_CHANCE = "tools.calculator.tau_f={ by_chance = 0.9 }"
UNREACHED = "tools.calculator.tau_f={ by_chance = 0.000001 }"


def test_the_filter_depends_on_the_control_only_with_a_threshold_by_chance(world):
    def upstream(*overrides):
        graph = definitions_of(world.project(*overrides).plan).resolve_asset_graph()
        return AssetKey(CONTROL.split("/")) in graph.get(AssetKey(FILTER.split("/"))).parent_keys

    assert upstream(BY_CHANCE) and not upstream()


def test_a_threshold_by_chance_costs_nothing_and_stands_in_tables_and_metadata(world):
    changed = world.reasons(BY_CHANCE)
    assert set(changed) == {FILTER}
    assert "settings.tau_f.by_chance: (absent) -> 0.9" in changed[FILTER]
    before = world.sql("select tau_f from lanes where tool = 'calculator'")
    assert free(world.run(BY_CHANCE)) and by_machine(world.stale(BY_CHANCE)) == []
    [(rule, verdict, tau_f)] = world.sql(
        "select by_chance, verdict, tau_f from filter_rules join lanes using (tool) where tool = 'calculator'"
    )
    level = f"select tau_f, kept from chance_thresholds where tool = 'calculator' and by_chance = {rule}"
    [(threshold, kept)] = world.sql(level)
    assert (rule, tau_f) == (0.9, threshold)
    assert world.sql("select count(*) from filtered_calls where tool = 'calculator'") == [(kept,)]
    figures = world.figures(FILTER)
    assert ("keeps" in figures["threshold"].value) == (verdict == "certified")
    assert free(world.run())
    assert world.sql("select tau_f from lanes where tool = 'calculator'") == before


def test_a_run_says_why_no_threshold_was_certified_and_what_would_do(world):
    done = CliRunner().invoke(
        app, ["stale", "--run", "--config", str(world.folder / "toolformer.toml"), "--set", UNREACHED]
    )
    assert done.exit_code == 0
    assert "calculator: no tau_f is certified at 1e-06" in done.output and "nothing is kept" in done.output
    assert world.sql("select sum(count) > 0 from rejections where reason = 'no_threshold'") == [(True,)]
    assert world.sql("select tau_f from lanes where tool = 'calculator'") == [(None,)]


def test_a_run_that_keeps_no_call_says_so_with_the_counts_by_chance_and_what_to_do(world):
    pairs = [f"--set=tools.{tool}.tau_f=50" for tool in ("calculator", "sums")]
    done = CliRunner().invoke(app, ["stale", "--run", "--config", str(world.folder / "toolformer.toml"), *pairs])
    [(places, best)] = world.sql("select count(*), max(delta) from places where tool = 'calculator'")
    [by_chance] = world.sql("select by_chance, by_chance_low, by_chance_high from swapped_statistics where tau_f = 50")[
        :1
    ]
    assert done.exit_code == 0
    assert f"calculator: no call is kept at tau_f = 50. Of {places} places the best gains {best:.3f}" in done.output
    assert "0 at 50 (by chance {}, 95 %: {}-{})".format(*by_chance) in done.output
    assert "nothing to finetune on. Lower tau_f" in done.output


def test_a_lane_without_a_judged_call_points_to_the_funnel(world):
    done = CliRunner().invoke(
        app,
        ["stale", "--run", "--config", str(world.folder / "toolformer.toml"), "--set=tools.calculator.tau_s=0.999999"],
    )
    assert done.exit_code == 0 and 'sql "from funnel"' in done.output and "nothing to finetune on" not in done.output
