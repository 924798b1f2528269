"""Compute what finetuning needs on each device, before anything is annotated, and refuse what cannot fit."""

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolformer_dag.model.loading import DTYPES, context_length, from_hub
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.launch import process_count
from toolformer_dag.training.recipe import check_recipe, has_short_moments, with_adapters
from toolformer_dag.training.trainer import device_batch
from toolformer_dag.training.training_run import TrainingError

GB = 1e9
ADAM, SHORT_ADAM = 16, 6
"""Bytes per trained parameter: weight, gradient and two moments of AdamW in float32 (Rajbhandari et al. 2020, section
3.1), or in bfloat16 with moments of 8 bits."""
AUTOCAST = 2
"""Bytes of the bfloat16 copy that a pass on a GPU makes of a float32 weight."""
LAYER_VALUES = 17
"""Values per token and unit of width that a layer keeps for its backward pass (Korthikanti et al. 2022, equation 1
without the scores of attention, which a fused kernel does not keep: 34 bytes in 16 bits). With gradient checkpointing
it keeps its input, one value."""
LOGIT_BYTES = 12
"""Per logit: transformers' loss in float32, its softmax and its gradient. A kept base model has another prediction."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each device. `states`: weights, gradients and moments; `activations`: the most beside them."""

    states: int
    activations: int


def memory_need(
    config: Any, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool, trust_remote_code: bool
) -> MemoryNeed:
    """Return the bytes that a recipe takes at least on each device, with sequences of `length` tokens.

    Not covered: weights that several processes gather for a layer, copies within a step of the optimizer, operations
    of a layer that are not fused, the allocator's fragments, and what torch and the driver take (about 1 GB).
    """
    text, dtype = config.get_text_config(), DTYPES[settings.precision]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )
        if settings.lora_rank is not None:
            model = with_adapters(model, settings.lora_rank)
    parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    each = SHORT_ADAM if has_short_moments(settings) else ADAM
    if on_gpu and settings.precision == "float32":
        each += AUTOCAST
    states = each * trained // processes + (parameters - trained) * dtype.itemsize
    logit_bytes = LOGIT_BYTES
    if settings.keep_base:
        states += parameters * dtype.itemsize
        logit_bytes += 4
    tokens = device_batch(settings, processes) * length
    value = tokens * text.hidden_size * dtype.itemsize
    checkpointing = on_gpu if settings.gradient_checkpointing is None else settings.gradient_checkpointing
    kept = text.num_hidden_layers * value * (1 if checkpointing else LAYER_VALUES)
    return MemoryNeed(states, kept + max(LAYER_VALUES * value, logit_bytes * tokens * text.vocab_size))


def check_finetuning(model: ModelSettings, settings: TrainingSettings) -> None:
    """Raise TrainingError with the remedy where finetuning cannot fit into memory, before anything runs.

    Also where a library is missing, or where processes cannot share the batch or the model.
    """
    processes = process_count(model, settings)
    check_recipe(model, settings, processes)
    on_gpu = model.device != "cpu" and torch.cuda.is_available()
    source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = from_hub(AutoConfig, model_name(model), source)
    length = min(settings.sequence_length, context_length(config))
    trusted = model.trust_remote_code
    need = memory_need(config, settings, length, processes, on_gpu=on_gpu, trust_remote_code=trusted)
    total = need.states + need.activations
    there = torch.cuda.get_device_properties(0).total_memory if on_gpu else _ram() // processes
    if total > there:
        remedies = [
            'training.precision = "bfloat16" (extra `gpu`)' * (settings.precision == "float32"),
            "training.lora_rank = 16 (extra `lora`)" * (settings.lora_rank is None),
            "a smaller training.device_batch_size" * (need.activations > need.states // 10),
            "more GPUs, among which float32 weights are divided" * on_gpu,
        ]
        raise TrainingError(
            f"finetuning {model.name} needs {total / GB:.0f} GB on each of {processes} devices (weights, "
            f"gradients and moments {need.states / GB:.0f}, activations {need.activations / GB:.0f}), and there are "
            f"{there / GB:.0f}; set {', or '.join(filter(None, remedies))}, or take a smaller model"
        )


def _ram() -> int:
    limit = Path("/sys/fs/cgroup/memory.max")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return whole if text == "max" else min(whole, int(text))
