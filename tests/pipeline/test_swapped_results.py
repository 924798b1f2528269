"""The control: other documents' results, scored like the true ones, counted like the kept ones."""

from collections.abc import Sequence
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine, engine_of, hand_made, publish, tokens
from toolformer_dag.cli.run import CHANCE
from toolformer_dag.lake.table import MissingPart
from toolformer_dag.lake.warehouse import build, query
from toolformer_dag.pipeline.stage import TEXT_KEY, TableOutput
from toolformer_dag.pipeline.stages import warehouse_tables
from toolformer_dag.pipeline.swapped_results import STAGE, by_chance, exchange, likeliest_places
from toolformer_dag.pipeline.update import StaleInput, TableReport

Row = dict[str, Any]
Key = tuple[Any, ...]
KEY = ("shard", "digest", "segment", "position", "sample")
CALLS = pl.Schema({name: STAGE.schema[name] for name in (*KEY, "input", "result", "p_api")})
TEXTS = 100
likely = st.sampled_from([0.1, 0.2, 0.2, 0.4])


def call(shard: str, digest: str, position: int, sample: int, input: str | None, p_api: float) -> Row:
    """A candidate; the result follows from document and input, as it does for a tool. Without an input, no call."""
    place = {"shard": shard, "digest": digest, "segment": 0, "position": position, "sample": sample}
    result = None if input is None else f"{input}{digest if input == 'date' else ''}"
    return {**place, "input": input, "result": result, "p_api": p_api}


def candidates_of(probabilities: dict[tuple[str, str], list[float]], inputs: Sequence[str | None]) -> list[Row]:
    """Three samples at every position; p_i by text."""
    turn = cycle(inputs)
    return [
        call(shard, digest, position, sample, next(turn), p_api)
        for (shard, digest), found in probabilities.items()
        for position, p_api in enumerate(found)
        for sample in range(3)
    ]


candidates = st.builds(
    candidates_of,
    st.dictionaries(
        st.tuples(st.sampled_from(["one", "two"]), st.sampled_from("abcd")), st.lists(likely, min_size=1, max_size=4)
    ),
    st.lists(st.sampled_from(["1", "2", "date", None]), min_size=1, max_size=20),
)


def exchanged(rows: Sequence[Row], limit: int = TEXTS, texts: Sequence[Row] | None = None) -> dict[Key, Row]:
    """By key. `rows`: candidates; `texts`: rows of all texts, where some have no candidate."""
    whole = pl.DataFrame(rows, schema=CALLS)
    known = pl.DataFrame(texts or rows, schema=CALLS).select(TEXT_KEY).unique()
    found = exchange(whole.filter(pl.col("result").is_not_null()), known, likeliest_places(whole), limit)
    return {key_of(row): row for row in found.to_dicts()}


def key_of(row: Row) -> Key:
    return tuple(row[name] for name in KEY)


def selected(rows: Sequence[Row], tau_s: float, k: int, m: int) -> list[Row]:
    """The candidates that these thresholds leave, found slowly."""
    texts = groupby(sorted(rows, key=key_of), key=lambda row: key_of(row)[:3])
    chosen: list[Row] = []
    for _, group in texts:
        own = list(group)
        places = sorted({(-row["p_api"], row["position"]) for row in own if row["p_api"] > tau_s})[:k]
        chosen += [row for row in own if (-row["p_api"], row["position"]) in places and row["sample"] < m]
    return chosen


@settings(max_examples=40, deadline=None)
@given(candidates, st.randoms(use_true_random=False))
def test_a_call_is_told_the_first_sample_of_a_likelier_place_elsewhere_or_has_a_reason(rows, random):
    found = exchanged(rows)
    assert found.keys() == {key_of(row) for row in rows if row["result"] is not None}
    best = {key_of(row)[:4]: row for row in selected(rows, 0.0, 1, 1)}
    for told in found.values():
        own = next(row for row in rows if key_of(row) == key_of(told))
        others = {
            row["result"]
            for row in best.values()
            if row["digest"] != own["digest"] and row["p_api"] >= own["p_api"] and row["result"] is not None
        } - {own["result"]}
        assert told["result"] in others if others else told["result"] is None
        assert told["swap_reason"] == (None if others else "no_other_result")
    assert exchanged(random.sample(rows, len(rows))) == found


@settings(max_examples=60, deadline=None)
@given(candidates, likely, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_fewer_calls_change_nothing_about_those_that_stay(rows, tau_s, k, m, limit):
    """Lowering k or m, or raising tau_s, asks for no pair that was not there."""
    fewer, more = exchanged(selected(rows, tau_s, k, m), limit, rows), exchanged(rows, limit)
    assert all(more[key] == row for key, row in fewer.items())


@settings(max_examples=20, deadline=None)
@given(candidates, st.integers(1, 3))
def test_a_larger_sample_holds_the_smaller_one_and_texts_count_by_shard(rows, limit):
    smaller, larger = exchanged(rows, limit), exchanged(rows, limit + 1)
    sampled = {key: row for key, row in smaller.items() if row["swap_reason"] != "not_sampled"}
    assert all(larger[key] == row for key, row in sampled.items())
    for shard in ("one", "two"):
        assert len({key[:3] for key in sampled if key[0] == shard}) <= limit


@settings(max_examples=20, deadline=None)
@given(candidates)
def test_equal_calls_at_a_position_are_told_the_same(rows):
    told: dict[tuple[Any, ...], set[str]] = {}
    for row in exchanged(rows).values():
        told.setdefault((*key_of(row)[:-1], row["input"]), set()).add(str(row["result"]))
    assert all(len(results) == 1 for results in told.values())


def test_results_of_a_shard_go_round():
    """Each of many documents has a result of its own; of equally likely ones each is told once."""
    rows = [call("one", f"{number:03}", 0, 0, "date", 0.5) for number in range(100)]
    told = [row["result"] for row in exchanged(rows).values()]
    assert sorted(told) == sorted(row["result"] for row in rows)


SWAPPED = "swapped_results"
LANE = ("scored_candidates", "tool_results", "loss_deltas", SWAPPED)


def rerun(line: Line) -> TableReport:
    """Bring the lane up to date from its candidates on; return the control's report."""
    return line.update(*LANE)[SWAPPED]


def test_losses_are_those_of_the_engine_and_are_computed_once(finished: NewLine) -> None:
    line = finished("one")
    true, table = line.read("loss_deltas"), line.read(SWAPPED)
    line.output(SWAPPED).table.remove("one")
    report = line.update(SWAPPED)[SWAPPED]
    assert (report.computed, tokens({SWAPPED: report})) == (0, 0) and report.reused > 0
    assert table.schema == STAGE.schema and table.equals(line.read(SWAPPED))
    texts = true.select(TEXT_KEY).unique().height
    assert table.height == report.rows["one"] > 0
    assert table.select(TEXT_KEY).unique().height <= 3 < texts
    assert table.height + sum(report.rejections.values()) == true.height
    pairs = table.join(true, on=("tool", *KEY, "input", "p_api", "char_offset"))
    assert pairs.height == table.height
    assert pairs.filter(pl.col("result") == pl.col("result_right")).is_empty()
    # the call without a call and the call without its result are the same ones as before
    for loss in ("loss_empty", "loss_call"):
        assert pairs[loss].to_list() == pytest.approx(pairs[f"{loss}_right"].to_list(), abs=1e-4)


@pytest.mark.parametrize("change", [{"k": 2}, {"m": 2}, {"tau_s": 0.3}])
def test_fewer_candidates_cost_nothing_and_more_cost_what_is_missing(
    new_line: NewLine, finished: NewLine, change: dict[str, object]
) -> None:
    line = finished("one")
    rows, wide = line.read(SWAPPED), {"k": 3, "m": 4, "tau_s": 0.1}
    line.set(**change)
    fewer = rerun(line)
    assert tokens({SWAPPED: fewer}) == 0 and 0 < fewer.rows["one"] < rows.height
    narrow = new_line("one")
    narrow.set(**change)
    narrow.update("raw_shards", "heuristic_subset")
    alone = rerun(narrow)
    assert_frame_equal(line.read(SWAPPED), narrow.read(SWAPPED), abs_tol=1e-5)
    narrow.set(**wide)
    distinct = rows.select(*KEY[:-1], "input", "result").n_unique()
    assert rerun(narrow).computed == distinct - alone.computed
    assert_frame_equal(narrow.read(SWAPPED), rows, abs_tol=1e-5)


def test_loss_of_a_swapped_result_against_the_engine_itself(finished: NewLine) -> None:
    from toolformer_dag.model.requests import LossRequest

    line = finished("one")
    found = line.read(SWAPPED).join(line.read("heuristic_subset"), on=TEXT_KEY)
    engine = engine_of(line.plan().settings.model)
    for row in found.to_dicts()[:3]:
        request = LossRequest(row["text"], row["position"], "Calculator", row["input"], row["result"])
        [losses] = engine.losses([request])
        assert row["loss_plus"] == pytest.approx(losses.loss_plus, abs=1e-4)
        assert row["delta"] == pytest.approx(losses.delta, abs=1e-4)


def test_more_texts_add_rows_and_leave_the_others_and_the_true_ones_as_they_are(finished: NewLine) -> None:
    line = finished("one")
    true, before = line.read("loss_deltas"), line.read(SWAPPED)
    line.set(evaluation__swapped_texts=6)
    report = line.update("loss_deltas", SWAPPED)
    assert report["loss_deltas"].unchanged and report[SWAPPED].computed > 0
    after = line.read(SWAPPED)
    assert after.height > before.height
    assert_frame_equal(after.join(before.select(KEY), on=KEY, how="semi"), before)
    assert_frame_equal(line.read("loss_deltas"), true)


def test_inputs_that_are_missing_or_do_not_fit_are_named(new_line: NewLine, finished: NewLine) -> None:
    with pytest.raises(MissingPart, match="calculator/heuristic_subset"):
        new_line("one").update(SWAPPED)
    line = finished("one")
    line.set(corpus__texts_per_shard=1)
    line.update("heuristic_subset")
    with pytest.raises(StaleInput, match="made from other rows of calculator/heuristic_subset"):
        line.update(SWAPPED)


deltas = st.sampled_from([-1.0, 0.0, 0.5, 0.9, 1.0, 2.0, 3.0])
pairs = st.lists(
    st.fixed_dictionaries(
        {
            "shard": st.sampled_from(["one", "two"]),
            "digest": st.sampled_from("ab"),
            "segment": st.just(0),
            "position": st.integers(0, 3),
            "sample": st.integers(0, 2),
            "delta": deltas,
            "swapped": st.one_of(st.none(), deltas),
        }
    ),
    max_size=25,
    unique_by=lambda row: tuple(row[name] for name in KEY),
)


def swapped_lake(folder: Path, calls: Sequence[Row], *more: str) -> dict[str, TableOutput]:
    """Publish both tables of loss_deltas' shape; a call without `swapped` was not sampled."""
    outputs = hand_made(folder, "calculator", *more)
    for shard in ("one", "two"):
        true = [{"tool": "calculator", **row} for row in calls if row["shard"] == shard]
        other = [{**row, "delta": row["swapped"]} for row in true if row["swapped"] is not None]
        for name, made in (("loss_deltas", true), (SWAPPED, other)):
            rows = [{k: v for k, v in row.items() if k != "swapped"} for row in made]
            publish(outputs[f"calculator/{name}"], shard, rows)
    return outputs


def warehouse(folder: Path, outputs: dict[str, TableOutput]) -> Path:
    some = next(iter(outputs.values()))
    lanes = [lane.key for lane in some.plan.lanes]
    build(some.plan.lake, warehouse_tables(list(outputs.values())), lanes, folder / "w.duckdb")
    return folder / "w.duckdb"


def slowly(calls: Sequence[Row], column: str, tau_f: float) -> int:
    """Positions at which some sampled call stays."""
    sampled = sorted((row for row in calls if row["swapped"] is not None), key=lambda row: [row[n] for n in KEY])
    places = groupby(sampled, key=lambda row: [row[name] for name in KEY[:-1]])
    return sum(any(row[column] >= tau_f for row in group) for _, group in places)


@settings(max_examples=6, deadline=None)
@given(pairs)
def test_shares_agree_with_plain_loops(tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("lake")
    outputs = swapped_lake(folder, calls)
    tables = [outputs[f"calculator/{name}"].table.scan() for name in ("loss_deltas", SWAPPED)]
    sampled = sum(row["swapped"] is not None for row in calls)
    for tau, *counts in by_chance(*tables, [0.5, 1.0, 2.0]).iter_rows():
        assert counts == [sampled, slowly(calls, "delta", tau), slowly(calls, "swapped", tau)]
    database = warehouse(folder, outputs)
    home = {row["digest"]: min(r["shard"] for r in calls if r["digest"] == row["digest"]) for row in calls}
    once = [row for row in calls if row["shard"] == home[row["digest"]]]
    sampled = sum(row["swapped"] is not None for row in once)
    view = query(database, "FROM swapped_statistics").to_dicts()
    assert [row["tau_f"] for row in view] == [0.5, 1.0, 2.0]
    for row in view:
        kept, swapped = slowly(once, "delta", row["tau_f"]), slowly(once, "swapped", row["tau_f"])
        assert (row["sampled"], row["kept"], row["kept_swapped"]) == (sampled, kept, swapped)
        assert row["share"] == (kept / sampled if sampled else None)
        assert row["ratio"] == (swapped / kept if kept else None)
        expected = None if not sampled else pytest.approx(swapped / sampled * len(once), abs=0.51)
        assert row["by_chance"] == expected
    calls_kept = query(database, "SELECT calls FROM filter_statistics ORDER BY tau_f")["calls"]
    assert [row["calls"] for row in view] == calls_kept.to_list()


def test_a_lane_that_was_not_swapped_has_true_counts_and_no_chance(tmp_path: Path) -> None:
    place = {"shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0}
    outputs = swapped_lake(tmp_path, [{**place, "delta": 1.5, "swapped": None}], "calendar")
    wanted = "SELECT tool, tau_f, calls, sampled, share, ratio, by_chance FROM swapped_statistics WHERE tau_f = 1"
    assert query(warehouse(tmp_path, outputs), wanted).rows() == [
        ("calculator", 1.0, 1, 0, None, None, None),
        ("calendar", 1.0, 0, 0, None, None, None),
    ]


def test_the_demo_prints_the_chance_beside_every_count(tmp_path: Path) -> None:
    place = {"shard": "one", "segment": 0, "position": 0, "sample": 0}
    calls = [
        {**place, "digest": "a", "delta": 1.5, "swapped": 0.5},
        {**place, "digest": "b", "delta": 3.0, "swapped": -1.0},
    ]
    assert query(warehouse(tmp_path, swapped_lake(tmp_path, calls, "calendar")), CHANCE).rows() == [
        ("calculator", "2 (1)", "2 (0)", "1 (0)"),
        ("calendar", "0 (not measured)", "0 (not measured)", "0 (not measured)"),
    ]
