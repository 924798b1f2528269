"""SQL over the warehouse, by the command and with any DuckDB."""

import csv
import json


def test_a_table_has_the_columns_and_the_rows(made):
    printed = made.ok("sql", "select tool, count(*) as calls from loss_deltas group by tool order by tool")
    for word in ("tool", "calls", "calculator", "sums"):
        assert word in printed


def test_csv_begins_with_the_columns(made):
    query = "select tool, tau_f from lanes order by tool"
    rows = list(csv.reader(made.ok("sql", query, "--format", "csv").splitlines()))
    assert rows == [["tool", "tau_f"], ["calculator", "0.0"], ["sums", "0.0"]]


def test_json_is_an_object_per_row_with_numbers_as_numbers(made):
    query = "select tool, delta, input, tools from filtered_calls, (select ['a', null] as tools) order by delta desc"
    rows = [json.loads(line) for line in made.ok("sql", query, "--format", "json").splitlines()]
    assert len(rows) == made.sql("select count(*) from filtered_calls")[0][0] > 0
    assert rows[0].keys() == {"tool", "delta", "input", "tools"}
    assert isinstance(rows[0]["delta"], float) and rows[0]["tools"] == ["a", None]
    assert rows[0]["delta"] >= rows[-1]["delta"]


def test_describe_lists_the_columns(made):
    rows = list(csv.DictReader(made.ok("sql", "describe loss_deltas", "--format", "csv").splitlines()))
    kinds = {row["column_name"]: row["column_type"] for row in rows}
    assert kinds["tool"] == "VARCHAR" and kinds["delta"] == "DOUBLE" and "loss_empty" in kinds


def test_another_threshold_is_asked_without_a_run(made):
    printed = made.ok("sql", "select count(*) as n from kept_at(-1000)", "--format", "csv")
    [(positions,)] = made.sql("select count(*) from (select distinct tool, digest, segment, position from eligible)")
    assert printed == f"n\n{positions}\n"


def test_an_error_in_sql_is_told_without_a_traceback(made):
    for query, word in (("from nothing_there", "nothing_there"), ("selekt 1", "selekt")):
        done = made.cli("sql", query)
        assert done.returncode == 1 and word in done.stderr and "Traceback" not in done.stderr


def test_the_warehouse_cannot_be_written_by_the_command(made):
    done = made.cli("sql", "drop table loss_deltas")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert made.sql("select count(*) > 0 from loss_deltas") == [(True,)]


def test_all_rows_belong_to_shards_and_lanes_that_there_are(made):
    for table in ("texts", "candidates", "loss_deltas", "filtered_calls", "swapped_results"):
        assert set(made.sql(f"select distinct tool, shard from {table}")) <= {
            (tool, shard) for tool in ("calculator", "sums") for shard in ("one", "two")
        }
        assert made.sql(f"select count(*) from {table} anti join documents using (digest)") == [(0,)]
