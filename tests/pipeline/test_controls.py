"""A second control: its entry in CONTROLS is all that its tables, counts, page and forecast need."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine, hand_made, publish, silent, tokens, warehouse
from toolformer_dag.computing.stage import CALL_KEY
from toolformer_dag.lake.warehouse import query
from toolformer_dag.pipeline import controls
from toolformer_dag.pipeline.controls import CHANCE_CONTROL, Control
from toolformer_dag.pipeline.estimate import LaneForecast, forecast_annotation
from toolformer_dag.pipeline.stages import list_lane_stages
from toolformer_dag.settings.sections import ControlSettings
from toolformer_dag.texts.chains import parse_chain

PLACE = ("tool", "digest", "segment", "position")
OTHER_VIEWS = ("swapped_statistics", "chance_thresholds", "candidate_sources", "curves", "swapped_places")


def backwards(calls: pl.DataFrame, settings: ControlSettings) -> list[list[str]]:
    """Return each result with a 7 before it, and its characters backwards."""
    return [[f"7{result[::-1]}"] for result in calls.filter("sampled")["result"]]


BACKWARDS = Control(
    name="backward_results",
    chained_stage_name="chained_backwards",
    results_description="their own results backwards",
    result_description="result of the call backwards",
    choose_other_results=backwards,
    version=1,
)


def add_control(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "CONTROLS", (*controls.CONTROLS, BACKWARDS))


def test_a_second_control_costs_its_own_losses_and_changes_no_other_table(
    finished: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = finished("one")
    before = line.tables()
    line.update()
    add_control(monkeypatch)
    reports = line.update()
    assert tokens(reports) == tokens({"": reports[BACKWARDS.name]}) > 0
    after = line.tables()
    [rows] = [after.pop(name) for name in after.keys() - before.keys()]
    assert after.keys() == before.keys() and all(frame.equals(before[name]) for name, frame in after.items())
    own = line.read("loss_deltas").select(*CALL_KEY, own="result")
    told = rows.join(own, on=CALL_KEY)
    assert told.height == rows.height > 0
    assert told["result"].to_list() == [f"7{result[::-1]}" for result in told["own"]]
    assert line.output(BACKWARDS.name).stage.description.endswith("scored again with their own results backwards.")


def test_results_equal_to_the_own_one_and_more_than_asked_for_are_no_swaps(
    finished: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_many(calls: pl.DataFrame, settings: ControlSettings) -> list[list[str]]:
        return [[result, "7", result, "8", "9"] for result in calls.filter("sampled")["result"]]

    line = finished("one")
    line.set(control__swaps=2)
    monkeypatch.setattr(controls, "CONTROLS", (*controls.CONTROLS, replace(BACKWARDS, choose_other_results=too_many)))
    line.update()
    swaps = line.read(BACKWARDS.name).filter(pl.col("result").is_not_null()).sort(*CALL_KEY, "swap")
    by_call = swaps.group_by(CALL_KEY, maintain_order=True).agg("swap", "result")
    assert by_call.height > 0
    for row in by_call.iter_rows(named=True):
        assert (row["swap"], row["result"]) == ([0, 1], ["7", "8"])


def test_it_is_counted_beside_the_first_one_which_alone_estimates_chance(
    finished: NewLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = finished("one")
    alone = warehouse(line.outputs(), "alone")
    estimates = {view: query(alone, f"FROM {view} ORDER BY ALL") for view in OTHER_VIEWS}
    add_control(monkeypatch)
    line.update()
    database = warehouse(line.outputs(), "both")
    for view, rows in estimates.items():
        assert query(database, f"FROM {view} ORDER BY ALL").equals(rows)
    statistics = query(database, "FROM control_statistics")
    assert set(statistics["control"]) == {control.name for control in controls.CONTROLS}
    of_first = statistics.filter(control=CHANCE_CONTROL.name).drop("control")
    assert_frame_equal(of_first, estimates["swapped_statistics"].select(of_first.columns))
    assert_counted(line, statistics.filter(control=BACKWARDS.name))
    output = line.output(BACKWARDS.name)
    page = output.stage.asset.collect_shown_values(output)["kept"]
    assert isinstance(page, pl.DataFrame)
    same = ("swaps", "swapped", "kept", "kept_swapped", "share_swapped")
    assert_frame_equal(page.select("tau_f", *same), statistics.filter(control=BACKWARDS.name).select("tau_f", *same))


def assert_counted(line: Line, statistics: pl.DataFrame) -> None:
    """Count the places of the second control one by one."""
    own = line.read("loss_deltas").filter(pl.col("reason").is_null()).select(*CALL_KEY, own="delta")
    swapped = line.read(BACKWARDS.name).filter(pl.col("reason").is_null()).join(own, on=CALL_KEY)
    places = swapped.group_by(PLACE).agg(pl.max("own"), pl.max("delta"))
    for row in statistics.iter_rows(named=True):
        assert row["swapped"] == row["swaps"] == places.height
        assert row["kept"] == (places["own"] >= row["tau_f"]).sum()
        assert row["kept_swapped"] == (places["delta"] >= row["tau_f"]).sum()
        assert row["share_swapped"] == pytest.approx(row["kept_swapped"] / places.height)
    assert statistics.height == 4


def test_a_threshold_at_which_a_bound_of_one_control_would_count_is_left_out_for_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_control(monkeypatch)
    outputs = hand_made(tmp_path, "calculator", tau_f=1.0)
    call = {"tool": "calculator", "shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0}
    publish(outputs["calculator/loss_deltas"], "one", [{**call, "delta": 1.5, "delta_is_bound": False}])
    swap = {**call, "swap": 0, "delta": 0.75}
    publish(outputs["calculator/swapped_results"], "one", [{**swap, "delta_is_bound": False}])
    publish(outputs["calculator/backward_results"], "one", [{**swap, "delta_is_bound": True}])
    statistics = query(
        warehouse(outputs), "SELECT control, tau_f, kept, kept_swapped FROM control_statistics WHERE swapped > 0"
    )
    assert statistics.rows() == [
        ("backward_results", 1.0, 1, 0),
        ("backward_results", 2.0, 0, 0),
        ("swapped_results", 0.5, 1, 1),
        ("swapped_results", 1.0, 1, 0),
        ("swapped_results", 2.0, 0, 0),
    ]


def forecast(line: Line) -> LaneForecast:
    outputs = line.outputs()
    with line.lent(outputs) as (worker, workers):
        [found] = forecast_annotation(worker, workers, list(outputs.values()), silent, seed=1)
    return found


def test_it_is_forecast(new_line: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_one = forecast(new_line("one", "two"))
    add_control(monkeypatch)
    with_two = forecast(new_line("one", "two"))
    assert with_two.text_count == with_one.text_count and with_two.sampled_text_count == with_one.sampled_text_count
    assert with_two.sample_tokens > with_one.sample_tokens > 0
    assert with_two.tokens.value > with_one.tokens.value
    assert with_two.bytes.value > with_one.bytes.value


def test_it_gives_chains_another_last_result(new_line: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_control(monkeypatch)
    line = new_line("one")
    line.set(tau_s=0.0, k=2, m=2, tools__calculator__depth=2, filtering__keep_idle_first=True)
    line.update()
    chains = line.read(BACKWARDS.chained_stage_name)
    own = line.read("chained_deltas").select(*CALL_KEY, own="chain")
    for row in chains.join(own, on=CALL_KEY).iter_rows(named=True):
        *before, last = parse_chain(row["own"])
        other = replace(last, result=f"7{last.result[::-1]}")
        assert parse_chain(row["chain"]) == [*before, other]
    in_warehouse = query(warehouse(line.outputs()), f"FROM {BACKWARDS.name}")
    assert in_warehouse.filter(pl.col("chain").is_not_null()).height == chains.height > 0


def test_a_setting_of_one_control_determines_no_other(new_line: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields that no control owns determine the rows of all."""
    plan = new_line("one").plan()
    shared = {"exchange": CHANCE_CONTROL.version, "swapped_texts": 3, "swaps": 1}
    assert CHANCE_CONTROL.collect_settings(plan) == shared
    second = replace(BACKWARDS, own_settings=("swaps",))
    monkeypatch.setattr(controls, "CONTROLS", (*controls.CONTROLS, second))
    assert second.collect_settings(plan) == {**shared, "exchange": 1}
    assert CHANCE_CONTROL.collect_settings(plan) == {name: shared[name] for name in ("exchange", "swapped_texts")}


def test_the_stages_of_controls_stand_after_the_scores(new_line: NewLine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_control(monkeypatch)
    plan = new_line("one").plan()
    stages = list_lane_stages(plan, replace(plan.lanes[0], max_chain_calls=2))
    names = [stage.name for stage in stages]
    single = [control.name for control in controls.CONTROLS]
    chained = [control.chained_stage_name for control in controls.CONTROLS]
    first = names.index("loss_deltas")
    assert names[first:] == ["loss_deltas", *single, "chained_deltas", *chained, "filtered_calls"]
