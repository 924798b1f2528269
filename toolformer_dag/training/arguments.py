"""Our settings in the words of the Trainer."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from toolformer_dag.training.errors import TrainingError
from toolformer_dag.training.settings import TrainingSettings

ZERO3 = Path(__file__).with_name("zero3.json")
POINTS = 200  # of the loss curve


def training_arguments(settings: TrainingSettings, folder: Path, steps: int, *, on_cpu: bool, resumed: bool) -> Any:
    """bfloat16 where the GPU has it, float32 elsewhere. Raises TrainingError."""
    world = world_size(on_cpu)
    each = device_batch(settings, world)
    every = min(settings.eval_steps, steps)
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        gradient_accumulation_steps=settings.batch_size // (each * world),
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup if settings.warmup < 1 else steps,  # below 1 it is a share of the steps
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=on_cpu,  # without it torchrun on CPU trains unconnected copies
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=every,
        eval_on_start=not resumed,
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="perplexity",
        greater_is_better=False,
        logging_steps=max(1, steps // POINTS),
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu and torch.cuda.is_available(),
        deepspeed=str(ZERO3) if settings.deepspeed else None,
    )


def world_size(on_cpu: bool) -> int:
    """How many shares a batch is cut into: torchrun's processes, or the GPUs of the only one."""
    return int(os.environ.get("WORLD_SIZE", "0")) or (1 if on_cpu else max(1, torch.cuda.device_count()))


def device_batch(settings: TrainingSettings, world: int) -> int:
    """The largest batch up to `device_batch_size` of which a whole number makes up the batch. Raises TrainingError."""
    share, rest = divmod(settings.batch_size, world)
    if rest or not share:
        raise TrainingError(
            f"a batch of {settings.batch_size} cannot be shared by {world} processes; set training.batch_size to a "
            "multiple of the processes"
        )
    return max(size for size in range(1, min(settings.device_batch_size, share) + 1) if share % size == 0)
