"""SQL over the warehouse, by the command and with any DuckDB."""


def test_another_threshold_is_asked_without_a_run(made):
    printed = made.ok("sql", "select count(*) as n from kept_at(-1000)", "--format", "csv")
    [(positions,)] = made.sql("select count(*) from (select distinct tool, digest, segment, position from eligible)")
    assert printed == f"n\n{positions}\n"


def test_all_rows_belong_to_shards_and_lanes_that_there_are(made):
    for table in ("texts", "candidates", "loss_deltas", "filtered_calls", "swapped_results"):
        assert set(made.sql(f"select distinct tool, shard from {table}")) <= {
            (tool, shard) for tool in ("calculator", "sums") for shard in ("one", "two")
        }
        assert made.sql(f"select count(*) from {table} anti join documents using (digest)") == [(0,)]
