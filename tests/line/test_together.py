"""Two runs over the same shards at once, and a reader who asks the warehouse all the while."""

import subprocess
import sys

from tests.line.conftest import assert_same

KEPT_WITHOUT_A_SCORE = """
select count(*) from filtered_calls anti join loss_deltas using (tool, digest, segment, position, sample)
"""


def test_two_runs_lose_nothing_and_no_reader_is_locked_out(made, fresh, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    settings = str(fresh.folder / "toolformer.toml")
    command = [sys.executable, "-m", "toolformer_dag.cli", "stale", "--run", "--config", settings]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    runs = [subprocess.Popen(command, **pipes) for _ in range(2)]
    answers = []
    while any(run.poll() is None for run in runs):
        if (fresh.folder / "lake" / "toolformer.duckdb").exists():
            answers += fresh.sql(KEPT_WITHOUT_A_SCORE)
    errors = [run.communicate()[1].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    assert set(answers) == {(0,)}
    paid = {name: table for name, table in made.tables().items() if name in fresh.tables()}
    assert_same(fresh.tables(), paid)
    assert {asset.partition("/")[0] for asset in fresh.stale()} == {"training", "evaluation"}
