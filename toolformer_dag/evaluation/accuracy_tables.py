"""Convert outcomes and scores to tables. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType

import polars as pl

from toolformer_dag.evaluation.arithmetic_baselines import NO_MODEL
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
    "model": pl.String,
    "k": pl.Int64,
    "weights": pl.String,
    "parameters": pl.Int64,
}
CALLS = pl.List(pl.Struct({name: pl.String() for name in ("tool", "input", "result", "reason")}))
"""The calls of a text; fields as in `DecodedCall`."""
OUTCOME_SCHEMA = {
    "benchmark": pl.String(),
    "question": pl.Int64(),
    "condition": pl.String(),
    "model": pl.String(),
    "k": pl.Int64(),
    "wording": pl.String(),
    "prompt": pl.String(),
    "context": pl.String(),
    "gold": pl.List(pl.String),
    "written": pl.String(),
    "plain": pl.String(),
    "called": pl.String(),
    "call_input": pl.String(),
    "call_result": pl.String(),
    "calls": CALLS,
    "reason": pl.String(),
    "right_tool": pl.Boolean(),
    "correct": pl.Boolean(),
    "tokens": pl.Int64(),
}
Weights = tuple[str, int]
"""What a model is, or was finetuned from, and its number of parameters."""


def score_table(scores: Sequence[Score], weights: Mapping[str, Weights] = MappingProxyType({})) -> pl.DataFrame:
    """Return a row per benchmark and condition: accuracy with 95 % interval, shares of calls and right tools.

    `weights`: by model; the columns of others are null.
    """
    told = SCORE_SCHEMA.keys() - {"weights", "parameters"}
    unknown = (None, None)
    rows = [
        {name: getattr(score, name) for name in told}
        | dict(zip(("weights", "parameters"), weights.get(score.model, unknown), strict=True))
        for score in scores
    ]
    return pl.DataFrame(rows, schema=SCORE_SCHEMA)


def outcome_table(outcomes: Sequence[QuestionOutcome]) -> pl.DataFrame:
    """Return a row per question and condition."""
    rows = [
        {name: getattr(outcome, name) for name in OUTCOME_SCHEMA} | {"calls": [asdict(call) for call in outcome.calls]}
        for outcome in outcomes
    ]
    return pl.DataFrame(rows, schema=OUTCOME_SCHEMA)


def accuracy_by_condition(scores: pl.DataFrame) -> pl.DataFrame:
    """Return a row per benchmark and a column per condition, in per cent: `95.0 (91.0-97.3)`; order is kept.

    The last column, where there is one, holds the best of the baselines that need no model.
    """
    percent = [(pl.col(name) * 100).round(1).cast(pl.String) for name in ("accuracy", "low", "high")]
    cells = scores.with_columns(cell=pl.format("{} ({}-{})", *percent))
    of_models, without = (cells.filter(chosen) for chosen in (pl.col("k").is_not_null(), pl.col("k").is_null()))
    wide = of_models.pivot("condition", index=["benchmark", "n"], values="cell", maintain_order=True)
    if without.is_empty():
        return wide
    best = without.sort("accuracy", descending=True, maintain_order=True).unique("benchmark", keep="first")
    named = best.select(
        "benchmark", pl.format("{} {}", "cell", pl.col("condition").str.split(": ").list.last()).alias(NO_MODEL)
    )
    return wide.join(named, on="benchmark", how="left", maintain_order="left")


def markdown(frame: pl.DataFrame) -> str:
    """Format a table as Markdown; floats have three decimals."""
    lines = [frame.columns, ["---"] * frame.width, *([_cell(value) for value in row] for row in frame.iter_rows())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value).replace("|", "\\|")
