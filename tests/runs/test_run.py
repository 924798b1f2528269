"""A run computes what is stale and skips the rest, whoever starts it."""

from tests.runs.conftest import free
from toolformer_dag.assets import JOB
from toolformer_dag.assets.by_hand import BY_HAND
from toolformer_dag.assets.declaration import asset_key
from toolformer_dag.assets.metadata import TOKENS
from toolformer_dag.assets.running import CHANGED
from toolformer_dag.definitions import definitions_of
from toolformer_dag.pipeline import filtered_calls

OURS = "toolformer/"
"""Tags that this project writes; Dagster's own begin with dagster/ or a dot."""


def test_everything_is_fresh_after_a_run_and_a_second_one_starts_nothing(world):
    assert world.stale() == []
    assert world.sql("select count(*) from documents") == [(12,)]
    assert world.sql("select count(*) from filtered_calls where delta < tau_f") == [(0,)]
    scored = dict(world.sql("select tool, count(*) from loss_deltas group by tool"))
    assert scored["calculator"] > 10 and scored["sums"] > 3
    assert {name for (name,) in world.sql("select distinct tool from funnel")} == {"calculator", "sums"}
    assert (world.folder / "lake/training/finetuned_checkpoint/model/model.safetensors").exists()
    project = world.project()
    before = project.instance.get_runs_count()
    report = project.run(training=True)
    assert report.ran == [] and free(report)
    assert project.instance.get_runs_count() == before


def test_a_run_started_from_dagster_tells_in_its_tag_what_changed(world, monkeypatch):
    [(middle,)] = world.sql("select round(median(delta), 3) from filtered_calls where tool = 'calculator'")
    monkeypatch.setattr(filtered_calls, "SQL", filtered_calls.SQL + "\n-- another text\n")
    project = world.project(f"tools.calculator.tau_f={middle}")
    job = definitions_of(project.plan).resolve_job_def(JOB)
    assert not {key.to_user_string() for key in job.asset_layer.selected_asset_keys} & set(BY_HAND)
    chosen = ("calculator/filtered_calls", "sums/filtered_calls", "warehouse/toolformer_duckdb")
    keys = [asset_key(name) for name in chosen]
    assert job.execute_in_process(instance=project.instance, asset_selection=keys).success
    [run] = project.instance.get_runs(limit=1)
    assert all(name.startswith((OURS, "dagster/", ".dagster/")) for name in run.tags)
    told = {name: set(value.split("; ")) for name, value in run.tags.items() if name.startswith(OURS)}
    assert told == {CHANGED: {f"calculator.tau_f 0.0 -> {middle}", "calculator.sql changed", "sums.sql changed"}}
    assert world.figures("calculator/filtered_calls")[TOKENS].value == 0
    assert world.sql("select min(delta) >= tau_f from filtered_calls where tool = 'calculator' group by tau_f") == [
        (True,)
    ]
