"""Compute what finetuning needs on each device, before anything is annotated, and refuse what cannot fit."""

import copy
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolformer_dag.model.loading import DTYPES, INCOMPATIBLE_ERRORS, context_length, from_hub
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.kept_activations import KeptActivations, kept_activations
from toolformer_dag.training.launch import process_count
from toolformer_dag.training.recipe import check_recipe, with_adapters
from toolformer_dag.training.trainer import device_batch
from toolformer_dag.training.training_run import TrainingError

_log = logging.getLogger(__name__)

GB = 1e9
LAYER_VALUES = 34
"""Values per token and unit of width that a layer keeps, for a model whose pass cannot be run without values."""
LOGIT_BYTES = 12
"""Bytes per logit: in float32 the softmax, the gradient of the loss and its product, or logits and softmax before."""
KEPT_LOGIT_BYTES = 16
"""The same with the base model's predictions, whose pass takes twice what a layer keeps (both measured)."""
WORKING_LAYER, WORKING_ADAPTED_LAYER = 140, 130
"""What a layer takes in its backward pass, in percent of what it keeps: all weights, or adapters (measured)."""
SMALL_PARTS = 102
"""Activations in percent, with masks, labels and indices."""
STEP_BYTES = 58
"""Bytes per value of the largest weight while it takes a step with moments of 8 bits: copies in float32 (measured)."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes on each device. `states`: weights, gradients and moments; `activations`: the most beside them."""

    states: int
    activations: int

    @property
    def total(self) -> int:
        return self.states + self.activations


def memory_need(
    config: Any, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool, trust_remote_code: bool
) -> MemoryNeed:
    """Return the bytes that a recipe takes on each device, with sequences of `length` tokens.

    - float32: 16 bytes per parameter (weights, gradients, two moments), divided among the processes; on a GPU also the
      bfloat16 copies of all weights in a pass, or where they are divided the gathered weights of the largest parts.
    - bfloat16 with moments of 8 bits: 6 bytes. LoRA: the frozen weights, and 16 bytes per value of the adapters.
    - `keep_base`: the base model beside them, and its predictions.
    - Activations: what the model keeps for its backward pass, with checkpointing the inputs of its layers; and the
      logits in float32, or the layer at work. Or what a step of the optimizer takes, where that is more.

    Where less is taken, more is counted: gradients beside all activations also where a step takes a single pass;
    activations of float32 also on a GPU, whose passes run in bfloat16; a step with moments of 8 bits as on a CPU,
    where it is not compiled.

    Not covered: the allocator's fragments, what torch and the driver take themselves (about 1 GB).
    """
    weight = 2 if settings.precision == "bfloat16" else 4
    computing = 2 if on_gpu or settings.precision == "bfloat16" else 4
    text = config.get_text_config()
    model = _skeleton(config, settings, trust_remote_code)
    sizes = [each.numel() for each in model.parameters() if settings.lora_rank is None or not each.requires_grad]
    parameters = sum(sizes)
    step = 0
    if settings.lora_rank is not None:
        states = weight * parameters + 16 * sum(each.numel() for each in model.parameters() if each.requires_grad)
    elif settings.precision == "bfloat16":
        states, step = 6 * parameters, STEP_BYTES * max(sizes)
    else:
        states = 16 * parameters // processes
        if processes == 1 and on_gpu:
            states += computing * parameters
        if processes > 1:
            ends = 2 * text.vocab_size * text.hidden_size
            states += computing * (ends + 2 * (parameters - ends) // text.num_hidden_layers)
    if settings.keep_base:
        states += weight * parameters
    batch = device_batch(settings, processes)
    checkpointing = on_gpu if settings.gradient_checkpointing is None else settings.gradient_checkpointing
    logits = LOGIT_BYTES * batch * length * text.vocab_size
    kept = _kept(model, batch, length)
    if checkpointing:
        held = kept.outside + kept.carried
        share = WORKING_LAYER if settings.lora_rank is None else WORKING_ADAPTED_LAYER
        working = max(logits, kept.largest * share // 100)
    else:
        held = kept.outside + kept.layers
        working = max(logits, kept.largest // 2)
    if settings.keep_base:
        working = max(logits * KEPT_LOGIT_BYTES // LOGIT_BYTES, 2 * kept.largest)
    return MemoryNeed(states, max((held + working) * SMALL_PARTS // 100, step))


def _skeleton(config: Any, settings: TrainingSettings, trust_remote_code: bool) -> Any:
    """Return the model as it is trained, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=DTYPES[settings.precision], trust_remote_code=trust_remote_code
        )
        return model if settings.lora_rank is None else with_adapters(model, settings.lora_rank)


def _kept(model: Any, batch: int, length: int) -> KeptActivations:
    """Return what a pass keeps; by a rule of thumb for a model whose pass depends on values, such as one of experts."""
    try:
        return kept_activations(model, batch, length)
    except INCOMPATIBLE_ERRORS as error:
        _log.info("activations of %s are estimated: %s", type(model).__name__, error)
    text = model.config.get_text_config()
    carried = batch * length * text.hidden_size * model.dtype.itemsize
    layer = LAYER_VALUES * carried
    return KeptActivations(text.num_hidden_layers * layer, layer, text.num_hidden_layers * carried, 2 * carried)


def check_finetuning(model: ModelSettings, settings: TrainingSettings) -> MemoryNeed:
    """Return what finetuning needs on each device, before anything runs.

    Raises TrainingError with the remedy where that cannot fit, where a library is missing, or where processes cannot
    share the batch or the model.
    """
    processes = process_count(model, settings)
    check_recipe(model, settings, processes)
    on_gpu = model.device != "cpu" and torch.cuda.is_available()
    source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = from_hub(AutoConfig, model_name(model), source)
    length = min(settings.sequence_length, context_length(config))
    trusted = model.trust_remote_code
    need = memory_need(config, settings, length, processes, on_gpu=on_gpu, trust_remote_code=trusted)
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
