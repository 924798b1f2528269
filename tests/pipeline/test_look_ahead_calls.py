"""Calls that look ahead are rejected before they are scored: the losses are saved, and nothing else changes."""

import polars as pl
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import TEXT_KEY, NewLine, computed, cost
from toolformer_dag.texts.look_ahead import TextUnits

KEY = ("shard", "digest", "segment", "position", "sample")
SCORED = "loss_deltas"


def test_calls_that_look_ahead_are_counted_and_not_scored(new_line: NewLine, finished: NewLine) -> None:
    plain, line = finished("one"), new_line("one")
    line.set(look_ahead="true")
    reports = line.update()
    every, table = plain.read(SCORED), line.read(SCORED)
    ahead = table.filter(reason="looks_ahead")
    assert 0 < ahead.height < table.height == every.height
    assert reports[SCORED].rejections["looks_ahead"] == ahead.height
    assert ahead["loss_empty"].null_count() == ahead["delta"].null_count() == ahead.height
    assert table.filter(pl.col("ahead").is_null()).height == table.height - ahead.height
    texts = line.read("heuristic_subset").select(*TEXT_KEY, "text", "offset")
    for row in table.join(texts, on=TEXT_KEY).iter_rows(named=True):
        units = TextUnits.of(row["text"]).ahead(row["char_offset"] - row["offset"], row["input"])
        assert units == (row["ahead"] or []) and (row["reason"] == "looks_ahead") == bool(units)
    distinct = every.select("digest", "segment", "position", "input", "result").n_unique()
    assert cost({SCORED: reports[SCORED]}, "losses")[0] < distinct
    others = table.filter(pl.col("ahead").is_null()).drop("ahead")
    assert_frame_equal(others, every.join(others, on=KEY, how="semi").drop("ahead"), abs_tol=1e-5)
    for stage in ("swapped_results", "filtered_calls"):
        assert line.read(stage).join(ahead, on=KEY, how="semi").is_empty()
    assert sum(reports["filtered_calls"].rejections.values()) + line.read("filtered_calls").height == table.height


def test_the_rule_costs_nothing_where_the_losses_are_there_and_only_what_lacks_when_it_ends(
    new_line: NewLine, finished: NewLine
) -> None:
    line = finished("one")
    every = line.read(SCORED)
    line.set(look_ahead="true")
    assert computed({SCORED: line.update(SCORED)[SCORED]}) == 0
    assert "looks_ahead" in set(line.read(SCORED)["reason"])
    line.set(look_ahead="false")
    assert computed({SCORED: line.update(SCORED)[SCORED]}) == 0
    assert_frame_equal(line.read(SCORED), every)
    late = new_line("one")
    late.set(look_ahead="true")
    late.update()
    late.set(look_ahead="false")
    made, reused = cost({SCORED: late.update(SCORED)[SCORED]}, "losses")
    assert made > 0 and reused > 0
    assert_frame_equal(late.read(SCORED), every, abs_tol=1e-5)
