"""Compute what finetuning needs on each device, before anything is annotated, and refuse what cannot fit."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from toolformer_dag.model.loading import context_length, from_hub
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.launch import process_count
from toolformer_dag.training.recipe import check_recipe
from toolformer_dag.training.trainer import device_batch
from toolformer_dag.training.training_run import TrainingError

GB = 1e9
LAYER_VALUES = 34
"""Values per token and unit of width that a layer keeps for its backward pass without attention scores (Korthikanti et
al. 2022, equation 2: 34 bytes at 2 bytes, of which masks take half as much per value)."""
LOGIT_BYTES = 12
"""Bytes per logit: in float32 the logits, their softmax and its gradient."""


@dataclass(frozen=True, slots=True)
class TransformerShape:
    """The numbers of a model that memory depends on.

    `inputs` and `outputs`: widths in and out, summed over linear layers but the output head. `eager_heads`: attention
    heads whose scores are held for the backward pass (GPT-J in transformers); 0 where a fused kernel computes them
    again.
    """

    parameters: int
    width: int
    layers: int
    vocabulary: int
    inputs: int
    outputs: int
    eager_heads: int = 0


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each device. `states`: weights, gradients and moments; `activations`: of one pass."""

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations


def model_shape(model: ModelSettings) -> TransformerShape:
    """Read the shape from the model's config, without its weights. Raises ModelError."""
    source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config: Any = from_hub(AutoConfig, model_name(model), source)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)
    text = config.get_text_config()
    linear = [
        (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (module.nx, module.nf)
        for module in skeleton.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not skeleton.get_output_embeddings()
    ]
    return TransformerShape(
        parameters=sum(weight.numel() for weight in skeleton.parameters()),
        width=text.hidden_size,
        layers=text.num_hidden_layers,
        vocabulary=text.vocab_size,
        inputs=sum(width for width, _ in linear),
        outputs=sum(width for _, width in linear),
        eager_heads=text.num_attention_heads if skeleton.config._attn_implementation == "eager" else 0,
    )


def memory_need(
    shape: TransformerShape, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool
) -> MemoryNeed:
    """Return the bytes that a recipe takes on each device, with sequences of `length` tokens.

    - float32: 16 bytes per parameter (weights, gradients, two moments), divided among the processes; on a GPU also the
      bfloat16 copies of all weights in a pass, or where they are divided the gathered weights of the largest parts.
    - bfloat16 with moments of 8 bits: 6 bytes. LoRA: the frozen weights, and 16 bytes per value of the adapters.
    - `keep_base`: the base model beside them.
    - Activations: the input of every layer and one layer's values, or all layers' values without checkpointing; the
      logits in float32. Where attention is eager, a layer's values hold its weights in float32 and as they are used,
      and the layer at work holds two more copies. Adapters beside bfloat16 weights are float32, and each keeps its
      input in float32.

    Not covered: experts, the allocator's fragments, what torch and the driver take themselves (about 1 GB).
    """
    weight = 2 if settings.precision == "bfloat16" else 4
    computing = 2 if on_gpu or settings.precision == "bfloat16" else 4
    if settings.lora_rank is not None:
        states = weight * shape.parameters + 16 * settings.lora_rank * (shape.inputs + shape.outputs)
    elif settings.precision == "bfloat16":
        states = 6 * shape.parameters
    else:
        states = 16 * shape.parameters // processes
        if processes == 1 and on_gpu:
            states += computing * shape.parameters
        if processes > 1:
            ends = 2 * shape.vocabulary * shape.width
            states += computing * (ends + 2 * (shape.parameters - ends) // shape.layers)
    if settings.keep_base:
        states += weight * shape.parameters
    tokens = min(settings.device_batch_size, settings.batch_size // processes or 1) * length
    kept = on_gpu if settings.gradient_checkpointing is None else settings.gradient_checkpointing
    scores = shape.eager_heads * length
    inner = LAYER_VALUES // 2 * computing * shape.width + scores * (4 if computing == 4 else 6)
    if settings.lora_rank is not None and weight == 2:
        inner += 4 * shape.inputs // shape.layers
    layers = shape.layers * computing * shape.width + inner if kept else shape.layers * inner
    layers += 2 * 4 * scores
    return MemoryNeed(states, tokens * (layers + LOGIT_BYTES * shape.vocabulary))


def check_finetuning(model: ModelSettings, settings: TrainingSettings) -> MemoryNeed:
    """Return what finetuning needs on each device, before anything runs.

    Raises TrainingError with the remedy where that cannot fit, where a library is missing, or where processes cannot
    share the batch or the model.
    """
    processes = process_count(model, settings)
    check_recipe(model, settings, processes)
    device_batch(settings, processes)
    shape = model_shape(model)
    on_gpu = model.device != "cpu" and torch.cuda.is_available()
    config: Any = from_hub(
        AutoConfig, model_name(model), {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    )
    need = memory_need(shape, settings, min(settings.sequence_length, context_length(config)), processes, on_gpu=on_gpu)
    there = torch.cuda.get_device_properties(0).total_memory if on_gpu else _ram() // processes
    if need.total > there:
        remedies = [
            'training.precision = "bfloat16" (extra `gpu`)' * (settings.precision == "float32"),
            "training.lora_rank = 16 (extra `lora`)" * (settings.lora_rank is None),
            "a smaller training.device_batch_size" * (need.activations > need.states // 10),
            "more GPUs, among which float32 weights are divided" * on_gpu,
        ]
        raise TrainingError(
            f"finetuning {model.name} needs {need.total / GB:.0f} GB on each of {processes} devices (weights, "
            f"gradients and moments {need.states / GB:.0f}, activations {need.activations / GB:.0f}), and there are "
            f"{there / GB:.0f}; set {', or '.join(filter(None, remedies))}, or take a smaller model"
        )
    return need


def _ram() -> int:
    limit = Path("/sys/fs/cgroup/memory.max")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return whole if text == "max" else min(whole, int(text))
