"""`stale --why` names the fields that changed, stage by stage."""

import dagster as dg
import pytest

from assets.augmented_corpus import KEY as CORPUS
from assets.plan import Plan
from assets.reasons import changed_fields
from tests.stages.conftest import write_shard
from toolformer_dag.evaluation.accuracy_tables import ACCURACY
from toolformer_dag.storage.lake import Lake

CHANGES = {
    "corpus.segment_tokens=30": {
        "calculator/heuristic_subset[one]": "settings.max_tokens: 40 -> 30",
        "training/augmented_corpus": "settings.max_tokens: 40 -> 30",
    },
    "tools.sums.edition=2": {
        "sums/heuristic_subset[one]": "settings.identity.edition: 1 -> 2",
        "sums/tool_results[two]": "settings.identity.edition: 1 -> 2",
    },
    "sampling.seed=5": {"sums/scored_candidates[one]": "settings.sampling.seed: 0 -> 5"},
    "model.dtype=bfloat16": {"calculator/loss_deltas[two]": "settings.model.dtype: float32 -> bfloat16"},
    "training.max_steps=3": {"training/finetuned_checkpoint": "settings.max_steps: 1 -> 3"},
    "decoding.k=3": {"evaluation/accuracy": "settings.decoding.k: 10 -> 3"},
    "evaluation.questions=2": {"evaluation/accuracy": "settings.questions.questions: 1 -> 2"},
}


def reasons(world, *overrides: str) -> dict[str, list[str]]:
    line = world.line(*overrides)
    return {str(asset): line.why(asset) for asset in line.stale()}


def test_another_base_model_is_named_for_the_checkpoints(world):
    config = world.folder / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert reasons(world)["training/baseline_checkpoint"][0].startswith("settings.base.config.json: ")


def test_another_checkpoint_is_named_for_what_was_measured_on_the_one_before(world):
    lake = Lake(world.folder / "lake")
    table = lake.table(ACCURACY)
    before = table.record("all")
    table.publish(
        "all", [table.read("all")], {**before, "inputs": {**before["inputs"], "finetuned_checkpoint": "0" * 16}}
    )
    [change] = changed_fields(Plan.of(world.line().settings), lake, dg.AssetKey(ACCURACY.split("/")), None)
    assert change.startswith(f"inputs.finetuned_checkpoint: {'0' * 16} -> ")


@pytest.mark.parametrize("change", CHANGES)
def test_the_field_is_named_with_both_values(world, change):
    found = reasons(world, change)
    for asset, reason in CHANGES[change].items():
        assert reason in found[asset]


def test_inputs_that_come_and_go_are_named(world):
    write_shard(world.folder / "web", "two", documents=5)
    assert any(reason.startswith("inputs.two.bytes: ") for reason in reasons(world)["ccnet/raw_shards[two]"])
    (world.folder / "web" / "two.json.gz").unlink()
    line = world.line()
    line.bring_up_to_date(training=False)
    write_shard(world.folder / "web", "two")
    world.line().bring_up_to_date(training=False)
    assert reasons(world) == {}


def test_a_text_that_changed_under_unchanged_calls_is_named_for_the_corpus(world):
    lake = Lake(world.folder / "lake")
    raw = lake.table("ccnet/raw_shards")
    raw.publish("two", [raw.read("two").head(1)], raw.record("two"))
    plan = Plan.of(world.line().settings)
    [change] = changed_fields(plan, lake, CORPUS, None)
    assert change.startswith("inputs.ccnet/raw_shards.two: ")
