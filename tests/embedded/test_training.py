"""A training run of seconds on a micro shape: it learns, is reproducible, and goes on where it was broken off."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.embedded_model.network import SHAPES, EmbeddedTraining, ModelShape
from benchmarks.embedded_model.train import PretrainingProgress, train
from tests.training.test_finetune import same_weights, weights
from toolformer_dag.files import UserError

MICRO = ModelShape(n_embd=32, n_layer=2, n_head=2, n_inner=64, rotary_dim=8, vocab_size=600, n_positions=1100)
SETTINGS = EmbeddedTraining(
    shape=MICRO, steps=40, boot_steps=6, warmup_steps=4, lanes=2, lane_tokens=1024, checkpoint_steps=20
)
Run = tuple[Path, list[PretrainingProgress]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A whole run, and what it told."""
    lines: list[PretrainingProgress] = []
    return train(SETTINGS, tmp_path_factory.mktemp("whole"), progress=lines.append), lines


def begun(run: Run, folder: Path) -> Path:
    """A folder with the tokenizer of the whole run, which takes longest to make."""
    shutil.copytree(run[0] / "training", folder / "training", ignore=shutil.ignore_patterns("c*", "m*"))
    return folder


@pytest.mark.long
def test_the_loss_falls_far_below_that_of_guessing_and_is_told_in_json_lines(run: Run) -> None:
    folder, lines = run
    written = [json.loads(line) for line in (folder / "training" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in written] == [(line.step, line.loss) for line in lines]
    assert [line.step for line in lines] == [10, 20, 30, 40] and lines[-1].tokens == 40 * 2 * 1024
    assert lines[0].loss > 6.0  # log(600) = 6.4
    assert lines[-1].loss < 5.4


@pytest.mark.long
def test_a_run_broken_off_ends_with_the_same_bits(run: Run, tmp_path: Path) -> None:
    def stop(line: PretrainingProgress) -> None:
        if line.step == 30:
            raise KeyboardInterrupt

    folder = begun(run, tmp_path / "broken")
    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, folder, progress=stop)
    assert not (folder / "model.safetensors").exists()
    resumed: list[PretrainingProgress] = []
    train(SETTINGS, folder, progress=resumed.append)
    assert [line.step for line in resumed] == [30, 40]
    assert same_weights(run[0], folder)


@pytest.mark.long
def test_what_is_exported_is_the_average_of_the_weights(run: Run) -> None:
    state = torch.load(run[0] / "training" / "checkpoint.pt")
    name = "transformer.wte.weight"
    assert torch.equal(weights(run[0])[name], state["average"][f"module.{name}"].half())
    assert not torch.equal(weights(run[0])[name], state["model"][name].half())


@pytest.mark.long
def test_the_seed_changes_the_weights(run: Run, tmp_path: Path) -> None:
    settings = replace(SETTINGS, steps=8)
    for name, seed in (("one", 0), ("other", 1)):
        train(replace(settings, seed=seed), begun(run, tmp_path / name))
    assert not same_weights(tmp_path / "one", tmp_path / "other")


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "named"),
    [({"muon_rate": 0.01}, "muon_rate"), ({"seed": 1}, "seed"), ({"steps": 30}, "has taken 40 steps, more than 30")],
)
def test_a_folder_of_another_run_is_refused_by_name(run: Run, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        train(replace(SETTINGS, **changes), run[0])


@pytest.mark.long
def test_a_folder_is_a_runs_own_before_its_first_checkpoint(run: Run, tmp_path: Path) -> None:
    def stop(line: PretrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SETTINGS, begun(run, tmp_path / "new"), progress=stop)
    with pytest.raises(UserError, match="seed"):
        train(replace(SETTINGS, seed=1), tmp_path / "new")


@pytest.mark.long
def test_a_run_that_starts_from_a_model_goes_on_where_it_ended(run: Run, tmp_path: Path) -> None:
    lines: list[PretrainingProgress] = []
    longer = replace(SETTINGS, shape=SHAPES["0.1M"], steps=10, seed=1)
    (begun(run, tmp_path) / "training" / "tokenizer.json").write_text("of another run that did not come far")
    train(longer, tmp_path, progress=lines.append, start=run[0])
    assert lines[0].loss < run[1][1].loss  # better than after 20 steps from nothing
    assert (tmp_path / "tokenizer.json").read_bytes() == (run[0] / "tokenizer.json").read_bytes()
    assert weights(tmp_path)["transformer.wte.weight"].shape == (MICRO.vocab_size, MICRO.n_embd)
    with pytest.raises(UserError, match="start"):
        train(longer, tmp_path, start=tmp_path)


def test_a_start_that_is_no_model_of_this_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config"):
        train(SETTINGS, tmp_path / "out", start=tmp_path)
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="llama"):
        train(SETTINGS, tmp_path / "out", start=tmp_path)
