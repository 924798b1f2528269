"""The control: other documents' results, scored like the true ones, counted like the kept ones."""

from collections.abc import Sequence
from itertools import cycle, groupby
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import TEXT_KEY, NewLine, engine_of, tokens
from toolformer_dag.pipeline.control_calls import exchange_results, select_likeliest_places
from toolformer_dag.pipeline.control_stages import build_control_stage
from toolformer_dag.pipeline.controls import CHANCE_CONTROL
from toolformer_dag.settings.sections import ControlSettings

Row = dict[str, Any]
Key = tuple[Any, ...]
KEY = ("shard", "digest", "segment", "position", "sample")
STAGE = build_control_stage(CHANCE_CONTROL)
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


def exchanged(
    rows: Sequence[Row], limit: int = TEXTS, texts: Sequence[Row] | None = None, swaps: int = 1
) -> dict[Key, Row]:
    """By key, and by swap where there may be several. `rows`: candidates; `texts`: rows of all texts."""
    whole = pl.DataFrame(rows, schema=CALLS)
    known = pl.DataFrame(texts or rows, schema=CALLS).select(TEXT_KEY).unique()
    known = known.with_columns(text_digest=pl.concat_str("shard", "digest"))
    found = exchange_results(
        whole.filter(pl.col("result").is_not_null()),
        control=CHANCE_CONTROL,
        settings=ControlSettings(swaps=swaps),
        texts=known,
        likeliest_places=select_likeliest_places(whole),
        max_texts=limit,
    )
    return {(*key_of(row), row["swap"]) if swaps > 1 else key_of(row): row for row in found.to_dicts()}


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
    fewer = exchanged(selected(rows, tau_s, k, m), limit, rows)
    more = exchanged(rows, limit)
    assert all(more[key] == row for key, row in fewer.items())


@settings(max_examples=20, deadline=None)
@given(candidates, st.integers(1, 3))
def test_a_larger_sample_holds_the_smaller_one_and_texts_count_by_shard(rows, limit):
    smaller = exchanged(rows, limit)
    larger = exchanged(rows, limit + 1)
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


@settings(max_examples=20, deadline=None)
@given(candidates, st.integers(1, 4))
def test_ids_of_documents_and_shards_decide_nothing(rows, limit):
    """The same texts under other ids, in the same number of shards, are told the same."""
    renamed = [{**row, "shard": f"z/{row['shard']}", "digest": f"{ord('z') - ord(row['digest'])}"} for row in rows]
    for row, other in zip(rows, renamed, strict=True):
        row["result"] = other["result"] = row["input"] and f"{row['input']}{row['position']}"

    def told(candidates, ids):
        whole = pl.DataFrame(candidates, schema=CALLS)
        texts = whole.select(TEXT_KEY).unique().join(ids, on=TEXT_KEY)
        found = exchange_results(
            whole.filter(pl.col("result").is_not_null()),
            control=CHANCE_CONTROL,
            settings=ControlSettings(),
            texts=texts,
            likeliest_places=select_likeliest_places(whole),
            max_texts=limit,
        )
        placed = found.join(ids, on=TEXT_KEY).select("text_digest", "position", "sample", "result", "swap_reason")
        return sorted(map(str, placed.rows()))

    named = pl.concat_str("shard", "digest").alias("text_digest")
    ids = pl.DataFrame(rows, schema=CALLS).select(*TEXT_KEY, named)
    others = pl.DataFrame(renamed, schema=CALLS).select(TEXT_KEY).with_columns(ids["text_digest"])
    assert told(rows, ids.unique()) == told(renamed, others.unique())


@settings(max_examples=40, deadline=None)
@given(candidates, st.integers(2, 4))
def test_every_swap_of_a_call_is_another_result_and_more_swaps_leave_the_first_ones(rows, swaps):
    one = exchanged(rows)
    fewer = exchanged(rows, swaps=swaps)
    more = exchanged(rows, swaps=swaps + 1)
    assert {key[:-1]: row for key, row in more.items() if key[-1] == 0} == one
    assert {key: row for key, row in more.items() if key[-1] < swaps} == fewer
    best = {key_of(row)[:4]: row for row in selected(rows, 0.0, 1, 1)}
    for key in one:
        own = next(row for row in rows if key_of(row) == key)
        told = [row["result"] for other, row in more.items() if other[:-1] == key and row["result"] is not None]
        fitting = {
            row["result"]
            for row in best.values()
            if row["digest"] != own["digest"] and row["p_api"] >= own["p_api"] and row["result"] is not None
        } - {own["result"]}
        assert len(told) == len(set(told)) == min(swaps + 1, len(fitting)) and set(told) <= fitting


def test_results_of_a_shard_go_round():
    """Each of many documents has a result of its own; of equally likely ones each is told once."""
    rows = [call("one", f"{number:03}", 0, 0, "date", 0.5) for number in range(100)]
    told = [row["result"] for row in exchanged(rows).values()]
    assert sorted(told) == sorted(row["result"] for row in rows)


SWAPPED = "swapped_results"


def test_losses_are_those_of_the_engine_and_are_computed_once(finished: NewLine) -> None:
    line = finished("one")
    true = line.read("loss_deltas")
    table = line.read(SWAPPED)
    line.output(SWAPPED).table.withdraw_part("one")
    report = line.update(SWAPPED)[SWAPPED]
    assert (report.computed_row_count, tokens({SWAPPED: report})) == (0, 0) and report.reused_row_count > 0
    assert table.schema == STAGE.schema and table.equals(line.read(SWAPPED))
    texts = true.select(TEXT_KEY).unique().height
    assert table.height == report.row_count_by_part["one"] > 0
    assert table.select(TEXT_KEY).unique().height <= 3 < texts
    assert table.height + sum(report.rejections_by_reason.values()) == true.height
    pairs = table.join(true, on=("tool", *KEY, "input", "p_api", "char_offset"))
    assert pairs.height == table.height
    assert pairs.filter(pl.col("result") == pl.col("result_right")).is_empty()
    # the call without a call and the call without its result are the same ones as before
    for loss in ("loss_empty", "loss_call"):
        assert pairs[loss].to_list() == pytest.approx(pairs[f"{loss}_right"].to_list(), abs=1e-4)


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


def test_more_swaps_add_rows_and_leave_the_others_as_they_are(finished: NewLine) -> None:
    line = finished("one")
    before = line.read(SWAPPED)
    assert set(before["swap"]) == {0}
    line.set(control__swaps=3)
    report = line.update("loss_deltas", SWAPPED)
    assert report["loss_deltas"].is_unchanged and report[SWAPPED].computed_row_count > 0
    after = line.read(SWAPPED)
    assert_frame_equal(after.filter(swap=0), before)
    assert not report[SWAPPED].violations_by_check["unique_keys"]
    assert after.filter(pl.col("swap") > 0).height > 0
    assert after.group_by(KEY).agg(same=pl.col("result").n_unique() == pl.len())["same"].all()
    line.set(control__swaps=1)
    assert tokens(line.update(SWAPPED)) == 0
    assert_frame_equal(line.read(SWAPPED), before)
