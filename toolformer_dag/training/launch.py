"""Check that finetuning fits into memory; train in this process, or start processes that train together.

Such processes are a job: a folder with its description, its log, and events that tell this process how far it is.
"""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolformer_dag.files import UserError
from toolformer_dag.identity import fingerprint
from toolformer_dag.model.loading import DTYPES, context_length, load_from_hub
from toolformer_dag.model.weights import model_name
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import find_finished_run, finetune
from toolformer_dag.training.recipe import check_recipe, has_short_moments, is_composite, objective_of, with_adapters
from toolformer_dag.training.trainer import Measured, StepProgress, choose_device_batch
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    build_run_identity,
    read_report,
)

GB = 1e9
ADAM_BYTES = 16
"""Bytes per trained parameter: weight, gradient and two moments of AdamW in float32 (Rajbhandari et al. 2020, section
3.1)."""
SHORT_ADAM_BYTES = 6
"""The same in bfloat16 with moments of 8 bits."""
AUTOCAST_BYTES = 2
"""Bytes of the bfloat16 copy that a pass in bfloat16 makes of a float32 weight."""
LAYER_VALUES = 17
"""Values per token and unit of width that a layer keeps for its backward pass (Korthikanti et al. 2022, equation 1
without the scores of attention, which a fused kernel does not keep: 34 bytes in 16 bits). With gradient checkpointing
it keeps its input, one value."""
LOGIT_BYTES = 12
"""Bytes per logit: transformers' loss in float32, its softmax and its gradient."""
BASE_LOGIT_BYTES = 4
"""Bytes per logit of a frozen base model, in float32."""


class MemoryNeed(NamedTuple):
    """Bytes on each device: of weights, gradients and moments (`states`), and of activations beside them."""

    states: int
    activations: int

    @property
    def total(self) -> int:
        """The bytes of both."""
        return self.states + self.activations

    @property
    def in_parts(self) -> str:
        """Both in GB, in words."""
        return f"weights, gradients and moments {self.states / GB:.0f}, activations {self.activations / GB:.0f}"


def estimate_memory_need(
    config: Any, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool, trust_remote_code: bool
) -> MemoryNeed:
    """Estimate how many bytes finetuning takes at least on each device.

    This does not include gathered layers, fragmented memory and torch's own share (about 1 GB).

    Args:
        config: The config of the base model. Its weights are not read.
        settings: The settings of the training.
        length: The number of tokens in the longest sequence.
        processes: The number of processes that train together.
        on_gpu: Whether the training runs on GPUs.
        trust_remote_code: Whether the model's own code may run.
    """
    counts = _count_parameters(config, settings, trust_remote_code=trust_remote_code)
    return MemoryNeed(
        states=_estimate_state_bytes(counts, settings, processes, on_gpu=on_gpu),
        activations=_estimate_activation_bytes(config, settings, length, processes, on_gpu=on_gpu),
    )


class _ParameterCounts(NamedTuple):
    """The parameters of the model as it is trained, LoRA's adapters among them, and how many of them are trained."""

    all: int
    trained: int


def _count_parameters(config: Any, settings: TrainingSettings, *, trust_remote_code: bool) -> _ParameterCounts:
    with torch.device("meta"):  # allocates no weights
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=DTYPES[settings.weights_dtype], trust_remote_code=trust_remote_code
        )
        if settings.lora_rank is not None:
            model = with_adapters(model, settings.lora_rank)
    return _ParameterCounts(all=model.num_parameters(), trained=model.num_parameters(only_trainable=True))


def _estimate_state_bytes(counts: _ParameterCounts, settings: TrainingSettings, processes: int, *, on_gpu: bool) -> int:
    """Estimate the bytes of weights, gradients and Adam's moments on each device.

    Trained parameters are divided among the processes, and frozen ones are whole on each. If the objective compares
    with the base model (`keep_base`), the base model's frozen weights come on top.
    """
    weight_bytes = DTYPES[settings.weights_dtype].itemsize
    trained = _estimate_bytes_per_parameter(settings, on_gpu=on_gpu) * counts.trained // processes
    frozen = (counts.all - counts.trained) * weight_bytes
    base_model = counts.all * weight_bytes if _needs_base_model(settings) else 0
    return trained + frozen + base_model


def _estimate_bytes_per_parameter(settings: TrainingSettings, *, on_gpu: bool) -> int:
    """Return the bytes of a trained parameter: weight, gradient, moments, and a bfloat16 copy for passes in it."""
    trained_bytes = SHORT_ADAM_BYTES if has_short_moments(settings) else ADAM_BYTES
    passes_in_bfloat16 = (on_gpu and settings.weights_dtype == "float32") or settings.precision == "mixed"
    return trained_bytes + AUTOCAST_BYTES if passes_in_bfloat16 else trained_bytes


def _needs_base_model(settings: TrainingSettings) -> bool:
    """Return whether the objective compares the trained model with the frozen base model."""
    return bool(objective_of(settings).without_base)


def _estimate_activation_bytes(
    config: Any, settings: TrainingSettings, length: int, processes: int, *, on_gpu: bool
) -> int:
    """Estimate the maximum number of bytes that activations take on a device.

    All layers keep some values for the backward pass. On top of that comes the larger of two peaks: all values within
    one layer during its backward pass, or the logits during the computation of the loss.

    Args:
        config: The config of the base model.
        settings: The settings of the training.
        length: The number of tokens in the longest sequence.
        processes: The number of processes that train together.
        on_gpu: Whether the training runs on GPUs.
    """
    text_config = config.get_text_config()
    tokens = _compute_tokens_per_pass(settings, length, processes)
    # One value, of which a layer keeps several, has a number for each token and unit of the model's width.
    value_bytes: int = tokens * text_config.hidden_size * DTYPES[settings.weights_dtype].itemsize
    kept_values_per_layer = _count_kept_values(
        settings, on_gpu=on_gpu
    )  # 1 with gradient checkpointing, else LAYER_VALUES
    kept_by_layers: int = text_config.num_hidden_layers * kept_values_per_layer * value_bytes

    within_one_layer = LAYER_VALUES * value_bytes
    at_loss: int = _estimate_bytes_per_logit(settings) * tokens * text_config.vocab_size
    return kept_by_layers + max(within_one_layer, at_loss)


def _compute_tokens_per_pass(settings: TrainingSettings, length: int, processes: int) -> int:
    """Return the most tokens that a forward pass on one device reads, with sequences of `length` tokens."""
    sequences = choose_device_batch(settings, processes) * objective_of(settings).sequences_per_item
    return sequences * length


def _count_kept_values(settings: TrainingSettings, *, on_gpu: bool) -> int:
    """Return how many values per token and unit of width each layer keeps for the backward pass.

    With gradient checkpointing, the default on a GPU, it keeps its input only, and computes the rest again.
    """
    checkpointing = settings.gradient_checkpointing
    if checkpointing is None:
        checkpointing = on_gpu
    return 1 if checkpointing else LAYER_VALUES


def _estimate_bytes_per_logit(settings: TrainingSettings) -> int:
    """Return the bytes that the loss takes per logit, with the base model's logits where the objective needs them."""
    return LOGIT_BYTES + BASE_LOGIT_BYTES if _needs_base_model(settings) else LOGIT_BYTES


def check_finetuning(model: ModelSettings, settings: TrainingSettings) -> None:
    """Check that finetuning can run, before anything runs. The error says what to change.

    Raises:
        TrainingError: The memory is too small, a library is missing, or the processes cannot share the batch or model.
        ModelError: The model's config cannot be read.
    """
    processes = choose_process_count(model, settings)
    check_recipe(model, settings, processes)
    on_gpu = model.device != "cpu" and torch.cuda.is_available()

    need = _estimate_need_of_model(model, settings, processes, on_gpu=on_gpu)
    available = _get_available_bytes(processes, on_gpu=on_gpu)
    if need.total > available:
        remedies = ", or ".join(_list_memory_remedies(settings, need, on_gpu=on_gpu))
        raise TrainingError(
            f"finetuning {model.name} needs {need.total / GB:.0f} GB on each of {processes} devices "
            f"({need.in_parts}), and there are {available / GB:.0f}; set {remedies}, or take a smaller model"
        )


def _estimate_need_of_model(
    model: ModelSettings, settings: TrainingSettings, processes: int, *, on_gpu: bool
) -> MemoryNeed:
    """Read the config of a model, and estimate how many bytes finetuning it takes on each device.

    Raises:
        ModelError: The config cannot be read.
    """
    remote_code = model.trust_remote_code
    config = load_from_hub(
        AutoConfig, model_name(model), {"revision": model.revision, "trust_remote_code": remote_code}
    )
    length = min(settings.sequence_length, context_length(config))
    return estimate_memory_need(config, settings, length, processes, on_gpu=on_gpu, trust_remote_code=remote_code)


def _get_available_bytes(processes: int, *, on_gpu: bool) -> int:
    """Return the bytes of a GPU's memory; without a GPU, each process's part of the machine's."""
    if on_gpu:
        return int(torch.cuda.get_device_properties(0).total_memory)
    return _read_memory_bytes() // processes


def _list_memory_remedies(settings: TrainingSettings, need: MemoryNeed, *, on_gpu: bool) -> list[str]:
    """Return settings with which training takes less memory, as an error recommends them."""
    remedies = []
    if settings.precision != "bfloat16":
        remedies.append('training.precision = "bfloat16" (extra `gpu`)')
    if settings.lora_rank is None:
        remedies.append("training.lora_rank = 16 (extra `lora`)")
    batch_matters = need.activations > need.states // 10
    if batch_matters:
        remedies.append("a smaller training.device_batch_size")
    if on_gpu:
        remedies.append("more GPUs, among which float32 weights are divided")
    return remedies


def _read_memory_bytes() -> int:
    """Read how many bytes of memory this process may use: those of the machine, or the limit of its control group."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    limit_file = Path("/sys/fs/cgroup/memory.max")
    if not limit_file.is_file():
        return machine_bytes
    limit = limit_file.read_text().strip()
    if limit == "max":
        return machine_bytes
    return min(machine_bytes, int(limit))


EVENTS = "events.jsonl"
"""File of a job: a JSON object per line, see `_Watch`."""
LOG = "output.log"
"""File of a job: what its processes print."""
JOB = "job.json"
"""File of a job: what is trained on what, see `run_job`."""
LOOK_SECONDS = 0.5
"""How long to wait before the events of a job are read again."""
PATIENCE_SECONDS = 10.0
"""How long the processes of a job may take to end after a signal."""


def train(
    base: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    out: Path,
    progress: StepProgress | None = None,
    measured: Measured | None = None,
) -> TrainingReport:
    """Finetune in as many processes as `training.processes` says, and publish the checkpoint in the folder `out`.

    If `out` already holds the checkpoint of the same run, nothing is trained.

    Args:
        base: The model to finetune.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        out: The folder of the checkpoint.
        progress: Called after each step. If it raises an error, the training ends.
        measured: Called for each point of a curve.

    Raises:
        TrainingError: The training cannot run, or it failed.
        ModelError: The model cannot be read.
    """
    count = choose_process_count(base, settings)
    gpus = _count_gpus(base)
    trains_in_this_process = count == 1 and gpus <= 1
    if trains_in_this_process:
        return finetune(base, data, settings, out, progress, measured)

    check_recipe(base, settings, count)
    _check_enough_gpus(count, gpus)
    run_fingerprint = fingerprint(build_run_identity(base, data, settings))
    finished = find_finished_run(run_fingerprint, out)
    if finished:
        return finished

    # Other processes train. They read the job in this folder, and write their progress there.
    with _create_job_folder(out) as folder:
        _write_job(folder, base, data, settings, out)
        _run_processes(folder, count, _Watch(progress, measured))  # until they have ended
    return _require_published_report(out)


def _check_enough_gpus(processes: int, gpus: int) -> None:
    """Raise TrainingError where a machine with GPUs has fewer of them than training has processes."""
    if processes > gpus > 0:
        raise TrainingError(f"{processes} processes need as many GPUs, and there are {gpus}; lower training.processes")


def _require_published_report(out: Path) -> TrainingReport:
    """Return the report of the checkpoint that other processes have published. Raises TrainingError without one."""
    report = read_report(out)
    if report is None:
        raise TrainingError(f"the processes ended, and {out} holds no whole checkpoint; run again")
    return report


@contextmanager
def _create_job_folder(out: Path) -> Iterator[Path]:
    """Within the `with` block, provide an empty folder beside `out` that only this user can read."""
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.with_name(f"{out.name}.job")
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_job(folder: Path, base: ModelSettings, data: TrainingData, settings: TrainingSettings, out: Path) -> None:
    """Write what is trained on what into the folder of a job, for `run_job`."""
    job = {
        "base": base.model_dump(),
        "settings": settings.model_dump(),
        "out": str(out),
        "parent": os.getpid(),
        "data": asdict(data),
    }
    (folder / JOB).write_text(json.dumps(job), encoding="utf-8")


def choose_process_count(base: ModelSettings, settings: TrainingSettings) -> int:
    """Choose how many processes train together.

    Returns:
        `training.processes` if it is set. Otherwise the largest number of GPUs that divides the batch, or 1 if there
        is no GPU or the training cannot be divided.

    Raises:
        ModelError: The model's config cannot be read.
    """
    if settings.processes is not None:
        return settings.processes
    gpus = _count_gpus(base)
    if gpus <= 1:
        return 1
    if not _can_be_divided(base, settings):
        return 1
    return max(count for count in range(1, gpus + 1) if settings.batch_size % count == 0)


def _can_be_divided(base: ModelSettings, settings: TrainingSettings) -> bool:
    """Return whether several GPUs can divide the weights among them. Raises ModelError."""
    has_moments_of_8_bits = settings.precision == "bfloat16"
    has_frozen_weights = settings.lora_rank is not None
    if has_moments_of_8_bits or has_frozen_weights or _needs_base_model(settings):
        return False
    return not is_composite(base)  # reads the model's config


def _count_gpus(base: ModelSettings) -> int:
    """Return the number of GPUs that training may use."""
    return torch.cuda.device_count() if base.device != "cpu" else 0


class _Watch:
    """Passes the events of a job to the callbacks of `train`, and keeps its last step and its first error.

    An event is {"step", "of"} after a step, {"step", "values"} for a point of a curve, or {"error"} before the end.

    - `error`: the first error that a process of the job wrote; None before that.
    """

    def __init__(self, progress: StepProgress | None, measured: Measured | None) -> None:
        self._progress = progress
        self._measured = measured
        self._steps_done = 0
        self._total_steps = 1  # until the first step is known
        self.error: str | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Handle an event of a training process, of one of three forms:

        - {"error": "..."}: the process ends. The first error is kept in `error`.
        - {"step": 3, "of": 100}: the third of 100 steps is done.
        - {"step": 3, "values": {"loss": 2.5}}: a point of a curve.
        """
        if "error" in event:
            if self.error is None:
                self.error = event["error"]
        elif "of" in event:
            self._steps_done = event["step"]
            self._total_steps = event["of"]
            self.report_step()
        elif self._measured:
            self._measured(event["step"], event["values"])

    def report_step(self) -> None:
        """Report the last step, perhaps again; `progress` raises where the run was cancelled."""
        if self._progress:
            self._progress(self._steps_done, self._total_steps)


def _run_processes(folder: Path, count: int, watch: _Watch) -> None:
    """Run a job in a group of processes until it ends, and pass its events to `watch`.

    If this process ends, the group ends too. An error in the events is kept in `watch.error`.

    Args:
        folder: The folder of the job.
        count: The number of processes.
        watch: Takes the events. An error that it raises ends the job, and is raised here.

    Raises:
        TrainingError: The job fails.
    """
    (folder / EVENTS).touch()  # the processes append to it
    with (
        (folder / LOG).open("wb") as log,
        (folder / EVENTS).open(encoding="utf-8") as events,
        _run_process_group(_build_job_command(folder, count), log, one_gpu=count == 1) as processes,
    ):
        _pass_on_events(processes, events, watch)  # returns once the processes have ended

    exit_code = processes.returncode
    if exit_code:
        wrote_error = watch.error is not None
        reason = watch.error if wrote_error else _read_last_lines(folder / LOG)
        raise TrainingError(f"{count} processes that train together ended with {exit_code}: {reason}")


def _build_job_command(folder: Path, count: int) -> list[str]:
    """Return the command that runs `run_job` in `count` processes."""
    module = ["-m", "toolformer_dag.training.launch"]
    if count > 1:
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), *module]
    return [sys.executable, *module, str(folder / JOB)]


def _pass_on_events(processes: subprocess.Popen[bytes], events: IO[str], watch: _Watch) -> None:
    """Pass the events that processes append to a file on to `watch`, until the processes have ended."""
    while True:
        ended = processes.poll() is not None  # checked first, so that the last events are read after the end
        for event in _iter_new_events(events):
            watch.take(event)
        if ended:
            break

        watch.report_step()  # notices that the run was cancelled, even if no step ends
        time.sleep(LOOK_SECONDS)


def _read_last_lines(log: Path) -> str:
    """Return the last 20 lines of a log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-20:])


def _iter_new_events(events: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the events that were appended since the last call; an unfinished line is left for the next call."""
    while True:
        line_start = events.tell()
        line = events.readline()
        if not line.endswith("\n"):
            events.seek(line_start)
            return
        yield json.loads(line)


@contextmanager
def _run_process_group(command: Sequence[str], log: IO[bytes], *, one_gpu: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Within the `with` block, run a command in a new process group; none of its processes outlives the block.

    Args:
        command: The command.
        log: The file that gets what the processes print.
        one_gpu: Whether the processes see only the first GPU.

    Yields:
        The first process of the group.
    """
    environment = _with_first_gpu(os.environ) if one_gpu else None
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    ) as leader:
        try:
            yield leader
        finally:
            _end_group(leader)


def _with_first_gpu(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that let CUDA see only the first of the GPUs that it sees now."""
    first_gpu = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {**environment, "CUDA_VISIBLE_DEVICES": first_gpu}


def _end_group(leader: subprocess.Popen[bytes]) -> None:
    """End all processes of a group, first politely; wait PATIENCE_SECONDS for its leader after each signal."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, ending)
        with suppress(subprocess.TimeoutExpired):
            leader.wait(PATIENCE_SECONDS)


def run_job(file: Path) -> None:
    """Train as one of the processes of a job; end when the process that started the job ends.

    Process 0 appends steps and curves to the job's events. An error that the user can fix is appended too, and the
    process exits with 1.

    Args:
        file: The description of the job, which `train` wrote.
    """
    job = json.loads(file.read_text(encoding="utf-8"))
    end_with_parent(job["parent"])
    with (file.parent / EVENTS).open("a", encoding="utf-8", buffering=1) as events:
        try:
            _finetune_job(job, events)
        except UserError as error:
            _append_event(events, error=str(error))
            sys.exit(1)


def _finetune_job(job: Mapping[str, Any], events: IO[str]) -> None:
    """Finetune as a job describes it, and append steps and curves to its events."""
    finetune(
        ModelSettings.model_validate(job["base"]),
        TrainingData(**job["data"]),
        TrainingSettings(**job["settings"]),
        Path(job["out"]),
        progress=lambda done, total: _append_event(events, step=done, of=total),
        measured=lambda step, values: _append_event(events, step=step, values=dict(values)),
    )


def _append_event(events: IO[str], **event: Any) -> None:
    events.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
