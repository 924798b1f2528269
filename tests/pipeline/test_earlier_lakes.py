"""A lake that an earlier release wrote is used as it is."""

import shutil

from tests.lake.earlier_release import turn_back
from tests.pipeline.conftest import NewLine, computed, tokens
from toolformer_dag.computing.spending import COSTS, StepCost, add_cost
from toolformer_dag.lake.manifest import FOLDER


def test_parts_rows_and_costs_of_an_earlier_release_are_used_without_a_token(finished: NewLine) -> None:
    line = finished("one", "two")
    add_cost(line.lake, "before", "calculator/loss_deltas", StepCost(1.0))
    before = line.tables()
    turn_back(line.lake)
    reports = line.update()
    assert tokens(reports) == computed(reports) == line.engines == 0
    add_cost(line.lake, "after", "calculator/loss_deltas", StepCost(1.0))
    assert line.lake.table(COSTS).read("calculator/loss_deltas")["run"].to_list() == ["before", "after"]
    shutil.rmtree(line.lake.root / FOLDER)
    for pointer in line.lake.root.glob("*/*/*.json"):
        pointer.unlink()
    assert tokens(line.update()) == 0, "the rows are found in the row stores"
    after = line.tables()
    assert after.keys() == before.keys() and all(rows.equals(before[name]) for name, rows in after.items())
