"""What a model is: its content, not its path; how it is run is no part of it."""

import shutil

from resources.spent import Spent
from tests.line.conftest import assert_same
from tests.stages.conftest import make_model


def test_path_device_batches_and_workers_change_nothing(world):
    shutil.move(world.folder / "model", world.folder / "elsewhere")
    (world.folder / "lake").rename(world.folder / "lake_elsewhere")
    moved = ("model.name=elsewhere", "paths.lake=lake_elsewhere", "paths.warehouse=lake_elsewhere/toolformer.duckdb")
    spread = ("model.device=auto", "model.token_budget=512", "execution.chunk_texts=3", "execution.chunk_calls=2")
    workers = ("execution.workers=3", "tools.calculator.limits.concurrency=3", "training.device_batch_size=1")
    assert world.stale(*moved, *spread, *workers) == []


def test_another_dtype_shares_no_row_and_keeps_the_tools_answers(world):
    other = ("model.dtype=bfloat16", "tools.sums.enabled=false")  # one lane: a CPU is slow in bfloat16
    ran = world.run(*other)
    assert {"calculator/scored_candidates", "calculator/loss_deltas"} <= ran.stages()
    assert ran.spent.tokens > 0
    assert world.run(*other).assets == []
    back = world.run()
    assert back.spent == Spent(tokens=0, calls=0)


def test_another_model_in_the_same_folder_is_another_model(world, fresh, monkeypatch):
    before = world.tables()
    shutil.rmtree(world.folder / "model")
    make_model(world.folder / "model", seed=1)
    ran = world.run()
    assert {"calculator/heuristic_subset", "calculator/scored_candidates", "sums/loss_deltas"} <= ran.stages()
    shutil.rmtree(fresh.folder / "model")
    make_model(fresh.folder / "model", seed=1)
    monkeypatch.setenv("DAGSTER_HOME", str(fresh.folder / ".dagster"))
    anew = fresh.run()
    assert ran.spent.tokens == anew.spent.tokens
    assert_same(world.tables(), fresh.tables())
    assert not before["calculator/loss_deltas[one]"].equals(world.tables()["calculator/loss_deltas[one]"])
