"""Killed at any moment, or with its lake gone: the same command again gives the tables of an undisturbed run."""

import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.contract.conftest import BY_HAND, NOTHING, World, assert_same

pytestmark = pytest.mark.long

LANDED = sorted(random.Random(3).sample(range(2, 14), 3))
"""After how many assets have landed for the first time the process is killed: near the start, midway, near the end."""


def kill_after(world: World, landed: int, wait: float, *options: str) -> int:
    """Starts `stale --run`, kills its process group in the middle of something, and returns the exit code."""
    run = world.start("stale", "--run", *options, output=subprocess.DEVNULL, **world.environment)
    while run.poll() is None and len(world.materialized()) < landed:
        time.sleep(0.05)
    time.sleep(wait)
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
    return run.wait()


@pytest.mark.parametrize(("landed", "workers"), list(zip(LANDED, (1, 1, 2), strict=True)))
def test_a_killed_run_goes_on_and_gives_the_tables_of_an_undisturbed_one(fresh, made, landed, workers):
    assert "warehouse/toolformer_duckdb" in fresh.stale()
    (fresh.folder / ".dagster").mkdir()
    assert fresh.materialized() == set()  # opens the instance, which is polled from here on
    wait = random.Random(landed).uniform(0, 0.5)
    code = kill_after(fresh, landed, wait, "--set", f"execution.workers={workers}")
    assert code in (0, -signal.SIGKILL)
    fresh.mend()
    assert_same(fresh.tables(), made.tables())
    assert fresh.stale() <= BY_HAND
    assert fresh.mend() == NOTHING


def test_a_lake_that_was_removed_is_made_again_in_full(world, made):
    shutil.rmtree(world.folder / "lake")
    stale = world.stale()
    assert {"ccnet/raw_shards", "calculator/loss_deltas", "sums/loss_deltas", "warehouse/toolformer_duckdb"} <= stale
    spent = world.run()
    assert spent.tokens > 0 and spent.calls > 0
    assert_same(world.tables(), made.tables())
    assert (world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors").is_file()
    assert world.stale() == set()
