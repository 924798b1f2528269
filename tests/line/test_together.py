"""Two runs at once, over the same shards and over different ones, and a reader who asks the warehouse all the while."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from tests.line.conftest import World, assert_same

KEPT_WITHOUT_A_SCORE = """
select count(*) from filtered_calls anti join loss_deltas using (tool, digest, segment, position, sample)
"""


STAGES = ("scored_candidates", "tool_results", "loss_deltas", "swapped_results")
WHOLE = ("calculator/filtered_calls", "training/augmented_corpus", "warehouse/loss_deltas")


def read_while(world: World, commands: Sequence[Sequence[str]], environment: Mapping[str, str]) -> None:
    """Runs the commands at once and asks the warehouse until all have ended well."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    runs = [subprocess.Popen([sys.executable, "-m", *command], env=environment, **pipes) for command in commands]
    answers = []
    while any(run.poll() is None for run in runs):
        if (world.folder / "lake" / "toolformer.duckdb").exists():
            answers += world.sql(KEPT_WITHOUT_A_SCORE)
    told = [run.communicate()[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], "\n".join(told)
    assert set(answers) == {(0,)}


def materialize(keys: Sequence[str], *options: str) -> list[str]:
    """Dagster's own command, which runs what a backfill of the UI runs."""
    selection = " or ".join(f'key:"{key}"' for key in keys)
    return ["dagster", "asset", "materialize", "-m", "toolformer_dag.definitions", "--select", selection, *options]


def test_two_runs_lose_nothing_and_no_reader_is_locked_out(made, fresh, monkeypatch):
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    settings = str(fresh.folder / "toolformer.toml")
    read_while(fresh, [["toolformer_dag.cli", "stale", "--run", "--config", settings]] * 2, os.environ)
    paid = {name: table for name, table in made.tables().items() if name in fresh.tables()}
    assert_same(fresh.tables(), paid)
    assert {asset.partition("/")[0] for asset in fresh.stale()} == {"training", "evaluation"}


def test_two_backfills_over_different_shards_at_once(made, world, tmp_path, monkeypatch):
    change = ("tools.calculator.k=3", "tools.calculator.m=4")
    settings = {"TOOLFORMER_CONFIG": str(world.folder / "toolformer.toml"), "TOOLFORMER__TOOLS__CALCULATOR__K": "3"}
    environment = os.environ | settings | {"TOOLFORMER__TOOLS__CALCULATOR__M": "4"}
    lane = [f"calculator/{stage}" for stage in STAGES]
    read_while(world, [materialize(lane, "--partition", shard) for shard in ("one", "two")], environment)
    read_while(world, [materialize(WHOLE)] * 2, environment)
    assert {asset.partition("/")[0] for asset in world.stale(*change)} == {"training", "evaluation"}
    alone = World(shutil.copytree(made.folder, tmp_path / "alone"))
    monkeypatch.setenv("DAGSTER_HOME", str(alone.folder / ".dagster"))
    alone.run(*change)
    assert_same(world.tables(), alone.tables())
