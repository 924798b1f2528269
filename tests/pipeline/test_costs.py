"""What tau_f is held against is arithmetic in SQL over stored losses: a score of one's own, less what a call costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline.conftest import (
    Line,
    NewLine,
    TableOutput,
    computed,
    hand_made,
    publish,
    tokens,
    update_one,
    warehouse,
)
from toolformer_dag.lake.record import list_record_changes
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline.chance import query_chance_tables
from toolformer_dag.pipeline.scores import query_cost_frontier
from toolformer_dag.settings.setting_types import SettingsError
from toolformer_dag.texts.chains import ChainLink, format_chain_json
from toolformer_dag.tools.built_in.calculator import Calculator
from toolformer_dag.tools.tool import ToolCall, ToolResult

Row = dict[str, Any]
Outputs = Mapping[str, TableOutput]
PLACE = ("digest", "segment", "position")
KEY = (*PLACE, "sample")
COSTS = {"a": 1.0, "b": 3.0, "c": None}
"""By input: c tells none."""
TAU_F = 0.5
WEIGHT = 0.25
calls = st.lists(
    st.fixed_dictionaries(
        {
            "digest": st.sampled_from("xy"),
            "segment": st.just(0),
            "position": st.integers(0, 3),
            "sample": st.integers(0, 2),
            "input": st.sampled_from("abc"),
            "before": st.sampled_from([None, "a", "b"]),
            "loss_minus": st.sampled_from([0.5, 1.0, 1.25, 1.5, 3.0]),
            "swapped": st.sampled_from([None, 0.0, 1.0, 2.0]),
        }
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: tuple(row[name] for name in KEY),
)


def lane(folder: Path, rows: Sequence[Row], weight: float = WEIGHT, **values: object) -> Outputs:
    """Publish calls with their results in a lane of its own; `before`: input of a call of the calendar before it."""
    sections = {
        "tools": {
            "calculator": {"tau_f": TAU_F, "depth": 2, "then": ["calendar"], **values},
            "calendar": {"cost_weight": 0.0},
        },
        "filtering": {"cost_weight": weight},
    }
    outputs = hand_made(folder, sections=sections)
    shard = {"tool": "calculator", "shard": "one"}
    own = []
    texts = {(row["digest"], row["segment"]) for row in rows}
    publish(
        outputs["calculator/heuristic_subset"],
        "one",
        [{**shard, "digest": a, "segment": b, "text_digest": a, "context": "now"} for a, b in texts],
    )
    for row in rows:
        chain = (
            [ChainLink("Calendar", row["before"], "r"), ChainLink("Calculator", row["input"], "r")]
            if row["before"]
            else []
        )
        losses = {
            "loss_empty": row["loss_minus"],
            "loss_plus": 0.0,
            "delta": row["loss_minus"],
            "delta_is_bound": False,
        }
        own.append({**row, **shard, **losses, "result": "r", "chain": format_chain_json(chain) if chain else None})
    for stage, tools in (("tool_results", ("calculator",)), ("chained_results", ("calculator", "calendar"))):
        found = [
            {"tool": tool, "input": one, "context": "now", "cost": cost, "seconds": 2.0}
            for tool in tools
            for one, cost in COSTS.items()
        ]
        publish(outputs[f"calculator/{stage}"], "one", [*found, {**found[0], "context": "then", "cost": 99.0}])

    def publish_both(single: str, chained: str, rows: Sequence[Row]) -> None:
        for stage, told in ((single, False), (chained, True)):
            of_stage = [without(row, "before", "swapped") for row in rows if (row["chain"] is not None) == told]
            publish(outputs[f"calculator/{stage}"], "one", of_stage)

    publish_both("loss_deltas", "chained_deltas", own)
    swapped = [
        {
            **without(row, "before", "swapped"),
            "delta": row["swapped"],
            "loss_plus": row["loss_minus"] - row["swapped"],
            "swap": 0,
        }
        for row in own
        if row["swapped"] is not None
    ]
    publish_both("swapped_results", "chained_swaps", swapped)
    return outputs


def without(row: Row, *names: str) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def price(row: Row) -> float:
    return (COSTS[row["input"]] or 0.0) + (COSTS[row["before"]] or 0.0 if row["before"] else 0.0)


def kept_slowly(rows: Sequence[Row], tau_f: float, weight: float = WEIGHT) -> list[Row]:
    """The best call of each place by its delta less its price, where that reaches the threshold."""
    priced = [{**row, "delta": row["loss_minus"] - weight * price(row)} for row in rows]
    priced.sort(key=lambda row: [*(row[name] for name in PLACE), -row["delta"], row["sample"]])
    best = [next(group) for _, group in groupby(priced, key=lambda row: [row[name] for name in PLACE])]
    return [row for row in best if row["delta"] >= tau_f]


@settings(max_examples=2)
@given(rows=calls)
def test_kept_calls_swaps_and_the_frontier_agree_with_plain_loops(
    rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    outputs = lane(tmp_path_factory.mktemp("lane"), rows)
    update_one(outputs, "calculator/filtered_calls")
    expected = [(*(row[name] for name in KEY), row["delta"]) for row in kept_slowly(rows, TAU_F)]
    assert outputs["calculator/filtered_calls"].table.read_part("one").select(*KEY, "delta").rows() == expected
    database = warehouse(outputs)
    told = "SELECT digest, segment, position, sample, delta FROM {} WHERE kept ORDER BY ALL"
    assert query(database, told.format("decisions")).rows() == sorted(expected)
    swaps = [
        (*(row[name] for name in KEY), row["swapped"] - WEIGHT * price(row))
        for row in rows
        if row["swapped"] is not None
    ]
    told = "SELECT digest, segment, position, sample, delta FROM swapped_results ORDER BY ALL"
    assert query(database, told).rows() == sorted(swaps)
    frontier = query(database, "FROM cost_frontier WHERE tool = 'calculator' ORDER BY tau_f")
    assert frontier.filter("today")["tau_f"].to_list() == [TAU_F]
    for row in frontier.iter_rows(named=True):
        there = kept_slowly(rows, row["tau_f"])
        sums = (
            len(there),
            sum(one["loss_minus"] for one in there),
            sum(map(price, there)),
            sum(4.0 if one["before"] else 2.0 for one in there),
        )
        assert (row["calls"], row["nats"], row["cost"], row["seconds"]) == pytest.approx(sums)
    plan = outputs["calculator/filtered_calls"].plan
    again = query_cost_frontier(plan, plan.lanes[0], TAU_F)
    assert again is not None and again.equals(frontier)
    statistics, _ = query_chance_tables(plan, plan.lanes[0])
    assert statistics.equals(query(database, "FROM swapped_statistics WHERE tool = 'calculator' ORDER BY tau_f"))


RATIO = "(loss_minus - loss_plus) / loss_minus"
Score = Callable[[float, float], float]
SCORES: dict[str, Score] = {
    "delta / greatest(cost, 1)": lambda delta, cost: delta / max(cost, 1.0),
    "1 / cost -- free calls have none": lambda delta, cost: 1 / cost if cost else float("inf"),
    "CASE WHEN delta > 1 THEN delta END": lambda delta, cost: delta if delta > 1 else float("nan"),
    RATIO: lambda delta, cost: float("nan"),  # `scored` divides by the loss
}


def scored(rows: Sequence[Row], name: str, delta: str) -> list[Row]:
    found = []
    for row in rows:
        score = row[delta] / row["loss_minus"] if name == RATIO else SCORES[name](row[delta], price(row))
        found.append({**row, "score": score})
    return [row for row in found if isfinite(row["score"])]


@pytest.mark.parametrize("name", SCORES)
@settings(max_examples=3)
@given(rows=calls)
def test_another_score_agrees_with_plain_loops_in_the_filter_the_control_and_the_warehouse(
    rows: list[Row], name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outputs = lane(tmp_path_factory.mktemp("lane"), rows, weight=0.0, score=name)
    update_one(outputs, "calculator/filtered_calls")
    order = sorted(
        scored(rows, name, "loss_minus"), key=lambda row: [*(row[k] for k in PLACE), -row["score"], row["sample"]]
    )
    best = [next(group) for _, group in groupby(order, key=lambda row: [row[k] for k in PLACE])]
    expected = [(*(row[k] for k in KEY), row["score"]) for row in best if row["score"] >= TAU_F]
    kept = outputs["calculator/filtered_calls"].table.read_part("one")
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
    statistics, rates = query_chance_tables(plan, plan.lanes[0])
    of_lane = "FROM {} WHERE tool = 'calculator' ORDER BY tau_f"
    assert statistics.equals(query(database, of_lane.format("swapped_statistics")))
    assert rates.equals(query(database, of_lane.format("chance_rates")))


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


def test_a_tool_s_own_weight_counts_before_that_of_all_and_0_changes_no_record(tmp_path: Path) -> None:
    plain = hand_made(tmp_path, "calculator", "calendar")
    both = hand_made(
        tmp_path,
        sections={"filtering": {"cost_weight": 2.0}, "tools": {"calculator": {}, "calendar": {"cost_weight": 0}}},
    )
    assert both.keys() == plain.keys()
    changed = [
        name
        for name, one in plain.items()
        if list_record_changes({"settings": one.settings}, {"settings": both[name].settings})
    ]
    assert changed == ["calculator/filtered_calls"]
    assert both["calculator/filtered_calls"].settings["score"] == "(loss_minus - loss_plus) - 2.0 * cost"
    assert [plain[f"{lane}/filtered_calls"].depends_on for lane in ("calculator", "calendar")] == [
        (f"{lane}/loss_deltas", f"{lane}/heuristic_subset") for lane in ("calculator", "calendar")
    ]
    assert both["calculator/filtered_calls"].depends_on == (
        "calculator/loss_deltas",
        "calculator/heuristic_subset",
        "calculator/tool_results",
    )
    assert both["calendar/filtered_calls"].depends_on == plain["calendar/filtered_calls"].depends_on


class Dear(Calculator):
    """Takes a unit for every character of its input."""

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        return [replace(one, cost=float(len(call.input))) for call, one in zip(calls, super().run(calls), strict=True)]


def dear(line: Line) -> Line:
    line.adapt = lambda lane: replace(lane, tool=Dear(lane.tool.key, lane.tool.options, lane.tool.prompt))
    return line


LENGTH = pl.col("input").str.len_chars()
OTHERS: list[tuple[str, Any, pl.Expr]] = [
    *(
        ("cost_weight", weight, pl.col("loss_minus") - pl.col("loss_plus") - weight * LENGTH)
        for weight in (0.01, 0.001)
    ),
    ("score", RATIO, 1 - pl.col("loss_plus") / pl.col("loss_minus")),
]


def test_another_weight_or_score_costs_no_token_and_no_call_and_back_all_is_as_before(new_line: NewLine) -> None:
    line = dear(new_line("one", "two"))
    line.set(tau_f=0.0)
    line.update()
    before = line.tables()
    as_before = {"cost_weight": 0.0, "score": "loss_minus - loss_plus"}
    for name, value, delta in OTHERS:
        line.set(**{f"filtering__{key}": one for key, one in {**as_before, name: value}.items()})
        reports = line.update()
        assert tokens(reports) == computed(reports) == line.engines == 0
        kept = line.read("filtered_calls")
        assert kept["delta"].to_list() == pytest.approx(kept.select(delta).to_series().to_list())
        assert kept["delta"].min() >= 0.0 and 0 < kept.height < before["calculator/filtered_calls[one]"].height * 3
    line.set(**{f"filtering__{key}": one for key, one in as_before.items()})
    assert tokens(line.update()) == 0
    after = line.tables()
    assert after.keys() == before.keys() and all(rows.equals(before[name]) for name, rows in after.items())


def test_other_costs_of_the_same_results_are_in_the_next_warehouse_and_judged_again(tmp_path: Path) -> None:
    row = {"digest": "x", "segment": 0, "position": 0, "sample": 0, "input": "a", "before": None}
    outputs = lane(tmp_path, [{**row, "loss_minus": 1.0, "swapped": 0.5}])
    update_one(outputs, "calculator/filtered_calls")
    kept = outputs["calculator/filtered_calls"].table
    results = outputs["calculator/tool_results"]
    deltas = "SELECT (SELECT delta FROM loss_deltas), (SELECT delta FROM swapped_results)"
    assert kept.read_part("one").height == 1 and query(warehouse(outputs), deltas).rows() == [(0.75, 0.25)]
    version = results.table.find_part_version("one")
    publish(results, "one", results.table.read_part("one").with_columns(cost=pl.lit(9.0)).to_dicts())
    assert results.table.find_part_version("one") == version, "costs are no part of the version"
    assert query(warehouse(outputs), deltas).rows() == [(-1.25, -1.75)]
    update_one(outputs, "calculator/filtered_calls")
    assert kept.read_part("one").height == 0
