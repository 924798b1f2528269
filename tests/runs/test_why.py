"""`stale --why` names what changed with both values, and `run` says what it did."""

import os
import re

import pytest

from tests.command_line import cli
from tests.runs.conftest import World
from tests.worlds import copy_world, write_shard
from toolformer_dag.evaluation.measurements import ACCURACY_TABLE
from toolformer_dag.files import seal_record, unseal_record
from toolformer_dag.lake.table import WHOLE_TABLE_PART
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.training.training_report import RECORD_FILE_NAME

CHANGES = {
    "corpus.segment_tokens=30": {
        "calculator/heuristic_subset": "settings.segment_tokens: 40 -> 30",
        "training/augmented_corpus": "settings.segment_tokens: 40 -> 30",
    },
    "tools.sums.edition=2": {
        "sums/heuristic_subset": "settings.identity.edition: 1 -> 2",
        "sums/tool_results": "settings.identity.edition: 1 -> 2",
    },
    "tools.calculator.k=3": {"calculator/scored_candidates": "settings.k: 2 -> 3"},
    "tools.calculator.tau_f=0.5": {"calculator/filtered_calls": "settings.tau_f: 0.0 -> 0.5"},
    "sampling.seed=5": {"sums/scored_candidates": "settings.sampling.seed: 0 -> 5"},
    "model.dtype=bfloat16": {"calculator/loss_deltas": "settings.model.dtype: float32 -> bfloat16"},
    "training.max_steps=3": {"training/finetuned_checkpoint": "settings.max_steps: 1 -> 3"},
    "evaluation.perplexity_texts=1": {"evaluation/perplexity": "settings.texts: 10000 -> 1"},
    "decoding.k=3": {"evaluation/accuracy": "settings.decoding.k: 10 -> 3"},
    "evaluation.questions=2": {"evaluation/accuracy": "settings.questions.questions: 1 -> 2"},
}


@pytest.fixture
def config(world) -> tuple[str, str]:
    return "--config", str(world.folder / "toolformer.toml")


@pytest.mark.parametrize("change", CHANGES)
def test_the_field_is_named_with_both_values(made, monkeypatch, change):
    monkeypatch.setenv("DAGSTER_HOME", str(made.folder / ".dagster"))
    found = made.reasons(change)
    for asset, reason in CHANGES[change].items():
        assert reason in found[asset]


def test_another_base_model_is_named_for_the_checkpoints(world):
    config = world.folder / "model" / "config.json"
    config.write_text(config.read_text() + "\n")
    assert world.reasons()["training/baseline_checkpoint"][0].startswith("settings.base.config.json: ")


def test_another_checkpoint_is_named_for_what_was_measured_on_the_one_before(world):
    table = world.lake.get_table(ACCURACY_TABLE)
    before = table.read_record(WHOLE_TABLE_PART)
    made_from = {**before, "inputs": {**before["inputs"], "finetuned_checkpoint": "0" * 16}}
    table.publish(WHOLE_TABLE_PART, [table.read_part(WHOLE_TABLE_PART)], lambda: made_from)
    [change] = world.reasons()[ACCURACY_TABLE]
    assert change.startswith(f"inputs.finetuned_checkpoint: {'0' * 16} -> ")


def test_a_text_that_changed_under_unchanged_calls_is_named_for_the_corpus(world):
    raw = world.lake.get_table("ccnet/raw_shards")
    record = raw.read_record("two")
    raw.publish("two", [raw.read_part("two").head(1)], lambda: record)
    [change] = world.reasons()["training/augmented_corpus"]
    assert change.startswith("inputs.ccnet/raw_shards: ")


def test_shards_that_come_change_and_go_are_named_and_the_command_line_says_it(world, config):
    done = cli("stale", "--why", *config)
    assert (done.returncode, done.stdout) == (0, "Nothing is stale.\n")
    assert cli("run", *config).stdout == "Everything is fresh: nothing ran.\n"
    web = world.folder / "web"
    write_shard(web, "zero")
    assert cli("stale", "--first", "2", *config).stdout == "Nothing is stale.\n"
    assert cli("stale", *config).stdout.startswith("ccnet/raw_shards\n")
    (web / "zero.json.gz").unlink()
    write_shard(web, "two", documents=5)
    write_shard(web, "added")
    lines = cli("stale", "--why", *config).stdout.splitlines()
    assert lines[0] == "ccnet/raw_shards"
    told = lines[1 : lines.index("calculator/heuristic_subset")]
    assert any(re.fullmatch(f"    {web / 'two.json.gz'}: [0-9]+ -> [0-9]+ bytes", line) for line in told), told
    assert "    without rows: added" in told
    (web / "added.json.gz").unlink()
    (web / "two.json.gz").unlink()
    assert world.reasons()["ccnet/raw_shards"] == ("removed: two",)


def test_a_copied_project_names_its_files_and_says_that_their_content_was_not_compared_yet(world, tmp_path):
    copied = copy_world(world.folder, tmp_path / "copied")
    for shard in (copied / "web").iterdir():
        os.utime(shard)
    [line] = World(copied).reasons()["ccnet/raw_shards"]
    assert line.startswith("another time of change, content not compared yet")
    assert all(str(shard) in line for shard in (copied / "web").iterdir())


def test_again_is_for_runs_and_for_shards_that_there_are(world, config):
    refused = cli("stale", "--again", "two", *config)
    assert refused.returncode == 1 and "write `stale --run --again two`" in refused.stderr
    assert world.stale() == []  # nothing was withdrawn
    refused = cli("stale", "--run", "--again", "nowhere", *config)
    assert refused.returncode == 1 and "--again nowhere: no such shard" in refused.stderr


@pytest.mark.long
def test_a_shard_that_a_person_names_is_made_anew(world, config):
    done = cli("stale", "--run", "--again", "two", *config)
    assert done.returncode == 0, done.stderr
    assert {"ran ccnet/raw_shards", "ran calculator/loss_deltas", "ran sums/swapped_results"} <= set(
        done.stdout.splitlines()
    )
    assert world.stale() == []


def test_a_checkpoint_in_whose_training_calls_ended_otherwise_is_stale(world):
    file = get_checkpoint_folder(world.settings()) / RECORD_FILE_NAME
    assert "training/finetuned_checkpoint" not in world.stale()
    file.write_bytes(seal_record(str(file.parent), {**unseal_record(file.read_bytes()), "calls_end": "by quotes"}))
    assert any("calls_end" in line for line in world.reasons()["training/finetuned_checkpoint"])
