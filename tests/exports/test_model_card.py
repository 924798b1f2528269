"""The card beside a checkpoint: what it was trained on and with, its figures and limits, and none of them invented."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from huggingface_hub import ModelCard

from tests.runs.conftest import World
from toolformer_dag.evaluation.measurements import read_checkpoint_tables
from toolformer_dag.exports.model_card import (
    EVALUATION_HEADING,
    add_evaluation_figures,
    count_texts_with_several_calls,
    describe_call_limits,
)
from toolformer_dag.files import unseal_record
from toolformer_dag.lake.table import WHOLE_TABLE_PART
from toolformer_dag.model.weights import get_checkpoint_folder
from toolformer_dag.pipeline.augmented_corpus import TABLE_NAME as CORPUS
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.training.training_report import CARD_FILE_NAME, RECORD_FILE_NAME, read_card, read_training_report

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
    return get_checkpoint_folder(world.settings(), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_card_has_the_hub_s_header_and_says_what_the_checkpoint_was_made_of(trained: World, name: str) -> None:
    card = ModelCard.load(folder(trained, name) / CARD_FILE_NAME)
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and "toolformer" in card.data.tags
    report = read_training_report(folder(trained, name))
    record = unseal_record((folder(trained, name) / RECORD_FILE_NAME).read_bytes())
    assert report is not None
    for told in (
        record["texts"],
        record["heldout"],
        report.fingerprint,
        f"{report.best_point.value:.3f}",
        "`calculator`",
    ):
        assert told in card.text
    assert "`training.max_steps` | 1" in card.text and "fewer than 100" in card.text
    assert str(trained.folder) not in card.content and "$" not in card.text


def test_training_texts_per_tool_are_those_of_c_star(trained: World) -> None:
    corpus = scan_corpus_rows(trained.lake, ["tools", "split"]).collect().filter(pl.col("split") == "train")
    card = (folder(trained, NAMES[0]) / CARD_FILE_NAME).read_text()
    for lane, name in (("calculator", "Calculator"), ("sums", "Search")):
        texts = corpus.filter(pl.col("tools").list.contains(lane)).height
        [line] = [line for line in card.splitlines() if line.startswith(f"| `{lane}` | {name} |")]
        assert line.endswith(f"| 0.0 | {texts:,} |") and texts > 0


def test_a_card_counts_the_calls_of_c_star_and_says_how_many_decoding_makes(trained: World) -> None:
    counts = scan_corpus_rows(trained.lake, ["calls", "split"]).collect().filter(pl.col("split") == "train")["calls"]
    several = (counts > 1).sum()
    first, second = describe_call_limits(trained.project().plan)
    assert first.startswith(f"{several} training texts hold more than one call" if several else "No training text")
    assert second.startswith("An answer has one call, no chained calls, and no second look at results, as in the paper")
    for name, told in zip(NAMES, (True, False), strict=True):
        card = (folder(trained, name) / CARD_FILE_NAME).read_text()
        assert (f"- {first}\n- {second}\n" in card) == told
    more = describe_call_limits(trained.project("decoding.calls=3", "decoding.depth=2").plan)
    assert more[0] == first
    assert more[1].startswith("An answer has up to 3 calls, chains of up to 2 calls; the paper has one call")


def test_a_card_tells_chains_from_calls_at_several_places(trained: World) -> None:
    """Publish a C* with a text of each kind: one call, two calls, a chain of two, and a held-out chain."""
    call = " [Calculator(1+1) -> 2]"
    one = {"text_with_calls": f"1 and 1 make{call} 2 .", "calls": 1, "split": "train"}
    two = {"text_with_calls": f"1 and 1 make{call} 2 and{call} 2 .", "calls": 2, "split": "train"}
    chain = {"text_with_calls": f"1 and 1 make{call}{call} 2 .", "calls": 2, "split": "train"}
    texts = [one, two, chain, {**chain, "split": "heldout"}]
    corpus = trained.lake.get_table(CORPUS)
    [part, *_] = corpus.list_part_names()
    before = {name: (corpus.read_part(name), corpus.read_record(name)) for name in corpus.list_part_names()}
    first_row = before[part][0].row(0, named=True)
    rows = [{**first_row, **text, "segment": number} for number, text in enumerate(texts)]
    of_each_kind = pl.DataFrame(rows, schema=before[part][0].schema)
    try:
        for name, (table, record) in before.items():
            corpus.publish(name, [of_each_kind if name == part else table.clear()], lambda record=record: record)
        assert count_texts_with_several_calls(trained.project().plan) == (2, 1)
    finally:
        for name, (table, record) in before.items():
            corpus.publish(name, [table], lambda record=record: record)


@pytest.mark.parametrize("name", NAMES)
def test_figures_of_evaluation_are_added_and_replaced_and_the_checkpoint_stays_whole(trained: World, name: str) -> None:
    card = folder(trained, name) / CARD_FILE_NAME
    before = card.read_text()
    assert (
        before.count(EVALUATION_HEADING) == 1 and "| calculator (seen) | 1 |" in before and "| C, held out |" in before
    )
    accuracy, perplexity = read_checkpoint_tables(trained.project().plan, name)
    add_evaluation_figures(card.parent, accuracy, None)
    assert "C, held out" not in card.read_text() and card.read_text().count(EVALUATION_HEADING) == 1
    add_evaluation_figures(card.parent, None, None)
    assert EVALUATION_HEADING not in card.read_text()
    add_evaluation_figures(card.parent, accuracy, perplexity)
    assert card.read_text() == before
    assert read_training_report(card.parent) is not None and trained.reasons() == {}


def test_measurements_of_another_checkpoint_are_not_told(trained: World) -> None:
    table = trained.lake.get_table("evaluation/accuracy")
    record = table.read_record(WHOLE_TABLE_PART)
    table.publish(
        WHOLE_TABLE_PART,
        [table.read_part(WHOLE_TABLE_PART)],
        lambda: {**record, "inputs": {**record["inputs"], NAMES[0]: "0" * 16}},
    )
    plan = trained.project().plan
    assert read_checkpoint_tables(plan, NAMES[0])[0] is None and read_checkpoint_tables(plan, NAMES[1])[0] is not None
    table.publish(WHOLE_TABLE_PART, [table.read_part(WHOLE_TABLE_PART)], lambda: record)


@pytest.mark.long
def test_a_card_that_was_changed_is_written_anew_and_nothing_is_trained(trained: World) -> None:
    card = folder(trained, NAMES[0]) / CARD_FILE_NAME
    before = card.read_text()
    card.write_text(before.replace("An answer has one call", "An answer has two calls"))
    assert read_card(card.parent) is None and trained.stale() == [f"training/{NAMES[0]}"]
    assert trained.run(training=True).made_assets == []
    assert card.read_text() == before and trained.stale() == []
    card.write_text("my own words")
    assert trained.stale() == []
    card.unlink()
    assert trained.stale() == [f"training/{NAMES[0]}"]
    assert trained.run(training=True).made_assets == [] and card.read_text() == before
