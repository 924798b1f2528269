"""Evaluation, training and costs: tables of the warehouse that are empty until these were run."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolformer_dag.explorer.warehouse_reader import WarehouseReader

MOST_QUESTIONS = 200
MOST_EXPORTED = 25
"""Questions won and as many lost, of each benchmark, that an exported page holds."""
PREFERRED = ("Toolformer", "Toolformer (disabled)", "base")
MOST_COSTS = 500
LONG = 600
"""Characters of a prompt or an answer that are shown."""
PAIRS = """
SELECT one.benchmark, count(*) AS questions, count(*) FILTER (one.correct AND NOT other.correct) AS won,
       count(*) FILTER (other.correct AND NOT one.correct) AS lost,
       count(*) FILTER (one.correct AND other.correct) AS both,
       count(*) FILTER (len(one.calls) > 0) AS called,
       count(*) FILTER (len(one.calls) > 0 AND (other.correct OR NOT one.correct)) AS needless
FROM outcomes AS one JOIN outcomes AS other USING (benchmark, question)
WHERE one.condition = $one AND other.condition = $other
GROUP BY one.benchmark ORDER BY one.benchmark
"""
QUESTIONS = f"""
SELECT one.benchmark, question, one.prompt[-{LONG}:] AS prompt, one.gold, one.written[:{LONG}] AS written,
       other.written[:{LONG}] AS other_written, one.correct, other.correct AS other_correct,
       [{{tool: made.tool, input: made.input[:{LONG}], result: coalesce(made.result[:{LONG}], made.reason)}}
        FOR made IN one.calls] AS calls
FROM outcomes AS one JOIN outcomes AS other USING (benchmark, question)
WHERE one.condition = $one AND other.condition = $other AND one.benchmark = $benchmark
  AND CASE $which WHEN 'won' THEN one.correct AND NOT other.correct
                  WHEN 'lost' THEN other.correct AND NOT one.correct ELSE true END
ORDER BY question LIMIT {MOST_QUESTIONS}
"""
CONDITIONS = "SELECT condition, coalesce(max(k), 0) > 0 AS calls FROM outcomes GROUP BY condition ORDER BY ALL"
COMPARED = f"""
WITH conditions AS ({CONDITIONS})
SELECT one.condition AS one, other.condition AS other FROM conditions AS one, conditions AS other
WHERE one.calls AND NOT other.calls ORDER BY ALL
"""
COSTS_SHOWN = "* REPLACE (ended AT TIME ZONE 'UTC' AS ended)"


def outcome_tables(reader: WarehouseReader) -> dict[str, Any]:
    """Return the conditions of the questions, which two to compare first, and the rows of the small tables."""

    def rows(name: str, order: str, limit: int = MOST_COSTS, columns: str = "*") -> list[dict[str, Any]]:
        return reader.rows(f'SELECT {columns} FROM "{name}" ORDER BY {order} LIMIT {limit}')

    conditions = _conditions(reader)
    return {
        "made_by": "toolformer-dag run",
        "conditions": conditions,
        "compared": _compared(conditions),
        "accuracy": rows("accuracy", "benchmark, condition"),
        "perplexity": rows("perplexity", "ALL"),
        "training_curve": rows("training_curve", "ALL", 20_000),
        "costs": rows("costs", "costs.ended DESC, stage, tool", columns=COSTS_SHOWN),
    }


def exported_outcomes(reader: WarehouseReader) -> dict[str, Any]:
    """Return what an exported page shows of questions: every condition with calls against every one without.

    Of the two that are compared first, MOST_EXPORTED questions won and lost of each benchmark.
    """
    counted = [{**both, "rows": pairs(reader, both)} for both in reader.rows(COMPARED)]
    first = dict(zip(("one", "other"), _compared(_conditions(reader)), strict=False))
    benchmarks = [row["benchmark"] for one in counted if first.items() <= one.items() for row in one["rows"]]
    asked = [{**first, "benchmark": name, "which": which} for name in benchmarks for which in ("won", "lost")]
    return {"pairs": counted, "questions": [{**one, "rows": questions(reader, one)[:MOST_EXPORTED]} for one in asked]}


def _conditions(reader: WarehouseReader) -> list[str]:
    return [row["condition"] for row in reader.rows(CONDITIONS)]


def _compared(conditions: Sequence[str]) -> list[str]:
    """The two conditions that are shown first: the paper's, else the first and the last."""
    preferred = [name for name in PREFERRED if name in conditions]
    return preferred[:2] if len(preferred) > 1 else [*conditions[:1], *conditions[-1:]]


def pairs(reader: WarehouseReader, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return how many questions of each benchmark one condition answers and the other does not."""
    return reader.rows(PAIRS, {name: asked.get(name, "") for name in ("one", "other")})


def questions(reader: WarehouseReader, asked: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return questions of a benchmark that were `won`, `lost` or either, with what both conditions wrote."""
    return reader.rows(QUESTIONS, {name: asked.get(name, "") for name in ("one", "other", "benchmark", "which")})
