"""What the UI is told over GraphQL is what the command line says."""

import asyncio
import json
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest
from dagster._core.remote_origin import InProcessCodeLocationOrigin
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import InProcessWorkspaceLoadTarget
from dagster_graphql.schema import create_schema

from tests.processes import processes_with, wait_until_ended
from tests.runs.conftest import BY_HAND, World
from tests.ui_server import asked, served
from tests.worlds import write_shard
from toolformer_dag.assets import COMPUTING_JOB, build_shard_sensor, report_lake
from toolformer_dag.assets.checkpoint_assets import list_checkpoint_asset_names
from toolformer_dag.assets.running import COMPUTED_TAG, ENTRY_SEPARATOR, SKIPPED_TAG
from toolformer_dag.assets.staleness import INPUT_VERSION_TAG_PREFIX, SHARD_LIST_ASSET, VERSION_TAG
from toolformer_dag.cli.project import Project, open_shared_instance
from toolformer_dag.definitions import build_definitions
from toolformer_dag.settings.settings_file import load_settings

KEYS = "{ assetNodes { assetKey { path } } }"
STALE = "{ assetNodes { assetKey { path } staleStatus } }"
CHECKS = """{ assetNodes { assetKey { path } assetChecksOrError { ... on AssetChecks { checks {
  name executionForLatestMaterialization { status } } } } } }"""
CHANGES = (
    {},
    {"TOOLFORMER__TOOLS__CALCULATOR__K": "3"},
    {"TOOLFORMER__TOOLS__CALCULATOR__TAU_F": "0.5"},
    {"TOOLFORMER__TOOLS__CALCULATOR__PROMPT": "another.txt"},
    {"TOOLFORMER__TRAINING__MAX_STEPS": "3"},
)


def nodes(query: str) -> dict[str, dict[str, Any]]:
    """Ask the page's schema about the definitions of $TOOLFORMER_CONFIG; asset -> what was asked."""
    origin = LoadableTargetOrigin(executable_path=sys.executable, module_name="toolformer_dag.definitions")
    target = InProcessWorkspaceLoadTarget(InProcessCodeLocationOrigin(origin, location_name="project"))
    with dg.DagsterInstance.get() as instance, WorkspaceProcessContext(instance, target) as process:
        asking = create_schema().execute_async(query, context_value=process.create_request_context())
        answer = asyncio.run(asking)
    assert answer.errors is None, json.dumps([str(error) for error in answer.errors])
    return {"/".join(node["assetKey"]["path"]): node for node in answer.data["assetNodes"]}


def unsynced() -> set[str]:
    """Return what the lineage page marks."""
    return {name for name, node in nodes(STALE).items() if node["staleStatus"] != "FRESH"}


def test_the_page_marks_what_the_command_line_lists_and_shows_checks_that_passed(world, monkeypatch):
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    text = (world.folder / "calculator.txt").read_text()
    (world.folder / "another.txt").write_text(text.replace("Call.", "Write calls."))
    seen = []
    for change in CHANGES:
        with monkeypatch.context() as patch:
            for name, value in change.items():
                patch.setenv(name, value)
            project = Project.from_settings(load_settings())
            listed = set(project.list_stale_assets())
            assert unsynced() == listed, change
            seen.append(listed)
    assert seen[:3] == [set(), {"calculator/scored_candidates"}, {"calculator/filtered_calls"}]
    write_shard(world.folder / "web", "added", documents=2)
    project = world.project()
    with dg.build_sensor_context(instance=project.dagster_instance) as context:
        assert build_shard_sensor(project.plan)(context) == dg.SkipReason("observed")
    listed = world.stale()
    assert listed[0] == "ccnet/raw_shards" and unsynced() == {"ccnet/raw_shards"}
    checks = {name: node["assetChecksOrError"].get("checks", []) for name, node in nodes(CHECKS).items()}
    assert {name for name in checks if not checks[name]} == {
        SHARD_LIST_ASSET,
        "warehouse/toolformer_duckdb",
        "warehouse/dataset",
        *(name for name in checks if name.startswith(("evaluation/", "tables/", "training/")) and "corpus" not in name),
    }
    told = {one["executionForLatestMaterialization"]["status"] for found in checks.values() for one in found}
    assert told == {"SUCCEEDED"}


def check_results() -> set[str | None]:
    """Return how the checks of the latest materializations ended; None where one has not run for it."""
    found = set()
    for node in nodes(CHECKS).values():
        for check in node["assetChecksOrError"].get("checks", []):
            execution = check["executionForLatestMaterialization"]
            found.add(execution and execution["status"])
    return found


def test_a_home_that_has_not_seen_the_lake_shows_nothing_as_unsynced_and_each_table_of_the_paper(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    monkeypatch.setenv("DAGSTER_HOME", str(world.folder / "another home"))
    assert world.run().made_assets == []
    assert unsynced() == set()
    assert "plot" in world.figures("tables/table_3")
    before = world.last("tables/table_3")
    assert world.run().made_assets == [] and world.last("tables/table_3") == before
    monkeypatch.setenv("TOOLFORMER__TOOLS__CALCULATOR__TAU_F", "0.5")
    monkeypatch.setenv("DAGSTER_HOME", str(world.folder / "a third home"))
    project = Project.from_settings(load_settings())
    report_lake(project.plan, project.dagster_instance)
    assert unsynced() == set(project.list_stale_assets()) == {"calculator/filtered_calls"}


def test_a_warehouse_that_is_out_of_date_leaves_the_tables_that_were_made_of_it_synced(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    world.update("tools.calculator.tau_f=0.5")  # without Dagster: the lake's rows are other ones than the file's
    monkeypatch.setenv("TOOLFORMER__TOOLS__CALCULATOR__TAU_F", "0.5")
    project = Project.from_settings(load_settings())
    report_lake(project.plan, project.dagster_instance)
    assert "warehouse/toolformer_duckdb" in project.list_stale_assets()
    assert not [name for name in unsynced() if name.startswith("tables/")]


def test_the_sensor_shows_shards_that_a_first_run_wrote_as_read_and_their_checks_as_passed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record the documents as that run does: made of a list of shards in which no file was there yet."""
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    project = world.project()
    last = world.last("ccnet/raw_shards")
    of_shard_list = f"{INPUT_VERSION_TAG_PREFIX}{SHARD_LIST_ASSET}"
    assert last.tags is not None and of_shard_list in last.tags
    tags = {**last.tags, of_shard_list: "no file yet"}
    for name, recorded in (("ccnet/raw_shards", tags), (SHARD_LIST_ASSET, {VERSION_TAG: "no file yet"})):
        event = dg.AssetMaterialization(name.split("/"), metadata=last.metadata, tags=recorded)
        project.dagster_instance.report_runless_asset_event(event)
    assert unsynced() == set() and None in check_results()
    with dg.build_sensor_context(instance=project.dagster_instance) as context:
        assert build_shard_sensor(project.plan)(context) == dg.SkipReason("observed")
    assert world.stale() == [] and unsynced() == set()
    assert check_results() == {"SUCCEEDED"}
    assert world.figures("ccnet/raw_shards")["dagster/row_count"] == last.metadata["dagster/row_count"]


@pytest.mark.long
def test_what_a_job_skips_stays_synced_and_what_comes_after_it_runs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    monkeypatch.setenv("TOOLFORMER__TOOLS__CALCULATOR__TAU_F", "0.5")
    project = Project.from_settings(load_settings())
    assert unsynced() == {"calculator/filtered_calls"}
    assert (
        build_definitions(project.plan)
        .resolve_job_def(COMPUTING_JOB)
        .execute_in_process(instance=project.dagster_instance)
        .success
    )
    [run] = project.dagster_instance.get_runs(limit=1)
    computed = run.tags[COMPUTED_TAG].split(ENTRY_SEPARATOR)
    assert computed[0] == "calculator/filtered_calls" and "training/augmented_corpus" in computed
    assert not [name for name in computed if name.startswith(("ccnet/", "sums/"))]
    assert int(run.tags[SKIPPED_TAG]) > 10
    assert unsynced() <= set(BY_HAND)
    report_lake(project.plan, project.dagster_instance)
    assert unsynced() == set(project.list_stale_assets()) == set(list_checkpoint_asset_names(project.plan))
    assert check_results() == {"SUCCEEDED"}


@pytest.mark.long
def test_the_page_shows_the_settings_that_were_named_and_ends_runs_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Name settings from another folder than theirs, which has no workspace.yaml; the variable names other ones."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "toolformer.toml").write_text("[tools.calculator]\n")
    (tmp_path / "mine" / "other.toml").write_text("[tools.calendar]\n")
    variables = {"DAGSTER_HOME": str(tmp_path / "home"), "TOOLFORMER_CONFIG": "mine/toolformer.toml"}
    monkeypatch.setenv("DAGSTER_HOME", variables["DAGSTER_HOME"])
    instance = open_shared_instance(tmp_path)
    killed = dg.DagsterRun("job", status=dg.DagsterRunStatus.STARTED)
    instance.add_run(killed)
    lock = tmp_path / "home" / "live_runs" / killed.run_id / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    with served(tmp_path, ["--config", "mine/other.toml"], variables) as address:
        lanes = {node["assetKey"]["path"][0] for node in asked(address, KEYS)["assetNodes"]}
        outside = httpx.get(f"{address}/logs/..%2f..%2fother.toml")
    assert "calendar" in lanes and "calculator" not in lanes
    assert outside.status_code == 404 and "there is no such log" in outside.text
    assert "Warning" not in capfd.readouterr().err
    assert instance.get_run_by_id(killed.run_id).status is dg.DagsterRunStatus.FAILURE


@pytest.mark.long
def test_a_port_in_use_is_named_and_nothing_is_left_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = World(tmp_path).start("ui", "--port", port)
        told = run.communicate()[1]
    assert run.returncode == 1 and f"port {port}: Address already in use" in told
    assert "--port" in told and "Traceback" not in told
    assert not processes_with(str(tmp_path))


@pytest.mark.long
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_ui_that_is_stopped_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: signal.Signals
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    with served(tmp_path, stop=stop):
        running = processes_with(str(tmp_path))
        assert running
    if stop is signal.SIGKILL:  # nobody was left to end them
        wait_until_ended(running)
    assert not processes_with(str(tmp_path))
