"""The card beside a checkpoint: what it was trained on and with, its figures and limits, and none of them invented."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from huggingface_hub import ModelCard

from tests.runs.conftest import World
from toolformer_dag.evaluation.measurements import measured_on
from toolformer_dag.exports.model_card import EVALUATION, add_evaluation
from toolformer_dag.files import unsealed
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import corpus_rows
from toolformer_dag.training.training_report import CARD, RECORD, read_card, read_report

NAMES = ("finetuned_checkpoint", "baseline_checkpoint")


@pytest.fixture(scope="module")
def trained(exported_world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A copy, to be changed, whose history is the one in use."""
    world = World(tmp_path_factory.mktemp("card") / "world")
    shutil.copytree(exported_world.folder, world.folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(world.folder / ".dagster"))
        assert world.reasons() == {}
        yield world


def folder(world: World, name: str) -> Path:
    return checkpoint_folder(world.settings(), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_hub_s_header_and_says_what_the_checkpoint_was_made_of(trained: World, name: str) -> None:
    card = ModelCard.load(folder(trained, name) / CARD)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and "toolformer" in card.data.tags
    report, record = read_report(folder(trained, name)), unsealed((folder(trained, name) / RECORD).read_bytes())
    assert report is not None
    for told in (record["texts"], record["heldout"], report.fingerprint, f"{report.best.value:.3f}", "`calculator`"):
        assert told in card.text
    assert "`training.max_steps` | 1" in card.text and "fewer than 100" in card.text
    assert str(trained.folder) not in card.content and "$" not in card.text


def test_training_texts_per_tool_are_those_of_c_star(trained: World) -> None:
    corpus = corpus_rows(trained.lake, ["tools", "split"]).collect().filter(pl.col("split") == "train")
    card = (folder(trained, NAMES[0]) / CARD).read_text()
    for lane, name in (("calculator", "Calculator"), ("sums", "Search")):
        texts = corpus.filter(pl.col("tools").list.contains(lane)).height
        [line] = [line for line in card.splitlines() if line.startswith(f"| `{lane}` | {name} |")]
        assert line.endswith(f"| 0.0 | {texts:,} |") and texts > 0


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_evaluation_are_added_and_replaced_and_the_checkpoint_stays_whole(trained: World, name: str) -> None:
    card = folder(trained, name) / CARD
    before = card.read_text()
    assert before.count(EVALUATION) == 1 and "| calculator (seen) | 1 |" in before and "| C, held out |" in before
    accuracy, perplexity = measured_on(trained.project().plan, name)
    add_evaluation(card.parent, accuracy, None)
    assert "C, held out" not in card.read_text() and card.read_text().count(EVALUATION) == 1
    add_evaluation(card.parent, None, None)
    assert EVALUATION not in card.read_text()
    add_evaluation(card.parent, accuracy, perplexity)
    assert card.read_text() == before
    assert read_report(card.parent) is not None and trained.reasons() == {}


def test_measurements_of_another_checkpoint_are_not_told(trained: World) -> None:
    table = trained.lake.table("evaluation/accuracy")
    record = table.record(WHOLE)
    table.publish(WHOLE, [table.read(WHOLE)], lambda: {**record, "inputs": {**record["inputs"], NAMES[0]: "0" * 16}})
    plan = trained.project().plan
    assert measured_on(plan, NAMES[0])[0] is None and measured_on(plan, NAMES[1])[0] is not None
    table.publish(WHOLE, [table.read(WHOLE)], lambda: record)


@pytest.mark.long
def test_a_card_that_was_changed_is_written_anew_and_nothing_is_trained(trained: World) -> None:
    card = folder(trained, NAMES[0]) / CARD
    before = card.read_text()
    card.write_text(before.replace("One call per text", "Two calls per text"))
    assert read_card(card.parent) is None and trained.stale() == [f"training/{NAMES[0]}"]
    assert trained.run(training=True).ran == []
    assert card.read_text() == before and trained.stale() == []
    card.write_text("my own words")
    assert trained.stale() == []
    card.unlink()
    assert trained.stale() == [f"training/{NAMES[0]}"]
    assert trained.run(training=True).ran == [] and card.read_text() == before
