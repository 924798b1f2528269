"""Compare the formula of finetuning's memory with what it takes: `python -m benchmarks.training_memory`.

Each recipe trains two steps of a model with random weights in a process of its own, in two passes each, so that
gradients lie beside activations. Measured is the most that torch's allocator held at once: on a GPU as it counts
itself, on a CPU from the profiler's record of every allocation. Fragments are not in it.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import make_tokenizer, peak_memory, texts
from toolformer_dag.model.loading import TORCH_DTYPES
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.launch import estimate_memory_need
from toolformer_dag.training.training_report import TrainingData

CHECKPOINTING = {"gradient_checkpointing": True}
HALF = {"precision": "bfloat16"}
RECIPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, checkpointing": CHECKPOINTING,
    "float32, base kept": {"keep_base": 0.9},
    "bfloat16, 8-bit moments": HALF,
    "bfloat16, 8-bit moments, checkpointing": {**HALF, **CHECKPOINTING},
    "LoRA 16, bfloat16": {**HALF, "lora_rank": 16},
    "LoRA 16, bfloat16, checkpointing": {**HALF, "lora_rank": 16, **CHECKPOINTING},
}
GPT = {"n_head": 12, "n_positions": 1024}
LLAMA = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 1024}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}


def config_of(architecture: str, width: int, layers: int, vocabulary: int) -> Any:
    """Return the config of a GPT-J or a Llama."""
    shape: dict[str, Any] = {"vocab_size": vocabulary, **ENDS}
    if architecture == "gptj":
        return AutoConfig.for_model("gptj", n_embd=width, n_layer=layers, rotary_dim=4, **GPT, **shape)
    inner = 7 * width // 2
    return AutoConfig.for_model(
        "llama", hidden_size=width, num_hidden_layers=layers, intermediate_size=inner, **LLAMA, **shape
    )


def train(config: Any, batch: int, length: int, keys: dict[str, Any]) -> tuple[float, float, float]:
    """Train with one recipe; return MB of states and activations by the formula, and MB held."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = TrainingSettings(
        batch_size=2 * batch, device_batch_size=batch, max_steps=2, eval_steps=2, sequence_length=length, **keys
    )
    states, activations = estimate_memory_need(
        config, settings, length, 1, on_gpu=device.type == "cuda", trust_remote_code=False
    )
    long = " ".join(texts(200))
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/base")
        make_tokenizer("Add calls.").save_pretrained(f"{folder}/base")
        weights = sum(tensor.numel() for tensor in load_file(f"{folder}/base/model.safetensors").values())
        base = ModelSettings(name=f"{folder}/base", device=device.type)
        gc.collect()  # circles of a run before would be freed within the profile, and counted as less
        with profile(activities=[ProfilerActivity.CPU], profile_memory=device.type == "cpu") as profiled:
            finetune(base, TrainingData([long], [long[:8000]]), settings, Path(folder, "model"))
        profiled.export_chrome_trace(f"{folder}/trace.json")
        recorded = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    changes = [each for each in recorded if each.get("name") == "[memory]"]
    held = 0
    if changes:  # the counter goes on from profiles before this one, and misses what was freed between them
        first = min(changes, key=lambda change: change["ts"])
        before = first["args"]["Total Allocated"] - first["args"]["Bytes"]
        held = max(change["args"]["Total Allocated"] for change in changes) - before
    if device.type == "cuda":
        return states / 1e6, activations / 1e6, peak_memory(device)
    loaded = weights * TORCH_DTYPES[settings.precision].itemsize * (2 if settings.keep_base else 1)
    return states / 1e6, activations / 1e6, (held + loaded) / 1e6  # threads load weights, seen by no profile


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row per recipe: formula, measured, ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=("gptj", "llama"), default="gptj")
    for name, default in (("width", 384), ("layers", 6), ("vocabulary", 16_000), ("batch", 4), ("length", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", choices=RECIPES, help="one recipe, in this process")
    options = parser.parse_args(arguments)
    if options.recipe:
        config = config_of(options.architecture, options.width, options.layers, options.vocabulary)
        states, activations, taken = train(config, options.batch, options.length, RECIPES[options.recipe])
        formula = states + activations
        figures = f"{formula:.0f} ({states:.0f} + {activations:.0f}) | {taken:.0f} | {taken / formula:.2f}"
        print(f"| {options.recipe} | {figures} |", flush=True)
        return
    print(
        "| recipe | formula MB (states + activations) | measured MB | measured / formula |\n|---|---|---|---|",
        flush=True,
    )
    given = sys.argv[1:] if arguments is None else arguments
    for name in RECIPES:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.training_memory", *given, "--recipe", name]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
