"""`run --estimate` as a person sees it."""

from toolformer_dag.cli.forecast import NOT_COVERED, forecast


def test_a_finished_world_has_nothing_to_forecast(world):
    assert forecast(world.project().plan) == "Nothing is left to annotate."


def test_a_forecast_has_a_line_per_lane(world):
    plan = world.project("tools.calculator.m=5").plan
    head, *lanes, total, time, spent, covered = forecast(plan).splitlines()
    assert head.split()[0] == "lane" and covered == NOT_COVERED
    assert [line.split()[0] for line in lanes] == ["calculator", "sums"] and total.startswith("all")
    assert time.startswith("Time on 1 worker: ") and " (" in time
    assert spent.startswith("The sample took ") and "took 0 tokens" not in spent
