"""Refuse what cannot fit into memory; train here, or start the processes that train together and follow them."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.loading import DTYPES, context_length, from_hub
from toolformer_dag.model.weights import model_name
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import finetune, finished_run
from toolformer_dag.training.recipe import check_recipe, has_short_moments, is_composite, objective_of, with_adapters
from toolformer_dag.training.trainer import Measured, StepProgress, device_batch
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    read_report,
    run_identity,
)

GB = 1e9
ADAM, SHORT_ADAM = 16, 6
"""Bytes per trained parameter: weight, gradient and two moments of AdamW in float32 (Rajbhandari et al. 2020, section
3.1), or in bfloat16 with moments of 8 bits."""
AUTOCAST = 2
"""Bytes of the bfloat16 copy that a pass in bfloat16 makes of a float32 weight."""
LAYER_VALUES = 17
"""Values per token and unit of width that a layer keeps for its backward pass (Korthikanti et al. 2022, equation 1
without the scores of attention, which a fused kernel does not keep: 34 bytes in 16 bits). With gradient checkpointing
it keeps its input, one value."""
LOGIT_BYTES = 12
"""Per logit: transformers' loss in float32, its softmax and its gradient. A kept base model has another prediction."""


def memory_need(
    config: Any, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool, trust_remote_code: bool
) -> tuple[int, int]:
    """Return the bytes that a recipe takes at least on each device, with sequences of `length` tokens.

    First those of weights, gradients and moments, then the most that activations take beside them.

    Not covered: weights that several processes gather for a layer, copies within a step of the optimizer, operations
    of a layer that are not fused, the allocator's fragments, and what torch and the driver take (about 1 GB).
    """
    text, dtype = config.get_text_config(), DTYPES[settings.weights_dtype]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )
        if settings.lora_rank is not None:
            model = with_adapters(model, settings.lora_rank)
    parameters, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    each = SHORT_ADAM if has_short_moments(settings) else ADAM
    if (on_gpu and settings.weights_dtype == "float32") or settings.precision == "mixed":
        each += AUTOCAST
    states = each * trained // processes + (parameters - trained) * dtype.itemsize
    logit_bytes = LOGIT_BYTES
    objective = objective_of(settings)
    if objective.without_base:
        states += parameters * dtype.itemsize
        logit_bytes += 4
    tokens = device_batch(settings, processes) * objective.sequences_per_item * length
    value = tokens * text.hidden_size * dtype.itemsize
    checkpointing = on_gpu if settings.gradient_checkpointing is None else settings.gradient_checkpointing
    kept = text.num_hidden_layers * value * (1 if checkpointing else LAYER_VALUES)
    return states, kept + max(LAYER_VALUES * value, logit_bytes * tokens * text.vocab_size)


def check_finetuning(model: ModelSettings, settings: TrainingSettings) -> None:
    """Raise TrainingError with the remedy where finetuning cannot fit into memory, before anything runs.

    Also where a library is missing, or where processes cannot share the batch or the model.
    """
    processes = process_count(model, settings)
    check_recipe(model, settings, processes)
    on_gpu = model.device != "cpu" and torch.cuda.is_available()
    source = {"revision": model.revision, "trust_remote_code": model.trust_remote_code}
    config = from_hub(AutoConfig, model_name(model), source)
    length = min(settings.sequence_length, context_length(config))
    states, activations = memory_need(
        config, settings, length, processes, on_gpu=on_gpu, trust_remote_code=model.trust_remote_code
    )
    total = states + activations
    there = torch.cuda.get_device_properties(0).total_memory if on_gpu else _ram() // processes
    if total > there:
        remedies = [
            'training.precision = "bfloat16" (extra `gpu`)' * (settings.precision != "bfloat16"),
            "training.lora_rank = 16 (extra `lora`)" * (settings.lora_rank is None),
            "a smaller training.device_batch_size" * (activations > states // 10),
            "more GPUs, among which float32 weights are divided" * on_gpu,
        ]
        raise TrainingError(
            f"finetuning {model.name} needs {total / GB:.0f} GB on each of {processes} devices (weights, "
            f"gradients and moments {states / GB:.0f}, activations {activations / GB:.0f}), and there are "
            f"{there / GB:.0f}; set {', or '.join(filter(None, remedies))}, or take a smaller model"
        )


def _ram() -> int:
    limit = Path("/sys/fs/cgroup/memory.max")
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return whole if text == "max" else min(whole, int(text))


EVENTS, LOG, JOB = "events.jsonl", "output.log", "job.json"
LOOK_SECONDS, PATIENCE_SECONDS = 0.5, 10.0


def train(
    base: ModelSettings,
    data: TrainingData,
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
        return finetune(base, data, settings, out, progress, measured)
    check_recipe(base, settings, count)
    if count > gpus > 0:
        raise TrainingError(f"{count} processes need as many GPUs, and there are {gpus}; lower training.processes")
    if finished := finished_run(fingerprint(run_identity(base, data, settings)), out):
        return finished
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.job")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(mode=0o700)
    try:
        job = {"base": base.model_dump(), "settings": settings.model_dump(), "out": str(out), "parent": os.getpid()}
        job |= {"data": asdict(data)}
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

    What cannot be divided trains on one GPU unless `processes` says otherwise: moments of 8 bits, LoRA's frozen
    weights, and models that are more than a language model.
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
        last = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
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
    end_with_parent(job["parent"])
    base, settings = ModelSettings.model_validate(job["base"]), TrainingSettings(**job["settings"])
    with (file.parent / EVENTS).open("a", encoding="utf-8", buffering=1) as events:

        def tell(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")

        try:
            finetune(
                base,
                TrainingData(**job["data"]),
                settings,
                Path(job["out"]),
                lambda done, total: tell(step=done, of=total),
                lambda step, values: tell(step=step, values=dict(values)),
            )
        except UserError as error:
            tell(error=str(error))
            sys.exit(1)


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
