"""Finetune on C* or on other rows (paper, section 2 "Model Finetuning", section 4.1, appendix B)."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError
from transformers import AutoConfig

from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.record import get_installed_version
from toolformer_dag.model.loading import load_pretrained
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.recipe import check_recipe, has_divided_weights, load_merged_model, set_use_cache
from toolformer_dag.training.trainer import (
    MeasurementCallback,
    PreparedRun,
    StepCallback,
    get_process_count,
    prepare_run,
)
from toolformer_dag.training.training_report import (
    RESUME_FILE_PATTERNS,
    TrainingData,
    TrainingError,
    TrainingReport,
    build_run_identity,
    extract_curve,
    publish_checkpoint,
    read_training_report,
    write_training_record,
)


def finetune(
    base_model: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    output_folder: Path,
    step_callback: StepCallback | None = None,
    measurement_callback: MeasurementCallback | None = None,
) -> TrainingReport:
    """Finetune a model in this process, and publish the checkpoint that is best on the held-out rows.

    A killed run resumes from its last checkpoint. On a CPU, it ends with the same weights as an uninterrupted run.
    Under torchrun, every process calls this function, and process 0 publishes. `train` starts these processes.

    Args:
        base_model: The model. Its dtype and token budget have no effect. Its device only matters if it is `cpu`, which
            avoids GPUs.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        output_folder: The folder of the checkpoint. If it holds the same run already, nothing is trained. Another run
            in it is replaced when this one is finished.
        step_callback: Called after each step.
        measurement_callback: Called for each point of a curve.

    Returns:
        The report of the training, or that of the run that was finished before.

    Raises:
        TrainingError: The training cannot run, also because of a full disk or a damaged checkpoint.
        ModelError: The model cannot be loaded.
    """
    _require_rows(data)
    check_recipe(base_model, settings, get_process_count())

    identity = build_run_identity(base_model, data, settings)
    run_fingerprint = fingerprint(identity)
    finished_report = find_finished_run(run_fingerprint, output_folder)
    if finished_report:
        return finished_report

    # `publish_checkpoint` removes such folders of other runs.
    partial_folder = output_folder.with_name(f"{output_folder.name}.partial-{run_fingerprint}")
    start_time = time.monotonic()
    prepared_run = prepare_run(base_model, data, settings, partial_folder, step_callback, measurement_callback)
    trainer = prepared_run.trainer
    with _explain_disk_errors(partial_folder, prepared_run.resume_checkpoint):
        prepared_run.run_training()
        report = _build_training_report(prepared_run, run_fingerprint, seconds=time.monotonic() - start_time)

        # Process 0 publishes once all processes have written their files, and the others wait for it.
        trainer.accelerator.wait_for_everyone()
        if trainer.is_world_process_zero():
            final_folder = _write_final_folder(trainer, base_model, settings, partial_folder / "final")
            record_fields = {"fingerprint": run_fingerprint, **identity, "versions": _get_library_versions()}
            write_training_record(final_folder, report, record_fields)
            publish_checkpoint(final_folder, output_folder)
        trainer.accelerator.wait_for_everyone()
    return report


def _require_rows(data: TrainingData) -> None:
    """Check that there are rows to train on, and held-out rows.

    Raises:
        TrainingError: One of them is missing.
    """
    if not data.train or not data.heldout:
        raise TrainingError(
            f"nothing to finetune on: {len(data.train)} texts, {len(data.heldout)} held-out texts; lower tau_f or add "
            "shards"
        )


def _get_library_versions() -> dict[str, str]:
    """Return the versions of the libraries that train. They are recorded, but are not part of a run's identity."""
    return {library: get_installed_version(library) for library in ("torch", "transformers", "accelerate")}


def find_finished_run(run_fingerprint: str, output_folder: Path) -> TrainingReport | None:
    """Return the report of a finished run, marked as reused.

    Returns:
        The report. None if `output_folder` holds no whole checkpoint, or that of a run with another fingerprint.
    """
    report = read_training_report(output_folder)
    if report is None or report.fingerprint != run_fingerprint:
        return None
    return replace(report, reused=True)


@contextmanager
def _explain_disk_errors(folder: Path, resume_checkpoint: Path | None) -> Iterator[None]:
    """Turn an error of the `with` block into a TrainingError, if a full disk or a damaged checkpoint caused it.

    Args:
        folder: The folder in which checkpoints are written.
        resume_checkpoint: The checkpoint from which the run resumed, if any.
    """
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        disk_error = _build_disk_error(folder, resume_checkpoint, error)
        if disk_error is None:  # the disk did not cause it
            raise
        raise disk_error from error


def _build_disk_error(folder: Path, resume_checkpoint: Path | None, error: Exception) -> TrainingError | None:
    """Explain an error that the disk caused, because a checkpoint could not be written or read.

    Returns:
        The error to raise instead, or None if there is another cause.
    """
    message = " ".join(str(error).split())[:200]
    if _is_damaged_checkpoint_error(error, message):
        return TrainingError(
            f"the checkpoint {resume_checkpoint} is damaged ({message}); remove it and run again, "
            "which goes on from the one before"
        )

    reason = _explain_disk_error(error, message)
    if reason is None:
        return None
    return TrainingError(f"weights in {folder} cannot be written or read ({reason}); free disk space and run again")


def _is_damaged_checkpoint_error(error: Exception, message: str) -> bool:
    """Return whether reading a damaged checkpoint caused an error, of which `message` is the text on one line."""
    return isinstance(error, EOFError | UnpicklingError) or "PytorchStreamReader" in message


def _explain_disk_error(error: Exception, message: str) -> str | None:
    """Explain how the disk caused an error.

    Args:
        error: The error.
        message: The text of the error on one line.

    Returns:
        The reason, or None if the disk did not cause the error.
    """
    was_write_incomplete = "PytorchStreamWriter" in message or "inline_container" in message
    if was_write_incomplete:
        return "the disk took less than was written"

    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or message
    if isinstance(error, SafetensorError | shutil.Error):
        return message
    return None


def _build_training_report(prepared_run: PreparedRun, run_fingerprint: str, *, seconds: float) -> TrainingReport:
    """Build the report of a run whose training has ended.

    Args:
        prepared_run: The run.
        run_fingerprint: The fingerprint of the run.
        seconds: How long it took.

    Raises:
        TrainingError: The held-out metric was never finite.
    """
    trainer = prepared_run.trainer
    trainer_state = trainer.state
    metric_name = trainer.objective.metric_name
    training_examples = prepared_run.training_examples
    return TrainingReport(
        fingerprint=run_fingerprint,
        steps=trainer_state.global_step,
        best_step=_get_best_step(trainer_state, metric_name),
        texts=training_examples.text_count,
        examples=len(training_examples.sequences),
        split_texts=training_examples.split_text_count,
        empty_texts=training_examples.empty_text_count,
        tokens=training_examples.token_count,
        seconds=seconds,
        device=str(trainer.args.device),
        processes=get_process_count(),
        divided=has_divided_weights(list(trainer.model.parameters())),
        losses=extract_curve(trainer_state.log_history, "loss"),
        heldout=extract_curve(trainer_state.log_history, metric_name, "eval_"),
    )


def _get_best_step(trainer_state: Any, metric_name: str) -> int:
    """Return the step with the best held-out metric.

    Args:
        trainer_state: The state of the Trainer.
        metric_name: The name of the metric, for the message.

    Raises:
        TrainingError: The metric was never finite.
    """
    if trainer_state.best_global_step is None:
        raise TrainingError(
            f"held-out {metric_name} was never finite in {trainer_state.global_step} steps; "
            "lower training.learning_rate"
        )
    return int(trainer_state.best_global_step)


def _write_final_folder(
    trainer: Any, base_model: ModelSettings, settings: TrainingSettings, final_folder: Path
) -> Path:
    """Write the trained model to the folder `final_folder`, in a form that transformers can load.

    It is the checkpoint that was best on the held-out rows, without the files that only a resumed run needs. LoRA's
    adapters are merged into the weights of `base_model`.

    Args:
        trainer: The Trainer, after its training.
        base_model: The model that was finetuned.
        settings: The settings of the training.
        final_folder: The folder to write. What is in it is removed first.

    Returns:
        The folder `final_folder`.
    """
    best_checkpoint = Path(trainer.state.best_model_checkpoint)
    shutil.rmtree(final_folder, ignore_errors=True)  # left by a run that was killed here

    has_adapters = settings.lora_rank is not None
    if has_adapters:  # the checkpoint has only the adapters
        load_merged_model(base_model, settings, best_checkpoint).save_pretrained(final_folder)
        tokenizer = trainer.processing_class
        tokenizer.save_pretrained(final_folder)
    else:
        _copy_checkpoint_weights(best_checkpoint, final_folder, base_model)
    return final_folder


def _copy_checkpoint_weights(best_checkpoint: Path, final_folder: Path, base_model: ModelSettings) -> None:
    """Copy a checkpoint without the files that only a resumed run needs, and turn the model's cache on again.

    Training had turned the cache of keys and values off in the config. Without it, generating text is slow.
    """
    shutil.copytree(best_checkpoint, final_folder, ignore=shutil.ignore_patterns(*RESUME_FILE_PATTERNS))

    loading_options = {"trust_remote_code": base_model.trust_remote_code}
    config = load_pretrained(AutoConfig, str(final_folder), loading_options)
    set_use_cache(config, True)
    config.save_pretrained(final_folder)
