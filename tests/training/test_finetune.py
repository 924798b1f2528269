"""Finetuning: what is learnt, what is kept, and what happens after a kill."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.decoded import generate
from tests.language_model.conftest import tiny
from tests.tiny_models import save
from toolformer_dag.model.loading import LanguageModel, load_model
from toolformer_dag.model.weights import ModelError
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.recipe import objective_of
from toolformer_dag.training.trainer import prepare_run
from toolformer_dag.training.training_report import (
    Point,
    TrainingData,
    TrainingError,
    TrainingReport,
    build_run_identity,
    find_last_complete_checkpoint,
    read_training_report,
    write_training_record,
)

TEXTS = [f"Ada had {a} apples [Calculator({a} + {b}) -> {a + b}] and {b} more." for a in range(9) for b in range(5)]
HELDOUT = [f"Ada had {a} apples and {a + 1} more." for a in range(4)]
DATA = TrainingData(TEXTS, HELDOUT)
SETTINGS = TrainingSettings(batch_size=8, device_batch_size=8, learning_rate=1e-2, max_steps=12, eval_steps=4)

ONE_THREAD = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.training.test_finetune import DATA, SETTINGS
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.training.finetune import finetune
def dies(done, total):
    if done == 8:
        os.kill(os.getpid(), signal.SIGKILL)
finetune(ModelSettings(name=sys.argv[1]), DATA, SETTINGS, Path(sys.argv[2]), dies)
"""
OWN_CODE = """
from transformers import GPTJConfig, GPTJForCausalLM
class OwnConfig(GPTJConfig):
    model_type = "own"
class OwnModel(GPTJForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def base(tiny_model: Callable[..., LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    folder = tmp_path_factory.mktemp("base") / "model"
    tiny = tiny_model("gptj", bos=True)
    save(tiny, folder)
    return ModelSettings(name=str(folder))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    first = weights(one)
    second = weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def perplexity_by_hand(folder: Path, texts: list[str]) -> float:
    """Token by token, one text at a time, with EOS at its end."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for text in texts:
        ids = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        with torch.no_grad():
            scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        losses += [-float(scores[at - 1, ids[at]]) for at in range(1, len(ids))]
    return float(torch.tensor(losses).mean().exp())


def test_best_checkpoint_is_published(base: ModelSettings, tmp_path: Path) -> None:
    steps = []
    report = finetune(base, DATA, SETTINGS, tmp_path / "out", lambda done, total: steps.append((done, total)))
    assert steps == [(step, 12) for step in range(1, 13)]
    assert [point.step for point in report.heldout] == [0, 4, 8, 12]
    assert report.losses[-1].value < 0.7 * report.losses[0].value
    best = min(report.heldout[1:], key=lambda point: point.value)
    assert (report.best_step, report.best_point) == (best.step, best)
    assert perplexity_by_hand(Path(base.name), HELDOUT) == pytest.approx(report.heldout[0].value, rel=1e-4)
    assert perplexity_by_hand(tmp_path / "out", HELDOUT) == pytest.approx(best.value, rel=1e-4)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    os.umask(umask := os.umask(0))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~umask}
    assert not list((tmp_path / "out").glob("*.bin"))
    assert load_model(ModelSettings(name=str(tmp_path / "out"), device="cpu")).model.config.use_cache


def test_held_out_texts_decide_which_checkpoint_wins(base: ModelSettings, tmp_path: Path) -> None:
    """Held-out texts unlike the training texts grow less likely while training goes on."""
    unlike = ["zzz qqq xxx " * 5]
    report = finetune(base, TrainingData(TEXTS, unlike), SETTINGS, tmp_path / "out")
    assert 0 < report.best_step < report.steps
    assert report.best_point.value < report.heldout[-1].value
    assert perplexity_by_hand(tmp_path / "out", unlike) == pytest.approx(report.best_point.value, rel=1e-4)


def test_a_finished_run_is_not_repeated_and_another_one_replaces_it(base: ModelSettings, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = finetune(base, DATA, SETTINGS, out)
    written = (out / "model.safetensors").stat().st_mtime_ns
    again = finetune(base, DATA, TrainingSettings(**{**fields(SETTINGS), "device_batch_size": 2}), out)
    assert again.reused and again.fingerprint == first.fingerprint and again.heldout == first.heldout
    assert (out / "model.safetensors").stat().st_mtime_ns == written
    other = finetune(base, TrainingData(TEXTS[1:], HELDOUT), SETTINGS, out)
    assert not other.reused and other.fingerprint != first.fingerprint
    assert read_training_report(out) == other


def fields(settings: TrainingSettings) -> dict[str, object]:
    return {**settings.select_weight_settings(), "device_batch_size": settings.device_batch_size}


def test_accumulated_batches_train_the_same_model(base: ModelSettings, tmp_path: Path) -> None:
    finetune(base, DATA, SETTINGS, tmp_path / "whole")
    small = TrainingSettings(**{**fields(SETTINGS), "device_batch_size": 3})  # 2 at a time: the largest that divides 8
    finetune(base, DATA, small, tmp_path / "accumulated")
    first = weights(tmp_path / "whole")
    second = weights(tmp_path / "accumulated")
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 2e-3


@pytest.mark.long
def test_a_killed_run_goes_on_and_gives_the_same_weights(base: ModelSettings, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, base.name, str(out)]
    run = subprocess.run(command, capture_output=True, check=False, env=ONE_THREAD)
    assert run.returncode == -signal.SIGKILL and not out.exists()
    [partial] = tmp_path.glob("killed.partial-*")
    (partial / "checkpoint-9").mkdir()  # as if it had died while saving: no state was written yet
    seen = []
    resumed = finetune(base, DATA, SETTINGS, out, lambda done, _: seen.append(done))
    assert seen == list(range(5, 13))
    whole = finetune(base, DATA, SETTINGS, tmp_path / "whole")
    assert same_weights(out, tmp_path / "whole")
    assert resumed.heldout == whole.heldout
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize("what", ["weights", "optimizer"])  # safetensors and torch each have errors of their own
def test_a_full_disk_is_named_and_the_run_goes_on_later(base: ModelSettings, tmp_path: Path, what: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    weights = Path(base.name) / "model.safetensors"
    share = 0.5 if what == "weights" else 1.5  # AdamW keeps two numbers per weight
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * weights.stat().st_size), limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"weights in .*partial-.* cannot be written .*; free disk space"):
            finetune(base, DATA, SETTINGS, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert finetune(base, DATA, SETTINGS, tmp_path / "out").steps == 12


def test_a_damaged_checkpoint_is_named_with_the_remedy(
    base: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(done: int, steps: int) -> None:
        if done == 8:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        finetune(base, DATA, SETTINGS, out, stop)
    [partial] = tmp_path.glob("out.partial-*")
    newest = find_last_complete_checkpoint(partial)
    assert newest is not None
    (partial / "checkpoint-mine").mkdir()  # of the user
    whole = (newest / "optimizer.pt").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"garbage " * 1000):
        (newest / "optimizer.pt").write_bytes(damaged)
        with pytest.raises(TrainingError, match=rf"checkpoint {newest} is damaged .*; remove it and run again"):
            finetune(base, DATA, SETTINGS, out)


def test_the_window_of_the_attention_shortens_no_sequence(
    tiny_model: Callable[..., LanguageModel], tmp_path: Path
) -> None:
    tiny = tiny_model("llama", bos=True)
    save(tiny, tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    windowed = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    config.write_text(json.dumps(json.loads(config.read_text()) | windowed))
    train = prepare_run(ModelSettings(name=str(tmp_path / "base")), DATA, SETTINGS, tmp_path / "run").training_examples
    assert train.split_text_count == 0 and max(len(ids) for [ids] in train.sequences) > 8


def test_a_model_with_a_config_within_its_config_is_trained_and_decodes(tmp_path: Path) -> None:
    nested = tiny("gemma3")
    save(nested, tmp_path / "base")
    settings = SETTINGS.model_copy(update={"max_steps": 2, "eval_steps": 1})
    report = finetune(ModelSettings(name=str(tmp_path / "base")), DATA, settings, tmp_path / "out")
    assert report.steps == 2
    [written] = generate(
        load_model(ModelSettings(name=str(tmp_path / "out"), device="cpu")), ["Ada had"], {}, max_new_tokens=2
    )
    assert written.token_count <= 2 and written.reason is None


def test_nothing_to_train_on_is_an_error(base: ModelSettings, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="lower tau_f"):
        finetune(base, TrainingData([], HELDOUT), SETTINGS, tmp_path / "out")


def test_rows_of_another_shape_and_another_metric_are_recorded_as_they_are(base: ModelSettings, tmp_path: Path) -> None:
    pairs = TrainingData(
        [{"prompt": "It", "chosen": " is.", "rejected": " was."}], [{"prompt": "He", "chosen": " is."}]
    )
    identity = build_run_identity(base, pairs, SETTINGS)
    assert build_run_identity(base, TrainingData(**json.loads(json.dumps(asdict(pairs)))), SETTINGS) == identity
    assert build_run_identity(base, TrainingData(pairs.heldout, pairs.train), SETTINGS) != identity
    heldout = (Point(0, "accuracy", 0.5), Point(4, "accuracy", 0.75))
    counts = {"steps": 4, "texts": 1, "examples": 1, "split_texts": 0, "empty_texts": 0, "tokens": 5, "processes": 1}
    report = TrainingReport(
        fingerprint="f",
        best_step=4,
        seconds=1.0,
        device="cpu",
        divided=False,
        losses=(Point(4, "loss", 0.7),),
        heldout=heldout,
        **counts,
    )
    write_training_record(tmp_path, report, identity)
    assert read_training_report(tmp_path) == report and report.best_point == heldout[1]
    written = json.loads((tmp_path / "training.json").read_text())["report"]
    assert written["heldout"] == [{"step": 0, "accuracy": 0.5}, {"step": 4, "accuracy": 0.75}]


def hub_cache(folder: Path, revisions: Mapping[str, Path]) -> None:
    """The cache of the hub as if `made/model` had been fetched at each of these revisions."""
    repository = folder / "models--made--model"
    (repository / "refs").mkdir(parents=True)
    for number, (revision, model) in enumerate(revisions.items()):
        commit = f"{number:040}"
        (repository / "refs" / revision).write_text(commit)
        shutil.copytree(model, repository / "snapshots" / commit)


def with_code(model: Path, folder: Path) -> Path:
    """The same model, of a type that only the code in its folder knows."""
    shutil.copytree(model, folder)
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    return folder


def test_a_run_starts_from_the_pinned_revision_with_the_code_that_comes_with_it(
    base: ModelSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_cache(tmp_path / "hub", {"main": Path(base.name), "pinned": with_code(Path(base.name), tmp_path / "coded")})
    once = SETTINGS.model_copy(update={"max_steps": 1, "eval_steps": 1})
    pinned = ModelSettings(name="made/model", revision="pinned", trust_remote_code=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    finetune(pinned, DATA, once, tmp_path / "out")
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["base"] == {"id": "made/model", "revision": "pinned"}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "own"
    assert (tmp_path / "out" / "own.py").read_text() == OWN_CODE


def test_a_base_that_cannot_be_loaded_is_named_with_the_remedy(base: ModelSettings, tmp_path: Path) -> None:
    coded = ModelSettings(name=str(with_code(Path(base.name), tmp_path / "coded")))
    with pytest.raises(ModelError, match=r"coded.*trust_remote_code"):
        finetune(coded, DATA, SETTINGS, tmp_path / "out")


def test_a_temperature_without_sampling_and_a_padding_beyond_the_embedding_keep_no_checkpoint_back(
    base: ModelSettings, tmp_path: Path
) -> None:
    """Both are common in models of the hub; one failed when a checkpoint was saved, the other when it was loaded."""
    folder = tmp_path / "base"
    shutil.copytree(base.name, folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(folder)
    once = TrainingSettings(batch_size=8, device_batch_size=8, max_steps=1, eval_steps=1)
    finetune(ModelSettings(name=str(folder)), DATA, once, tmp_path / "out")
    reloaded = load_model(ModelSettings(name=str(tmp_path / "out"), dtype="float32", device="cpu"))
    assert len(reloaded.tokenizer) > reloaded.model.get_input_embeddings().num_embeddings


def test_a_loss_that_no_number_holds_is_never_the_best() -> None:
    objective = objective_of(SETTINGS)(tiny("gptj").encoding, SETTINGS)
    assert objective.compute_metric(numpy.array([[8000.0, 10.0], [1.0, 1.0]])) == math.inf
    assert objective.compute_metric(numpy.ones((1, 2))) == pytest.approx(math.e)
