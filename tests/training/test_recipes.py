"""Recipes that fit a large model: what they train equals what plain float32 training in one process does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from tests.language_model.conftest import tiny
from tests.processes import processes_with, wait_until_ended
from tests.tiny_models import save
from tests.training.test_finetune import DATA
from toolformer_dag.model.loading import choose_fast_dtype
from toolformer_dag.model.trials import list_trial_token_ids
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.launch import train
from toolformer_dag.training.objective import LanguageModeling, compute_row_losses
from toolformer_dag.training.recipe import check_packed_texts_apart, check_recipe
from toolformer_dag.training.training_report import TrainingError, TrainingReport, read_training_report

SETTINGS = TrainingSettings(batch_size=8, device_batch_size=4, learning_rate=1e-2, max_steps=12, eval_steps=4)


def saved(architecture: str, folder: Path) -> ModelSettings:
    made = tiny(architecture.removeprefix("tied "))
    if architecture.startswith("tied "):
        made.model.config.tie_word_embeddings = True
        made.model.tie_weights()
    save(made, folder)
    return ModelSettings(name=str(folder))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSettings:
    return saved("gptj", tmp_path_factory.mktemp("base") / "model")


def changed(**values: object) -> TrainingSettings:
    return SETTINGS.model_copy(update=values)


def difference(one: Path, other: Path) -> float:
    first = load_file(one / "model.safetensors")
    second = load_file(other / "model.safetensors")
    assert first.keys() <= second.keys() <= first.keys() | {"lm_head.weight"}  # a tied head may be written too
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def perplexities(report: TrainingReport) -> list[float]:
    return [point.value for point in report.heldout]


@pytest.mark.parametrize("architecture", ["gptj", "gpt2", "llama", "gemma2", "gemma3"])
def test_packed_texts_cost_what_they_cost_alone(architecture: str) -> None:
    made = tiny(architecture)
    model = made.model.float()
    check_packed_texts_apart(model, list_trial_token_ids(made.encoding))
    parts = [[3, 5, 7, 9], [2, 4, 6], [8, 1, 3, 2, 5]]
    alone = sum(losses(model, [[part]]) for part in parts)
    together = losses(model, [[parts[0], parts[1]], [parts[2]]])
    assert together[1] == alone[1] == sum(map(len, parts)) - len(parts)
    assert together[0] == pytest.approx(float(alone[0]), rel=1e-5)


def losses(model: torch.nn.Module, rows: list[list[list[int]]]) -> torch.Tensor:
    batch = LanguageModeling.collate_sequences(rows)
    labels = batch.pop("labels")
    with torch.no_grad():
        return compute_row_losses(model(**batch, use_cache=False).logits, labels).sum(0)


def test_a_model_without_attention_is_not_packed() -> None:
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)).eval()
    with pytest.raises(TrainingError, match=r"MambaForCausalLM does not keep packed texts apart.*packing = false"):
        check_packed_texts_apart(model, range(1, 31))


def test_packing_checkpointing_and_plain_training_learn_alike(base: ModelSettings, tmp_path: Path) -> None:
    whole = finetune(base, DATA, SETTINGS, tmp_path / "plain")
    again = finetune(base, DATA, changed(gradient_checkpointing=True, seed=0), tmp_path / "checkpointed")
    assert again.fingerprint == whole.fingerprint and difference(tmp_path / "plain", tmp_path / "checkpointed") < 1e-4
    packed = finetune(base, DATA, changed(packing=True, sequence_length=128), tmp_path / "packed")
    assert packed.examples < whole.examples and packed.tokens == whole.tokens
    assert packed.best_point.value < 0.7 * packed.heldout[0].value


def test_passes_in_bfloat16_over_float32_weights_learn_what_float32_learns(base: ModelSettings, tmp_path: Path) -> None:
    """Where the processor has no AVX-512, passes stay in float32."""
    on_cpu = base.model_copy(update={"device": "cpu"})
    exact = perplexities(finetune(on_cpu, DATA, SETTINGS, tmp_path / "float32"))
    mixed = perplexities(finetune(on_cpu, DATA, changed(precision="mixed"), tmp_path / "mixed"))
    assert exact[0] - exact[-1] > 0.1 * exact[0]
    assert exact[0] - exact[-1] == pytest.approx(mixed[0] - mixed[-1], rel=0.1)
    weights = load_file(tmp_path / "mixed" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert (difference(tmp_path / "float32", tmp_path / "mixed") > 0) == (choose_fast_dtype() == torch.bfloat16)


@pytest.mark.long
def test_bfloat16_learns_what_float32_learns(base: ModelSettings, tmp_path: Path) -> None:
    """At this learning rate half a unit in the last place of a bfloat16 weight is more than a step."""
    slow = {"max_steps": 50, "eval_steps": 50, "learning_rate": 1e-4}
    exact = perplexities(finetune(base, DATA, changed(**slow), tmp_path / "float32"))
    short = perplexities(finetune(base, DATA, changed(**slow, precision="bfloat16"), tmp_path / "bfloat16"))
    assert exact[0] - exact[-1] > 0.1 * exact[0]
    assert short[0] - short[-1] == pytest.approx(exact[0] - exact[-1], rel=0.1)
    weights = load_file(tmp_path / "bfloat16" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_adapters_are_merged_into_a_plain_model(base: ModelSettings, tmp_path: Path) -> None:
    report = finetune(base, DATA, changed(lora_rank=4), tmp_path / "out")
    assert report.best_point.value < 0.9 * report.heldout[0].value
    before = load_file(Path(base.name) / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and all(before[name].ndim == 2 for name in moved)
    assert not list((tmp_path / "out").glob("adapter*"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.use_cache


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [{"packing": True}, {"precision": "bfloat16"}, {"precision": "mixed"}, {"lora_rank": 4}]
)
def test_an_interrupted_run_goes_on_under_each_recipe(
    base: ModelSettings, tmp_path: Path, settings: dict[str, object]
) -> None:
    recipe = changed(**settings)
    seen = list[int]()

    def interrupt(done: int, total: int) -> None:
        if done == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        finetune(base, DATA, recipe, tmp_path / "out", interrupt)
    finetune(base, DATA, recipe, tmp_path / "out", lambda done, _: seen.append(done))
    assert seen[0] == 5
    finetune(base, DATA, recipe, tmp_path / "whole")
    assert difference(tmp_path / "out", tmp_path / "whole") < 1e-6


@pytest.mark.parametrize(
    ("recipe", "processes", "message"),
    [
        ({"precision": "bfloat16"}, 2, r'"bfloat16" trains in one process, and there are 2'),
        ({"keep_base": 0.95}, 2, "training.keep_base needs the whole base model"),
        ({"keep_base": 0.95, "lora_rank": 2}, 1, "training.keep_base needs the whole base model"),
    ],
)
def test_what_processes_or_adapters_cannot_share_is_refused(
    base: ModelSettings, recipe: dict[str, object], processes: int, message: str
) -> None:
    with pytest.raises(TrainingError, match=message):
        check_recipe(base, changed(**recipe), processes)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gptj", "tied llama"])
def test_two_processes_that_hold_half_the_weights_train_what_one_does(architecture: str, tmp_path: Path) -> None:
    model = saved(architecture, tmp_path / "base")
    curve = list[tuple[int, dict[str, float]]]()
    one = finetune(model, DATA, SETTINGS, tmp_path / "one")
    steps: list[tuple[int, int]] = []
    two = train(
        model,
        DATA,
        changed(processes=2),
        tmp_path / "two",
        lambda *step: steps.append(step),
        lambda step, values: curve.append((step, dict(values))),
    )
    assert (one.processes, one.divided, two.processes, two.divided) == (1, False, 2, True)
    assert two.fingerprint == one.fingerprint and perplexities(two) == pytest.approx(perplexities(one), rel=2e-3)
    assert difference(tmp_path / "one", tmp_path / "two") < 5e-3
    assert steps[-1] == (12, 12)
    assert [step for step, values in curve if "perplexity" in values] == [0, 4, 8, 12]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "one", "two"]
    assert train(model, DATA, changed(processes=2), tmp_path / "two").reused


@pytest.mark.long
def test_two_processes_that_were_ended_go_on(base: ModelSettings, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done >= 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(base, DATA, changed(processes=2), tmp_path / "out", interrupt)
    assert not processes_with(str(tmp_path))
    seen: list[int] = []
    train(base, DATA, changed(processes=2), tmp_path / "out", lambda done, _: seen.append(done))
    assert all(done > 4 for done in seen if done)  # none where the run was through before it was interrupted
    train(base, DATA, changed(processes=2), tmp_path / "whole")
    assert difference(tmp_path / "out", tmp_path / "whole") < 1e-4


@pytest.mark.long
def test_processes_end_with_the_one_that_started_them(base: ModelSettings, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from tests.training.test_recipes import DATA, changed\n"
        "from toolformer_dag.training.launch import train\n"
        "from toolformer_dag.settings.sections import ModelSettings\n"
        "dies = lambda done, total: done and os.kill(os.getpid(), signal.SIGKILL)\n"
        "train(ModelSettings(name=sys.argv[1]), DATA, changed(processes=2), Path(sys.argv[2]), dies)\n"
    )
    command = [sys.executable, "-c", code, base.name, str(tmp_path / "out")]
    ended = subprocess.run(command, check=False, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert ended.returncode == -signal.SIGKILL
    wait_until_ended(processes_with(str(tmp_path)))


@pytest.mark.long
def test_what_ends_a_process_is_told(base: ModelSettings, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"batch of 7 cannot be shared by 2 processes.*multiple of 2"):
        train(base, DATA, changed(processes=2, batch_size=7), tmp_path / "out")
    assert read_training_report(tmp_path / "out") is None
