"""Build the Trainer of a finetuning run: its arguments, the model under its recipe, and what it reports and saves."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils.logging import disable_progress_bar

from toolformer_dag.model.loading import choose_fast_dtype, load_config, load_encoding, read_context_length
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.objective import Objective
from toolformer_dag.training.recipe import (
    RestoredShares,
    choose_optimizer,
    load_trainable_model,
    objective_of,
    save_training_shares,
)
from toolformer_dag.training.sequences import Examples, compute_step_count, count_sequence_tokens, draw_batch_order
from toolformer_dag.training.training_report import TrainingData, TrainingError, find_last_complete_checkpoint

MAX_CURVE_POINTS = 200
"""How many points the curve of the training loss has at most, about."""


def build_training_arguments(
    settings: TrainingSettings, checkpoints_folder: Path, step_count: int, *, on_cpu: bool, is_resumed: bool
) -> Any:
    """Build the Trainer's arguments for a run.

    Args:
        settings: The settings of the training.
        checkpoints_folder: The folder in which checkpoints are saved.
        step_count: The number of optimizer steps.
        on_cpu: Whether to use no GPU.
        is_resumed: Whether the run continues from a checkpoint.

    Raises:
        TrainingError: The batch cannot be divided by the number of processes.
    """
    process_count = get_process_count()
    sequences_per_pass = choose_device_batch_size(settings, process_count)
    passes_per_step = settings.batch_size // (sequences_per_pass * process_count)

    objective = objective_of(settings)
    steps_between_evaluations = min(settings.eval_steps, step_count)
    is_warmup_share = settings.warmup < 1  # the Trainer takes a number below 1 as a share of the steps

    return TrainingArguments(
        output_dir=str(checkpoints_folder),
        max_steps=step_count,
        per_device_train_batch_size=sequences_per_pass,
        per_device_eval_batch_size=sequences_per_pass,
        gradient_accumulation_steps=passes_per_step,
        gradient_checkpointing=_uses_gradient_checkpointing(settings, on_cpu=on_cpu),
        gradient_checkpointing_kwargs={"use_reentrant": False},  # with it, adapters before frozen layers learn nothing
        learning_rate=settings.learning_rate,
        warmup_steps=settings.warmup if is_warmup_share else step_count,
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=uses_bfloat16_passes(settings, on_cpu=on_cpu),
        use_cpu=on_cpu,  # without it, torchrun on a CPU trains independent copies
        ddp_find_unused_parameters=False,
        seed=settings.seed,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=steps_between_evaluations,
        eval_on_start=not is_resumed,  # a resumed run has evaluated the base model already
        save_steps=steps_between_evaluations,
        save_total_limit=2,  # the last and the best
        # With divided weights, `save_training_shares` writes the rest: the Trainer would save one process's share.
        save_only_model=divides_weights(settings),
        metric_for_best_model=objective.metric_name,
        greater_is_better=objective.greater_is_better,
        logging_steps=max(1, step_count // MAX_CURVE_POINTS),
        logging_nan_inf_filter=False,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=not on_cpu and torch.cuda.is_available(),
    )


def _uses_gradient_checkpointing(settings: TrainingSettings, *, on_cpu: bool) -> bool:
    """Return whether layers keep only their inputs, and compute the rest again in the backward pass.

    If the setting is not given, they do so on a GPU.
    """
    if settings.gradient_checkpointing is None:
        return not on_cpu
    return settings.gradient_checkpointing


def uses_bfloat16_passes(settings: TrainingSettings, *, on_cpu: bool) -> bool:
    """Return whether a model with float32 weights computes its passes in bfloat16 (autocast), which is faster.

    - On a CPU: with `precision = "mixed"`, whose weights are float32, if the CPU is fast at bfloat16.
    - On a GPU: with any float32 weights, if the GPU supports bfloat16.

    It is False for weights in bfloat16, which need no autocast.
    """
    if on_cpu:
        return settings.precision == "mixed" and choose_fast_dtype() == torch.bfloat16

    if settings.weights_dtype != "float32":
        return False
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported()


def get_process_count() -> int:
    """Return the number of processes that train together, which torchrun sets. Without torchrun, it is 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def divides_weights(settings: TrainingSettings) -> bool:
    """Return whether each process holds only a share of the weights, as several processes do without LoRA."""
    return get_process_count() > 1 and settings.lora_rank is None


def choose_device_batch_size(settings: TrainingSettings, process_count: int) -> int:
    """Choose how many sequences a device takes in a pass.

    This is the largest number up to `device_batch_size` that divides the device's part of the batch.

    Raises:
        TrainingError: The batch cannot be divided by `process_count`, the number of processes.
    """
    sequences_per_device, remainder = divmod(settings.batch_size, process_count)
    if remainder or not sequences_per_device:
        raise TrainingError(
            f"a batch of {settings.batch_size} cannot be shared by {process_count} processes; "
            f"set training.batch_size to a multiple of {process_count}, or training.processes"
        )

    largest_size = min(settings.device_batch_size, sequences_per_device)
    return max(size for size in range(1, largest_size + 1) if sequences_per_device % size == 0)


StepCallback = Callable[[int, int], None]
"""Called as (steps done, total steps) after each optimizer step. What it raises ends the run."""
MeasurementCallback = Callable[[int, Mapping[str, float]], None]
"""Called as (step, figures) for each point of a curve; the key is "loss" or the objective's metric."""


class ProgressCallback(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Reports steps and curves from the first process, and evaluates and saves after the last step.

    Without it the last step would be neither, unless it is a multiple of `eval_steps`.
    """

    def __init__(
        self, metric_name: str, step_callback: StepCallback | None, measurement_callback: MeasurementCallback | None
    ) -> None:
        self.metric_name = metric_name
        self.step_callback = step_callback
        self.measurement_callback = measurement_callback

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Report an optimizer step, and request evaluation and saving at the last step."""
        is_last_step = state.global_step >= state.max_steps
        if is_last_step:
            control.should_log = True
            control.should_evaluate = True
            control.should_save = True
        if self.step_callback and state.is_world_process_zero:
            self.step_callback(state.global_step, state.max_steps)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, float] | None = None, **_: Any) -> None:
        """Report the training loss or the held-out metric, whichever the Trainer logs."""
        if not self.measurement_callback or not logs:
            return
        if not state.is_world_process_zero:  # only the first process reports
            return

        if "loss" in logs:
            self.measurement_callback(state.global_step, {"loss": float(logs["loss"])})

        heldout_key = f"eval_{self.metric_name}"
        if heldout_key in logs:
            self.measurement_callback(state.global_step, {self.metric_name: float(logs[heldout_key])})


class _Trainer(Trainer):  # type: ignore[misc]
    """Trains by an objective's loss, and compares checkpoints by its metric.

    If weights are divided among processes, checkpoints also get the shares of moments and random states. Such
    weights are not loaded here when a run resumes: `load_trainable_model` has read them from the checkpoint.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` divides by the items of all passes of a step

    def __init__(self, objective: Objective, **options: Any) -> None:
        self.objective = objective
        super().__init__(
            **options, data_collator=objective.collate_sequences, compute_metrics=self._compute_objective_metric
        )

    def _compute_objective_metric(self, eval_prediction: Any) -> dict[str, float]:
        """Compute the objective's metric from the figures of all held-out sequences, as {"perplexity": 12.5}."""
        metric = self.objective.compute_metric(eval_prediction.predictions)
        return {self.objective.metric_name: metric}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        """Count the items of a step, such as predicted tokens, over all its passes and processes."""
        item_count = sum(self.objective.count_items(batch) for batch in batch_samples)
        counts_of_processes = self.accelerator.gather(torch.tensor(item_count, device=device))
        return counts_of_processes.sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return how much a forward pass adds to the mean loss of a step.

        Args:
            model: The trained model.
            inputs: The batch of the pass.
            return_outputs: Not used.
            num_items_in_batch: The number of items of the step, such as predicted tokens, over all its passes and
                processes.
        """
        summed_loss = self.objective.compute_loss(model, inputs)
        # Gradients are averaged over the processes afterwards, so the loss is multiplied by their number.
        return summed_loss / num_items_in_batch * self.accelerator.num_processes

    def prediction_step(self, model: Any, inputs: dict[str, Any], *_: Any, **__: Any) -> Any:
        """Run the model on a held-out batch, and return loss, predictions and labels as the Trainer expects them.

        The loss is None, and the predictions are the figures of the sequences. The labels are the figures again, since
        without labels the Trainer computes no metric.
        """
        with torch.no_grad(), self.compute_loss_context_manager():
            figures = self.objective.compute_figures(model, self._prepare_inputs(inputs))
        return None, figures, figures

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the weights and then, if they are divided, the shares of moments and random states.

        The Trainer's own state, which makes a checkpoint complete, is written after both.
        """
        super().save_model(output_dir, _internal_call)
        has_divided_weights = self.is_distributed_loading_by_transformers
        if has_divided_weights:
            folder = Path(output_dir or self.args.output_dir)
            save_training_shares(self.args, folder, self.model, self.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint, unless they are divided: then they are loaded already."""
        has_divided_weights = self.is_distributed_loading_by_transformers
        if not has_divided_weights:
            super()._load_from_checkpoint(resume_from_checkpoint, model)


class PreparedRun(NamedTuple):
    """A training run that can start.

    Attributes:
        trainer: The Trainer of transformers.
        training_examples: The training sequences, in the order of the texts.
        resume_checkpoint: The folder of the last complete checkpoint, from which the run resumes. None for a new run.
    """

    trainer: Any
    training_examples: Examples
    resume_checkpoint: Path | None

    def run_training(self) -> None:
        """Run all steps, or those after the checkpoint if there is one."""
        checkpoint_folder = str(self.resume_checkpoint) if self.resume_checkpoint else None
        self.trainer.train(resume_from_checkpoint=checkpoint_folder)


def prepare_run(
    base_model: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    checkpoints_folder: Path,
    step_callback: StepCallback | None = None,
    measurement_callback: MeasurementCallback | None = None,
) -> PreparedRun:
    """Prepare a run: load the model, tokenize the rows, and build the Trainer.

    This sets the random seeds of the process, and joins the processes that train together.

    Args:
        base_model: The model to train.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        checkpoints_folder: The folder of the run's checkpoints. The run resumes from the last complete one in it.
        step_callback: Called after each step.
        measurement_callback: Called for each point of a curve.

    Raises:
        TrainingError: The rows or the settings do not allow this training.
        ModelError: The model cannot be loaded.
    """
    set_seed(settings.seed)
    disable_progress_bar()

    encoding = load_encoding(base_model)
    objective = objective_of(settings)(encoding, settings)
    run_examples = _tokenize_rows(objective, base_model, data)
    step_count = compute_step_count(len(run_examples.training_examples.sequences), settings)

    on_cpu = base_model.device == "cpu" or not torch.accelerator.is_available()
    resume_checkpoint = find_last_complete_checkpoint(checkpoints_folder, divides_weights(settings))
    training_arguments = build_training_arguments(
        settings, checkpoints_folder, step_count, on_cpu=on_cpu, is_resumed=resume_checkpoint is not None
    )
    # Reading the device joins the processes, which has to happen before weights are divided among them.
    device = training_arguments.device

    trainer = _Trainer(
        objective,
        model=_load_model(base_model, settings, resume_checkpoint, encoding.tokenizer),
        args=training_arguments,
        train_dataset=_list_sequences_in_training_order(run_examples.training_examples, step_count, settings),
        eval_dataset=sorted(run_examples.heldout_examples.sequences, key=count_sequence_tokens),
        processing_class=encoding.tokenizer,
        callbacks=_build_callbacks(objective, settings, step_callback, measurement_callback),
        optimizer_cls_and_kwargs=choose_optimizer(settings, on_cpu=on_cpu),
    )
    trainer.remove_callback(PrinterCallback)  # the report holds the curves

    needs_base_model = bool(objective.setting_without_base_model)
    if needs_base_model:
        objective.base_model = _load_frozen_base_model(base_model, settings, device)
    return PreparedRun(trainer, run_examples.training_examples, resume_checkpoint)


class _RunExamples(NamedTuple):
    """The sequences that a run trains on, and those held out."""

    training_examples: Examples
    heldout_examples: Examples


def _tokenize_rows(objective: Objective, base_model: ModelSettings, data: TrainingData) -> _RunExamples:
    """Tokenize the rows of a run to sequences that fit into the model's context.

    Held-out rows are not packed, that is, each of their sequences is of one row.

    Raises:
        TrainingError: No sequence is left to train on, or none is held out.
        ModelError: The model's config cannot be loaded.
    """
    settings = objective.settings
    context_length = read_context_length(load_config(base_model))
    sequence_length = min(settings.sequence_length, context_length)

    training_examples = objective.build_examples(data.train, sequence_length, packing=settings.packing)
    heldout_examples = objective.build_examples(data.heldout, sequence_length, packing=False)
    if not training_examples.sequences or not heldout_examples.sequences:
        raise TrainingError("all texts, or all held-out texts, are empty for this tokenizer; use longer texts")
    return _RunExamples(training_examples, heldout_examples)


def _load_model(
    base_model: ModelSettings, settings: TrainingSettings, resume_checkpoint: Path | None, tokenizer: Any
) -> Any:
    """Load the model to train, or this process's share of it, and fit the tokenizer's padding to it.

    Args:
        base_model: The base model.
        settings: The settings of the training.
        resume_checkpoint: The checkpoint from which a run resumes. It is read here only if weights are divided.
        tokenizer: The model's tokenizer. It loses a padding token that the model does not know.

    Raises:
        ModelError: The model cannot be loaded.
        TrainingError: Texts are packed into one sequence, and would see each other in this model.
    """
    dividing_process_count = get_process_count() if divides_weights(settings) else 1
    model = load_trainable_model(base_model, settings, dividing_process_count, resume_checkpoint)
    _remove_unknown_padding_token(tokenizer, model)
    return model


def _build_callbacks(
    objective: Objective,
    settings: TrainingSettings,
    step_callback: StepCallback | None,
    measurement_callback: MeasurementCallback | None,
) -> list[TrainerCallback]:
    """Return the Trainer's callbacks: one that reports progress and, if weights are divided, one for their shares."""
    progress_callback = ProgressCallback(objective.metric_name, step_callback, measurement_callback)
    if divides_weights(settings):
        return [progress_callback, RestoredShares()]
    return [progress_callback]


def _remove_unknown_padding_token(tokenizer: Any, model: Any) -> None:
    """Remove the tokenizer's padding token if the model has no embedding for it: the checkpoint could not be loaded."""
    padding_token_id = tokenizer.pad_token_id or 0
    embedding_count = model.get_input_embeddings().num_embeddings
    if padding_token_id >= embedding_count:
        tokenizer.pad_token = None


def _load_frozen_base_model(base_model: ModelSettings, settings: TrainingSettings, device: Any) -> Any:
    """Load the base model onto a device, in the form in which it is trained but without gradients.

    Raises:
        ModelError: The model cannot be loaded.
        TrainingError: Texts are packed into one sequence, and would see each other in this model.
    """
    model = load_trainable_model(base_model, settings, process_count=1, resume_checkpoint=None)
    return model.to(device).eval().requires_grad_(False)


def _list_sequences_in_training_order(
    training_examples: Examples, step_count: int, settings: TrainingSettings
) -> list[tuple[list[int], ...]]:
    """Return the sequences of all steps, in the order in which the Trainer reads them. They repeat in later epochs."""
    sequence_lengths = [count_sequence_tokens(sequence) for sequence in training_examples.sequences]
    sequence_indices = draw_batch_order(sequence_lengths, settings.batch_size, step_count, settings.seed)
    return [training_examples.sequences[index] for index in sequence_indices]
