"""The plots beside an asset."""

import polars as pl
import pytest

from assets.plots import chance_curves, delta_histogram, histogram, loss_curve


def test_a_curve_that_leaves_the_numbers_is_still_drawn() -> None:
    curve = pl.DataFrame({"step": [1, 2, 3], "measure": ["loss"] * 3, "value": [2.0, float("nan"), float("inf")]})
    assert loss_curve(curve).startswith(b"\x89PNG")


def test_a_bar_stands_over_its_own_deltas_so_that_tau_f_parts_them() -> None:
    deltas = pl.Series("delta", [0.45, 0.45, 0.5, None, 99.0, -99.0])
    bars = histogram(deltas).filter(pl.col("calls") > 0)
    assert bars["calls"].to_list() == [1, 2, 1, 1]
    assert bars["delta"].to_list() == pytest.approx([-3.0, 0.4, 0.5, 4.9])
    assert (bars["end"] - bars["delta"]).to_list() == pytest.approx([0.1] * 4)
    assert delta_histogram(deltas.to_frame(), 0.5).startswith(b"\x89PNG")


def test_a_lane_without_a_threshold_and_rates_by_chance_are_drawn() -> None:
    assert delta_histogram(pl.DataFrame({"delta": [0.4]}), None).startswith(b"\x89PNG")
    rates = pl.DataFrame({"tau_f": [0.2, 0.7], "kept": [2, 1], "fdr": [0.4, 0.1], "fdr_high": [1.0, 0.3]})
    assert chance_curves(rates).startswith(b"\x89PNG")
