"""Queries of the page to the warehouse about evaluation, training and costs; their tables may be empty.

A condition is a model and how it may call tools, such as `Toolformer (disabled)`. A pair is two conditions whose
answers to the same questions are compared, `one` and `other`; questions are won where only `one` is right, lost where
only `other` is.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from toolformer_dag.explorer.warehouse_reader import Row, WarehouseReader

MAX_QUESTIONS = 200
"""The most questions that are listed at once."""
MAX_EXPORTED_QUESTIONS = 25
"""Questions won and as many lost, of each benchmark, that an exported page holds."""
PREFERRED_CONDITIONS = ("Toolformer", "Toolformer (disabled)", "base")
"""Conditions that are compared first, where they were measured."""
MAX_TABLE_ROWS = 500
"""The most rows of a small table."""
MAX_CURVE_POINTS = 20_000
"""The most points of the training curves."""
MAX_TEXT_CHARACTERS = 600
"""Characters of a prompt or an answer that are shown."""
START_SLICE_SQL = f"[:{MAX_TEXT_CHARACTERS}]"
"""Cuts a text to its first characters that are shown, written after the name of a column."""
END_SLICE_SQL = f"[-{MAX_TEXT_CHARACTERS}:]"
"""Cuts a text to its last characters that are shown, written after the name of a column."""
PAIR_COUNTS_SQL = """
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
CALL_RESULT_SQL = f"result: coalesce(made.result{START_SLICE_SQL}, made.reason)"
"""The field of a call with its result, or with the reason why it has none."""
QUESTIONS_SQL = f"""
SELECT one.benchmark, question, one.prompt{END_SLICE_SQL} AS prompt, one.gold, one.written{START_SLICE_SQL} AS written,
       other.written{START_SLICE_SQL} AS other_written, one.correct, other.correct AS other_correct,
       [{{tool: made.tool, input: made.input{START_SLICE_SQL}, {CALL_RESULT_SQL}}}
        FOR made IN one.calls] AS calls
FROM outcomes AS one JOIN outcomes AS other USING (benchmark, question)
WHERE one.condition = $one AND other.condition = $other AND one.benchmark = $benchmark
  AND CASE $which WHEN 'won' THEN one.correct AND NOT other.correct
                  WHEN 'lost' THEN other.correct AND NOT one.correct ELSE true END
ORDER BY question LIMIT {MAX_QUESTIONS}
"""
"""Selects the questions of a pair that were won, lost or either, with both answers. Long texts are cut."""
CONDITIONS_SQL = "SELECT condition, coalesce(max(k), 0) > 0 AS calls FROM outcomes GROUP BY condition ORDER BY ALL"
"""Selects the conditions, and whether tools may be called under them."""
COMPARED_PAIRS_SQL = f"""
WITH conditions AS ({CONDITIONS_SQL})
SELECT one.condition AS one, other.condition AS other FROM conditions AS one, conditions AS other
WHERE one.calls AND NOT other.calls ORDER BY ALL
"""
"""Selects the pairs of a condition with calls and one without."""
COST_COLUMNS_SQL = "* REPLACE (ended AT TIME ZONE 'UTC' AS ended)"
"""The columns of costs, with times in UTC."""


def query_outcome_tables(reader: WarehouseReader) -> dict[str, Any]:
    """Collect what the page shows of evaluation, as JSON data: accuracy, perplexity, training curves and costs.

    Returns:
        The rows of these tables by name, and the names of the conditions (a model and how it may call tools):
        `conditions` has all, `compared` has the two that the page compares first.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    conditions = _query_conditions(reader)
    return {
        "made_by": "toolformer-dag run",
        "conditions": conditions,
        "compared": _choose_compared_conditions(conditions),
        "accuracy": reader.query_rows(f"FROM accuracy ORDER BY benchmark, condition LIMIT {MAX_TABLE_ROWS}"),
        "perplexity": reader.query_rows(f"FROM perplexity ORDER BY ALL LIMIT {MAX_TABLE_ROWS}"),
        "training_curve": reader.query_rows(f"FROM training_curve ORDER BY ALL LIMIT {MAX_CURVE_POINTS}"),
        "costs": reader.query_rows(
            f"SELECT {COST_COLUMNS_SQL} FROM costs ORDER BY costs.ended DESC, stage, tool LIMIT {MAX_TABLE_ROWS}"
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
    counted_pairs = []
    for pair in reader.query_rows(COMPARED_PAIRS_SQL):
        counted_pairs.append({**pair, "rows": query_pair_counts(reader, pair)})

    first_shown_conditions = _choose_compared_conditions(_query_conditions(reader))

    exported_questions: list[Row] = []
    for pair in counted_pairs:
        is_shown_first = [pair["one"], pair["other"]] == first_shown_conditions
        if is_shown_first:
            exported_questions += _query_questions_won_and_lost(reader, pair)
    return {"pairs": counted_pairs, "questions": exported_questions}


def _query_questions_won_and_lost(reader: WarehouseReader, counted_pair: Row) -> list[Row]:
    """Query some questions of each benchmark that one of two conditions answers and the other one does not.

    Args:
        reader: Reads the warehouse.
        counted_pair: The conditions, `one` and `other`, and `rows` with the counts of each benchmark.

    Returns:
        Two rows per benchmark, for the questions won and lost: the fields of a request to `query_questions`, and under
        `rows` at most MAX_EXPORTED_QUESTIONS questions.
    """
    requests_with_rows = []
    for benchmark_counts in counted_pair["rows"]:
        for which in ("won", "lost"):
            request_fields = {
                "one": counted_pair["one"],
                "other": counted_pair["other"],
                "benchmark": benchmark_counts["benchmark"],
                "which": which,
            }
            question_rows = query_questions(reader, request_fields)[:MAX_EXPORTED_QUESTIONS]
            requests_with_rows.append({**request_fields, "rows": question_rows})
    return requests_with_rows


def _query_conditions(reader: WarehouseReader) -> list[str]:
    """Return the conditions under which questions were asked, such as `Toolformer (disabled)`."""
    return [row["condition"] for row in reader.query_rows(CONDITIONS_SQL)]


def _choose_compared_conditions(conditions: Sequence[str]) -> list[str]:
    """Return the two conditions that the page compares first.

    These are two of PREFERRED_CONDITIONS if they were measured, otherwise the first and the last condition.

    Returns:
        Two names, or [] without conditions. A single condition is compared with itself.
    """
    preferred_conditions = [condition for condition in PREFERRED_CONDITIONS if condition in conditions]
    if len(preferred_conditions) > 1:
        return preferred_conditions[:2]
    return [*conditions[:1], *conditions[-1:]]


def query_pair_counts(reader: WarehouseReader, request_fields: Mapping[str, str]) -> list[Row]:
    """Count, for each benchmark, the questions that only one of two conditions answers correctly, and those with calls.

    Args:
        reader: Reads the warehouse.
        request_fields: The two conditions, `one` and `other`, such as "Toolformer" and "Toolformer (disabled)".

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    parameters = {name: request_fields.get(name, "") for name in ("one", "other")}
    return reader.query_rows(PAIR_COUNTS_SQL, parameters)


def query_questions(reader: WarehouseReader, request_fields: Mapping[str, str]) -> list[Row]:
    """Query questions of a benchmark with what the model wrote under two conditions.

    Args:
        reader: Reads the warehouse.
        request_fields: The conditions, `one` and `other`; the `benchmark`; and `which`: "won" for questions that only
            `one` answers correctly, "lost" for those that only `other` does, or anything else for all.

    Raises:
        WarehouseError: The warehouse cannot be read.
    """
    parameters = {name: request_fields.get(name, "") for name in ("one", "other", "benchmark", "which")}
    return reader.query_rows(QUESTIONS_SQL, parameters)
