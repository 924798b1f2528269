"""What finetuning needs is computed before it begins: the figures of known models, and the refusal."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GPTJConfig, LlamaConfig, PreTrainedConfig

from benchmarks.training_memory import RECIPES, config_of, train
from tests.training.test_recipes import saved
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.launch import GB, check_finetuning, memory_need
from toolformer_dag.training.training_report import TrainingError

GPTJ = GPTJConfig()
EIGHT = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
)


@pytest.mark.parametrize(
    ("config", "recipe", "processes", "gigabytes"),
    [
        (GPTJ, {}, 1, 117.6),
        (GPTJ, {}, 8, 22.3),
        (GPTJ, {"precision": "mixed"}, 1, 117.6),
        (GPTJ, {"precision": "bfloat16"}, 1, 43.1),
        (GPTJ, {"precision": "bfloat16", "lora_rank": 16}, 1, 19.5),
        (EIGHT, {}, 1, 161.4),
        (EIGHT, {"precision": "bfloat16"}, 1, 62.9),
        (EIGHT, {"precision": "bfloat16", "lora_rank": 16}, 1, 31.5),
    ],
)
def test_known_models_on_a_gpu(
    config: PreTrainedConfig, recipe: dict[str, Any], processes: int, gigabytes: float
) -> None:
    """Eight sequences of 1,024 tokens a pass; two of these do not fit a card of 80 GB, the others do."""
    need = memory_need(config, TrainingSettings(**recipe), 1024, processes, on_gpu=True, trust_remote_code=False)
    assert sum(need) / GB == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["gptj", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_training_takes_at_least_what_the_formula_says(architecture: str, recipe: str) -> None:
    """Torch's allocator holds hardly more with checkpointing in float32, and up to twice as much without."""
    config = config_of(architecture, width=192, layers=3, vocabulary=3000)
    states, activations, taken = train(config, 3, 200, RECIPES[recipe])
    assert 1 <= taken / (states + activations) < 2.2


def test_what_cannot_fit_is_refused_with_the_remedies(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    huge = TrainingSettings(device_batch_size=10_000_000, batch_size=10_000_000)
    with pytest.raises(
        TrainingError, match=r"needs .* GB on each of 1 devices .*; set .*a smaller training.device_batch_size"
    ):
        check_finetuning(base, huge)
    check_finetuning(base, TrainingSettings())


def test_what_processes_cannot_share_is_refused_before_anything_runs(tmp_path: Path) -> None:
    base = saved("llama", tmp_path / "base").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match="a batch of 128 cannot be shared by 3 processes"):
        check_finetuning(base, TrainingSettings(processes=3))
    images = saved("gemma3", tmp_path / "images").model_copy(update={"device": "cpu"})
    with pytest.raises(TrainingError, match=r"is more than a language model.*training.processes = 1"):
        check_finetuning(images, TrainingSettings(processes=2))
