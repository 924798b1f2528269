"""What the UI is told over GraphQL is what the command line says."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import dagster as dg
import httpx
import pytest
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget
from dagster_graphql.schema import create_schema

from resources.instance import shared_instance
from resources.processes import PROCESS

QUERY = "{ assetNodes { assetKey { path } isPartitioned staleStatus } }"


def test_the_ui_shows_the_changed_filter_as_stale_and_nothing_else(world, monkeypatch):
    monkeypatch.setenv("TOOLFORMER_CONFIG", str(world.folder / "toolformer.toml"))
    monkeypatch.setenv("TOOLFORMER__TOOLS__CALCULATOR__TAU_F", "0.5")
    target = ModuleTarget("toolformer_dag.definitions", None, str(world.folder), "line")
    with dg.DagsterInstance.get() as instance, WorkspaceProcessContext(instance, target) as process:
        answer = create_schema().execute(QUERY, context_value=process.create_request_context())
    assert answer.errors is None, json.dumps([str(error) for error in answer.errors])
    nodes = {"/".join(node["assetKey"]["path"]): node for node in answer.data["assetNodes"]}
    stale = [name for name, node in nodes.items() if not node["isPartitioned"] and node["staleStatus"] != "FRESH"]
    assert stale == ["calculator/filtered_calls"]


def test_the_page_shows_the_settings_that_were_named_and_ends_runs_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named from another folder than theirs, which has no workspace.yaml; the variable names other ones."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "toolformer.toml").write_text("[tools.calculator]\n")
    (tmp_path / "mine" / "other.toml").write_text("[tools.calendar]\n")
    variables = {"DAGSTER_HOME": str(tmp_path / "home"), "TOOLFORMER_CONFIG": "mine/toolformer.toml"}
    monkeypatch.setenv("DAGSTER_HOME", variables["DAGSTER_HOME"])
    instance = shared_instance(tmp_path)
    killed = dg.DagsterRun("job", status=dg.DagsterRunStatus.STARTED, tags={PROCESS: "gone"})
    instance.add_run(killed)
    with page(tmp_path, ["--config", "mine/other.toml"], variables) as address:
        nodes = asked(address)["assetNodes"]
    lanes = {node["assetKey"]["path"][0] for node in nodes}
    assert "calendar" in lanes and "calculator" not in lanes
    assert instance.get_run_by_id(killed.run_id).status is dg.DagsterRunStatus.FAILURE


@contextmanager
def page(folder: Path, options: list[str], variables: Mapping[str, str]) -> Iterator[str]:
    """`toolformer-dag ui` in `folder` until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "toolformer_dag.cli", "ui", "--port", str(port), *options]
    server = subprocess.Popen(command, cwd=folder, env=os.environ | variables)
    try:
        address = f"http://127.0.0.1:{port}/graphql"
        while server.poll() is None and not answers(address):
            time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def answers(address: str) -> bool:
    try:
        return bool(asked(address)["assetNodes"])
    except httpx.TransportError:
        return False


def asked(address: str) -> dict[str, list[dict[str, dict[str, list[str]]]]]:
    answer: dict[str, dict[str, list[dict[str, dict[str, list[str]]]]]]
    answer = httpx.post(address, json={"query": "{ assetNodes { assetKey { path } } }"}).json()
    return answer["data"]
