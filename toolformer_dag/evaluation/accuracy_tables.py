"""Measurements as tables, and where they lie in the lake. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from toolformer_dag.evaluation.scores import QuestionOutcome, Score
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.record import STORES, record

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
    """One row per benchmark and condition; accuracy with its 95 % interval, shares of calls and of the right tool."""
    return pl.DataFrame(
        [{name: getattr(score, name) for name in SCORE_SCHEMA} for score in scores], schema=SCORE_SCHEMA
    )


def outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """One row per question and condition."""
    return pl.DataFrame(
        [{name: getattr(one, name) for name in OUTCOME_SCHEMA} for one in outcomes], schema=OUTCOME_SCHEMA
    )


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


ACCURACY = "evaluation/accuracy"
"""The table of scores, as `score_table` makes it; its only partition is WHOLE, as in the tables below."""
OUTCOMES = "evaluation/outcomes"
"""Every question under every condition, as `outcome_table` makes it."""
PERPLEXITY = "evaluation/perplexity"
"""Source, condition, texts, perplexity, bits_per_byte."""


def publish(
    lake: Lake,
    table: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    checkpoints: Mapping[str, str],
    stores: Sequence[str] = (),
) -> str:
    """Replaces a table of measurements; returns the version of its content. Raises WriteError.

    `checkpoints`: name -> fingerprint of those that were measured. `stores`: names of the row stores that it was made
    from, which `clean` then keeps.
    """
    made = record(settings, checkpoints, **{STORES: list(stores)})
    return lake.table(table).publish(WHOLE, [rows], made).data_version


def read_accuracy(lake: Path) -> pl.DataFrame:
    """A row per benchmark, a column per condition. Raises MissingPartition where nothing was measured yet."""
    return accuracy_by_condition(Lake(lake).table(ACCURACY).read(WHOLE))
