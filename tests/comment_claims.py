"""What the comments of a warehouse claim of the values of their columns, held against the rows.

A comment is prose; some of its phrases say something that can be counted, such as `null for most` or `key of the lane`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb

LEAST_ROWS = 8
"""In a smaller table `most` says nothing."""
COLUMNS = """
SELECT table_name, column_name, data_type, comment FROM duckdb_columns()
WHERE NOT internal ORDER BY table_name, column_index
"""


BENCHMARKS = "SELECT benchmark FROM outcomes UNION ALL SELECT item FROM paper_figures"


@dataclass(frozen=True)
class Claim:
    """A phrase of a comment, and the SQL that is true of a row that contradicts it; `value` stands for the column.

    `unless`: a phrase beside which the claim is another one.
    """

    phrase: str
    contradicted: str
    unless: str = "(?!)"

    def made_by(self, comment: str) -> bool:
        return bool(re.search(self.phrase, comment)) and not re.search(self.unless, comment)


CLAIMS = (
    Claim(r"^(?!.*\bnull\b)", "value IS NULL", unless="^as in "),
    Claim(r"^key of the lane", "value NOT IN (SELECT tool FROM lanes)", unless="in the paper's rows"),
    Claim(r"^name in the text of the tool", "value NOT IN (SELECT name FROM lanes)", unless="no tool"),
    Claim(r"^name of the benchmark", f"value NOT IN ({BENCHMARKS})", unless="All: "),
    Claim(r"^name of the benchmark.*All: ", f"value NOT IN ({BENCHMARKS}) AND value <> 'All'"),
    Claim(r"file of `corpus.decontaminate`", "value IN (SELECT benchmark FROM outcomes)"),
    Claim(r"^name of the shard: ", "value NOT IN (SELECT shard FROM documents)"),
    Claim(r"from 1\b", "value < 1"),
    Claim(r"^`ours` or `the paper`", "value NOT IN ('ours', 'the paper')"),
    Claim(r"^who proposed the call: model, rule", "value NOT IN ('model', 'rule') AND NOT contains(value, '.')"),
    Claim(r"^(how many|number of|questions\b|places\b|those (of them )?(that|whose))", "TRY_CAST(value AS DOUBLE) < 0"),
    Claim(r"per cent", "value NOT BETWEEN 0 AND 100", unless="shares in per cent"),
    Claim(r"^share of ", "value NOT BETWEEN 0 AND 1", unless="per cent"),
)
FOR_MOST = Claim(r"null for most", "value IS NOT NULL")
"""Of the rows together: half of them or fewer contradict it."""


def contradictions(database: Path) -> Iterator[str]:
    """Name each column of the warehouse whose rows contradict its comment, with how many do."""
    with duckdb.connect(database, read_only=True) as warehouse:
        for table, column, kind, comment in warehouse.execute(COLUMNS).fetchall():
            place = f"{table}.{column} ({comment})"
            if comment.startswith("whether ") and kind != "BOOLEAN":
                yield f"{place}: is of type {kind}"
            for claim in CLAIMS:
                if claim.made_by(comment):
                    wrong, rows = _counted(warehouse, table, column, claim)
                    if wrong:
                        yield f"{place}: {wrong} of {rows} rows have {claim.contradicted}"
            if FOR_MOST.made_by(comment):
                wrong, rows = _counted(warehouse, table, column, FOR_MOST)
                if rows >= LEAST_ROWS and 2 * wrong > rows:
                    yield f"{place}: {wrong} of {rows} rows are not null"


def _counted(warehouse: duckdb.DuckDBPyConnection, table: str, column: str, claim: Claim) -> tuple[int, int]:
    """Return how many rows contradict a claim, and how many there are."""
    query = f'SELECT count(*) FILTER ({claim.contradicted}), count(*) FROM (SELECT "{column}" AS value FROM "{table}")'
    [(wrong, rows)] = warehouse.execute(query).fetchall()
    return wrong, rows
