"""What fails stops what depends on it and nothing else; what was lost or damaged is made again without a token."""

import shutil

import dagster as dg
import pytest

from assets import JOB, shard_sensor
from assets.outputs import BY_HAND
from tests.command_line import cli
from tests.runs.conftest import apart_from_tables, by_machine, free
from tests.worlds import write_shard
from toolformer_dag.cli.project import NOT_RUN, RunError
from toolformer_dag.pipeline.spending import COSTS
from toolformer_dag.training.checkpoint_outputs import checkpoint_reasons
from toolformer_dag.training.training_report import RECORD, checkpoint_folder

BROKEN = '''
"""Sums whose scale is broken while the file `broken` is there."""

from pathlib import Path

from sums_tool import Sums
from toolformer_dag.files import UserError

FILE = Path(__file__).with_name("broken")


class Broken(Sums):
    def keeps(self, text, offset, input):
        if FILE.exists():
            raise UserError("the scale is broken; mend it")
        return True
'''
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
AUTOMATION = "execution.automation=true"


def asked(world, *overrides: str, cursor: str | None = None) -> dg.SensorResult | dg.SkipReason:
    """Evaluate the sensor once."""
    project = world.project(AUTOMATION, *overrides)
    with dg.build_sensor_context(instance=project.instance, cursor=cursor) as context:
        return shard_sensor(project.plan)(context)


def test_a_failed_asset_stops_what_depends_on_it_alone_and_automation_does_not_try_again(world):
    (world.folder / "broken_tool.py").write_text(BROKEN)
    world.edit("sums_tool:Sums", "broken_tool:Broken")
    (world.folder / "broken").touch()
    change = ("tools.sums.edition=2", "tools.calculator.tau_f=1e-9")
    first = asked(world, *change)
    project = world.project(*change)
    report = project.run(training=True)
    failed = {name for name, reason in report.failed.items() if reason != NOT_RUN}
    assert failed == {"sums/loss_deltas"}
    assert set(apart_from_tables(list(report.failed))) - failed == {
        "sums/swapped_results",
        "sums/filtered_calls",
        "training/augmented_corpus",
        "warehouse/toolformer_duckdb",
        "warehouse/dataset",
    }
    assert {"calculator/filtered_calls", "sums/tool_results"} <= set(report.ran)
    with pytest.raises(RunError) as told:
        report.raise_for_failures()
    assert "\nsums/loss_deltas: the scale is broken; mend it\n" in str(told.value)
    assert "Dagster" not in str(told.value) and NOT_RUN not in str(told.value)
    [cost] = project.plan.lake.table(COSTS).read("sums/loss_deltas").filter("failed").to_dicts()
    assert cost["tokens"] > 0 and cost["seconds"] > 0 and cost["computed"] is None
    waits = asked(world, *change, cursor=first.cursor)
    assert waits == dg.SkipReason("the last run did not succeed, and nothing changed since")
    assert isinstance(asked(world, "tools.sums.edition=1", cursor=first.cursor), dg.SensorResult)
    file = str(world.folder / "toolformer.toml")
    done = cli("stale", "--run", "--config", file, "--set", change[0], "--set", change[1])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "sums/loss_deltas: the scale is broken; mend it" in done.stderr
    assert "\nsums/loss_deltas: failed: the scale is broken; mend it\n" in f"\n{done.stderr}"


def test_a_shard_that_cannot_be_read_fails_nothing_and_is_tried_again(world):
    (world.folder / "web" / "broken.json.gz").symlink_to(world.folder / "gone" / "broken.json.gz")
    write_shard(world.folder / "web", "added", documents=2)
    report = world.run()
    assert report.failed == {} and "calculator/loss_deltas" in report.ran
    assert world.sql("select count(*) from documents where shard = 'added'") == [(2,)]
    assert world.sql("select shard, reason, count from rejections where stage = 'raw_shards'") == [
        ("broken", "unreadable", 1)
    ]
    told = world.reasons()
    assert by_machine(list(told)) == ["ccnet/raw_shards"]
    assert told["ccnet/raw_shards"][0].startswith("broken could not be read: ")
    assert asked(world) == dg.SkipReason("nothing is out of date")
    again = world.run()
    assert again.ran == ["ccnet/raw_shards"] and free(again)


def test_lost_calls_are_tried_again_once_per_run_and_never_by_automation(world):
    down = world.folder / "down"
    down.touch()
    (world.folder / "flaky_tool.py").write_text(FLAKY)
    world.edit("sums_tool:Sums", "flaky_tool:Flaky")
    world.run()
    assert world.sql(LOST)[0][0] > 0
    told = world.reasons()
    assert by_machine(list(told)) == ["sums/tool_results"]
    assert "lost:OSError" in told["sums/tool_results"][0]
    assert asked(world) == dg.SkipReason("nothing is out of date")
    again = world.run()
    assert (
        again.ran == ["sums/tool_results", "warehouse/toolformer_duckdb"] and again.calls > 0
    )  # which tells the costs
    down.unlink()
    assert world.run().calls == again.calls
    assert world.sql(LOST) == [(0,)]
    assert by_machine(world.stale()) == []


def test_files_cut_short_or_removed_are_found_and_made_again_at_no_token(world, made):
    lake = world.folder / "lake"
    [part] = world.lake.table("calculator/loss_deltas").files("one")
    with open(part, "r+b") as stream:  # noqa: PTH123
        stream.truncate(100)
    (lake / "sums/scored_candidates/two.json").write_text("{")
    (lake / "toolformer.duckdb").unlink()
    told = world.reasons()
    assert set(told) >= {"calculator/loss_deltas", "sums/scored_candidates", "warehouse/toolformer_duckdb"}
    assert part.rpartition("/")[2] in told["calculator/loss_deltas"][0]
    assert "is gone" in told["warehouse/toolformer_duckdb"][0]
    report = world.run()
    assert set(apart_from_tables(report.ran)) == {
        "calculator/loss_deltas",
        "sums/scored_candidates",
        "warehouse/toolformer_duckdb",
    }
    assert free(report)
    assert all(table.equals(made.tables()[name]) for name, table in world.tables().items())
    assert world.stale() == []


def test_each_lost_table_of_evaluation_is_noticed_and_measured_again(world, tmp_path):
    for table in ("accuracy", "outcomes", "perplexity"):
        folder = world.folder / "lake" / "evaluation" / table
        shutil.move(folder, tmp_path / table)
        name = "evaluation/perplexity" if table == "perplexity" else "evaluation/accuracy"
        assert world.reasons() == {
            name: ("never made",),
            "warehouse/toolformer_duckdb": (f"evaluation/{table} changed since it was copied",),
        }
        shutil.move(tmp_path / table, folder)
    shutil.rmtree(world.folder / "lake" / "evaluation" / "outcomes")
    assert "evaluation/accuracy" in world.run(training=True).ran
    assert world.stale() == []


@pytest.mark.parametrize("damage", ["weights", "no weights", "no record", "half a record", "another record"])
def test_a_checkpoint_that_is_not_whole_is_out_of_date(made, tmp_path, damage):
    shutil.copytree(made.folder / "lake", tmp_path / "lake")
    plan = made.project(f"paths.lake={tmp_path / 'lake'}").plan
    folder = checkpoint_folder(plan.settings)
    (folder / "README.md").write_text("a note of the user")
    assert checkpoint_reasons(plan, "finetuned_checkpoint") == []
    weights, record = folder / "model.safetensors", (folder / RECORD).read_text()
    match damage:
        case "weights":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "no weights":
            weights.unlink()
        case "no record":
            (folder / RECORD).unlink()
        case "half a record":
            (folder / RECORD).write_text(record[: len(record) // 2])
        case "another record":
            (folder / RECORD).write_text("{}")
    assert checkpoint_reasons(plan, "finetuned_checkpoint") == [f"{folder} is gone or not whole"]


def test_a_lost_lake_is_missing_from_the_shards_on(world):
    shutil.rmtree(world.folder / "lake")
    stale = set(world.stale())
    assert {"ccnet/raw_shards", "calculator/loss_deltas", "sums/filtered_calls", "warehouse/toolformer_duckdb"} <= stale
    assert set(BY_HAND) <= stale


def test_rows_that_another_instance_published_are_seen_and_those_wanted_here_are_published_again(world, monkeypatch):
    own, change = world.project().instance, "tools.calculator.tau_f=0.3"
    monkeypatch.setenv("DAGSTER_HOME", str(world.folder / "another"))
    world.run(change)
    monkeypatch.setenv("DAGSTER_HOME", own.root_directory)
    assert world.reasons()["calculator/filtered_calls"] == ("settings.tau_f: 0.3 -> 0.0",)
    assert world.reasons(change)["calculator/filtered_calls"] == (
        "has a new code version",
        "the lake holds other rows than the last run made",
    )
    report = world.run(change)
    assert apart_from_tables(report.ran) == [] and free(report)
    assert by_machine(world.stale(change)) == []


def test_automation_starts_nothing_while_the_job_is_running(world):
    (world.folder / "lake" / "toolformer.duckdb").unlink()
    project = world.project(AUTOMATION)
    run = project.instance.add_run(dg.DagsterRun(JOB, status=dg.DagsterRunStatus.STARTED))
    assert asked(world) == dg.SkipReason("the job is running already")
    project.instance.report_run_failed(run)
    assert isinstance(asked(world), dg.SensorResult)
