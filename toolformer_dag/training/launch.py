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
from toolformer_dag.model.loading import TORCH_DTYPES, load_pretrained, read_context_length
from toolformer_dag.model.weights import resolve_model_name
from toolformer_dag.processes import end_with_parent
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.finetune import find_finished_run, finetune
from toolformer_dag.training.recipe import (
    add_adapters,
    check_recipe,
    is_composite_model,
    objective_of,
    uses_8bit_moments,
)
from toolformer_dag.training.trainer import MeasurementCallback, StepCallback, choose_device_batch_size
from toolformer_dag.training.training_report import (
    TrainingData,
    TrainingError,
    TrainingReport,
    build_run_identity,
    read_training_report,
)

BYTES_PER_GB = 1e9
ADAM_BYTES_PER_PARAMETER = 16
"""Bytes per trained parameter: weight, gradient and two moments of AdamW in float32 (Rajbhandari et al. 2020, section
3.1)."""
ADAM_8BIT_BYTES_PER_PARAMETER = 6
"""The same in bfloat16 with moments of 8 bits."""
AUTOCAST_BYTES_PER_PARAMETER = 2
"""Bytes of the bfloat16 copy that a pass in bfloat16 makes of a float32 weight."""
BACKWARD_VALUES_PER_LAYER = 17
"""Values per token and unit of width that a layer's backward pass needs (Korthikanti et al. 2022, equation 1
without the scores of attention, which a fused kernel does not keep: 34 bytes in 16 bits). With gradient checkpointing
the layer keeps only its input, one value, and computes the others again."""
BYTES_PER_LOGIT = 12
"""Bytes per logit: transformers' loss in float32, its softmax and its gradient."""
BYTES_PER_BASE_LOGIT = 4
"""Bytes per logit of a frozen base model, in float32."""


class MemoryNeed(NamedTuple):
    """The memory that finetuning takes on each device.

    Attributes:
        state_bytes: The bytes of weights, gradients and the optimizer's moments.
        activation_bytes: The bytes of activations, the intermediate results that the backward pass needs.
    """

    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """The bytes of both parts together."""
        return self.state_bytes + self.activation_bytes

    @property
    def parts_text(self) -> str:
        """Both parts in GB, as a text for messages."""
        state_gb = self.state_bytes / BYTES_PER_GB
        activation_gb = self.activation_bytes / BYTES_PER_GB
        return f"weights, gradients and moments {state_gb:.0f}, activations {activation_gb:.0f}"


def estimate_memory_need(
    config: Any,
    settings: TrainingSettings,
    sequence_length: int,
    process_count: int,
    *,
    on_gpu: bool,
    trust_remote_code: bool,
) -> MemoryNeed:
    """Estimate how many bytes finetuning takes at least on each device.

    This does not include gathered layers, fragmented memory and torch's own share (about 1 GB).

    Args:
        config: The config of the base model. Its weights are not read.
        settings: The settings of the training.
        sequence_length: The number of tokens in the longest sequence.
        process_count: The number of processes that train together.
        on_gpu: Whether the training runs on GPUs.
        trust_remote_code: Whether the model's own code may run.
    """
    parameter_counts = _count_model_parameters(config, settings, trust_remote_code=trust_remote_code)
    state_bytes = _estimate_state_bytes(parameter_counts, settings, process_count, on_gpu=on_gpu)
    activation_bytes = _estimate_activation_bytes(config, settings, sequence_length, process_count, on_gpu=on_gpu)
    return MemoryNeed(state_bytes, activation_bytes)


class _ParameterCounts(NamedTuple):
    """How many parameters the model has as it is trained, with LoRA's adapters, and how many of them are trained."""

    total_count: int
    trained_count: int


def _count_model_parameters(config: Any, settings: TrainingSettings, *, trust_remote_code: bool) -> _ParameterCounts:
    """Count the parameters of the model that a config describes, with adapters if the settings have a `lora_rank`."""
    dtype = TORCH_DTYPES[settings.weights_dtype]
    with torch.device("meta"):  # allocates no weights
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code
        )
        if settings.lora_rank is not None:
            model = add_adapters(model, settings.lora_rank)

    return _ParameterCounts(total_count=model.num_parameters(), trained_count=model.num_parameters(only_trainable=True))


def _estimate_state_bytes(
    parameter_counts: _ParameterCounts, settings: TrainingSettings, process_count: int, *, on_gpu: bool
) -> int:
    """Estimate the bytes of weights, gradients and Adam's moments on each device.

    Trained parameters are divided among the processes, and frozen ones are whole on each. If the objective compares
    with the base model (`keep_base`), the base model's frozen weights come on top.
    """
    bytes_per_trained_parameter = _estimate_bytes_per_trained_parameter(settings, on_gpu=on_gpu)
    trained_bytes = bytes_per_trained_parameter * parameter_counts.trained_count // process_count

    bytes_per_weight = TORCH_DTYPES[settings.weights_dtype].itemsize
    frozen_count = parameter_counts.total_count - parameter_counts.trained_count
    frozen_bytes = frozen_count * bytes_per_weight

    base_model_bytes = 0
    if _needs_base_model(settings):
        base_model_bytes = parameter_counts.total_count * bytes_per_weight

    return trained_bytes + frozen_bytes + base_model_bytes


def _estimate_bytes_per_trained_parameter(settings: TrainingSettings, *, on_gpu: bool) -> int:
    """Return the bytes that a trained parameter takes with its gradient and Adam's moments.

    If forward and backward passes run in bfloat16 over float32 weights, a copy in bfloat16 is included.
    """
    byte_count = ADAM_8BIT_BYTES_PER_PARAMETER if uses_8bit_moments(settings) else ADAM_BYTES_PER_PARAMETER

    has_bfloat16_copy = (on_gpu and settings.weights_dtype == "float32") or settings.precision == "mixed"
    if has_bfloat16_copy:
        byte_count += AUTOCAST_BYTES_PER_PARAMETER
    return byte_count


def _needs_base_model(settings: TrainingSettings) -> bool:
    """Return whether the objective compares the trained model with the frozen base model."""
    return bool(objective_of(settings).setting_without_base_model)


def _estimate_activation_bytes(
    config: Any, settings: TrainingSettings, sequence_length: int, process_count: int, *, on_gpu: bool
) -> int:
    """Estimate the maximum number of bytes that activations take on a device.

    All layers keep some values for the backward pass. On top of that comes the larger of two peaks: all values within
    one layer during its backward pass, or the logits during the computation of the loss.

    Args:
        config: The config of the base model.
        settings: The settings of the training.
        sequence_length: The number of tokens in the longest sequence.
        process_count: The number of processes that train together.
        on_gpu: Whether the training runs on GPUs.
    """
    text_config = config.get_text_config()
    tokens_per_pass = _compute_tokens_per_pass(settings, sequence_length, process_count)

    # A value is a tensor with a number for each token and each unit of the model's width. A layer keeps several.
    bytes_per_number = TORCH_DTYPES[settings.weights_dtype].itemsize
    bytes_per_value: int = tokens_per_pass * text_config.hidden_size * bytes_per_number

    kept_values_per_layer = _count_kept_values_per_layer(settings, on_gpu=on_gpu)
    bytes_kept_by_layers: int = text_config.num_hidden_layers * kept_values_per_layer * bytes_per_value

    peak_within_layer = BACKWARD_VALUES_PER_LAYER * bytes_per_value
    peak_at_loss: int = _estimate_bytes_per_logit(settings) * tokens_per_pass * text_config.vocab_size
    return bytes_kept_by_layers + max(peak_within_layer, peak_at_loss)


def _compute_tokens_per_pass(settings: TrainingSettings, sequence_length: int, process_count: int) -> int:
    """Return the most tokens that a forward pass on one device reads, with sequences of `sequence_length` tokens."""
    items_per_pass = choose_device_batch_size(settings, process_count)
    sequences_per_pass = items_per_pass * objective_of(settings).sequences_per_item
    return sequences_per_pass * sequence_length


def _count_kept_values_per_layer(settings: TrainingSettings, *, on_gpu: bool) -> int:
    """Return how many values per token and unit of width each layer keeps for the backward pass.

    With gradient checkpointing, the default on a GPU, a layer keeps its input only, and computes the rest again.
    """
    uses_checkpointing = settings.gradient_checkpointing
    if uses_checkpointing is None:
        uses_checkpointing = on_gpu
    return 1 if uses_checkpointing else BACKWARD_VALUES_PER_LAYER


def _estimate_bytes_per_logit(settings: TrainingSettings) -> int:
    """Return the bytes that the loss takes per logit, with the base model's logits if the objective needs them."""
    if _needs_base_model(settings):
        return BYTES_PER_LOGIT + BYTES_PER_BASE_LOGIT
    return BYTES_PER_LOGIT


def check_finetuning(base_model: ModelSettings, settings: TrainingSettings) -> None:
    """Check that finetuning can run, before anything runs. The error says what to change.

    Raises:
        TrainingError: The memory is too small, a library is missing, or the processes cannot share the batch or model.
        ModelError: The model's config cannot be read.
    """
    process_count = choose_process_count(base_model, settings)
    check_recipe(base_model, settings, process_count)

    on_gpu = base_model.device != "cpu" and torch.cuda.is_available()
    memory_need = _estimate_model_memory_need(base_model, settings, process_count, on_gpu=on_gpu)
    available_bytes = _get_available_memory_bytes(process_count, on_gpu=on_gpu)
    if memory_need.total_bytes <= available_bytes:
        return

    needed_gb = memory_need.total_bytes / BYTES_PER_GB
    available_gb = available_bytes / BYTES_PER_GB
    remedies = ", or ".join(_list_memory_remedies(settings, memory_need, on_gpu=on_gpu))
    raise TrainingError(
        f"finetuning {base_model.name} needs {needed_gb:.0f} GB on each of {process_count} devices "
        f"({memory_need.parts_text}), and there are {available_gb:.0f}; set {remedies}, or take a smaller model"
    )


def _estimate_model_memory_need(
    base_model: ModelSettings, settings: TrainingSettings, process_count: int, *, on_gpu: bool
) -> MemoryNeed:
    """Read the config of a model, and estimate how many bytes finetuning it takes on each device.

    Raises:
        ModelError: The config cannot be read.
    """
    loading_options = {"revision": base_model.revision, "trust_remote_code": base_model.trust_remote_code}
    config = load_pretrained(AutoConfig, resolve_model_name(base_model), loading_options)

    sequence_length = min(settings.sequence_length, read_context_length(config))
    return estimate_memory_need(
        config,
        settings,
        sequence_length,
        process_count,
        on_gpu=on_gpu,
        trust_remote_code=base_model.trust_remote_code,
    )


def _get_available_memory_bytes(process_count: int, *, on_gpu: bool) -> int:
    """Return the bytes of a GPU's memory. Without a GPU, return each process's part of the machine's memory."""
    if on_gpu:
        return int(torch.cuda.get_device_properties(0).total_memory)
    return _read_usable_memory_bytes() // process_count


def _list_memory_remedies(settings: TrainingSettings, memory_need: MemoryNeed, *, on_gpu: bool) -> list[str]:
    """List the settings with which training takes less memory, as parts of an error message."""
    remedies = []
    if settings.precision != "bfloat16":
        remedies.append('training.precision = "bfloat16" (extra `gpu`)')
    if settings.lora_rank is None:
        remedies.append("training.lora_rank = 16 (extra `lora`)")

    # A smaller batch only makes the activations smaller.
    does_batch_matter = memory_need.activation_bytes > memory_need.state_bytes // 10
    if does_batch_matter:
        remedies.append("a smaller training.device_batch_size")
    if on_gpu:
        remedies.append("more GPUs, among which float32 weights are divided")
    return remedies


def _read_usable_memory_bytes() -> int:
    """Return how many bytes of memory this process may use: those of the machine, or the limit of its control group."""
    machine_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    limit_file = Path("/sys/fs/cgroup/memory.max")
    if not limit_file.is_file():
        return machine_bytes

    limit_text = limit_file.read_text().strip()
    if limit_text == "max":  # no limit
        return machine_bytes
    return min(machine_bytes, int(limit_text))


EVENTS_FILE_NAME = "events.jsonl"
"""File of a job: a JSON object per line, see `_EventHandler`."""
LOG_FILE_NAME = "output.log"
"""File of a job: what its processes print."""
JOB_FILE_NAME = "job.json"
"""File of a job: what is trained on what, see `run_job`."""
POLL_SECONDS = 0.5
"""How long to wait before the events of a job are read again."""
TERMINATION_TIMEOUT_SECONDS = 10.0
"""How long the processes of a job may take to end after a signal."""


def train(
    base_model: ModelSettings,
    data: TrainingData,
    settings: TrainingSettings,
    output_folder: Path,
    step_callback: StepCallback | None = None,
    measurement_callback: MeasurementCallback | None = None,
) -> TrainingReport:
    """Finetune in as many processes as `choose_process_count` says, and publish the checkpoint in `output_folder`.

    If this folder already holds the checkpoint of the same run, nothing is trained.

    Args:
        base_model: The model to finetune.
        data: The rows to train on, and the held-out rows.
        settings: The settings of the training.
        output_folder: The folder of the checkpoint.
        step_callback: Called after each step. If it raises an error, the training ends.
        measurement_callback: Called for each point of a curve.

    Returns:
        The report of the training, or that of the run that was finished before.

    Raises:
        TrainingError: The training cannot run, or it failed.
        ModelError: The model cannot be read.
    """
    process_count = choose_process_count(base_model, settings)
    gpu_count = _count_usable_gpus(base_model)

    # With several GPUs, a process of its own sees only one of them.
    can_train_here = process_count == 1 and gpu_count <= 1
    if can_train_here:
        return finetune(base_model, data, settings, output_folder, step_callback, measurement_callback)

    check_recipe(base_model, settings, process_count)
    _check_enough_gpus(process_count, gpu_count)
    run_fingerprint = fingerprint(build_run_identity(base_model, data, settings))
    finished_report = find_finished_run(run_fingerprint, output_folder)
    if finished_report:
        return finished_report

    # Other processes train. They read the job in this folder, and write their progress there.
    event_handler = _EventHandler(step_callback, measurement_callback)
    with _create_job_folder(output_folder) as job_folder:
        _write_job_file(job_folder, base_model, data, settings, output_folder)
        _run_job_processes(job_folder, process_count, event_handler)  # returns once they have ended
    return _require_published_report(output_folder)


def _check_enough_gpus(process_count: int, gpu_count: int) -> None:
    """Check that a machine with GPUs has one for each process. Without any GPU, the processes train on the CPU.

    Raises:
        TrainingError: There are fewer GPUs than processes.
    """
    if process_count > gpu_count > 0:
        raise TrainingError(
            f"{process_count} processes need as many GPUs, and there are {gpu_count}; lower training.processes"
        )


def _require_published_report(output_folder: Path) -> TrainingReport:
    """Return the report of the checkpoint that other processes have published.

    Raises:
        TrainingError: There is no whole checkpoint.
    """
    report = read_training_report(output_folder)
    if report is None:
        raise TrainingError(f"the processes ended, and {output_folder} holds no whole checkpoint; run again")
    return report


@contextmanager
def _create_job_folder(output_folder: Path) -> Iterator[Path]:
    """Create an empty folder next to `output_folder` that only this user can read, and remove it after the block."""
    output_folder.parent.mkdir(parents=True, exist_ok=True)
    job_folder = output_folder.with_name(f"{output_folder.name}.job")
    shutil.rmtree(job_folder, ignore_errors=True)  # left by a run that was killed
    job_folder.mkdir(mode=0o700)
    try:
        yield job_folder
    finally:
        shutil.rmtree(job_folder, ignore_errors=True)


def _write_job_file(
    job_folder: Path, base_model: ModelSettings, data: TrainingData, settings: TrainingSettings, output_folder: Path
) -> None:
    """Write the description of a training into the folder of its job, for `run_job` to read."""
    job_description = {
        "base": base_model.model_dump(),
        "settings": settings.model_dump(),
        "out": str(output_folder),
        "parent": os.getpid(),
        "data": asdict(data),
    }
    (job_folder / JOB_FILE_NAME).write_text(json.dumps(job_description), encoding="utf-8")


def choose_process_count(base_model: ModelSettings, settings: TrainingSettings) -> int:
    """Choose how many processes train together.

    Returns:
        `training.processes` if it is set. Otherwise the largest number of GPUs that divides the batch, or 1 if there
        is no GPU or the training cannot be divided.

    Raises:
        ModelError: The model's config cannot be read.
    """
    if settings.processes is not None:
        return settings.processes

    gpu_count = _count_usable_gpus(base_model)
    if gpu_count <= 1:
        return 1
    if not _can_divide_weights(base_model, settings):
        return 1
    return max(count for count in range(1, gpu_count + 1) if settings.batch_size % count == 0)


def _can_divide_weights(base_model: ModelSettings, settings: TrainingSettings) -> bool:
    """Return whether several GPUs can divide the weights of a training among them.

    They cannot if the optimizer keeps its moments in 8 bits, with LoRA adapters, if the objective compares with the
    base model (`keep_base`), or if the model is more than a language model.

    Raises:
        ModelError: The model's config cannot be read.
    """
    has_8bit_moments = settings.precision == "bfloat16"
    has_frozen_weights = settings.lora_rank is not None
    if has_8bit_moments or has_frozen_weights:
        return False
    if _needs_base_model(settings):
        return False
    return not is_composite_model(base_model)  # reads the model's config


def _count_usable_gpus(base_model: ModelSettings) -> int:
    """Return the number of GPUs that training may use: none if the device in the settings is the CPU."""
    if base_model.device == "cpu":
        return 0
    return torch.cuda.device_count()


class _EventHandler:
    """Passes the events of a job to the callbacks of `train`, and keeps its last step and its first error.

    `handle_event` describes the events.

    Attributes:
        first_error: The first error that a process of the job wrote. None before that.
    """

    def __init__(self, step_callback: StepCallback | None, measurement_callback: MeasurementCallback | None) -> None:
        self._step_callback = step_callback
        self._measurement_callback = measurement_callback
        self._finished_steps = 0
        self._total_steps = 1  # until the first step is known
        self.first_error: str | None = None

    def handle_event(self, event: Mapping[str, Any]) -> None:
        """Handle an event of a training process, which has one of three forms.

        - {"error": "..."}: The process ends. The first error is kept in `first_error`.
        - {"step": 3, "of": 100}: The third of 100 steps is done.
        - {"step": 3, "values": {"loss": 2.5}}: A point of a curve was measured.
        """
        if "error" in event:
            if self.first_error is None:
                self.first_error = event["error"]
        elif "of" in event:
            self._finished_steps = event["step"]
            self._total_steps = event["of"]
            self.report_last_step()
        elif self._measurement_callback:
            self._measurement_callback(event["step"], event["values"])

    def report_last_step(self) -> None:
        """Call the step callback with the last step, perhaps again. The callback raises if the run was canceled."""
        if self._step_callback:
            self._step_callback(self._finished_steps, self._total_steps)


def _run_job_processes(job_folder: Path, process_count: int, event_handler: _EventHandler) -> None:
    """Run a job in a group of processes until it ends, and pass its events to `event_handler`.

    If this process ends, the group ends too. The first error in the events is the reason in the TrainingError.

    Args:
        job_folder: The folder of the job.
        process_count: The number of processes.
        event_handler: Takes the events. An error that it raises ends the job, and is raised here.

    Raises:
        TrainingError: The job fails.
    """
    command = _build_job_command(job_folder, process_count)
    log_path = job_folder / LOG_FILE_NAME
    events_path = job_folder / EVENTS_FILE_NAME
    events_path.touch()  # the processes append to it
    with (
        log_path.open("wb") as log_file,
        events_path.open(encoding="utf-8") as events_file,
        _run_process_group(command, log_file, uses_one_gpu=process_count == 1) as leader_process,
    ):
        _handle_events_until_end(leader_process, events_file, event_handler)  # returns once the processes have ended

    exit_code = leader_process.returncode
    if exit_code:
        reason = event_handler.first_error
        if reason is None:
            reason = _read_last_lines(log_path)
        raise TrainingError(f"{process_count} processes that train together ended with {exit_code}: {reason}")


def _build_job_command(job_folder: Path, process_count: int) -> list[str]:
    """Return the command that runs `run_job` in some processes, through torchrun if there are several."""
    module_arguments = ["-m", "toolformer_dag.training.launch"]
    if process_count > 1:
        launcher_arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(process_count)]
        module_arguments = [*launcher_arguments, *module_arguments]
    return [sys.executable, *module_arguments, str(job_folder / JOB_FILE_NAME)]


def _handle_events_until_end(
    leader_process: subprocess.Popen[bytes], events_file: IO[str], event_handler: _EventHandler
) -> None:
    """Pass the events that processes append to a file on to `event_handler`, until the processes have ended."""
    while True:
        has_ended = leader_process.poll() is not None  # checked first, so that the last events are read after the end
        for event in _iter_new_events(events_file):
            event_handler.handle_event(event)
        if has_ended:
            break

        event_handler.report_last_step()  # notices that the run was canceled, even if no step ends
        time.sleep(POLL_SECONDS)


def _read_last_lines(log_path: Path) -> str:
    """Return the last 20 lines of a log file."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-20:])


def _iter_new_events(events_file: IO[str]) -> Iterator[dict[str, Any]]:
    """Yield the events that were appended to a file since the last call. The position in the file moves on.

    A line that is not finished yet is left for the next call.
    """
    while True:
        line_start = events_file.tell()
        line = events_file.readline()
        is_finished = line.endswith("\n")
        if not is_finished:
            events_file.seek(line_start)
            return
        yield json.loads(line)


@contextmanager
def _run_process_group(
    command: Sequence[str], log_file: IO[bytes], *, uses_one_gpu: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a new process group during the `with` block. None of its processes outlives the block.

    Args:
        command: The command.
        log_file: The file that gets what the processes print.
        uses_one_gpu: Whether the processes see only the first GPU.

    Yields:
        The first process of the group.
    """
    environment = _build_first_gpu_environment(os.environ) if uses_one_gpu else None  # None: the same as this process
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, env=environment, start_new_session=True
    ) as leader_process:
        try:
            yield leader_process
        finally:
            _end_process_group(leader_process)


def _build_first_gpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that let CUDA see only the first of the GPUs that it sees now."""
    visible_gpus = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    return {**environment, "CUDA_VISIBLE_DEVICES": visible_gpus[0]}


def _end_process_group(leader_process: subprocess.Popen[bytes]) -> None:
    """End all processes of a group, first with SIGTERM, then with SIGKILL.

    After each signal, the leader of the group gets TERMINATION_TIMEOUT_SECONDS to end.
    """
    for end_signal in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):  # all have ended already
            os.killpg(leader_process.pid, end_signal)
        with suppress(subprocess.TimeoutExpired):
            leader_process.wait(TERMINATION_TIMEOUT_SECONDS)


def run_job(job_path: Path) -> None:
    """Train as one of the processes of a job. This process ends when the process that started the job ends.

    Process 0 appends steps and curves to the job's events. An error that the user can fix is appended too, and the
    process exits with 1.

    Args:
        job_path: The description of the job, which `train` wrote.
    """
    job_description = json.loads(job_path.read_text(encoding="utf-8"))
    end_with_parent(job_description["parent"])

    events_path = job_path.parent / EVENTS_FILE_NAME
    with events_path.open("a", encoding="utf-8", buffering=1) as events_file:  # each line is written at once
        try:
            _finetune_job(job_description, events_file)
        except UserError as error:
            _append_event(events_file, error=str(error))
            sys.exit(1)


def _finetune_job(job_description: Mapping[str, Any], events_file: IO[str]) -> None:
    """Finetune as a job describes it, and append steps and points of curves to its events."""
    finetune(
        base_model=ModelSettings.model_validate(job_description["base"]),
        data=TrainingData(**job_description["data"]),
        settings=TrainingSettings(**job_description["settings"]),
        output_folder=Path(job_description["out"]),
        step_callback=lambda done, total: _append_event(events_file, step=done, of=total),
        measurement_callback=lambda step, values: _append_event(events_file, step=step, values=dict(values)),
    )


def _append_event(events_file: IO[str], **event: Any) -> None:
    """Append an event to the file of a job's events, as a line of JSON with the keyword arguments as its fields."""
    events_file.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    run_job(Path(sys.argv[1]))
