"""What fails stops what depends on it and nothing else; what was lost or damaged is made again without a token."""

import shutil

import dagster as dg
import polars as pl
import pytest

from tests.command_line import cli
from tests.runs.conftest import by_machine
from toolformer_dag.assets import COMPUTING_JOB, build_shard_sensor, list_outputs
from toolformer_dag.assets.staleness import report_stored_assets
from toolformer_dag.cli.project import NOT_RUN_REASON
from toolformer_dag.computing.spending import COSTS_TABLE
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE, PERPLEXITY_TABLE
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.training import training_report
from toolformer_dag.training.checkpoint_outputs import find_checkpoint_stale_reasons
from toolformer_dag.training.training_report import RECORD_FILE_NAME

BROKEN = '''
"""Sums whose scale is broken."""

from sums_tool import Sums
from toolformer_dag.files import UserError


class Broken(Sums):
    def keeps(self, text, offset, input):
        raise UserError("the scale is broken; mend it")
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
    with dg.build_sensor_context(instance=project.dagster_instance, cursor=cursor) as context:
        return build_shard_sensor(project.plan)(context)


def test_a_failed_asset_stops_what_depends_on_it_alone_and_automation_does_not_try_again(world):
    (world.folder / "broken_tool.py").write_text(BROKEN)
    world.edit("sums_tool:Sums", "broken_tool:Broken")
    change = ("tools.sums.edition=2", "tools.calculator.tau_f=1e-9")
    first = asked(world, *change)
    options = [part for pair in change for part in ("--set", pair)]
    done = cli("stale", "--run", "--config", str(world.folder / "toolformer.toml"), *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "\nsums/loss_deltas: failed: [tools.sums] the scale is broken; mend it\n" in f"\n{done.stderr}"
    told = done.stderr.partition("some assets failed:\n")[2]
    assert told.startswith(
        "sums/loss_deltas: [tools.sums] the scale is broken; mend it\nWhat comes after them did not run"
    )
    assert "Dagster" not in done.stderr and NOT_RUN_REASON not in done.stderr
    ran = {line.removeprefix("ran ") for line in done.stdout.splitlines()}
    assert {"calculator/filtered_calls", "sums/tool_results"} <= ran
    assert not ran & {"sums/loss_deltas", "sums/filtered_calls", "training/augmented_corpus", "warehouse/dataset"}
    [cost] = world.lake.get_table(COSTS_TABLE).read_part("sums/loss_deltas").filter("failed").to_dicts()
    assert cost["tokens"] > 0 and cost["seconds"] > 0 and cost["computed"] is None
    waits = asked(world, *change, cursor=first.cursor)
    assert waits == dg.SkipReason("the last run did not succeed, and nothing changed since")
    assert isinstance(asked(world, "tools.sums.edition=1", cursor=first.cursor), dg.SensorResult)


@pytest.mark.long
def test_lost_calls_and_an_unreadable_shard_fail_nothing_and_only_a_person_s_run_tries_them_again(world):
    down = world.folder / "down"
    down.touch()
    (world.folder / "flaky_tool.py").write_text(FLAKY)
    world.edit("sums_tool:Sums", "flaky_tool:Flaky")
    (world.folder / "web" / "broken.json.gz").symlink_to(world.folder / "gone" / "broken.json.gz")
    assert "sums/loss_deltas" in world.run().made_assets
    assert world.sql(LOST)[0][0] > 0
    unreadable = "select shard, reason, count from rejections where stage = 'raw_shards'"
    assert world.sql(unreadable) == [("broken", "unreadable", 1)]
    told = world.reasons()
    assert by_machine(list(told)) == ["ccnet/raw_shards", "sums/tool_results"]
    assert told["ccnet/raw_shards"][0].startswith("broken could not be read: ")
    assert "lost:OSError" in told["sums/tool_results"][0]
    assert asked(world) == dg.SkipReason("nothing is out of date")
    again = world.run()
    assert again.made_assets == ["ccnet/raw_shards", "sums/tool_results", "warehouse/toolformer_duckdb"]
    assert again.spending.tokens == 0 and again.spending.calls > 0
    down.unlink()
    assert world.update()["sums/tool_results"].work.computed_rows_by_kind["calls"] == again.spending.calls
    assert (
        world.lake.get_table("sums/tool_results")
        .scan_parts()
        .filter(pl.col("reason") == "lost:OSError")
        .collect()
        .is_empty()
    )


@pytest.mark.parametrize("table", [ACCURACY_TABLE, "evaluation/outcomes", PERPLEXITY_TABLE])
def test_what_was_measured_is_missed_when_its_file_is_lost(world, table):
    shutil.rmtree(world.folder / "lake" / table)
    assert world.stale() == [
        PERPLEXITY_TABLE if table == PERPLEXITY_TABLE else ACCURACY_TABLE,
        "warehouse/toolformer_duckdb",
    ]


@pytest.mark.long
def test_a_damaged_measurement_is_left_to_the_second_job(world):
    manifest = world.folder / "lake/table-manifests/evaluation/accuracy.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b"files", b"flies"))
    world.run()
    assert world.sql("select count(*) from accuracy") == [(0,)]
    assert world.stale() == [ACCURACY_TABLE]
    world.run(training=True)
    assert world.sql("select count(*) from accuracy") != [(0,)] and world.stale() == []


def test_a_checkpoint_that_is_not_whole_is_out_of_date(made, tmp_path):
    shutil.copytree(made.folder / "lake", tmp_path / "lake")
    plan = made.project(f"paths.lake={tmp_path / 'lake'}").plan
    folder = get_checkpoint_folder(plan.settings)
    (folder / "README.md").write_text("a note of the user")
    assert find_checkpoint_stale_reasons(plan, "finetuned_checkpoint") == []
    weights = folder / "model.safetensors"
    record = folder / RECORD_FILE_NAME
    whole = weights.read_bytes()
    noted = record.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for file, contents in ((weights, (whole[:-1], flipped, None)), (record, (noted[: len(noted) // 2], b"{}", None))):
        before = file.read_bytes()
        for content in contents:
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            assert find_checkpoint_stale_reasons(plan, "finetuned_checkpoint") == [f"{folder} is gone or not whole"]
        file.write_bytes(before)


def test_a_checkpoint_that_keeps_its_base_is_out_of_date_with_another_loss_window(made, monkeypatch):
    plan = made.project("training.keep_base=0.5").plan
    before = find_checkpoint_stale_reasons(plan, "finetuned_checkpoint")
    monkeypatch.setattr(training_report, "WINDOW_WEIGHTS", (1.0, 0.5))
    [reason] = set(find_checkpoint_stale_reasons(plan, "finetuned_checkpoint")) - set(before)
    assert "learned_after" in reason


def test_the_lake_says_what_is_stale_and_the_history_of_each_home_is_told_what_it_holds(world, monkeypatch):
    name = "calculator/filtered_calls"
    change = "tools.calculator.tau_f=0.3"
    before = world.told(name)
    world.update(change)  # as a run does that another home knows of
    assert world.reasons()[name] == ("settings.tau_f: 0.3 -> 0.0",)
    stale = world.stale(change)
    assert name not in stale
    for home in (".dagster", "without a history"):
        monkeypatch.setenv("DAGSTER_HOME", str(world.folder / home))
        assert world.stale(change) == stale
        project = world.project(change)
        report_stored_assets(list_outputs(project.plan), project.dagster_instance)
        assert world.told(name) != before and project.dagster_instance.get_runs_count() == (
            2 if home == ".dagster" else 0
        )


def test_automation_starts_nothing_while_the_job_is_running(world):
    (world.folder / "lake" / "toolformer.duckdb").unlink()
    project = world.project(AUTOMATION)
    run = project.dagster_instance.add_run(dg.DagsterRun(COMPUTING_JOB, status=dg.DagsterRunStatus.STARTED))
    assert asked(world) == dg.SkipReason("the job is running already")
    project.dagster_instance.report_run_failed(run)
    assert isinstance(asked(world), dg.SensorResult)
