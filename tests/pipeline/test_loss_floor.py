"""Calls and texts that are left out unscored, below a floor, looking ahead or not finite; nothing else changes."""

from pathlib import Path

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pipeline.conftest import TEXT_KEY, Line, NewLine, computed, cost, tokens
from toolformer_dag.settings.setting_types import SettingsError
from toolformer_dag.texts.look_ahead import TextUnits

FLOOR = 0.05
SCORED = ("loss_deltas", "swapped_results")
DECIDED = pl.col("loss_empty") - pl.col("loss_result") < FLOOR


def test_a_floor_saves_tokens_and_keeps_the_same_calls(new_line: NewLine) -> None:
    """Whatever was computed before: without a floor, or with a higher one; and without it all is as if never set."""
    whole = new_line("one")
    fewer = new_line("one")
    line = new_line("one")
    fewer.set(filtering__loss_floor=FLOOR)
    every = tokens(whole.update())
    spent = tokens(fewer.update())
    assert 0 < spent < every
    for stage in ("filtered_calls", "augmented_corpus"):
        assert_frame_equal(fewer.read(stage), whole.read(stage), rel_tol=0, abs_tol=1e-5)
    for stage in SCORED:
        assert_bounded(whole.read(stage), fewer.read(stage))
    line.set(tau_f=0.5, filtering__loss_floor=0.5)
    line.update()
    line.set(tau_f=FLOOR, filtering__loss_floor=FLOOR)
    assert 0 < tokens(line.update()) < spent
    exact = {stage: whole.read(stage) for stage in SCORED}
    whole.set(filtering__loss_floor=FLOOR)
    assert tokens(whole.update()) == 0
    for stage in SCORED:
        for other in (line, whole):
            assert_frame_equal(other.read(stage), fewer.read(stage), rel_tol=0, abs_tol=1e-5)
    del fewer.values["filtering.loss_floor"]
    fewer.update()
    for stage, rows in exact.items():
        assert_frame_equal(fewer.read(stage), rows, rel_tol=0, abs_tol=1e-5)


def assert_bounded(exact: pl.DataFrame, bounded: pl.DataFrame) -> None:
    """L(c) is left out exactly where the two other losses decide."""
    assert not exact["delta_is_bound"].any() and not exact["loss_call"].has_nulls()
    assert (bounded["delta_is_bound"] == bounded.select(DECIDED).to_series()).all()
    assert (bounded["loss_call"].is_null() == bounded["delta_is_bound"]).all()
    assert (bounded["delta"] >= exact["delta"] - 1e-5).all()
    sure = ~bounded["delta_is_bound"]
    assert not sure.all()
    assert bounded["delta"].filter(sure).to_list() == pytest.approx(exact["delta"].filter(sure).to_list(), abs=1e-5)


def test_a_threshold_below_the_floor_is_refused(new_line: NewLine) -> None:
    line: Line = new_line("one")
    line.set(filtering__loss_floor=0.06)
    with pytest.raises(SettingsError, match=r"loss_floor = 0.06 is above tau_f = 0.05 of tools.calculator.*; lower"):
        line.plan()


KEY = ("shard", "digest", "segment", "position", "sample")


def test_calls_that_look_ahead_are_counted_and_not_scored(new_line: NewLine, finished: NewLine) -> None:
    plain = finished("one")
    line = new_line("one")
    line.set(look_ahead="true")
    reports = line.update()
    every = plain.read("loss_deltas")
    table = line.read("loss_deltas")
    ahead = table.filter(reason="looks_ahead")
    assert 0 < ahead.height < table.height == every.height
    assert reports["loss_deltas"].rejections_by_reason["looks_ahead"] == ahead.height
    assert ahead["loss_empty"].null_count() == ahead["delta"].null_count() == ahead.height
    assert table.filter(pl.col("ahead").is_null()).height == table.height - ahead.height
    texts = line.read("heuristic_subset").select(*TEXT_KEY, "text", "offset")
    for row in table.join(texts, on=TEXT_KEY).iter_rows(named=True):
        units = TextUnits.from_text(row["text"]).list_units_ahead(row["char_offset"] - row["offset"], row["input"])
        assert units == (row["ahead"] or []) and (row["reason"] == "looks_ahead") == bool(units)
    distinct = every.select("digest", "segment", "position", "input", "result").n_unique()
    assert cost({"loss_deltas": reports["loss_deltas"]}, "losses")[0] < distinct
    others = table.filter(pl.col("ahead").is_null()).drop("ahead")
    assert_frame_equal(others, every.join(others, on=KEY, how="semi").drop("ahead"), abs_tol=1e-5)
    for stage in ("swapped_results", "filtered_calls"):
        assert line.read(stage).join(ahead, on=KEY, how="semi").is_empty()
    assert (
        sum(reports["filtered_calls"].rejections_by_reason.values()) + line.read("filtered_calls").height
        == table.height
    )


def test_the_rule_costs_nothing_where_the_losses_are_there_and_only_what_lacks_when_it_ends(
    new_line: NewLine, finished: NewLine
) -> None:
    line = finished("one")
    every = line.read("loss_deltas")
    line.set(look_ahead="true")
    assert computed({"loss_deltas": line.update("loss_deltas")["loss_deltas"]}) == 0
    assert "looks_ahead" in set(line.read("loss_deltas")["reason"])
    line.set(look_ahead="false")
    assert computed({"loss_deltas": line.update("loss_deltas")["loss_deltas"]}) == 0
    assert_frame_equal(line.read("loss_deltas"), every)
    late = new_line("one")
    late.set(look_ahead="true")
    late.update()
    late.set(look_ahead="false")
    made, reused = cost({"loss_deltas": late.update("loss_deltas")["loss_deltas"]}, "losses")
    assert made > 0 and reused > 0
    assert_frame_equal(late.read("loss_deltas"), every, abs_tol=1e-5)


def overflowing(model_folder: Path, folder: Path) -> Path:
    """Save the same model with weights that float32 can hold and float16 cannot."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.fill_(1e5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


def test_texts_whose_positions_are_not_finite_are_counted_and_computed_once(new_line: NewLine) -> None:
    line = new_line("one")
    overflowing(line.folder / "model", line.folder / "overflowing")
    line.set(model__name="overflowing", model__dtype="float16")
    first = line.update()
    texts = first["heuristic_subset"].row_count_by_part["one"]
    assert texts and first["scored_candidates"].rejections_by_reason == {"not_finite": texts}
    assert (first["scored_candidates"].row_count_by_part["one"], first["filtered_calls"].row_count_by_part["one"]) == (
        0,
        0,
    )
    line.set(k=4)  # the part is made anew; nothing of the texts is computed again
    again = line.update()
    assert again["scored_candidates"].updated_parts == ("one",)
    assert (computed(again), line.engines) == (0, 0)
