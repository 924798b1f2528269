"""Finetune with plain language modelling on C* (paper, section 2 "Model Finetuning", section 4.1, appendix B)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.trainer import Prepared, StepProgress, prepare, set_cache
from toolformer_dag.training.training_report import (
    TrainingReport,
    curves,
    publish,
    read_report,
    remove_partial,
    write_record,
)
from toolformer_dag.training.training_run import (
    TrainingError,
    claim,
    last_complete_checkpoint,
    library_versions,
    partial_folder,
    run_identity,
)


def finetune(
    base: ModelSettings,
    texts: Sequence[str],
    heldout: Sequence[str],
    settings: TrainingSettings,
    out: Path,
    progress: StepProgress | None = None,
) -> TrainingReport:
    """Train `base` on `texts` and publish the checkpoint with the lowest perplexity on `heldout` to `out`.

    - `out` gets safetensors, tokenizer and training.json.
    - A run that `out` already holds is not repeated. A killed run resumes from its last checkpoint.
    - Another run replaces `out` once it is finished.
    - On a CPU with the same number of threads, an interrupted run ends in the same weights as an uninterrupted run.
    - Under torchrun, every process calls this, and process 0 publishes.
    - The dtype and token budget of `base` have no effect; its device only matters if it is `cpu`, which avoids GPUs.

    Raises TrainingError, and ModelError where `base` cannot be loaded.
    """
    if not texts or not heldout:
        raise TrainingError(
            f"nothing to finetune on: {len(texts)} texts, {len(heldout)} held-out texts; lower tau_f or add shards"
        )
    identity = run_identity(base, texts, heldout, settings)
    name = fingerprint(identity)
    finished = read_report(out)
    if finished and finished.fingerprint == name:
        return replace(finished, reused=True)
    folder = partial_folder(out, name)
    claim(folder, identity)
    began = time.monotonic()
    prepared = prepare(base, texts, heldout, settings, folder, progress)
    checkpoint = last_complete_checkpoint(folder)
    try:
        prepared.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        report = _report(prepared, name, time.monotonic() - began)
        _finish(prepared.trainer, folder / "final", out, report, {"fingerprint": name, **identity})
    except SafetensorError as error:
        raise TrainingError(
            f"weights in {folder} cannot be written or read ({error}); free disk space and run again"
        ) from error
    return report


def _report(prepared: Prepared, name: str, seconds: float) -> TrainingReport:
    state = prepared.trainer.state
    losses, heldout = curves(state.log_history)
    if state.best_global_step is None:
        raise TrainingError(
            f"held-out perplexity was never finite in {state.global_step} steps; lower training.learning_rate"
        )
    return TrainingReport(
        fingerprint=name,
        steps=state.global_step,
        best_step=state.best_global_step,
        texts=prepared.train.texts,
        examples=len(prepared.train.sequences),
        split_texts=prepared.train.split,
        empty_texts=prepared.train.empty,
        tokens=prepared.train.tokens,
        seconds=seconds,
        device=str(prepared.trainer.args.device),
        losses=losses,
        heldout=heldout,
    )


def _finish(trainer: Any, final: Path, out: Path, report: TrainingReport, identity: Mapping[str, object]) -> None:
    set_cache(trainer.model, True)
    trainer.accelerator.wait_for_everyone()  # each process reads the best checkpoint, which process 0 then removes
    if trainer.is_world_process_zero():
        trainer.save_model(str(final))
        (final / "training_args.bin").unlink(missing_ok=True)  # a pickle that loading the model does not need
        write_record(final, report, {**identity, "versions": library_versions()})
        publish(final, out)
        remove_partial(out)
    trainer.accelerator.wait_for_everyone()
