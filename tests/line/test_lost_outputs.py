"""What a power loss or a person took away is reported, and made again without being paid for."""

import shutil

import pytest

from resources.spent import Spent
from toolformer_dag.evaluation.accuracy_tables import read_accuracy
from toolformer_dag.storage.lake import Lake

FLAKY = '''
"""Sums whose backend loses the calls that end with a 3 while the file `down` is there."""

from pathlib import Path

from sums_tool import Sums

DOWN = Path(__file__).with_name("down")


class Flaky(Sums):
    version = "2"

    def run(self, calls):
        if DOWN.exists() and any(call.input.endswith("3") for call in calls):
            raise OSError
        return super().run(calls)
'''
LOST = "select count(*) from tool_results where reason like 'lost:%'"


def test_a_checkpoint_without_its_weights_is_lost(world):
    (world.folder / "lake" / "training" / "finetuned_checkpoint" / "model" / "model.safetensors").unlink()
    assert "training/finetuned_checkpoint" in world.stale()
    assert "training/finetuned_checkpoint" in world.run(training=True).assets
    assert "training/finetuned_checkpoint" not in world.stale()


def test_files_cut_short_or_removed_are_found_and_mended(world):
    before = world.tables()
    lake = world.folder / "lake"
    [part] = (lake / "calculator/loss_deltas/parts/one").iterdir()
    part.write_bytes(part.read_bytes()[:-20])
    (lake / "sums/scored_candidates/two.json").write_text("{")
    (lake / "toolformer.duckdb").unlink()
    line = world.line()
    reasons = {str(asset): line.why(asset)[-1] for asset in line.stale()}
    assert reasons.keys() == {"calculator/loss_deltas[one]", "sums/scored_candidates[two]", "warehouse/loss_deltas"}
    assert part.name in reasons["calculator/loss_deltas[one]"]
    assert "is gone" in reasons["warehouse/loss_deltas"]
    ran = world.run()
    assert set(ran.assets) == reasons.keys()
    assert ran.spent == Spent(tokens=0, calls=0)
    assert all(table.equals(before[name]) for name, table in world.tables().items())


def test_rows_that_were_paid_for_and_cut_short_are_computed_again(world):
    before = world.tables()
    lake = world.folder / "lake"
    for part in (lake / "calculator/losses").glob("*/*.parquet"):
        part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    shutil.rmtree(lake / "calculator/loss_deltas")
    assert world.run().spent.tokens > 0
    assert world.tables()["calculator/loss_deltas[one]"].equals(before["calculator/loss_deltas[one]"])


def test_calls_that_were_lost_are_tried_again_once_per_run(world):
    down = world.folder / "down"
    down.touch()
    (world.folder / "flaky_tool.py").write_text(FLAKY)
    world.edit("sums_tool:Sums", "flaky_tool:Flaky")
    world.run(training=True)
    assert world.sql(LOST)[0][0] > 0
    line = world.line()
    told = {str(asset): line.why(asset)[-1] for asset in line.stale()}
    assert told and {name.partition("[")[0] for name in told} == {"sums/tool_results"}
    assert all("lost:OSError" in reason for reason in told.values())
    again = world.run()
    assert sorted(again.assets) == sorted(told) and again.spent.calls > 0
    down.unlink()
    assert world.run(training=True).spent.calls == again.spent.calls
    assert world.sql(LOST) == [(0,)]
    assert world.stale() == []


@pytest.mark.parametrize(
    ("table", "asset"),
    [("accuracy", "evaluation/accuracy"), ("outcomes", "evaluation/accuracy"), ("perplexity", "evaluation/perplexity")],
)
def test_each_lost_table_of_evaluation_is_noticed(world, table, asset):
    shutil.rmtree(world.folder / "lake/evaluation" / table)
    assert world.stale() == [asset]


def test_a_lost_lake_is_made_again_and_measured_again(world):
    before = read_accuracy(world.folder / "lake")
    shutil.rmtree(world.folder / "lake")
    ran = world.run(training=True)
    assert {"evaluation/accuracy", "evaluation/perplexity", "training/finetuned_checkpoint"} <= set(ran.assets)
    assert read_accuracy(world.folder / "lake").equals(before)
    assert world.stale() == []


def test_rows_of_other_settings_under_a_fresh_asset_are_made_again(world):
    """As a second instance over the lake leaves them, or a run that was killed before Dagster knew of its rows."""
    before = world.tables()
    kept = Lake(world.folder / "lake").table("calculator/filtered_calls")
    kept.publish("all", [kept.read("all").head(1)], kept.record("all"))
    assert world.stale() == ["calculator/filtered_calls", "warehouse/loss_deltas"]
    assert world.run(training=True).assets == ["calculator/filtered_calls"]
    assert all(table.equals(before[name]) for name, table in world.tables().items())
    assert world.stale() == []
