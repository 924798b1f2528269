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
    """Train `base` in this process and publish the checkpoint that is best on the held-out rows in the folder `out`.

    - A run that `out` already holds is not repeated; another one replaces it once it is finished.
    - A killed run resumes from its last checkpoint; on a CPU it ends in the same weights as an uninterrupted one.
    - Under torchrun, every process calls this, and process 0 publishes; `train` starts them.
    - The dtype and token budget of `base` have no effect; its device only matters if it is `cpu`, which avoids GPUs.

    Raises TrainingError, also for a full disk and a damaged checkpoint, and ModelError where `base` cannot be loaded.
    """
    _check_rows(data)
    check_recipe(base, settings, world_size())
    identity = build_run_identity(base, data, settings)
    name = fingerprint(identity)
    finished = find_finished_run(name, out)
    if finished:
        return finished

    folder = out.with_name(f"{out.name}.partial-{name}")  # `publish` removes those of other runs
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
    """Turn an error of the `with` block that a full disk or a damaged checkpoint caused into a TrainingError.

    folder: where checkpoints are written. checkpoint: the one from which the run resumed, if any.
    """
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, EOFError, UnpicklingError) as error:
        disk_error = _find_disk_error(folder, checkpoint, error)
        if disk_error is None:
            raise
        raise disk_error from error


def _find_disk_error(folder: Path, checkpoint: Path | None, error: Exception) -> TrainingError | None:
    """Return the error to raise where a checkpoint could not be written or read; None for an error of another cause."""
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
    """Return the report of a run whose training has ended.

    name: the fingerprint of the run. Raises TrainingError where the held-out metric was never finite.
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
    """Return the step with the best held-out metric. Raises TrainingError where the metric was never finite.

    state: of the Trainer.
    """
    if state.best_global_step is None:
        raise TrainingError(
            f"held-out {metric} was never finite in {state.global_step} steps; lower training.learning_rate"
        )
    return int(state.best_global_step)


def _write_final_folder(trainer: Any, base: ModelSettings, settings: TrainingSettings, final: Path) -> Path:
    """Write the trained model to the folder `final`, which transformers can load; return `final`.

    It is the checkpoint that was best on the held-out rows, without files that only a resumed run needs. LoRA's
    adapters are merged into the weights of `base`.

    trainer: the Trainer of transformers, once it has trained.
    """
    best = Path(trainer.state.best_model_checkpoint)
    shutil.rmtree(final, ignore_errors=True)  # of a run that was killed here
    if settings.lora_rank is None:
        _copy_weights(best, final, base)
    else:  # the checkpoint has adapters alone
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
