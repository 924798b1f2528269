"""llama.cpp computes a checkpoint of the project as transformers does."""

from pathlib import Path

import pytest

from tests.environments.environment import beside_this_one, pip_install, ran
from tests.tiny_models import TEXTS, save, tiny_model, tokenizer_of
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.training_report import TrainingData

WITH_CALLS = [
    f"I had {a} pens [Calculator({a} + {b}) -> {a + b}] and bought {b} more." for a in range(9) for b in range(5)
]
PROMPT = f"{WITH_CALLS[7]} {' '.join(TEXTS)}"


@pytest.mark.installs
@pytest.mark.usefixtures("registry")
def test_logits_of_a_finetuned_llama_agree_in_llama_cpp(tmp_path: Path) -> None:
    """The file is written by llama.cpp's own package `gguf`."""
    base = save(tiny_model("Llama", tokenizer_of("merged")), tmp_path / "base")
    settings = TrainingSettings(batch_size=8, device_batch_size=8, learning_rate=1e-3, max_steps=8, eval_steps=4)
    finetune(ModelSettings(name=base, device="cpu"), TrainingData(WITH_CALLS, TEXTS), settings, tmp_path / "finetuned")
    python = beside_this_one(tmp_path / "environment")
    pip_install(python, "--no-deps", "--only-binary", ":all:", "gguf", "cyllama")
    [checkpoint] = {file.parent for file in tmp_path.joinpath("finetuned").rglob("model.safetensors")}
    file = str(tmp_path / "model.gguf")
    told = ran(python, "gguf_child.py", str(checkpoint), file, PROMPT, folder=tmp_path)
    assert told["same_tokens"] and told["tokens"] > 100
    assert told["difference"] < 1e-3 < told["largest"]
    print(f"largest difference of {told['tokens']} x vocabulary logits: {told['difference']:.1e}")
