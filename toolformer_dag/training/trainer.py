"""Build the Trainer of a run: its arguments, the model under a recipe that fits, what it reports and saves."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.loading import context_length, fast_dtype, load_config, load_encoding
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import Objective
from toolformer_dag.training.recipe import RestoredShares, objective_of, optimizer, save_shares, trained_model
from toolformer_dag.training.sequences import Examples, batch_order, tokens_of, training_steps
from toolformer_dag.training.training_report import TrainingData, TrainingError, last_complete_checkpoint

POINTS = 200  # points of the loss curve


def training_arguments(settings: TrainingSettings, folder: Path, steps: int, *, on_cpu: bool, resumed: bool) -> Any:
    """Return the Trainer's arguments; passes run in bfloat16 where `short_passes` says so. Raises TrainingError."""
    world = world_size()
    each, objective = device_batch(settings, world), objective_of(settings)
    every = min(settings.eval_steps, steps)
    checkpointing = settings.gradient_checkpointing
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=each,
        per_device_eval_batch_size=each,
        gradient_accumulation_steps=settings.batch_size // (each * world),
        gradient_checkpointing=not on_cpu if checkpointing is None else checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},  # with it, adapters before frozen layers learn nothing
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup if settings.warmup < 1 else steps,  # below 1: a share of the steps
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=short_passes(settings, on_cpu=on_cpu),
        use_cpu=on_cpu,  # without it, torchrun on a CPU trains independent copies
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=every,
        eval_on_start=not resumed,
        save_steps=every,
        save_total_limit=2,  # the last and the best
        save_only_model=sharded(settings),  # save_shares writes the rest: the Trainer would save one process's share
        metric_for_best_model=objective.metric,
        greater_is_better=objective.greater_is_better,
        logging_steps=max(1, steps // POINTS),
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu and torch.cuda.is_available(),
    )


def short_passes(settings: TrainingSettings, *, on_cpu: bool) -> bool:
    """Return whether passes over float32 weights run in bfloat16: on a GPU that has it, on a CPU as `mixed`."""
    if on_cpu:
        return settings.precision == "mixed" and fast_dtype() == torch.bfloat16
    return settings.weights_dtype == "float32" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def world_size() -> int:
    """Return the number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharded(settings: TrainingSettings) -> bool:
    """Return whether each process holds a share of the weights: not one alone, and not beside LoRA's frozen weights."""
    return world_size() > 1 and settings.lora_rank is None


def device_batch(settings: TrainingSettings, world: int) -> int:
    """Return the largest size up to `device_batch_size` that divides a device's share of the batch.

    Raises TrainingError where the batch cannot be divided by the processes.
    """
    share, rest = divmod(settings.batch_size, world)
    if rest or not share:
        raise TrainingError(
            f"a batch of {settings.batch_size} cannot be shared by {world} processes; set training.batch_size to a "
            f"multiple of {world}, or training.processes"
        )
    return max(size for size in range(1, min(settings.device_batch_size, share) + 1) if share % size == 0)


StepProgress = Callable[[int, int], None]
"""(steps done, total steps) -> None."""
Measured = Callable[[int, Mapping[str, float]], None]
"""(step, {"loss": ...} or {the objective's metric: ...}) -> None: a point of a curve as soon as it is known."""


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports steps and curves, and evaluates and saves the last step even if it is not a multiple of `eval_steps`."""

    def __init__(self, metric: str, progress: StepProgress | None, measured: Measured | None) -> None:
        self.metric, self.progress, self.measured = metric, progress, measured

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step; request evaluation and saving at the last step."""
        if state.global_step >= state.max_steps:
            control.should_log = control.should_evaluate = control.should_save = True
        if self.progress and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Report the training loss or the held-out metric."""
        for key, name in (("loss", "loss"), (f"eval_{self.metric}", self.metric)):
            if self.measured and logs and key in logs and state.is_world_process_zero:
                self.measured(state.global_step, {name: float(logs[key])})


class _Trainer(Trainer):  # type: ignore[misc]
    """Trains by an objective's loss and compares by its metric.

    Saves shares beside divided weights, which are loaded from their checkpoint before a run goes on.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` divides by the items of all passes of a step

    def __init__(self, objective: Objective, **options: Any) -> None:
        self.objective = objective
        super().__init__(
            **options,
            data_collator=objective.collate,
            compute_metrics=lambda evaluated: {objective.metric: objective.compared(evaluated.predictions)},
        )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the items of a step over all its passes and processes."""
        return self.accelerator.gather(torch.tensor(sum(map(self.objective.items, batch_samples)), device=device)).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a pass's share of the mean loss of a step; gradients are averaged over the processes."""
        return self.objective.loss(model, inputs) / num_items_in_batch * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return the figures of held-out sequences, as labels too: without labels the Trainer compares nothing."""
        with torch.no_grad(), self.compute_loss_context_manager():
            figures = self.objective.figures(model, self._prepare_inputs(inputs))
        return None, figures, figures

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights, and the shares before the Trainer's state, which makes a checkpoint count."""
        super().save_model(output_dir, _internal_call)
        if self.is_distributed_loading_by_transformers:
            folder = Path(output_dir or self.args.output_dir)
            save_shares(self.args, folder, self.model, self.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


def prepare(
    base: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    folder: Path,
    progress: StepProgress | None = None,
    measured: Measured | None = None,
) -> tuple[Any, Examples, Path | None]:
    """Return the Trainer of a run, its training sequences, and the last checkpoint in `folder`, from which it goes on.

    Raises TrainingError, ModelError.
    """
    set_seed(settings.seed)
    disable_progress_bar()
    encoding = load_encoding(base)
    length = min(settings.sequence_length, context_length(load_config(base)))
    objective = objective_of(settings)(encoding, settings)
    train = objective.examples(data.train, length, settings.packing)
    held = objective.examples(data.heldout, length, False)
    if not train.sequences or not held.sequences:
        raise TrainingError("all texts, or all held-out texts, are empty for this tokenizer; use longer texts")
    steps = training_steps(len(train.sequences), settings)
    order = batch_order(list(map(tokens_of, train.sequences)), settings.batch_size, steps, settings.seed)
    on_cpu = base.device == "cpu" or not torch.accelerator.is_available()
    divided = sharded(settings)
    checkpoint = last_complete_checkpoint(folder, divided)
    arguments = training_arguments(settings, folder, steps, on_cpu=on_cpu, resumed=checkpoint is not None)
    _ = arguments.device  # asking for it joins the processes, before weights are divided among them
    model = trained_model(base, settings, world_size() if divided else 1, checkpoint)
    if (encoding.tokenizer.pad_token_id or 0) >= model.get_input_embeddings().num_embeddings:
        encoding.tokenizer.pad_token = None  # beyond the embedding it would make the checkpoint unloadable
    trainer = _Trainer(
        objective,
        model=model,
        args=arguments,
        train_dataset=[train.sequences[at] for at in order],
        eval_dataset=sorted(held.sequences, key=tokens_of),
        processing_class=encoding.tokenizer,
        callbacks=[ProgressCallback(objective.metric, progress, measured), *([RestoredShares()] if divided else [])],
        optimizer_cls_and_kwargs=optimizer(settings, on_cpu=on_cpu),
    )
    if objective.without_base:
        frozen = trained_model(base, settings, 1, None).to(arguments.device)
        objective.base = frozen.eval().requires_grad_(False)
    trainer.remove_callback(PrinterCallback)  # the report holds the curves
    return trainer, train, checkpoint
