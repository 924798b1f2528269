"""Build the Trainer of a finetuning run: its arguments, the model under its recipe, and what it reports and saves."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.loading import choose_fast_dtype, context_length, load_config, load_encoding
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import Objective
from toolformer_dag.training.recipe import RestoredShares, load_trainable_model, objective_of, optimizer, save_shares
from toolformer_dag.training.sequences import Examples, compute_training_steps, draw_batch_order, tokens_of
from toolformer_dag.training.training_report import TrainingData, TrainingError, find_last_complete_checkpoint

POINTS = 200
"""How many points the curve of the training loss has at most, about."""


def build_training_arguments(
    settings: TrainingSettings, folder: Path, steps: int, *, on_cpu: bool, resumed: bool
) -> Any:
    """Build the Trainer's arguments for a run.

    Args:
        settings: The settings of the training.
        folder: The folder in which checkpoints are saved.
        steps: The number of optimizer steps.
        on_cpu: Whether to use no GPU.
        resumed: Whether the run continues from a checkpoint.

    Raises:
        TrainingError: The batch cannot be divided by the number of processes.
    """
    world = world_size()
    sequences_per_pass = choose_device_batch(settings, world)
    objective = objective_of(settings)
    steps_between_evaluations = min(settings.eval_steps, steps)
    warmup_is_share = settings.warmup < 1  # the Trainer takes a number below 1 as a share of the steps

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=sequences_per_pass,
        per_device_eval_batch_size=sequences_per_pass,
        gradient_accumulation_steps=settings.batch_size // (sequences_per_pass * world),
        gradient_checkpointing=_needs_gradient_checkpointing(settings, on_cpu=on_cpu),
        gradient_checkpointing_kwargs={"use_reentrant": False},  # with it, adapters before frozen layers learn nothing
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup if warmup_is_share else steps,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=has_short_passes(settings, on_cpu=on_cpu),
        use_cpu=on_cpu,  # without it, torchrun on a CPU trains independent copies
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=steps_between_evaluations,
        eval_on_start=not resumed,  # a resumed run has evaluated the base model already
        save_steps=steps_between_evaluations,
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


def _needs_gradient_checkpointing(settings: TrainingSettings, *, on_cpu: bool) -> bool:
    """Return whether layers keep their inputs only, and compute the rest again; by default on a GPU."""
    if settings.gradient_checkpointing is None:
        return not on_cpu
    return settings.gradient_checkpointing


def has_short_passes(settings: TrainingSettings, *, on_cpu: bool) -> bool:
    """Return whether forward and backward passes over float32 weights run in bfloat16 (autocast).

    On a CPU they do with `precision = "mixed"`, if it is fast at bfloat16; elsewhere on every GPU that supports it.
    """
    if on_cpu:
        return settings.precision == "mixed" and choose_fast_dtype() == torch.bfloat16
    return settings.weights_dtype == "float32" and torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def world_size() -> int:
    """Return the number of processes that train together, as torchrun sets it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def sharded(settings: TrainingSettings) -> bool:
    """Return whether each process holds only a share of the weights: with several processes and without LoRA."""
    return world_size() > 1 and settings.lora_rank is None


def choose_device_batch(settings: TrainingSettings, world: int) -> int:
    """Choose how many sequences a device takes in a pass.

    This is the largest number up to `device_batch_size` that divides the device's part of the batch.

    Raises:
        TrainingError: The batch cannot be divided by `world`, the number of processes.
    """
    per_device, remainder = divmod(settings.batch_size, world)
    if remainder or not per_device:
        raise TrainingError(
            f"a batch of {settings.batch_size} cannot be shared by {world} processes; set training.batch_size to a "
            f"multiple of {world}, or training.processes"
        )

    largest = min(settings.device_batch_size, per_device)
    return max(size for size in range(1, largest + 1) if per_device % size == 0)


StepProgress = Callable[[int, int], None]
"""Called as (steps done, total steps) after each optimizer step. What it raises ends the run."""
Measured = Callable[[int, Mapping[str, float]], None]
"""Called as (step, figures) for each point of a curve; the key is "loss" or the objective's metric."""


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports steps and curves from the first process, and evaluates and saves after the last step.

    Without it the last step would be neither, unless it is a multiple of `eval_steps`.
    """

    def __init__(self, metric: str, progress: StepProgress | None, measured: Measured | None) -> None:
        self.metric = metric
        self.progress = progress
        self.measured = measured

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step; request evaluation and saving at the last step."""
        if state.global_step >= state.max_steps:
            control.should_log = True
            control.should_evaluate = True
            control.should_save = True
        if self.progress and state.is_world_process_zero:
            self.progress(state.global_step, state.max_steps)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Report the training loss or the held-out metric, whichever the Trainer logs."""
        if not self.measured or not logs or not state.is_world_process_zero:
            return
        if "loss" in logs:
            self.measured(state.global_step, {"loss": float(logs["loss"])})
        heldout_key = f"eval_{self.metric}"
        if heldout_key in logs:
            self.measured(state.global_step, {self.metric: float(logs[heldout_key])})


class _Trainer(Trainer):  # type: ignore[misc]
    """Trains by an objective's loss, and compares checkpoints by its metric.

    Where weights are divided among processes, checkpoints also get the shares of moments and random states. Such
    weights are not loaded here when a run resumes: `load_trainable_model` has read them from the checkpoint.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` divides by the items of all passes of a step

    def __init__(self, objective: Objective, **options: Any) -> None:
        self.objective = objective
        super().__init__(**options, data_collator=objective.collate, compute_metrics=self._compute_objective_metric)

    def _compute_objective_metric(self, evaluated: Any) -> dict[str, float]:
        """Return the objective's metric by name, from the figures of all held-out sequences."""
        return {self.objective.metric: self.objective.compared(evaluated.predictions)}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the items of a step, such as predicted tokens, over all its passes and processes."""
        items = sum(self.objective.items(batch) for batch in batch_samples)
        return self.accelerator.gather(torch.tensor(items, device=device)).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return what a pass adds to the mean loss of a step.

        The number of processes is a factor because gradients are averaged over the processes afterwards.
        """
        return self.objective.loss(model, inputs) / num_items_in_batch * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Return (loss, predictions, labels) of a held-out batch: None, and the figures of its sequences twice.

        They stand in for the labels too, since without labels the Trainer computes no metric.
        """
        with torch.no_grad(), self.compute_loss_context_manager():
            figures = self.objective.figures(model, self._prepare_inputs(inputs))
        return None, figures, figures

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights and then, where they are divided, the other shares.

        The Trainer's own state, which makes a checkpoint complete, is written after both.
        """
        super().save_model(output_dir, _internal_call)
        if self.is_distributed_loading_by_transformers:
            folder = Path(output_dir or self.args.output_dir)
            save_shares(self.args, folder, self.model, self.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self.is_distributed_loading_by_transformers:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


class PreparedRun(NamedTuple):
    """A run that can start.

    - `trainer`: transformers' Trainer, whose `train` runs the steps.
    - `examples`: the training sequences, in the order of the texts.
    - `checkpoint`: the folder of the last complete checkpoint, from which the run resumes; None for a new run.
    """

    trainer: Any
    examples: Examples
    checkpoint: Path | None

    def train(self) -> None:
        """Run the steps, from the checkpoint on if there is one."""
        resumed_from = str(self.checkpoint) if self.checkpoint else None
        self.trainer.train(resume_from_checkpoint=resumed_from)


def prepare(
    base: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    folder: Path,
    progress: StepProgress | None = None,
    measured: Measured | None = None,
) -> PreparedRun:
    """Prepare a run: load the model, tokenize the rows, and build the Trainer.

    This sets the random seeds of the process, and joins the processes that train together.

    Args:
        base: The model to train.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        folder: The folder of the run's checkpoints. The run resumes from the last complete one in it.
        progress: Called after each step.
        measured: Called for each point of a curve.

    Raises:
        TrainingError: The rows or the settings do not allow this training.
        ModelError: The model cannot be loaded.
    """
    set_seed(settings.seed)
    disable_progress_bar()

    encoding = load_encoding(base)
    objective = objective_of(settings)(encoding, settings)
    sequences = _tokenize_rows(objective, base, data)
    steps = compute_training_steps(len(sequences.train.sequences), settings)

    on_cpu = base.device == "cpu" or not torch.accelerator.is_available()
    checkpoint = find_last_complete_checkpoint(folder, sharded(settings))
    arguments = build_training_arguments(settings, folder, steps, on_cpu=on_cpu, resumed=checkpoint is not None)
    _ = arguments.device  # reading it joins the processes, which has to happen before weights are divided among them

    trainer = _Trainer(
        objective,
        model=_load_model(base, settings, checkpoint, encoding.tokenizer),
        args=arguments,
        train_dataset=_list_in_training_order(sequences.train, steps, settings),
        eval_dataset=sorted(sequences.heldout.sequences, key=tokens_of),
        processing_class=encoding.tokenizer,
        callbacks=_build_callbacks(objective, settings, progress, measured),
        optimizer_cls_and_kwargs=optimizer(settings, on_cpu=on_cpu),
    )
    if objective.without_base:  # it compares the trained model with the base model
        objective.base = _load_frozen_base(base, settings, arguments.device)
    trainer.remove_callback(PrinterCallback)  # the report holds the curves
    return PreparedRun(trainer, sequences.train, checkpoint)


class _Sequences(NamedTuple):
    """The sequences that a run trains on, and those held out."""

    train: Examples
    heldout: Examples


def _tokenize_rows(objective: Objective, base: ModelSettings, data: TrainingData) -> _Sequences:
    """Tokenize the rows of a run to sequences that fit into the model's context. Held-out rows are not packed.

    Raises:
        TrainingError: No sequence is left to train on, or none is held out.
        ModelError: The model's config cannot be loaded.
    """
    settings = objective.settings
    length = min(settings.sequence_length, context_length(load_config(base)))
    train = objective.examples(data.train, length, packing=settings.packing)
    heldout = objective.examples(data.heldout, length, packing=False)

    if not train.sequences or not heldout.sequences:
        raise TrainingError("all texts, or all held-out texts, are empty for this tokenizer; use longer texts")
    return _Sequences(train, heldout)


def _load_model(base: ModelSettings, settings: TrainingSettings, checkpoint: Path | None, tokenizer: Any) -> Any:
    """Load the model to train, or this process's share of it, and fit the tokenizer's padding to it.

    checkpoint: where a run with divided weights resumes. Raises ModelError, TrainingError.
    """
    processes = world_size() if sharded(settings) else 1
    model = load_trainable_model(base, settings, processes, checkpoint)
    _drop_unknown_padding(tokenizer, model)
    return model


def _build_callbacks(
    objective: Objective, settings: TrainingSettings, progress: StepProgress | None, measured: Measured | None
) -> list[TrainerCallback]:
    """Return what the Trainer calls: reports of progress and, where weights are divided, the restoring of shares."""
    report = ProgressCallback(objective.metric, progress, measured)
    return [report, RestoredShares()] if sharded(settings) else [report]


def _drop_unknown_padding(tokenizer: Any, model: Any) -> None:
    """Remove a padding token without an embedding, which would make the checkpoint unloadable."""
    if (tokenizer.pad_token_id or 0) >= model.get_input_embeddings().num_embeddings:
        tokenizer.pad_token = None


def _load_frozen_base(base: ModelSettings, settings: TrainingSettings, device: Any) -> Any:
    """Load the base model as it is trained, without gradients, onto a device. Raises ModelError."""
    model = load_trainable_model(base, settings, world=1, checkpoint=None).to(device)
    return model.eval().requires_grad_(False)


def _list_in_training_order(train: Examples, steps: int, settings: TrainingSettings) -> list[tuple[list[int], ...]]:
    """Return the sequences of all steps, in the order in which the Trainer reads them."""
    lengths = [tokens_of(sequence) for sequence in train.sequences]
    order = draw_batch_order(lengths, settings.batch_size, steps, settings.seed)
    return [train.sequences[index] for index in order]
