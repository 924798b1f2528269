"""The control: other documents' results, scored like the true ones, counted like the kept ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dagster as dg
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from assets.plan import Plan
from assets.swapped_results import swapped_results
from resources.instance import SHARDS
from resources.lake import LakeResource
from resources.language_model import LanguageModelResource
from toolformer_dag.cli.demo import CHANCE
from toolformer_dag.settings.settings import Settings
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.exchange import TEXT, exchange, likeliest_places
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.swapped_results import by_chance
from toolformer_dag.storage.errors import MissingPartition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.warehouse import build, query

if TYPE_CHECKING:
    from conftest import Line

    from toolformer_dag.stages.report import StageReport

NewLine = Callable[..., "Line"]
Row = dict[str, Any]
Key = tuple[Any, ...]
KEY = ("shard", "digest", "segment", "position", "sample")
CALLS = pl.Schema({name: columns("loss_deltas")[name] for name in (*KEY, "input", "result", "p_api")})
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
    known = pl.DataFrame(texts or rows, schema=CALLS).select(TEXT).unique()
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


@pytest.fixture
def line(new_line: NewLine) -> "Line":
    line = new_line(["one"])
    for name in ("raw_shards", "heuristic_subset", "scored_candidates", "tool_results", "loss_deltas"):
        line.stage(name, "one")
    return line


def test_losses_are_those_of_the_engine_and_are_paid_once(line: "Line") -> None:
    true = line.lake.table("calculator/loss_deltas").read("one")
    report = line.stage("swapped_results", "one")
    table = line.lake.table("calculator/swapped_results").read("one")
    assert table.schema == columns("swapped_results")
    texts = true.select(TEXT).unique().height
    assert table.height == report.rows > 0
    assert table.select(TEXT).unique().height <= line.swapped_texts < texts
    assert table.height + sum(report.rejections.values()) == true.height
    assert report.computed > 0
    pairs = table.join(true, on=("tool", *KEY, "input", "p_api", "char_offset"))
    assert pairs.height == table.height
    assert pairs.filter(pl.col("result") == pl.col("result_right")).is_empty()
    # the call without a call and the call without its result are the same ones as before
    for loss in ("loss_empty", "loss_call"):
        assert (pairs[loss] - pairs[f"{loss}_right"]).abs().max() < 1e-4
    engines = line.engines
    again = line.stage("swapped_results", "one")
    assert (again.computed, again.tokens, line.engines) == (0, {}, engines)
    assert again.data_version == report.data_version
    line.swapped_texts += 1
    more = line.stage("swapped_results", "one")
    assert more.reused >= report.computed
    assert 0 < more.computed < report.computed


def rerun(line: "Line") -> "StageReport":
    """The lane from its candidates on; returns the control's report."""
    for name in ("scored_candidates", "tool_results", "loss_deltas"):
        line.stage(name, "one")
    return line.stage("swapped_results", "one")


@pytest.mark.parametrize("change", [{"k": 2}, {"m": 2}, {"tau_s": 0.3}])
def test_fewer_candidates_cost_nothing_and_more_cost_what_is_missing(new_line: NewLine, line: "Line", change) -> None:
    wide, whole = line.lane, line.stage("swapped_results", "one")
    rows = line.lake.table("calculator/swapped_results").read("one")
    line.lane = replace(wide, **change)
    fewer = rerun(line)
    assert fewer.tokens == {} and 0 < fewer.rows < whole.rows
    narrow = new_line(["one"])
    narrow.lane = line.lane
    for name in ("raw_shards", "heuristic_subset"):
        narrow.stage(name, "one")
    alone = rerun(narrow)
    assert_frame_equal(*(one.lake.table("calculator/swapped_results").read("one") for one in (line, narrow)))
    narrow.lane = wide
    assert rerun(narrow).computed == whole.computed - alone.computed
    assert_frame_equal(narrow.lake.table("calculator/swapped_results").read("one"), rows, abs_tol=1e-5)


def test_loss_of_a_swapped_result_against_the_engine_itself(line: "Line") -> None:
    from toolformer_dag.model.requests import LossRequest

    line.swapped_texts = 1
    line.stage("swapped_results", "one")
    texts = line.lake.table("calculator/heuristic_subset").read("one")
    found = line.lake.table("calculator/swapped_results").read("one").join(texts, on=("shard", "digest", "segment"))
    for row in found.to_dicts():
        request = LossRequest(row["text"], row["position"], "Calculator", row["input"], row["result"])
        [losses] = line.engine().losses([request])
        assert row["loss_plus"] == pytest.approx(losses.loss_plus, abs=1e-4)
        assert row["delta"] == pytest.approx(losses.delta, abs=1e-4)


def test_the_true_rows_stay_as_they_are(line: "Line") -> None:
    before = line.lake.table("calculator/loss_deltas").read("one")
    line.stage("swapped_results", "one")
    assert line.stage("loss_deltas", "one").computed == 0
    assert_frame_equal(line.lake.table("calculator/loss_deltas").read("one"), before)


def test_inputs_that_are_missing_or_do_not_fit_are_named(new_line: NewLine, line: "Line") -> None:
    with pytest.raises(MissingPartition, match="calculator/heuristic_subset"):
        new_line(["one"]).stage("swapped_results", "one")
    line.texts_per_shard = 1
    line.stage("heuristic_subset", "one")
    with pytest.raises(StaleInput, match="texts that are gone"):
        line.stage("swapped_results", "one")


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


def lake_with(folder: Path, calls: Sequence[Row]) -> Lake:
    """Both tables of loss_deltas' shape; a call without `swapped` was not sampled."""
    lake = Lake(folder)
    for shard in ("one", "two"):
        true = [{"tool": "calculator", **row} for row in calls if row["shard"] == shard]
        other = [{**row, "delta": row["swapped"]} for row in true if row["swapped"] is not None]
        for name, made in (("loss_deltas", true), ("swapped_results", other)):
            frame = pl.DataFrame([{k: v for k, v in row.items() if k != "swapped"} for row in made], columns(name))
            lake.table(f"calculator/{name}").publish(shard, [frame], {})
    return lake


def slowly(calls: Sequence[Row], column: str, tau_f: float) -> int:
    """Positions at which some sampled call stays."""
    sampled = sorted((row for row in calls if row["swapped"] is not None), key=lambda row: [row[n] for n in KEY])
    places = groupby(sampled, key=lambda row: [row[name] for name in KEY[:-1]])
    return sum(any(row[column] >= tau_f for row in group) for _, group in places)


@settings(max_examples=6, deadline=None)
@given(pairs)
def test_shares_agree_with_plain_loops(tmp_path_factory, calls):
    folder = tmp_path_factory.mktemp("lake")
    lake = lake_with(folder, calls)
    tables = [lake.table(f"calculator/{name}").scan(["one", "two"]) for name in ("loss_deltas", "swapped_results")]
    sampled = sum(row["swapped"] is not None for row in calls)
    for tau, *counts in by_chance(*tables, [0.5, 1.0, 2.0]).iter_rows():
        assert counts == [sampled, slowly(calls, "delta", tau), slowly(calls, "swapped", tau)]
    build(lake, ["calculator"], ["one", "two"], folder / "w.duckdb")
    home = {row["digest"]: min(r["shard"] for r in calls if r["digest"] == row["digest"]) for row in calls}
    once = [row for row in calls if row["shard"] == home[row["digest"]]]
    sampled = sum(row["swapped"] is not None for row in once)
    view = query(folder / "w.duckdb", "FROM swapped_statistics").to_dicts()
    assert [row["tau_f"] for row in view] == [0.5, 1.0, 2.0]
    for row in view:
        kept, swapped = slowly(once, "delta", row["tau_f"]), slowly(once, "swapped", row["tau_f"])
        assert (row["sampled"], row["kept"], row["kept_swapped"]) == (sampled, kept, swapped)
        assert row["share"] == (kept / sampled if sampled else None)
        assert row["ratio"] == (swapped / kept if kept else None)
        expected = None if not sampled else pytest.approx(swapped / sampled * len(once), abs=0.51)
        assert row["by_chance"] == expected
    calls_kept = query(folder / "w.duckdb", "SELECT calls FROM filter_statistics ORDER BY tau_f")["calls"]
    assert [row["calls"] for row in view] == calls_kept.to_list()


def test_a_lane_that_was_not_swapped_has_true_counts_and_no_chance(tmp_path: Path) -> None:
    place = {"shard": "one", "digest": "a", "segment": 0, "position": 0, "sample": 0}
    lake = lake_with(tmp_path, [{**place, "delta": 1.5, "swapped": None}])
    build(lake, ["calculator", "calendar"], ["one"], tmp_path / "w.duckdb")
    wanted = "SELECT tool, tau_f, calls, sampled, share, ratio, by_chance FROM swapped_statistics WHERE tau_f = 1"
    assert query(tmp_path / "w.duckdb", wanted).rows() == [
        ("calculator", 1.0, 1, 0, None, None, None),
        ("calendar", 1.0, 0, 0, None, None, None),
    ]


def test_the_demo_prints_the_chance_beside_every_count(tmp_path: Path) -> None:
    place = {"shard": "one", "segment": 0, "position": 0, "sample": 0}
    calls = [
        {**place, "digest": "a", "delta": 1.5, "swapped": 0.5},
        {**place, "digest": "b", "delta": 3.0, "swapped": -1.0},
    ]
    build(lake_with(tmp_path, calls), ["calculator", "calendar"], ["one"], tmp_path / "w.duckdb")
    assert query(tmp_path / "w.duckdb", CHANCE).rows() == [
        ("calculator", "2 (1)", "2 (0)", "1 (0)"),
        ("calendar", "0 (not measured)", "0 (not measured)", "0 (not measured)"),
    ]


def test_the_asset_shows_both_shares(line: "Line") -> None:
    model = {"name": str(line.model_folder), "device": "cpu"}
    settings = Settings.model_validate(
        {"root": line.folder, "tools": {"calculator": {}}, "model": model, "evaluation": {"swapped_texts": 2}}
    )
    instance = dg.DagsterInstance.ephemeral()
    instance.add_dynamic_partitions(SHARDS.name or "", ["one"])
    done = dg.materialize(
        [swapped_results(Plan(settings, (line.lane,), line.model, line.sampling), line.lane)],
        partition_key="one",
        instance=instance,
        resources={
            "lake": LakeResource(root=str(line.folder / "lake")),
            "language_model": LanguageModelResource(**settings.model.model_dump()),
        },
    )
    [made] = done.asset_materializations_for_node("calculator__swapped_results")
    rows = made.metadata["dagster/row_count"].value
    assert rows == line.lake.table("calculator/swapped_results").read("one").height > 0
    table = str(made.metadata["kept"].value)
    assert table.startswith("| tau_f | sampled | kept | kept_swapped | % kept | % kept_swapped |")
    assert [row.split(" | ")[:2] for row in table.splitlines()[2:]] == [
        [f"| {tau:.3f}", str(rows)] for tau in (line.lane.tau_f, 0.5, 1.0, 2.0)
    ]
