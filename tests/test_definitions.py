"""The asset graph: what Dagster loads, how light, how it hangs together, and what each setting makes stale."""

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import dagster as dg
import pytest

from assets import graph
from assets.plan import Plan
from toolformer_dag.definitions import build_definitions
from toolformer_dag.settings.load import load_settings

REPOSITORY = Path(__file__).parents[1]
SNAPSHOT = Path(__file__).with_name("asset_graph.json")
HEAVY = ("torch", "transformers", "datasets", "ray", "accelerate")


@pytest.fixture(scope="module")
def definitions() -> dg.Definitions:
    return build_definitions(load_settings(REPOSITORY / "toolformer.toml", environment={}))


def picture(definitions: dg.Definitions) -> dict[str, dict[str, object]]:
    graph = definitions.resolve_asset_graph()
    return {
        key.to_user_string(): {
            "after": sorted(parent.to_user_string() for parent in graph.get(key).parent_keys),
            "group": graph.get(key).group_name,
            "partitioned": graph.get(key).is_partitioned,
            "checks": sorted(check.name for check in graph.get(key).check_keys),
        }
        for key in sorted(graph.toposorted_asset_keys)
    }


def test_graph_is_the_one_in_the_snapshot(definitions):
    """After a wanted change: `python -m tests.test_definitions` writes the snapshot anew."""
    assert picture(definitions) == json.loads(SNAPSHOT.read_text())


def test_definitions_are_loadable(definitions):
    dg.Definitions.validate_loadable(definitions)


def test_every_asset_tells_what_it_is(definitions):
    for spec in definitions.resolve_all_asset_specs():
        assert spec.description, spec.key
        assert spec.owners, spec.key
        assert spec.kinds, spec.key
        assert spec.code_version, spec.key


def test_import_loads_nothing_heavy():
    code = f"import sys, toolformer_dag.definitions as d; d.defs(); print([m for m in {HEAVY} if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True)
    assert output.stdout.strip() == "[]"


@lru_cache
def versions(*overrides: str, file: Path = REPOSITORY / "toolformer.toml") -> dict[str, str | None]:
    settings = load_settings(file, environment={}, overrides=overrides)
    specs = [spec for asset in graph(Plan.of(settings)) for spec in asset.specs]
    return {spec.key.to_user_string(): spec.code_version for spec in specs}


def changed(*overrides: str, file: Path = REPOSITORY / "toolformer.toml") -> set[str]:
    before, after = versions(file=file), versions(*overrides, file=file)
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


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
        ("paths.lake='elsewhere'", set()),
        ("tools.calculator.limits.max_result_characters=7", {"calculator/tool_results", "evaluation/accuracy"}),
        ("training.learning_rate=0.5", {"training/finetuned_checkpoint", "training/baseline_checkpoint"}),
    ],
)
def test_setting_changes_the_code_version_of_the_stage_that_applies_it(override, stale):
    assert changed(override) == stale


def test_sampling_and_dtype_change_what_depends_on_them():
    assert {key.split("/")[1] for key in changed("sampling.seed=9")} == {"scored_candidates"}
    longer = changed("sampling.max_call_tokens=9")
    assert {key.split("/")[1] for key in longer} == {"heuristic_subset", "scored_candidates", "accuracy"}
    stages = {key.split("/")[1] for key in changed("model.dtype=bfloat16")}
    assert {"heuristic_subset", "scored_candidates", "loss_deltas", "finetuned_checkpoint"} <= stages
    assert {"accuracy", "perplexity"} <= stages  # what is measured is loaded with that dtype
    assert not stages & {"tool_results", "filtered_calls", "raw_shards"}


def test_another_tool_is_asked_anew_and_changes_the_accuracy_with_it():
    stale = changed("tools.wiki_search.snippet_characters=50")
    assert {"wiki_search/tool_results", "evaluation/accuracy"} <= stale
    assert {key.split("/")[0] for key in stale} == {"wiki_search", "evaluation"}


def test_another_rule_for_wanted_texts_chooses_them_anew_and_asks_no_server(tmp_path):
    (tmp_path / "weather.txt").write_text("Call.\nInput: Sun in Rome.\nOutput: [Weather(Rome)] Sun in Rome.\n")
    server = {"use": "mcp", "name": "Weather", "prompt": "weather.txt", "url": "http://localhost/mcp", "tool": "sky"}
    section = "".join(f"{key} = {json.dumps(value)}\n" for key, value in server.items())
    (tmp_path / "toolformer.toml").write_text(f"[tools.weather]\n{section}")
    stale = changed("tools.weather.wants='rain|sun'", file=tmp_path / "toolformer.toml")
    assert stale == {"weather/heuristic_subset"}


def test_a_lane_removed_changes_no_stage_of_another_lane():
    stale = changed("tools.calendar.enabled=false")
    assert {key.split("/")[0] for key in stale} == {"calendar", "training", "warehouse", "evaluation"}
    assert "training/augmented_corpus" in stale and "training/finetuned_checkpoint" not in stale


if __name__ == "__main__":
    loaded = build_definitions(load_settings(REPOSITORY / "toolformer.toml", environment={}))
    SNAPSHOT.write_text(json.dumps(picture(loaded), indent=1) + "\n")
