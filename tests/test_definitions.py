"""The asset graph: what Dagster loads, how light, how it hangs together, and what each change makes stale."""

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import get_args

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from toolformer_dag.assets import list_outputs, tables
from toolformer_dag.cli.explore_command import explore
from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.plan import Plan
from toolformer_dag.definitions import ToolformerLine, build_definitions, definitions_to_merge
from toolformer_dag.files import UserError
from toolformer_dag.pipeline.controls import CONTROLS
from toolformer_dag.pipeline.stages import STAGES
from toolformer_dag.settings.settings_file import load_settings

REPOSITORY = Path(__file__).parents[1]
SNAPSHOT = Path(__file__).with_name("asset_graph.json")


@pytest.fixture(scope="module", autouse=True)
def unchanged() -> None:
    """Remember the versions before any test changes a constant, whichever comes first."""
    default(), default(file=REPOSITORY / "toolformer.toml")


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    return build_definitions(Plan.from_settings(load_settings(REPOSITORY / "toolformer.toml", environment={})))


def picture(definitions: dg.Definitions) -> dict[str, dict[str, object]]:
    """Return what people see of the graph: what stands after what, in which group, with which checks and pools."""
    graph = definitions.resolve_asset_graph()
    return {
        key.to_user_string(): {
            "after": sorted(parent.to_user_string() for parent in graph.get(key).parent_keys),
            "group": graph.get(key).group_name,
            "checks": sorted(check.name for check in graph.get(key).check_keys),
            "pools": sorted(graph.get(key).pools or ()),
        }
        for key in sorted(graph.toposorted_asset_keys)
    }


def test_graph_is_the_one_in_the_snapshot(definitions):
    """After a wanted change: `python -m tests.test_definitions` writes the snapshot anew."""
    assert picture(definitions) == json.loads(SNAPSHOT.read_text())


def test_dagster_skips_what_depends_on_an_asset_that_yields_nothing() -> None:
    """Why a step with nothing to compute records a materialization: docs/decisions.md, "One job"."""

    @dg.asset(output_required=False)
    def silent() -> Iterator[dg.MaterializeResult]:
        yield from ()

    @dg.asset
    def stale() -> None:
        return

    @dg.asset(deps=[silent, stale])
    def after_both() -> None:
        return

    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.materialize([silent, stale, after_both], instance=instance)
    landed = [event.asset_key.to_user_string() for event in run.get_asset_materialization_events() if event.asset_key]
    assert run.success and landed == ["stale"]


def test_a_lane_with_chains_has_its_calls_and_results_twice_and_waits_for_the_tools_it_calls():
    chains = ["tools.calculator.depth=2", 'tools.calculator.then=["wiki_search"]', "tools.calculator.tau_f=0.3"]
    graph = picture(
        build_definitions(
            Plan.from_settings(load_settings(REPOSITORY / "toolformer.toml", environment={}, overrides=chains))
        )
    )
    assert graph["calculator/chained_candidates"]["after"] == [
        f"calculator/{name}" for name in ("heuristic_subset", "scored_candidates", "tool_results")
    ]
    assert graph["calculator/chained_results"]["after"] == [
        *("calculator/chained_candidates", "calculator/heuristic_subset"),
        "wiki_search/prepared_tool",
    ]
    assert {f"calculator/chained_{name}" for name in ("candidates", "results")} <= set(
        graph["calculator/chained_deltas"]["after"]
    )


def test_definitions_are_loadable_and_have_no_partitions(definitions):
    dg.Definitions.validate_loadable(definitions)
    graph = definitions.resolve_asset_graph()
    assert not [key for key in graph.toposorted_asset_keys if graph.get(key).is_partitioned]


def test_every_check_says_what_it_promises(definitions):
    checks = [spec for asset in definitions.assets for spec in asset.check_specs]
    told = {spec.name: spec.description for spec in checks if "calculator" in spec.asset_key.path}
    assert all(spec.description for spec in checks)
    assert told["kept_at_tau_f"] == "Every kept call gains at least tau_f."
    assert {len(told)} == {3} and told["unique_keys"].startswith("No two rows have the same ")


def test_whoever_adds_a_stage_edits_no_asset():
    """What the asset of a stage shows, warns of and refuses is in the stage's declaration."""
    stages = {stage.name for stage in STAGES} | set(get_args(LaneTable))
    stages |= {control.chained_stage_name for control in CONTROLS}
    module = ast.parse(Path(tables.__file__).read_text())
    words = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
    assert not stages & words
    imported = {node.module for node in ast.walk(module) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if name.startswith("toolformer_dag.pipeline")]


def test_the_two_jobs_make_every_asset_between_them_and_both_show_what_came_out(definitions):
    first, second = (
        {key.to_user_string() for key in definitions.resolve_job_def(name).asset_layer.selected_asset_keys}
        for name in ("bring_up_to_date", "finetune_and_evaluate")
    )
    shown = {"warehouse/toolformer_duckdb", "warehouse/dataset", *(f"tables/table_{n}" for n in range(2, 11))}
    assert first & second == shown | {"tables/figure_4"}
    assert second - first == {f"training/{name}_checkpoint" for name in ("finetuned", "baseline")} | {
        "evaluation/accuracy",
        "evaluation/perplexity",
    }
    assert first | second == set(picture(definitions))


def test_another_project_holds_the_assets_beside_resources_jobs_and_an_executor_of_its_own():
    @dg.asset(deps=[dg.AssetKey(["training", "augmented_corpus"])])
    def downstream(lake: dg.ResourceParam[str]) -> None: ...

    own = dg.Definitions(
        assets=[downstream],
        jobs=[dg.define_asset_job("everything", executor_def=dg.in_process_executor)],
        resources={"lake": "a lake", "compute": "a cluster", "warehouse": "a database"},
        executor=dg.multiprocess_executor,
    )
    merged = dg.Definitions.merge(own, definitions_to_merge(REPOSITORY / "toolformer.toml"))
    dg.Definitions.validate_loadable(merged)
    reached = merged.resolve_job_def("everything").asset_layer.selected_asset_keys
    ours = merged.resolve_job_def("bring_up_to_date")
    assert downstream.key in reached and downstream.key not in ours.asset_layer.selected_asset_keys
    assert ours.executor_def is dg.in_process_executor
    assert merged.resolve_implicit_global_asset_job_def().executor_def is dg.multiprocess_executor


def test_a_defs_yaml_that_names_the_settings_file_adds_the_line(definitions):
    with create_defs_folder_sandbox() as project:
        written = project.scaffold_component(ToolformerLine, "line", {"settings": "tools/toolformer.toml"})
        assert "{{ project_root }}/tools/toolformer.toml" in (written / "defs.yaml").read_text()
        (project.project_root / "tools").mkdir()
        shutil.copy(REPOSITORY / "toolformer.toml", project.project_root / "tools")
        (written / "defs.yaml").write_text(
            "type: toolformer_dag.ToolformerLine\nattributes:\n  settings: ../../../../tools/toolformer.toml\n"
        )
        with project.load_component_and_build_defs(written) as (component, added):
            assert isinstance(component, ToolformerLine) and added.executor is None  # the project's own holds
            assert picture(added) == picture(definitions)


def test_a_second_line_in_one_project_is_refused_by_a_sentence():
    with create_defs_folder_sandbox() as project:
        for name in ("one", "two"):
            project.scaffold_component(ToolformerLine, name, {"settings": "none.toml"})
        with pytest.raises(Exception, match="building definitions") as refused, project.build_all_defs():
            pass
        reason = refused.value.__cause__
        assert isinstance(reason, UserError)
        assert re.search(r"one/defs\.yaml and .*two/defs\.yaml: a project holds one toolformer_dag\.Toolf", str(reason))


def test_dg_finds_the_component_and_the_library_needs_no_dagster():
    program = (
        "import sys, toolformer_dag as one; print('dagster' in sys.modules, 'ToolformerLine' in dir(one), "
        "one.ToolformerLine.__module__, hasattr(one, 'ToolformerLin'))"
    )
    told = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["False", "True", "toolformer_dag.definitions", "False"]


def test_every_asset_links_to_its_view_of_the_explorer_on_the_usual_port(definitions):
    port = inspect.signature(explore).parameters["port"].default
    made = [spec for spec in definitions.resolve_all_asset_specs() if spec.key.to_user_string() != "ccnet/shard_list"]
    told = {spec.key.to_user_string(): spec.metadata["explore"].value for spec in made}
    assert {link.partition("#")[0] for link in told.values()} == {f"http://127.0.0.1:{port}/"}
    shown = {name: link.partition("#")[2] for name, link in told.items()}
    assert shown["calculator/loss_deltas"] == "tool=calculator&view=calls"
    assert shown["calculator/filtered_calls"] == "tool=calculator&verdict=kept&view=calls"
    assert shown["warehouse/toolformer_duckdb"] == shown["tables/table_2"] == "view=thresholds"
    assert shown["evaluation/accuracy"] == shown["training/finetuned_checkpoint"] == "view=runs"
    assert shown["tables/figure_4"] == "view=runs"


def versions(*overrides: str, file: Path = REPOSITORY / "toolformer.toml") -> dict[str, str]:
    """Return the code version of every asset that has settings."""
    plan = Plan.from_settings(load_settings(file, environment={}, overrides=overrides))
    return {output.name: output.code_version for output in list_outputs(plan)}


default = lru_cache(versions)


def changed(*overrides: str, file: Path = REPOSITORY / "toolformer.toml") -> set[str]:
    return difference(default(file=file), versions(*overrides, file=file))


def difference(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def lanes(stage: str) -> set[str]:
    """Name a stage's assets in all lanes."""
    return {name for name in default() if name.endswith(f"/{stage}") and not name.startswith("warehouse/")}


def test_the_code_versions_are_those_that_dagster_compares(definitions):
    specs = {spec.key.to_user_string(): spec.code_version for spec in definitions.resolve_all_asset_specs()}
    assert {name: specs[name] for name in default()} == default()


@pytest.mark.parametrize(
    ("override", "stale"),
    [
        ("tools.calculator.tau_f=0.8", {"calculator/filtered_calls"}),
        ("tools.calculator.k=4", {"calculator/scored_candidates"}),
        ("tools.calendar.m=2", {"calendar/scored_candidates"}),
        ("tools.calculator.tau_s=0.5", {"calculator/scored_candidates"}),
        ("model.device='cpu'", set()),
        ("model.token_budget=4096", set()),
        ("execution.chunk_texts=3", set()),
        ("tools.calculator.limits.concurrency=4", set()),
        ("execution.workers=3", set()),
        ("execution.automation=true", set()),
        ("training.device_batch_size=1", set()),
        ("paths.lake='elsewhere'", set()),
        ("evaluation.questions=3", {"evaluation/accuracy"}),
        ("decoding.k=3", {"evaluation/accuracy"}),
        ("tools.question_answering.inference.reader='extractive'", {"evaluation/accuracy"}),
        ("evaluation.decoding_k=[1]", {"evaluation/accuracy"}),
        ("evaluation.models={ small = 'embedded' }", {"evaluation/accuracy", "evaluation/perplexity"}),
        (
            "tools.calculator.limits.max_result_characters=7",
            {"calculator/tool_results", "question_answering/chained_results", "evaluation/accuracy"},
        ),
        ("training.heldout_texts=3", {"training/finetuned_checkpoint", "training/baseline_checkpoint"}),
        ("evaluation.perplexity_texts=3", {"evaluation/perplexity"}),
        ("training.learning_rate=0.5", {"training/finetuned_checkpoint", "training/baseline_checkpoint"}),
    ],
)
def test_setting_changes_the_code_version_of_the_stage_that_applies_it(override, stale):
    assert changed(override) == stale


@pytest.fixture
def served(tmp_path):
    """Settings with two lanes of a server, which nothing asks."""
    schema = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    listing = {"office": [{"name": name, "description": "", "input_schema": schema} for name in ("sky", "sea")]}
    (tmp_path / "mcp_tools.json").write_text(json.dumps(listing))
    lanes = "".join(
        f"[tools.{key}]\nexamples = ['[{key.title()}(city=\"Rome\")] Sun.', 'Sun.']\n" for key in ("sky", "sea")
    )
    own = "[tools.calculator]\n"
    (tmp_path / "toolformer.toml").write_text(f"[servers.office]\nurl = 'http://localhost/mcp'\n{lanes}{own}")
    return tmp_path / "toolformer.toml"


def test_another_rule_for_wanted_texts_chooses_them_anew_and_asks_no_server(served):
    assert changed("tools.sky.wants='rain|sun'", file=served) == {"sky/heuristic_subset"}


def test_the_lanes_of_a_server_are_one_group(served):
    graph = picture(build_definitions(Plan.from_settings(load_settings(served, environment={}))))
    groups = {name.partition("/")[0]: one["group"] for name, one in graph.items()}
    assert (groups["sky"], groups["sea"], groups["calculator"]) == ("server_office", "server_office", "calculator")


@pytest.mark.parametrize(
    ("constant", "value", "names"),
    [
        ("method.warehouse_views.VIEWS", "CREATE VIEW one AS SELECT 1;", "warehouse/toolformer_duckdb"),
        (
            "tools.built_in.calculator.Calculator.version",
            "another",
            "calculator/heuristic_subset calculator/tool_results calculator/loss_deltas "
            "question_answering/chained_results question_answering/chained_deltas evaluation/accuracy",
        ),
    ],
)
def test_a_constant_of_the_method_changes_the_assets_that_use_it(monkeypatch, constant, value, names):
    monkeypatch.setattr(f"toolformer_dag.{constant}", value)
    assert changed() == set().union(*(lanes(name) or {name} for name in names.split()))


@pytest.mark.skipif(not (REPOSITORY / ".git").exists(), reason="no checkout of git")
def test_a_checkout_without_symbolic_links_loads_the_definitions(tmp_path):
    """As on a file system that has none: git writes the target of a link into a plain file."""
    git = ["git", "-c", "core.symlinks=false", "checkout-index", "--all", f"--prefix={tmp_path}/clone/"]
    subprocess.run(git, cwd=REPOSITORY, check=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_symlink()]
    told = subprocess.run(
        [sys.executable, "-c", "import toolformer_dag.definitions as one; print(one.__file__)"],
        cwd=tmp_path / "clone",
        env=os.environ | {"PYTHONPATH": str(tmp_path / "clone")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(told.stdout.strip()) == tmp_path / "clone" / "toolformer_dag" / "definitions.py"


if __name__ == "__main__":
    loaded = build_definitions(Plan.from_settings(load_settings(REPOSITORY / "toolformer.toml", environment={})))
    SNAPSHOT.write_text(json.dumps(picture(loaded), indent=1) + "\n")
