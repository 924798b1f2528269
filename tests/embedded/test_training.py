"""A training run of seconds on a micro shape: it learns, is reproducible, and goes on where it was broken off."""

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from embedded_model.export import StartError, mean_model
from embedded_model.network import SHAPES, EmbeddedTraining, ModelShape
from embedded_model.train import CheckpointError, PretrainingProgress, train
from tests.processes import started_by_a_killed
from toolformer_dag.synthetic import SMALL_MODEL

MICRO = ModelShape(width=32, layers=2, heads=2, feed_forward=64, rotary=8, vocabulary=600, positions=1100)
SETTINGS = EmbeddedTraining(
    shape=MICRO, steps=40, boot_steps=6, warmup_steps=4, lanes=2, lane_tokens=1024, checkpoint_steps=20
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[PretrainingProgress]]:
    """A whole run in one process, and what it told."""
    lines: list[PretrainingProgress] = []
    return train(SETTINGS, tmp_path_factory.mktemp("whole"), progress=lines.append, processes=1), lines


def begun(run: Path, folder: Path) -> Path:
    """A folder with the tokenizer of the whole run, which takes longest to make."""
    (folder / "training").mkdir(parents=True)
    (folder / "training" / "tokenizer.json").write_bytes((run / "training" / "tokenizer.json").read_bytes())
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_same_weights(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_the_loss_falls_far_below_that_of_guessing(run: tuple[Path, list[PretrainingProgress]]) -> None:
    losses = [line.loss for line in run[1]]
    assert losses[0] > 6.0  # log(600) = 6.4
    assert losses[-1] < 5.4


def test_metrics_are_json_lines_of_what_progress_was_told(run: tuple[Path, list[PretrainingProgress]]) -> None:
    folder, lines = run
    written = [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [10, 20, 30, 40]
    assert [line["loss"] for line in written] == [line.loss for line in lines]
    assert written[-1]["tokens"] == 40 * 2 * 1024


def test_a_run_broken_off_ends_with_the_same_bits(run: tuple[Path, list[PretrainingProgress]], tmp_path: Path) -> None:
    class BrokenOff(Exception):
        pass

    def stop(line: PretrainingProgress) -> None:
        if line.step == 30:
            raise BrokenOff

    folder = begun(run[0], tmp_path / "broken")
    with pytest.raises(BrokenOff):
        train(SETTINGS, folder, progress=stop, processes=1)
    assert not (folder / "model.safetensors").exists()
    resumed: list[PretrainingProgress] = []
    train(SETTINGS, folder, progress=resumed.append, processes=1)
    assert [line.step for line in resumed] == [30, 40]
    assert_same_weights(run[0], folder)


def test_what_is_exported_is_the_average_of_the_weights(run: tuple[Path, list[PretrainingProgress]]) -> None:
    state = load_file(run[0] / "training" / "checkpoint.safetensors")
    exported = weights(run[0])["transformer.wte.weight"]
    assert torch.equal(exported, state["average.embedding.weight"].half())
    assert not torch.equal(exported, state["model.embedding.weight"].half())


@pytest.mark.long
def test_two_processes_end_with_the_same_bits_as_one(
    run: tuple[Path, list[PretrainingProgress]], tmp_path: Path
) -> None:
    settings = replace(SETTINGS, steps=8)
    for name, processes in (("one", 1), ("two", 2)):
        train(settings, begun(run[0], tmp_path / name), processes=processes)
    assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_another_seed_gives_another_model(run: tuple[Path, list[PretrainingProgress]], tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=2)
    for seed in (0, 1):
        train(replace(settings, seed=seed), begun(run[0], tmp_path / str(seed)), processes=1)
    zero, one = weights(tmp_path / "0"), weights(tmp_path / "1")
    assert not torch.equal(zero["transformer.wte.weight"], one["transformer.wte.weight"])


def test_a_folder_of_another_run_is_refused_by_name(
    run: tuple[Path, list[PretrainingProgress]], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="muon_rate"):
        train(replace(SETTINGS, muon_rate=0.01), run[0], processes=1)

    def stop(line: PretrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # before its first checkpoint
        train(SETTINGS, begun(run[0], tmp_path), progress=stop, processes=1)
    with pytest.raises(CheckpointError, match="seed"):
        train(replace(SETTINGS, seed=1), tmp_path, processes=1)


def test_a_run_goes_on_with_the_same_real_text_and_no_fewer_steps(
    run: tuple[Path, list[PretrainingProgress]], tmp_path: Path
) -> None:
    page = {"digest": "sha1:A", "url": "http://a.org/", "source_domain": "a.org", "title": "A", "language": "en"}
    shard = tmp_path / "web_0000.json.gz"
    shard.write_bytes(gzip.compress(json.dumps({**page, "raw_content": "Ada went to the sea. " * 9}).encode()))
    with pytest.raises(CheckpointError, match="real_text"):
        train(SETTINGS, run[0], [shard], processes=1)
    with pytest.raises(CheckpointError, match="has taken 40 steps, more than 30"):
        train(replace(SETTINGS, steps=30), run[0], processes=1)


def test_a_run_that_starts_from_a_model_goes_on_where_it_ended(
    run: tuple[Path, list[PretrainingProgress]], tmp_path: Path
) -> None:
    lines: list[PretrainingProgress] = []
    longer = replace(SETTINGS, shape=SHAPES["0.1M"], steps=10, seed=1)
    (begun(run[0], tmp_path) / "training" / "tokenizer.json").write_text("of another run that did not come far")
    train(longer, tmp_path, progress=lines.append, processes=1, start=run[0])
    assert lines[0].loss < run[1][1].loss  # better than after 20 steps from nothing
    assert (tmp_path / "tokenizer.json").read_bytes() == (run[0] / "tokenizer.json").read_bytes()
    assert weights(tmp_path)["transformer.wte.weight"].shape == (MICRO.vocabulary, MICRO.width)
    with pytest.raises(CheckpointError, match="start"):
        train(longer, tmp_path, processes=1, start=tmp_path)


def test_the_mean_of_two_models_lies_between_them(run: tuple[Path, list[PretrainingProgress]], tmp_path: Path) -> None:
    other = train(replace(SETTINGS, steps=2, seed=7), begun(run[0], tmp_path / "other"), processes=1)
    found = weights(mean_model([run[0], other], tmp_path / "mean"))
    for name, tensor in found.items():
        middle = (weights(run[0])[name].float() + weights(other)[name].float()) / 2
        assert torch.equal(tensor, middle.half()), name
    assert (tmp_path / "mean" / "tokenizer.json").read_bytes() == (run[0] / "tokenizer.json").read_bytes()


def test_models_of_different_shapes_or_tokenizers_have_no_mean(
    run: tuple[Path, list[PretrainingProgress]], tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=r"has another shape than .*; name models of one size"):
        mean_model([run[0], SMALL_MODEL], tmp_path / "mean")
    other = shutil.copytree(run[0], tmp_path / "other")
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="has another tokenizer than"):
        mean_model([run[0], other], tmp_path / "mean")


def test_a_start_that_is_no_model_of_this_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="has no config"):
        train(SETTINGS, tmp_path / "out", start=tmp_path)
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(StartError, match="llama"):
        train(SETTINGS, tmp_path / "out", start=tmp_path)


@pytest.mark.long
def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    begun_folder = tmp_path / "training"
    begun_folder.mkdir()
    (begun_folder / "tokenizer.json").write_bytes((SMALL_MODEL / "tokenizer.json").read_bytes())
    train_it = ["embedded", "train", str(tmp_path), "--size", "0.1M"]
    assert started_by_a_killed(train_it, (begun_folder / "metrics.jsonl").exists)
