"""What tau_f is held against is arithmetic in SQL: another costs no token, and a call without a number is not kept."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import isfinite
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings

from tests.pipeline.conftest import NewLine, computed, hand_made, publish, tokens, update_one, warehouse
from tests.pipeline.test_costs import KEY, PLACE, TAU_F, Row, calls, lane, price
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.chance import chance_tables
from toolformer_dag.settings.setting_types import SettingsError

Score = Callable[[float, float], float]
SCORES: dict[str, Score] = {
    "delta / greatest(cost, 1)": lambda delta, cost: delta / max(cost, 1.0),
    "1 / cost -- free calls have none": lambda delta, cost: 1 / cost if cost else float("inf"),
    "CASE WHEN delta > 1 THEN delta END": lambda delta, cost: delta if delta > 1 else float("nan"),
    "(loss_minus - loss_plus) / loss_minus": lambda delta, cost: float("nan"),  # below: of both losses
}
RATIO = "(loss_minus - loss_plus) / loss_minus"


def scored(rows: Sequence[Row], name: str, delta: str) -> list[Row]:
    found = []
    for row in rows:
        score = row[delta] / row["loss_minus"] if name == RATIO else SCORES[name](row[delta], price(row))
        found.append({**row, "score": score})
    return [row for row in found if isfinite(row["score"])]


@pytest.mark.parametrize("name", SCORES)
@settings(max_examples=3)
@given(rows=calls)
def test_the_filter_the_control_and_the_warehouse_agree_with_plain_loops(
    rows: list[Row], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outputs = lane(tmp_path_factory.mktemp("lane"), rows, weight=0.0, score=name)
    update_one(outputs, "calculator/filtered_calls")
    order = sorted(
        scored(rows, name, "loss_minus"), key=lambda row: [*(row[k] for k in PLACE), -row["score"], row["sample"]]
    )
    best = [next(group) for _, group in groupby(order, key=lambda row: [row[k] for k in PLACE])]
    expected = [(*(row[k] for k in KEY), row["score"]) for row in best if row["score"] >= TAU_F]
    kept = outputs["calculator/filtered_calls"].table.read("one")
    assert kept.select(*KEY, "delta").rows() == expected
    database = warehouse(outputs)
    told = "SELECT digest, segment, position, sample, delta FROM {} WHERE {} ORDER BY ALL"
    assert query(database, told.format("decisions", "kept")).rows() == sorted(expected)
    swapped = scored([row for row in rows if row["swapped"] is not None], name, "swapped")
    assert query(database, told.format("swapped_results", "reason IS NULL")).rows() == sorted(
        (*(row[k] for k in KEY), row["score"]) for row in swapped
    )
    without = query(database, "SELECT count(*) FROM decisions WHERE reason = 'no_score'").item()
    assert without == len(rows) - len(scored(rows, name, "loss_minus"))
    plan = outputs["calculator/filtered_calls"].plan
    statistics, rates = chance_tables(plan, plan.lanes[0])
    of_lane = "FROM {} WHERE tool = 'calculator' ORDER BY tau_f"
    assert statistics.equals(query(database, of_lane.format("swapped_statistics")))
    assert rates.equals(query(database, of_lane.format("chance_rates")))


def test_another_score_costs_no_token_makes_the_filter_stale_alone_and_back_all_is_as_before(new_line: NewLine) -> None:
    line = new_line("one", "two")
    line.set(tau_f=0.0)
    line.update()
    before = line.tables()
    line.set(filtering__score=RATIO)
    reports = line.update()
    assert tokens(reports) == computed(reports) == line.engines == 0
    kept = line.read("filtered_calls")
    ratio = (pl.col("loss_minus") - pl.col("loss_plus")) / pl.col("loss_minus")
    assert kept["delta"].to_list() == kept.select(ratio).to_series().to_list()
    line.set(filtering__score="loss_minus - loss_plus")
    assert tokens(line.update()) == 0
    after = line.tables()
    assert after.keys() == before.keys() and all(rows.equals(before[name]) for name, rows in after.items())


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"score": "sum(delta)"}, "aggregates"),
        ({"score": "delta - dear"}, "dear"),
        ({"score": "(SELECT 1)"}, "subquery"),
        ({"score": "delta); DROP TABLE x; SELECT (1"}, "syntax error"),
        ({"score": "random()"}, "volatile"),
        ({"score": RATIO, "loss_floor": 0.0}, "loss_floor"),
    ],
)
def test_what_is_no_score_of_one_call_is_refused(tmp_path: Path, sections: dict[str, object], told: str) -> None:
    with pytest.raises(SettingsError, match=told):
        hand_made(tmp_path, "calculator", sections={"filtering": sections})


def test_other_costs_of_one_shard_are_in_the_next_warehouse_too(tmp_path: Path) -> None:
    row = {"digest": "x", "segment": 0, "position": 0, "sample": 0, "input": "a", "before": None}
    outputs = lane(tmp_path, [{**row, "loss_minus": 1.0, "swapped": 0.5}], weight=0.25)
    update_one(outputs, "calculator/filtered_calls")
    deltas = "SELECT (SELECT delta FROM loss_deltas), (SELECT delta FROM swapped_results)"
    assert query(warehouse(outputs), deltas).rows() == [(0.75, 0.25)]
    results = outputs["calculator/tool_results"]
    publish(results, "one", results.table.read("one").with_columns(cost=pl.lit(2.0)).to_dicts())
    assert query(warehouse(outputs), deltas).rows() == [(0.5, 0.0)]
