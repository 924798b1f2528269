"""What a run changed can be asked in SQL: settings before and after, and kept calls before and after."""

from datetime import timedelta

import pytest

from tests.runs.conftest import World
from toolformer_dag.cli.query_results import load_saved_queries
from toolformer_dag.lake.cleaning import clean_lake

RUNS = "select tool, changed, kept_before, kept_after from runs order by ended, tool"
KEPT = "select tool, count(*) filter (kept) from decisions group by tool order by tool"
THRESHOLD = "tools.calculator.tau_f=100"


def test_a_run_tells_a_changed_threshold_with_the_kept_calls_before_and_after(world: World) -> None:
    assert world.sql("from changes") == [] and world.sql(RUNS) == [], "a first run changes nothing"
    before = dict(world.sql(KEPT))
    world.run(THRESHOLD)
    assert world.sql(RUNS) == [("calculator", ["tau_f 0.0 -> 100.0"], before["calculator"], 0)]
    [(_, _, *shown)] = world.sql(load_saved_queries()["what_changed"])
    assert shown == ["calculator", "tau_f 0.0 -> 100.0", before["calculator"], 0]
    clean_lake(world.lake, timedelta(0), dry_run=False)
    log = world.lake.get_table("warehouse/changes")
    assert sum(log.read_part(part).height for part in log.list_part_names()) == len(world.sql("from changes"))


@pytest.mark.long
def test_a_setting_of_sampling_stands_beside_the_calls_that_its_lane_keeps_after_it(world: World) -> None:
    before = dict(world.sql(KEPT))
    world.run(THRESHOLD)
    [first] = world.sql(RUNS)
    world.run(THRESHOLD)
    assert world.sql(RUNS) == [first], "a run that changes nothing adds no row"
    world.run("tools.sums.m=1", THRESHOLD)
    after = dict(world.sql(KEPT))
    assert before["sums"] != after["sums"]
    assert world.sql(RUNS) == [first, ("sums", ["m 6 -> 1"], before["sums"], after["sums"])]
    world.run()
    *_, calculator, sums = world.sql(RUNS)
    assert calculator == ("calculator", ["tau_f 100.0 -> 0.0"], 0, before["calculator"])
    assert sums == ("sums", ["m 1 -> 6"], after["sums"], before["sums"])
