"""A run computes what is stale and skips the rest, whoever starts it."""

import re

import dagster as dg

from assets import JOB
from assets.outputs import BY_HAND
from assets.running import CHANGED
from tests.runs.conftest import apart_from_tables, assert_same, free
from toolformer_dag.definitions import definitions_of
from toolformer_dag.pipeline import filtered_calls

AFTER_FILTER = ["training/augmented_corpus", "warehouse/toolformer_duckdb", "warehouse/dataset"]
HASH = re.compile("[0-9a-f]{12,}")
OURS = "toolformer/"
"""Tags that this project writes; Dagster's own begin with dagster/ or a dot."""


def last_tags(instance: dg.DagsterInstance) -> dict[str, str]:
    """Return the tags of the newest run that we write."""
    [run] = instance.get_runs(limit=1)
    assert all(name.startswith((OURS, "dagster/", ".dagster/")) for name in run.tags)
    return {name: value for name, value in run.tags.items() if name.startswith(OURS)}


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


def test_the_job_started_from_dagster_leaves_training_alone_and_tells_what_changed_in_its_tag(world):
    [(middle,)] = world.sql("select round(median(delta), 3) from filtered_calls where tool = 'calculator'")
    project = world.project(f"tools.calculator.tau_f={middle}")
    job = definitions_of(project.plan).resolve_job_def(JOB)
    assert job.execute_in_process(instance=project.instance).success
    assert {one.name for one in project.stale()} == set(BY_HAND) - {"evaluation/accuracy"}
    assert last_tags(project.instance) == {CHANGED: f"calculator.tau_f 0.0 -> {middle}"}
    tokens = sum(
        world.figures(name)["tokens through the model"].value
        for name in ("calculator/filtered_calls", "calculator/loss_deltas")
    )
    assert tokens == 0
    assert world.sql(f"select count(*) from filtered_calls where tool = 'calculator' and delta < {middle}") == [(0,)]


def test_a_tau_f_that_keeps_the_same_calls_runs_its_filter_and_the_copies(world):
    [(smallest,)] = world.sql("select min(delta) from filtered_calls where tool = 'calculator'")
    before = world.tables()
    change = f"tools.calculator.tau_f={smallest / 2}"
    assert world.reasons(change) == {"calculator/filtered_calls": (f"settings.tau_f: 0.0 -> {smallest / 2}",)}
    report = world.run(change, training=True)
    assert apart_from_tables(report.ran) == ["calculator/filtered_calls", *AFTER_FILTER[1:]] and free(report)
    assert world.sql("select tau_f from lanes where tool = 'calculator'") == [(smallest / 2,)]
    assert world.stale(change) == []
    for name in (name for name in before if name.startswith("calculator/filtered_calls ")):
        assert world.tables()[name].drop("tau_f").equals(before[name].drop("tau_f"))


def test_no_hash_stands_in_a_tag_where_sql_changed(world, monkeypatch):
    monkeypatch.setattr(filtered_calls, "SQL", filtered_calls.SQL + "\n-- another text\n")
    assert world.run().ran == ["calculator/filtered_calls", "sums/filtered_calls"]
    tags = last_tags(world.project().instance)
    assert tags == {CHANGED: "calculator.sql changed; sums.sql changed"}
    assert not HASH.search(str(tags))


def test_a_lane_removed_and_added_again_leaves_the_other_alone_and_costs_nothing(world, made):
    world.run("tools.sums.enabled=false")
    assert world.sql("select distinct tool from loss_deltas") == [("calculator",)]
    assert world.sql("select count(*) from filtered_calls where tool = 'sums'") == [(0,)]
    report = world.run()
    assert free(report) and apart_from_tables(report.ran) == AFTER_FILTER
    assert_same(world.tables(), made.tables())


def test_path_device_batches_and_workers_change_nothing(world):
    (world.folder / "model").rename(world.folder / "elsewhere")
    (world.folder / "lake").rename(world.folder / "lake_elsewhere")
    moved = ("model.name=elsewhere", "paths.lake=lake_elsewhere", "paths.warehouse=lake_elsewhere/toolformer.duckdb")
    spread = ("model.device=auto", "model.token_budget=512", "execution.chunk_texts=3", "execution.chunk_calls=2")
    workers = ("execution.workers=3", "tools.calculator.limits.concurrency=3", "training.device_batch_size=1")
    assert world.stale(*moved, *spread, *workers) == []
