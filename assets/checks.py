"""What must hold of the rows that an asset wrote; a failed check keeps the assets after it from running."""

from collections.abc import Sequence

import dagster as dg
import polars as pl

from toolformer_dag.stages.schema import KEYS


def unique_keys(rows: pl.LazyFrame, stage: str) -> dg.AssetCheckResult:
    """No two rows share the key of their stage."""
    key = KEYS[stage]
    twice = _count(rows.group_by(key).len().filter(pl.col("len") > 1))
    return dg.AssetCheckResult(
        passed=twice == 0, check_name="unique_keys", metadata={"key": ", ".join(key), "keys held twice": twice}
    )


def losses_finite(rows: pl.LazyFrame) -> dg.AssetCheckResult:
    """The three losses and the delta are numbers."""
    columns = ("loss_empty", "loss_call", "loss_result", "delta")
    broken = _count(rows.filter(~pl.all_horizontal(pl.col(name).is_finite() for name in columns)))
    return dg.AssetCheckResult(passed=broken == 0, check_name="losses_finite", metadata={"rows not finite": broken})


def kept_at_tau_f(rows: pl.LazyFrame, tau_f: float) -> dg.AssetCheckResult:
    """No kept call gained less than its threshold."""
    below = _count(rows.filter(pl.col("delta") < tau_f))
    return dg.AssetCheckResult(passed=below == 0, check_name="kept_at_tau_f", metadata={"calls below tau_f": below})


def gives_text_back(rows: pl.LazyFrame, tools: Sequence[str]) -> dg.AssetCheckResult:
    """Taking the calls out of x* gives x, byte for byte."""
    from toolformer_dag.texts.calls import take_out

    pairs = rows.select("text_with_calls", "text").collect().iter_rows()
    lost = sum(take_out(augmented, tools) != text for augmented, text in pairs)
    return dg.AssetCheckResult(passed=lost == 0, check_name="gives_text_back", metadata={"texts not given back": lost})


def specs(asset: dg.AssetKey, *names: str) -> list[dg.AssetCheckSpec]:
    """The declarations of the checks that an asset's results carry."""
    return [dg.AssetCheckSpec(name, asset=asset, blocking=True) for name in names]


def _count(rows: pl.LazyFrame) -> int:
    return int(rows.select(pl.len()).collect().item())
