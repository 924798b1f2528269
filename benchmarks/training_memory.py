"""Compare the formula of finetuning's memory with what it takes: `python -m benchmarks.training_memory`.

Each recipe trains two steps of a GPT-J with random weights in a process of its own, where a tiny one was trained
before, so that libraries are loaded. On a GPU, what torch allocated at most is measured; on a CPU, by how much the
memory of the process grew, which holds the reading of weights and the fragments of the allocator too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPTJConfig

from benchmarks.measure import peak_memory
from benchmarks.models import make_tokenizer, texts
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.memory_need import memory_need, model_shape

RECIPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, checkpointing": {"gradient_checkpointing": True},
    "bfloat16, 8-bit moments": {"precision": "bfloat16"},
    "LoRA 16, bfloat16": {"precision": "bfloat16", "lora_rank": 16},
    "LoRA 16, bfloat16, checkpointing": {"precision": "bfloat16", "lora_rank": 16, "gradient_checkpointing": True},
}
LENGTH = 512
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def save_model(folder: str, width: int, layers: int) -> None:
    """Write a GPT-J with random weights and a tokenizer."""
    shape = GPTJConfig(
        n_embd=width, n_layer=layers, n_head=12, rotary_dim=4, vocab_size=16_000, n_positions=1024, **ENDS
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    make_tokenizer("Add calls.").save_pretrained(folder)


def train(folder: str, keys: str) -> None:
    """Train with one recipe and print the formula's bytes and those taken."""
    base, on_gpu = ModelSettings(name=folder), torch.cuda.is_available()
    settings = TrainingSettings(
        batch_size=4, device_batch_size=4, max_steps=2, eval_steps=2, sequence_length=LENGTH, **json.loads(keys)
    )
    need = memory_need(model_shape(base), settings, LENGTH, 1, on_gpu=on_gpu)
    device = torch.device("cuda" if on_gpu else "cpu")
    long = " ".join(texts(200))
    with tempfile.TemporaryDirectory() as out:
        save_model(f"{out}/tiny", 48, 1)
        short = settings.model_copy(update={"sequence_length": 16})
        finetune(ModelSettings(name=f"{out}/tiny"), [long], [long[:800]], short, Path(out) / "warm")
        before = 0.0 if on_gpu else peak_memory(device)
        finetune(base, [long], [long[:8000]], settings, Path(out) / "model")
    print(f"{need.states / 1e6:.0f} {need.activations / 1e6:.0f} {peak_memory(device) - before:.0f}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per recipe: formula, measured, ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=768, help="width of the model")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options.width, options.layers)
        print("| recipe | formula MB (states + activations) | measured MB | measured / formula |\n|---|---|---|---|")
        for name, keys in RECIPES.items():
            code = f"from benchmarks.training_memory import train; train({folder!r}, {json.dumps(keys)!r})"
            printed = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout
            states, activations, taken = map(float, printed.split()[-3:])
            formula = states + activations
            print(
                f"| {name} | {formula:.0f} ({states:.0f} + {activations:.0f}) | {taken:.0f} | {taken / formula:.2f} |"
            )


if __name__ == "__main__":
    main()
