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
from toolformer_dag.model.loading import load_from_hub
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.recipe import check_recipe, is_divided, merged, set_cache
from toolformer_dag.training.trainer import Measured, PreparedRun, StepProgress, prepare, world_size
from toolformer_dag.training.training_report import (
    NOT_WEIGHTS,
    TrainingData,
    TrainingError,
    TrainingReport,
    build_run_identity,
    curve,
    publish,
    read_report,
    write_record,
)


def finetune(
    base: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    out: Path,
    progress: StepProgress | None = None,
    measured: Measured | None = None,
) -> TrainingReport:
    """Finetune a model in this process, and publish the checkpoint that is best on the held-out rows.

    A killed run resumes from its last checkpoint. On a CPU, it ends with the same weights as an uninterrupted run.
    Under torchrun, every process calls this function, and process 0 publishes. `train` starts these processes.

    Args:
        base: The model. Its dtype and token budget have no effect. Its device only matters if it is `cpu`, which avoids
            GPUs.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        out: The folder of the checkpoint. If it holds the same run already, nothing is trained. Another run in it is
            replaced when this one is finished.
        progress: Called after each step.
        measured: Called for each point of a curve.

    Raises:
        TrainingError: The training cannot run, also because of a full disk or a damaged checkpoint.
        ModelError: The model cannot be loaded.
    """
    _check_rows(data)
    check_recipe(base, settings, world_size())

    identity = build_run_identity(base, data, settings)
    name = fingerprint(identity)
    finished = find_finished_run(name, out)
    if finished:
        return finished

    folder = out.with_name(f"{out.name}.partial-{name}")  # `publish` removes such folders of other runs
    began = time.monotonic()
    run = prepare(base, data, settings, folder, progress, measured)
    with _explain_disk_errors(folder, run.checkpoint):
        run.train()
        report = _build_report(run, name, seconds=time.monotonic() - began)

        run.trainer.accelerator.wait_for_everyone()
        if run.trainer.is_world_process_zero():
            final = _write_final_folder(run.trainer, base, settings, folder / "final")
            write_record(final, report, {"fingerprint": name, **identity, "versions": _get_library_versions()})
            publish(final, out)
        run.trainer.accelerator.wait_for_everyone()
    return report


def _check_rows(data: TrainingData) -> None:
    """Raise TrainingError where there are no rows to train on, or none held out."""
    if not data.train or not data.heldout:
        raise TrainingError(
            f"nothing to finetune on: {len(data.train)} texts, {len(data.heldout)} held-out texts; lower tau_f or add "
            "shards"
        )


def _get_library_versions() -> dict[str, str]:
    """Return the versions of the libraries that train; the record holds them, the identity of a run does not."""
    return {library: get_installed_version(library) for library in ("torch", "transformers", "accelerate")}


def find_finished_run(name: str, out: Path) -> TrainingReport | None:
    """Return the report of the run with the fingerprint `name`, marked as reused; None where `out` does not hold it."""
    finished = read_report(out)
    if finished is None or finished.fingerprint != name:
        return None
    return replace(finished, reused=True)


@contextmanager
def _explain_disk_errors(folder: Path, checkpoint: Path | None) -> Iterator[None]:
    """Turn an error of the `with` block into a TrainingError, if a full disk or a damaged checkpoint caused it.

    Args:
        folder: The folder in which checkpoints are written.
        checkpoint: The checkpoint from which the run resumed, if any.
    """
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        disk_error = _find_disk_error(folder, checkpoint, error)
        if disk_error is None:
            raise
        raise disk_error from error


def _find_disk_error(folder: Path, checkpoint: Path | None, error: Exception) -> TrainingError | None:
    """Find out whether the disk caused an error, which means that a checkpoint could not be written or read.

    Returns:
        The error to raise instead, or None if there is another cause.
    """
    message = " ".join(str(error).split())[:200]
    if _is_of_damaged_checkpoint(error, message):
        return TrainingError(
            f"the checkpoint {checkpoint} is damaged ({message}); remove it and run again, which goes on from the one "
            "before"
        )

    reason = _find_disk_reason(error, message)
    if reason is None:
        return None
    return TrainingError(f"weights in {folder} cannot be written or read ({reason}); free disk space and run again")


def _is_of_damaged_checkpoint(error: Exception, message: str) -> bool:
    """Return whether reading a damaged checkpoint caused an error. message: the error's text on one line."""
    return isinstance(error, EOFError | UnpicklingError) or "PytorchStreamReader" in message


def _find_disk_reason(error: Exception, message: str) -> str | None:
    """Return why the disk caused an error; None where it did not. message: the error's text on one line."""
    if "PytorchStreamWriter" in message or "inline_container" in message:
        return "the disk took less than was written"
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror or message
    return message if isinstance(error, SafetensorError | shutil.Error) else None


def _build_report(run: PreparedRun, name: str, *, seconds: float) -> TrainingReport:
    """Build the report of a run whose training has ended.

    Args:
        run: The run.
        name: The fingerprint of the run.
        seconds: How long it took.

    Raises:
        TrainingError: The held-out metric was never finite.
    """
    trainer = run.trainer
    state = trainer.state
    metric = trainer.objective.metric
    return TrainingReport(
        fingerprint=name,
        steps=state.global_step,
        best_step=_get_best_step(state, metric),
        texts=run.examples.texts,
        examples=len(run.examples.sequences),
        split_texts=run.examples.split,
        empty_texts=run.examples.empty,
        tokens=run.examples.tokens,
        seconds=seconds,
        device=str(trainer.args.device),
        processes=world_size(),
        divided=is_divided(list(trainer.model.parameters())),
        losses=curve(state.log_history, "loss"),
        heldout=curve(state.log_history, metric, "eval_"),
    )


def _get_best_step(state: Any, metric: str) -> int:
    """Return the step with the best held-out metric.

    Args:
        state: The state of the Trainer.
        metric: The name of the metric, for the message.

    Raises:
        TrainingError: The metric was never finite.
    """
    if state.best_global_step is None:
        raise TrainingError(
            f"held-out {metric} was never finite in {state.global_step} steps; lower training.learning_rate"
        )
    return int(state.best_global_step)


def _write_final_folder(trainer: Any, base: ModelSettings, settings: TrainingSettings, final: Path) -> Path:
    """Write the trained model to the folder `final`, in a form that transformers can load.

    It is the checkpoint that was best on the held-out rows, without the files that only a resumed run needs. LoRA's
    adapters are merged into the weights of `base`.

    Args:
        trainer: The Trainer, after its training.
        base: The model that was finetuned.
        settings: The settings of the training.
        final: The folder to write. What is in it is removed first.

    Returns:
        The folder `final`.
    """
    best = Path(trainer.state.best_model_checkpoint)
    shutil.rmtree(final, ignore_errors=True)  # left by a run that was killed here

    if settings.lora_rank is None:
        _copy_weights(best, final, base)
    else:  # the checkpoint has only the adapters
        merged(base, settings, best).save_pretrained(final)
        tokenizer = trainer.processing_class
        tokenizer.save_pretrained(final)
    return final


def _copy_weights(best: Path, final: Path, base: ModelSettings) -> None:
    """Copy weights, config, tokenizer and code; the config says again that passes return keys and values."""
    shutil.copytree(best, final, ignore=shutil.ignore_patterns(*NOT_WEIGHTS))
    config = load_from_hub(AutoConfig, str(final), {"trust_remote_code": base.trust_remote_code})
    set_cache(config, True)
    config.save_pretrained(final)
