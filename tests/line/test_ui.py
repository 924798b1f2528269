"""What the UI is told over GraphQL is what the command line says."""

import json

import dagster as dg
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget
from dagster_graphql.schema import create_schema

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
