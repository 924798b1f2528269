"""Build the Trainer of a run: arguments, model and held-out perplexity."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.loading import fit_threads, from_hub, load_tokens
from toolformer_dag.model.weights import model_name
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.sequences import IGNORED, Examples, batch_order, collate, examples, training_steps
from toolformer_dag.training.training_run import TrainingError, last_complete_checkpoint

POINTS = 200  # points of the loss curve


def training_arguments(settings: TrainingSettings, folder: Path, steps: int, *, on_cpu: bool, resumed: bool) -> Any:
    """Return the Trainer's arguments; bfloat16 where the GPU supports it, else float32. Raises TrainingError."""
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
        warmup_steps=settings.warmup if settings.warmup < 1 else steps,  # below 1: a share of the steps
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        use_cpu=on_cpu,  # without it, torchrun on a CPU trains independent copies
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
    )


def world_size(on_cpu: bool) -> int:
    """Return the number of parts of a batch: the processes of torchrun, or the GPUs of a single process."""
    return int(os.environ.get("WORLD_SIZE", "0")) or (1 if on_cpu else max(1, torch.cuda.device_count()))


def device_batch(settings: TrainingSettings, world: int) -> int:
    """Return the largest size up to `device_batch_size` that divides a device's share of the batch.

    Raises TrainingError where the batch cannot be divided by the processes.
    """
    share, rest = divmod(settings.batch_size, world)
    if rest or not share:
        raise TrainingError(
            f"a batch of {settings.batch_size} cannot be shared by {world} processes; set training.batch_size to a "
            f"multiple of {world}"
        )
    return max(size for size in range(1, min(settings.device_batch_size, share) + 1) if share % size == 0)


def row_losses(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed loss in nats and the number of predicted tokens, [rows, 2], to discard the logits."""
    scores = (logits[0] if isinstance(logits, tuple) else logits)[:, :-1].float()
    targets = labels[:, 1:]
    losses = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
    return torch.stack([losses.view_as(targets).sum(-1), (targets != IGNORED).sum(-1)], -1)


def token_perplexity(evaluated: Any) -> dict[str, float]:
    """Compute the perplexity over all held-out tokens; infinite on overflow, so that it is never the best."""
    loss, tokens = evaluated.predictions.sum(0, dtype="float64")
    try:
        return {"perplexity": math.exp(loss / tokens)}
    except OverflowError:
        return {"perplexity": math.inf}


StepProgress = Callable[[int, int], None]
"""(steps done, total steps) -> None."""


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports progress, and evaluates and saves the last step even if it is not a multiple of `eval_steps`."""

    def __init__(self, progress: StepProgress | None) -> None:
        self.progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step; request evaluation and saving at the last step."""
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        if self.progress and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)
        return control


@dataclass(frozen=True, slots=True)
class Prepared:
    """A Trainer that is ready to start, and its training sequences."""

    trainer: Any
    train: Examples


def prepare(
    base: ModelSettings,
    texts: Sequence[str],
    heldout: Sequence[str],
    settings: TrainingSettings,
    folder: Path,
    progress: StepProgress | None,
) -> Prepared:
    """Build the Trainer of a run. Weights are float32, even where passes run in bfloat16.

    Raises TrainingError, ModelError.
    """
    set_seed(settings.seed)
    disable_progress_bar()
    tokens = load_tokens(model_name(base), revision=base.revision, trust_remote_code=base.trust_remote_code)
    length = min(settings.sequence_length, tokens.positions)
    train, held = examples(tokens.encoding, texts, length), examples(tokens.encoding, heldout, length)
    if not train.sequences or not held.sequences:
        raise TrainingError("all texts, or all held-out texts, are empty for this tokenizer; use longer texts")
    steps = training_steps(len(train.sequences), settings.batch_size, settings.max_steps, settings.epochs)
    order = batch_order([len(ids) for ids in train.sequences], settings.batch_size, steps, settings.seed)
    on_cpu = base.device == "cpu" or not torch.accelerator.is_available()
    resumed = last_complete_checkpoint(folder) is not None
    arguments = training_arguments(settings, folder, steps, on_cpu=on_cpu, resumed=resumed)
    model = _model(base)
    _remove_invalid_padding(tokens.encoding.tokenizer, model)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": train.sequences}).select(order),
        eval_dataset=Dataset.from_dict({"input_ids": sorted(held.sequences, key=len)}),
        data_collator=collate,
        processing_class=tokens.encoding.tokenizer,
        preprocess_logits_for_metrics=row_losses,
        compute_metrics=token_perplexity,
        callbacks=[ProgressCallback(progress)],
    )
    trainer.remove_callback(PrinterCallback)  # the report holds the curves
    return Prepared(trainer, train)


def _model(base: ModelSettings) -> Any:
    source = {"revision": base.revision, "trust_remote_code": base.trust_remote_code}
    options = {**source, "dtype": torch.float32, "use_safetensors": True}
    model = from_hub(AutoModelForCausalLM, model_name(base), options)
    set_cache(model, False)
    _fix_generation(model.generation_config)
    if tied := getattr(model, "all_tied_weights_keys", None):
        model._keys_to_ignore_on_save = set(tied)  # the Trainer warns if its best checkpoint lacks them
    if getattr(model.config, "output_router_logits", False):
        model.config.output_router_logits = False  # disables the auxiliary loss of experts
    fit_threads(model)
    return model


def _fix_generation(generation: Any) -> None:
    """Set `do_sample` where the config is invalid without it and could not be saved."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def _remove_invalid_padding(tokenizer: Any, model: Any) -> None:
    """Remove a padding token beyond the embedding: in the config, it would make the checkpoint unloadable."""
    if (tokenizer.pad_token_id or 0) >= model.get_input_embeddings().num_embeddings:
        tokenizer.pad_token = None


def set_cache(model: Any, enabled: bool) -> None:
    """Set whether passes return keys and values, also in the text config of a model of text and images."""
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = enabled
