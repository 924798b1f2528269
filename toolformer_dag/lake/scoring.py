"""The score that tau_f is held against: an SQL expression over the columns of a scored call, for each lane its own.

It is applied where calls are read and stored nowhere, so that another one costs no token. Whoever reads calls reads
them through `relation`: its `delta` is the score.
"""

import re
from collections.abc import Mapping, Sequence

import duckdb

from toolformer_dag.files import UserError
from toolformer_dag.lake.queries import in_memory, quoted, sql_text

PAPER_SCORE = "loss_minus - loss_plus"
"""What loss_deltas and swapped_results hold as delta."""
OVER_ECHO = "least(delta, delta - echo)"
"""What a call gains, or gains over its echo where that is less; least ignores a null."""
NUMBERS = (
    *("p_api", "loss_empty", "loss_call", "loss_result", "loss_before", "need", "loss_minus", "loss_plus", "delta"),
    *("echo", "cost"),
)
"""What a score may read; `cost`: what the call cost, a chain all its calls, 0 where the tool says nothing."""
CALL_COSTS = sql_text(__package__, "call_costs.sql")
"""What each scored call cost: a query over decisions, lanes, texts and tool_costs."""
COSTS = f"CREATE VIEW call_costs AS {CALL_COSTS};{sql_text(__package__, 'call_costs_comments.sql')}"
SCORED_SQL = sql_text(__package__, "scored.sql")
IDENTITY = SCORED_SQL + CALL_COSTS
"""The text that belongs in the fingerprint of what is made with a score other than the paper's."""
CALL_KEY = "tool, shard, digest, segment, position, sample"


class ScoreError(UserError):
    """An expression that is no score."""


def refuse(score: str) -> None:
    """Raise ScoreError for what is no expression over NUMBERS of one call, such as a sum over calls."""
    typed = ", ".join(f"NULL::DOUBLE AS {name}" for name in NUMBERS)
    try:
        with in_memory() as connection:  # a condition of WHERE is of one row
            connection.execute(f"SELECT delta FROM (SELECT {typed}) WHERE {_value(score)} > 0")
    except duckdb.Error as error:
        reason = str(error).splitlines()[0]
        raise ScoreError(f"{score!r} is no score ({reason}); write SQL over {', '.join(NUMBERS)}") from error


def _value(score: str) -> str:
    """The expression as it is computed; null where it fails. A comment ends with its line."""
    return f"TRY((\n{score}\n)::DOUBLE)"


def reads_cost(scores: Mapping[str, str]) -> list[str]:
    """Return the tools whose score reads what a call cost."""
    return [tool for tool, score in scores.items() if re.search(r"\bcost\b", score, re.IGNORECASE)]


def kept_as(scores: Mapping[str, str]) -> str:
    """Return what to keep scored calls as where they are read several times: costs are joined once."""
    return "TABLE" if reads_cost(scores) else "VIEW"


def relation(files: Sequence[str], scores: Mapping[str, str] = {}, asked: str = "", swaps: bool = False) -> str:
    """Return the query for the calls in part files of loss_deltas, or of swapped_results (`swaps`), numbered by `row`.

    `scores`: tool -> expression, of tools that have another than the paper's; their `delta` is the score. `asked`: the
    tables that call_costs reads beside the calls, as parts of a WITH clause: texts, lanes and tool_costs; needed where
    a score reads `cost`. A swap costs what its call costs with its own result.
    """
    read = f"read_parquet([{', '.join(map(quoted, files))}], hive_partitioning = false, file_row_number = true)"
    numbered = f"SELECT * EXCLUDE (file_row_number), file_index::BIGINT << 32 | file_row_number AS row FROM {read}"
    if not scores:
        return numbered
    costly = reads_cost(scores)
    costs = f"SELECT {CALL_KEY}, 0.0::DOUBLE AS cost FROM called WHERE false"
    if costly:
        of_tools = f"tool IN ({', '.join(map(quoted, costly))}){' AND swap = 0' if swaps else ''}"
        costs = f"WITH decisions AS (FROM called WHERE {of_tools}), {asked} FROM ({CALL_COSTS})"
    return with_scores(numbered, costs, scores)


def with_scores(called: str, costs: str, scores: Mapping[str, str]) -> str:
    """Return the query for the rows of the query `called` with their score as delta; `costs`: (key of a call, cost)."""
    cases = " ".join(f"WHEN {quoted(tool)} THEN {_value(score)}" for tool, score in scores.items())
    texts = {
        "CALLED": called,
        "COSTS": costs,
        "TOOLS": ", ".join(map(quoted, scores)),
        "SCORE": f"CASE tool {cases} END",
    }
    return re.sub("|".join(texts), lambda match: texts[match[0]], SCORED_SQL.partition("\n\n")[2])
