"""Convert outcomes and scores to tables. Imports no torch."""

from collections.abc import Sequence

import polars as pl

from toolformer_dag.evaluation.scores import QuestionOutcome, Score

SCORE_SCHEMA = {
    "benchmark": pl.String,
    "condition": pl.String,
    "n": pl.Int64,
    "accuracy": pl.Float64,
    "low": pl.Float64,
    "high": pl.Float64,
    "calls": pl.Float64,
    "right_tool": pl.Float64,
}
OUTCOME_SCHEMA = {
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
    """Return a row per benchmark and condition: accuracy with 95 % interval, shares of calls and right tools."""
    return pl.DataFrame(
        [{name: getattr(score, name) for name in SCORE_SCHEMA} for score in scores], schema=SCORE_SCHEMA
    )


def outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return a row per question and condition."""
    return pl.DataFrame(
        [{name: getattr(outcome, name) for name in OUTCOME_SCHEMA} for outcome in outcomes], schema=OUTCOME_SCHEMA
    )


def accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition, in per cent: `95.0 (91.0-97.3)`; order is kept."""
    percent = [(pl.col(name) * 100).round(1).cast(pl.String) for name in ("accuracy", "low", "high")]
    cell = pl.format("{} ({}-{})", *percent).alias("cell")
    return scores.with_columns(cell).pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)


def markdown(frame: pl.DataFrame) -> str:
    """Format a table as Markdown; floats have three decimals."""
    lines = [frame.columns, ["---"] * frame.width, *([_cell(value) for value in row] for row in frame.iter_rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")
