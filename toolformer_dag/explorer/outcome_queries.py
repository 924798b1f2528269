"""Queries of the page to the warehouse about evaluation, training and costs; their tables may be empty.

A condition is a model and how it may call tools, such as `Toolformer (disabled)`. A pair is two conditions whose
answers to the same questions are compared, `one` and `other`; questions are won where only `one` is right, lost where
only `other` is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader

MOST_QUESTIONS = 200
"""The most questions that are listed at once."""
MOST_EXPORTED = 25
"""Questions won and as many lost, of each benchmark, that an exported page holds."""
PREFERRED = ("Toolformer", "Toolformer (disabled)", "base")
"""Conditions that are compared first, where they were measured."""
MOST_COSTS = 500
"""The most rows of a small table."""
MOST_POINTS = 20_000
"""The most points of the training curves."""
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
"""Counts the questions of a pair by benchmark."""
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
"""Selects the questions of a pair that were won, lost or either, with both answers; texts are cut at LONG."""
CONDITIONS = "SELECT condition, coalesce(max(k), 0) > 0 AS calls FROM outcomes GROUP BY condition ORDER BY ALL"
"""Selects the conditions, and whether tools may be called under them."""
COMPARED = f"""
WITH conditions AS ({CONDITIONS})
SELECT one.condition AS one, other.condition AS other FROM conditions AS one, conditions AS other
WHERE one.calls AND NOT other.calls ORDER BY ALL
"""
"""Selects the pairs of a condition with calls and one without."""
COSTS_SHOWN = "* REPLACE (ended AT TIME ZONE 'UTC' AS ended)"
"""The columns of costs, with times in UTC."""


def query_outcome_tables(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what the page shows of evaluation, as JSON data: accuracy, perplexity, training curves and costs.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    conditions = _query_conditions(reader)
    return {
        "made_by": "toolformer-dag run",
        "conditions": conditions,
        "compared": _choose_compared_conditions(conditions),
        "accuracy": reader.rows(f"FROM accuracy ORDER BY benchmark, condition LIMIT {MOST_COSTS}"),
        "perplexity": reader.rows(f"FROM perplexity ORDER BY ALL LIMIT {MOST_COSTS}"),
        "training_curve": reader.rows(f"FROM training_curve ORDER BY ALL LIMIT {MOST_POINTS}"),
        "costs": reader.rows(
            f"SELECT {COSTS_SHOWN} FROM costs ORDER BY costs.ended DESC, stage, tool LIMIT {MOST_COSTS}"
        ),
    }


def query_exported_outcomes(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what an exported page shows of the questions of benchmarks.

    Returns:
        `pairs` are pairs of conditions (a model and how it may call tools), with the number of questions that each
        wins. `questions` are some questions won and lost, but only of the pair that the page shows first.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    counted_pairs = [{**pair, "rows": pairs(reader, pair)} for pair in reader.rows(COMPARED)]
    shown_first = _choose_compared_conditions(_query_conditions(reader))

    exported_questions: list[Row] = []
    for pair in counted_pairs:
        is_shown_first = [pair["one"], pair["other"]] == shown_first
        if is_shown_first:
            exported_questions += _query_questions_won_and_lost(reader, pair)
    return {"pairs": counted_pairs, "questions": exported_questions}


def _query_questions_won_and_lost(reader: WarehouseReader, pair: Row) -> list[Row]:
    """Return MOST_EXPORTED questions won and lost of each benchmark, each list with the query that it answers."""
    answers = []
    for counts in pair["rows"]:
        for which in ("won", "lost"):
            query = {"one": pair["one"], "other": pair["other"], "benchmark": counts["benchmark"], "which": which}
            answers.append({**query, "rows": questions(reader, query)[:MOST_EXPORTED]})
    return answers


def _query_conditions(reader: WarehouseReader) -> list[str]:
    """Return the conditions under which questions were asked, such as `Toolformer (disabled)`."""
    return [row["condition"] for row in reader.rows(CONDITIONS)]


def _choose_compared_conditions(conditions: Sequence[str]) -> list[str]:
    """Return the two conditions to compare first: from PREFERRED, else the first and the last."""
    preferred = [name for name in PREFERRED if name in conditions]
    if len(preferred) > 1:
        return preferred[:2]
    return [*conditions[:1], *conditions[-1:]]


def pairs(reader: WarehouseReader, query: Mapping[str, str]) -> list[Row]:
    """Count, by benchmark, the questions that only one of two conditions answers, and the calls.

    `query`: the conditions, `one` and `other`. Raises WarehouseError.
    """
    return reader.rows(PAIRS, {name: query.get(name, "") for name in ("one", "other")})


def questions(reader: WarehouseReader, query: Mapping[str, str]) -> list[Row]:
    """Return questions of a benchmark with what two conditions wrote. Raises WarehouseError.

    `query`: the conditions, `one` and `other`; `benchmark`; and `which`: won, lost, or another word for all.
    """
    return reader.rows(QUESTIONS, {name: query.get(name, "") for name in ("one", "other", "benchmark", "which")})
