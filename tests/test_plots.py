"""The plots beside an asset."""

import polars as pl

from assets.plots import loss_curve


def test_a_curve_that_leaves_the_numbers_is_still_drawn() -> None:
    curve = pl.DataFrame({"step": [1, 2, 3], "measure": ["loss"] * 3, "value": [2.0, float("nan"), float("inf")]})
    assert loss_curve(curve).startswith(b"\x89PNG")
