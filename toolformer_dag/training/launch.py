"""Train in this process, or start the processes that train together and follow them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import torch

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.settings.sections import ModelSettings, TrainingSettings
from toolformer_dag.training.finetune import finetune, finished_run
from toolformer_dag.training.recipe import check_recipe, is_composite
from toolformer_dag.training.trainer import Measured, StepProgress
from toolformer_dag.training.training_report import TrainingReport, read_report
from toolformer_dag.training.training_run import TrainingError, run_identity

EVENTS, LOG, JOB = "events.jsonl", "output.log", "job.json"
LOOK_SECONDS, PATIENCE_SECONDS = 0.5, 10.0
LAST_LINES = 20
"""Lines of the processes' output that an error shows."""


def train(
    base: ModelSettings,
    texts: Sequence[str],
    heldout: Sequence[str],
    settings: TrainingSettings,
    out: Path,
    progress: StepProgress | None = None,
    measured: Measured | None = None,
) -> TrainingReport:
    """Finetune with as many processes as `processes` says; see `finetune` for the rest.

    Several processes are started by torch.distributed.run, and one on a machine with several GPUs by itself, as a
    process group of their own. It ends with an exception of `progress`, and with this process. Raises TrainingError,
    ModelError.
    """
    count, gpus = process_count(base, settings), _gpus(base)
    if count == 1 and gpus <= 1:
        return finetune(base, texts, heldout, settings, out, progress, measured)
    check_recipe(base, settings, count)
    if count > gpus > 0:
        raise TrainingError(f"{count} processes need as many GPUs, and there are {gpus}; lower training.processes")
    if finished := finished_run(fingerprint(run_identity(base, texts, heldout, settings)), out):
        return finished
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.job")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(mode=0o700)
    try:
        job = {"base": base.model_dump(), "settings": settings.model_dump(), "out": str(out), "parent": os.getpid()}
        job |= {"texts": list(texts), "heldout": list(heldout)}
        (folder / JOB).write_text(json.dumps(job), encoding="utf-8")
        _follow(folder, count, progress or _nothing, measured or _nothing)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report = read_report(out)
    if report is None:
        raise TrainingError(f"the processes ended, and {out} holds no whole checkpoint; run again")
    return report


def process_count(base: ModelSettings, settings: TrainingSettings) -> int:
    """Return `processes`, or as many of the GPUs as divide the batch, or 1. Raises ModelError.

    What cannot be divided trains on one GPU unless told otherwise: moments of 8 bits, LoRA's frozen weights, and models
    that are more than a language model.
    """
    if settings.processes is not None:
        return settings.processes
    gpus = _gpus(base)
    if gpus <= 1 or settings.precision == "bfloat16" or settings.lora_rank is not None or is_composite(base):
        return 1
    return max(count for count in range(1, gpus + 1) if settings.batch_size % count == 0)


def _gpus(base: ModelSettings) -> int:
    return torch.cuda.device_count() if base.device != "cpu" else 0


def _nothing(*_: Any) -> None:
    """Nobody is watching."""


def _follow(folder: Path, count: int, progress: StepProgress, measured: Measured) -> None:
    together = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(count), "-m"] if count > 1 else []
    command = [sys.executable, "-m", *together, "toolformer_dag.training.launch", str(folder / JOB)]
    (folder / EVENTS).touch()
    steps, failures = (0, 1), []
    with (
        (folder / LOG).open("wb") as log,
        (folder / EVENTS).open(encoding="utf-8") as events,
        _process_group(command, log, one_gpu=count == 1) as processes,
    ):
        while True:
            ended = processes.poll() is not None
            for event in _whole_lines(events):
                if "error" in event:
                    failures.append(event["error"])
                elif "of" in event:
                    steps = event["step"], event["of"]
                    progress(*steps)
                else:
                    measured(event["step"], event["values"])
            if ended:
                break
            progress(*steps)  # it raises where the run was cancelled, also while no step ends
            time.sleep(LOOK_SECONDS)
    if processes.returncode:
        last = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        reason = failures[0] if failures else "\n".join(last)
        raise TrainingError(f"{count} processes that train together ended with {processes.returncode}: {reason}")


def _whole_lines(events: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield what was appended since; a line that is being written is left for the next time."""
    while True:
        at = events.tell()
        line = events.readline()
        if not line.endswith("\n"):
            events.seek(at)
            return
        yield json.loads(line)


@contextmanager
def _process_group(command: Sequence[str], log: IO[bytes], one_gpu: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command as a process group, none of which outlives the block. `one_gpu`: it sees the first GPU alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible} if one_gpu else None
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    ) as running:
        try:
            yield running
        finally:
            for how in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, how)
                with suppress(subprocess.TimeoutExpired):
                    running.wait(PATIENCE_SECONDS)


def run_job(file: Path) -> None:
    """Train as one of the processes of a job; process 0 appends steps, curves and its error to the job's events."""
    job = json.loads(file.read_text(encoding="utf-8"))
    threading.Thread(target=_end_with, args=(job["parent"],), daemon=True).start()
    base, settings = ModelSettings.model_validate(job["base"]), TrainingSettings(**job["settings"])
    with (file.parent / EVENTS).open("a", encoding="utf-8", buffering=1) as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        try:
            finetune(
                base,
                job["texts"],
                job["heldout"],
                settings,
                Path(job["out"]),
                lambda done, total: tell(step=done, of=total),
                lambda step, values: tell(step=step, values=dict(values)),
            )
        except UserError as error:
            tell(error=str(error))
            sys.exit(1)


def _end_with(parent: int) -> None:
    """End this process when the one that started the job is gone."""
    while True:
        try:
            os.kill(parent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(1.0)


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
