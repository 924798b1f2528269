"""filtering.loss_floor: fewer tokens, the same kept calls, and nothing that depends on what was computed before."""

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from tests.pipeline.conftest import Line, NewLine, tokens
from toolformer_dag.settings.setting_types import SettingsError

FLOOR = 0.05
SCORED = ("loss_deltas", "swapped_results")
DECIDED = pl.col("loss_empty") - pl.col("loss_result") < FLOOR


def test_a_floor_saves_tokens_and_keeps_the_same_calls(new_line: NewLine) -> None:
    """Whatever was computed before: without a floor, or with a higher one; and without it all is as if never set."""
    whole, fewer, line = new_line("one"), new_line("one"), new_line("one")
    fewer.set(filtering__loss_floor=FLOOR)
    every, spent = tokens(whole.update()), tokens(fewer.update())
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
