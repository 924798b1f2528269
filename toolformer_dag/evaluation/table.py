"""Scores as a table. Imports no torch."""

from collections.abc import Sequence

import polars as pl

from toolformer_dag.evaluation.outcome import Outcome, Score

SCHEMA = {
    "benchmark": pl.String,
    "condition": pl.String,
    "n": pl.Int64,
    "accuracy": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "calls": pl.Float64,
    "right_tool": pl.Float64,
}
OUTCOMES = {
    "benchmark": pl.String(),
    "condition": pl.String(),
    "prompt": pl.String(),
    "answers": pl.List(pl.String),
    "wording": pl.String(),
    "text": pl.String(),
    "called": pl.String(),
    "right_tool": pl.Boolean(),
    "correct": pl.Boolean(),
    "reason": pl.String(),
}


def score_table(scores: Sequence[Score]) -> pl.DataFrame:
    """One row per benchmark and condition; accuracy with its 95 % interval, shares of calls and of the right tool."""
    return pl.DataFrame([{name: getattr(score, name) for name in SCHEMA} for score in scores], schema=SCHEMA)


def outcome_table(outcomes: Sequence[Outcome]) -> pl.DataFrame:
    """One row per question and condition."""
    return pl.DataFrame([{name: getattr(one, name) for name in OUTCOMES} for one in outcomes], schema=OUTCOMES)


def accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """A row per benchmark, a column per condition: `95.0 (91.0-97.3)` per cent, in the order in which they come."""
    percent = [(pl.col(name) * 100).round(1).cast(pl.String) for name in ("accuracy", "low", "high")]
    cell = pl.format("{} ({}-{})", *percent).alias("cell")
    return scores.with_columns(cell).pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)


def markdown(frame: pl.DataFrame) -> str:
    """A small table for a README or an asset's metadata; numbers with at most three decimals."""
    lines = [frame.columns, ["---"] * frame.width, *([_cell(value) for value in row] for row in frame.iter_rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")
