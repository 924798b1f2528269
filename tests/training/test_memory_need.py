"""What finetuning needs is computed before it begins: the figures of known models, and the refusal."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, GPTJConfig, LlamaConfig, PreTrainedConfig

from benchmarks.training_memory import RECIPES, config_of, train
from tests.tiny_models import ARCHITECTURES
from tests.training.test_recipes import saved
from toolformer_dag.settings.sections import TrainingSettings
from toolformer_dag.training.memory_need import GB, MemoryNeed, check_finetuning, memory_need
from toolformer_dag.training.training_run import TrainingError

GPTJ = GPTJConfig()
EIGHT = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


def need_of(config: PreTrainedConfig, length: int = 1024, processes: int = 1, **recipe: Any) -> MemoryNeed:
    settings = TrainingSettings(**recipe)
    return memory_need(config, settings, length, processes, on_gpu=True, trust_remote_code=False)


@pytest.mark.parametrize(
    ("config", "recipe", "processes", "gigabytes"),
    [
        (GPTJ, {}, 1, 118.8),
        (GPTJ, {}, 8, 23.6),
        (GPTJ, {"precision": "bfloat16"}, 1, 48.3),
        (GPTJ, {"precision": "bfloat16", "lora_rank": 16}, 1, 19.7),
        (EIGHT, {}, 1, 162),
        (EIGHT, {"precision": "bfloat16"}, 1, 78.7),
        (EIGHT, {"precision": "bfloat16", "lora_rank": 16}, 1, 31.9),
    ],
)
def test_known_models_on_a_gpu(
    config: PreTrainedConfig, recipe: dict[str, object], processes: int, gigabytes: float
) -> None:
    """Eight sequences of 1,024 tokens a pass; two of these do not fit a card of 80 GB, the others do."""
    assert need_of(config, processes=processes, **recipe).total / GB == pytest.approx(gigabytes, rel=0.02)


@pytest.mark.parametrize("architecture", ["GPT-2", "GPT-J", "OPT", "Llama", "Gemma 2", "Bloom", "gpt-oss", "LFM2"])
def test_a_pass_is_counted_from_the_config_alone(architecture: str) -> None:
    """Twice the sequences keep twice as much; so does the rule of thumb where a pass depends on values (experts)."""
    kind, shape = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(kind, vocab_size=320, **shape)
    one, two = (
        need_of(config, 16, precision="bfloat16", lora_rank=2, device_batch_size=rows, gradient_checkpointing=False)
        for rows in (1, 2)
    )
    assert one.states == two.states and 1.9 * one.activations < two.activations < 2.1 * one.activations


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gptj", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_takes_what_the_formula_says(architecture: str, recipe: str) -> None:
    """What torch's allocator holds at most is never above the formula, and not far below."""
    config = config_of(architecture, width=192, layers=3, vocabulary=3000)
    states, activations, taken = train(config, 3, 200, RECIPES[recipe])
    assert 1 / 1.15 <= taken / (states + activations) <= 1


def test_what_cannot_fit_is_refused_with_the_remedies(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    huge = TrainingSettings(device_batch_size=10_000_000, batch_size=10_000_000)
    with pytest.raises(
        TrainingError, match=r"needs .* GB on each of 1 devices .*; set .*a smaller training.device_batch_size"
    ):
        check_finetuning(base, huge)
    assert check_finetuning(base, TrainingSettings()).total < 1 * GB


def test_what_processes_cannot_share_is_refused_before_anything_runs(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match="a batch of 128 cannot be shared by 3 processes"):
        check_finetuning(base, TrainingSettings(processes=3))
    images = saved("gemma3", tmp_path / "images").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match=r"is more than a language model.*training.processes = 1"):
        check_finetuning(images, TrainingSettings(processes=2))
