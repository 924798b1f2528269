"""The lake holds something else than Dagster's last run made."""

from pathlib import Path

import dagster as dg
import polars as pl
import pytest

from resources.lost_outputs import lost_outputs
from toolformer_dag.evaluation.accuracy_tables import ACCURACY, OUTCOMES
from toolformer_dag.settings.load import load_settings
from toolformer_dag.settings.settings import Settings
from toolformer_dag.storage.lake import Lake
from toolformer_dag.training.training_report import RECORD, TrainingReport, write_record

LOSSES = dg.AssetKey(["calculator", "loss_deltas"])
MEASURED = dg.AssetKey(["evaluation", "accuracy"])
CHECKPOINT = dg.AssetKey(["training", "finetuned_checkpoint"])
OTHER = "the lake holds other rows than the last run made"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "toolformer.toml").write_text("[tools.calculator]\n")
    return load_settings(tmp_path / "toolformer.toml", environment={})


def published(settings: Settings, table: str, partition: str, value: int) -> str:
    """The data version."""
    return Lake(settings.paths.lake).table(table).publish(partition, [pl.DataFrame({"a": [value]})], {}).data_version


def test_rows_that_another_run_has_put_in_place_are_told(settings: Settings) -> None:
    one, two = (published(settings, "calculator/loss_deltas", name, 1) for name in ("one", "two"))
    made = {(LOSSES, "one"): one, (LOSSES, "two"): two}
    assert lost_outputs(settings, made) == {}
    published(settings, "calculator/loss_deltas", "two", 2)
    assert lost_outputs(settings, made) == {(LOSSES, "two"): OTHER}


def test_measurements_are_told_alike_and_their_second_table_needs_no_version(settings: Settings) -> None:
    version = published(settings, ACCURACY, "all", 1)
    published(settings, OUTCOMES, "all", 2)
    assert lost_outputs(settings, {(MEASURED, None): version}) == {}
    published(settings, ACCURACY, "all", 3)
    assert lost_outputs(settings, {(MEASURED, None): version}) == {(MEASURED, None): OTHER}


def test_another_model_in_the_place_of_a_checkpoint_is_told(settings: Settings) -> None:
    folder = settings.paths.lake / "training" / "finetuned_checkpoint" / "model"
    folder.mkdir(parents=True)
    write_record(folder, TrainingReport("mine", 1, 1, 1, 1, 0, 0, 1, 1.0, "cpu", (), ()), {})
    assert "not whole" in lost_outputs(settings, {(CHECKPOINT, None): "mine"})[CHECKPOINT, None]
    (folder / "model.safetensors").write_bytes(b"weights")
    write_record(folder, TrainingReport("mine", 1, 1, 1, 1, 0, 0, 1, 1.0, "cpu", (), ()), {})
    (folder / "README.md").write_text("a note of the user")
    assert lost_outputs(settings, {(CHECKPOINT, None): "mine"}) == {}
    assert "another model" in lost_outputs(settings, {(CHECKPOINT, None): "other"})[CHECKPOINT, None]


@pytest.mark.parametrize("damage", ["weights", "no record", "half a record", "another record"])
def test_a_checkpoint_that_is_not_whole_is_told(settings: Settings, damage: str) -> None:
    folder = settings.paths.lake / "training" / "finetuned_checkpoint" / "model"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    write_record(folder, TrainingReport("mine", 1, 1, 1, 1, 0, 0, 1, 1.0, "cpu", (), ()), {})
    record = (folder / RECORD).read_text()
    match damage:
        case "weights":
            (folder / "model.safetensors").write_bytes(b"wei")
        case "no record":
            (folder / RECORD).unlink()
        case "half a record":
            (folder / RECORD).write_text(record[: len(record) // 2])
        case "another record":
            (folder / RECORD).write_text("{}")
    assert "gone or not whole" in lost_outputs(settings, {(CHECKPOINT, None): "mine"})[CHECKPOINT, None]
