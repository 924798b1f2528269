"""What the warehouse's comments say of its columns is true of the rows."""

from pathlib import Path

import duckdb

from tests.comment_claims import contradictions

COMMENTS = "SELECT comment FROM duckdb_columns() WHERE table_name = ? AND column_name = ?"
SAME_COLUMN = (
    ("calls", "decisions", "reason"),
    ("needless_calls", "outcomes", "called"),
    ("answers", "outcomes", "called"),
    ("won_and_lost", "outcomes", "benchmark"),
    ("with_and_without", "outcomes", "reason"),
    ("with_and_without", "outcomes", "tokens"),
)
"""(view, table that it shows, column): other tables have a column of this name that holds something else."""


def test_the_rows_of_a_whole_run_contradict_no_comment(made_folder: Path) -> None:
    assert list(contradictions(made_folder / "lake" / "toolformer.duckdb")) == []


def test_a_column_of_a_view_has_the_comment_of_the_table_that_it_comes_from(made_folder: Path) -> None:
    with duckdb.connect(made_folder / "lake" / "toolformer.duckdb", read_only=True) as warehouse:
        for view, table, column in SAME_COLUMN:
            [(shown,), (declared,)] = [warehouse.execute(COMMENTS, [name, column]).fetchone() for name in (view, table)]
            assert shown == declared


def test_a_comment_that_the_rows_contradict_is_named(tmp_path: Path) -> None:
    with duckdb.connect(tmp_path / "w.duckdb") as warehouse:
        for table, column in (("lanes", "name"), ("outcomes", "benchmark"), ("paper_figures", "item")):
            warehouse.execute(f"CREATE TABLE {table} (tool VARCHAR, {column} VARCHAR)")
            for name in ("tool", column):
                warehouse.execute(f"COMMENT ON COLUMN {table}.{name} IS 'text; null for most'")
        warehouse.execute("INSERT INTO lanes VALUES ('calculator', 'Calculator')")
        warehouse.execute("CREATE TABLE answers AS SELECT 'Calculator' AS called, range AS n FROM range(10)")
        warehouse.execute("COMMENT ON COLUMN answers.called IS 'key of the lane'")
        warehouse.execute("COMMENT ON COLUMN answers.n IS 'number of calls; null for most'")
    wrong = list(contradictions(tmp_path / "w.duckdb"))
    assert [line.partition(" ")[0] for line in wrong] == ["answers.called", "answers.n"]
