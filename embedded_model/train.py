"""Train the embedded model, from scratch or from another model: boot camp, then the mix, in any number of processes."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, multiprocessing

from embedded_model.documents import train_tokenizer
from embedded_model.export import export_model, fingerprint, load_weights, shape_of
from embedded_model.network import GPTJ, EmbeddedTraining
from embedded_model.optimizer import MuonAdamW, SharedGradients, WeightAverage
from embedded_model.real_text import fingerprint as real_text_fingerprint
from embedded_model.stream import Mixture, Stream
from toolformer_dag.files import UserError
from toolformer_dag.model.loading import fast_dtype
from toolformer_dag.pipeline.chunks import end_with_parent

MAY_CHANGE = ("steps", "checkpoint_steps")  # a run may be made longer or shorter while it is under way


class CheckpointError(UserError):
    """Report a checkpoint of another run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Hold the state that a step changes."""

    model: GPTJ
    average: WeightAverage
    optimiser: MuonAdamW

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors by part and name."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.tensors,
            "optimiser": self.optimiser.tensors(),
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Restore a state that `tensors` returned."""
        self.model.load_state_dict(tensors["model"])
        self.average.tensors = tensors["average"]
        self.optimiser.load(tensors["optimiser"])


def save_checkpoint(path: Path, state: RunState, step: int, settings: EmbeddedTraining) -> None:
    """Replace the checkpoint atomically; `step` is the number of steps done."""
    tensors = {f"{part}.{name}": tensor for part, own in state.tensors().items() for name, tensor in own.items()}
    beside = path.with_suffix(".part")
    save_file(tensors, beside, {"step": str(step), "settings": json.dumps(asdict(settings))})
    beside.replace(path)


def load_checkpoint(path: Path, state: RunState, settings: EmbeddedTraining) -> int:
    """Restore a state that `save_checkpoint` wrote and return its step, 0 where there is no file.

    Raises CheckpointError where the file's settings differ in more than MAY_CHANGE, or where it has done more steps.
    """
    if not path.exists():
        return 0
    refuse_other_run(path, settings)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors: dict[str, dict[str, Tensor]] = {}
        for stored in file.keys():  # noqa: SIM118, no mapping
            part, name = stored.split(".", 1)
            tensors.setdefault(part, {})[name] = file.get_tensor(stored)
    if (taken := int(metadata["step"])) > settings.steps:
        raise CheckpointError(
            f"{path.parent} has taken {taken} steps, more than {settings.steps}; give at least as many"
        )
    state.load(tensors)
    return taken


def refuse_other_run(path: Path, settings: EmbeddedTraining) -> None:
    """Raise CheckpointError where the file's settings differ in more than MAY_CHANGE; accept a missing file."""
    if not path.exists():
        return
    with safe_open(path, "pt") as file:
        stored = json.loads(file.metadata()["settings"])
    changed = [key for key, value in asdict(settings).items() if key not in MAY_CHANGE and stored.get(key) != value]
    if changed:
        raise CheckpointError(
            f"{path.parent} is of a run with other settings ({', '.join(changed)}); remove it or choose another folder"
        )


LOG_STEPS = 10


@dataclass(frozen=True, slots=True)
class PretrainingProgress:
    """Hold a line of metrics.jsonl; `loss`, in nats per token, is the mean over LOG_STEPS steps."""

    step: int
    steps: int
    loss: float
    rate_factor: float
    tokens: int
    tokens_per_second: float
    seconds: float  # of this process


@dataclass(frozen=True, slots=True)
class PretrainingRun:
    """Hold the settings that every process of a run receives."""

    settings: EmbeddedTraining
    folder: Path
    real_text: tuple[Path, ...]
    processes: int
    start: Path | None

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"


def train(
    settings: EmbeddedTraining,
    out: Path,
    real_text: Sequence[Path] = (),
    progress: Callable[[PretrainingProgress], None] = lambda line: None,
    processes: int = 2,
    start: Path | None = None,
) -> Path:
    """Train a model and export it to the folder `out`; return `out`. An interrupted run in `out` continues.

    `start`, a model folder, provides the first weights, shape and tokenizer; then there is no boot camp.

    `out/training` keeps the tokenizer, checkpoint.safetensors and metrics.jsonl. Neither an interruption nor the
    number of processes changes the weights. Raises CheckpointError for a folder of another run, WorkerLost when a
    process ends, RealTextError for unreadable real text, StartError for a `start` without a model.
    """
    settings = replace(settings, real_text=real_text_fingerprint(real_text))
    if start is not None:
        settings = replace(settings, shape=shape_of(start), start=fingerprint(start), boot_steps=0)
    run = PretrainingRun(settings, out / "training", tuple(real_text), processes, start)
    refuse_other_run(run.checkpoint, settings)
    run.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(run)
    context = multiprocessing.get_context("spawn")
    gradients = SharedGradients.make(context, settings.lanes, settings.shape.parameters, processes)
    others = [context.Process(target=_work, args=(run, gradients), daemon=True) for _ in range(1, processes)]
    for process in others:
        process.start()
    try:
        model = _work(run, gradients, _Log(run, progress))
    finally:
        gradients.barrier.abort()
        for process in others:
            process.join()
    export_model(model, tokenizer, out)
    return out


def _tokenizer(run: PretrainingRun) -> Tokenizer:
    path = run.folder / "tokenizer.json"
    if run.start is not None:
        shutil.copyfile(run.start / "tokenizer.json", path)
    elif not path.exists():
        texts = Mixture.load(run.real_text).sample_texts(run.settings.seed, run.settings.real_share)
        train_tokenizer(texts, run.settings.shape.vocabulary).save(str(path))
    return Tokenizer.from_file(str(path))


def _work(run: PretrainingRun, gradients: SharedGradients, log: "_Log | None" = None) -> GPTJ:
    end_with_parent()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _steps(run, gradients, log)
    finally:
        torch.set_num_threads(threads)


def _steps(run: PretrainingRun, gradients: SharedGradients, log: "_Log | None") -> GPTJ:
    """Run the remaining steps and return the averaged weights; the process with the log writes the checkpoints."""
    settings = run.settings
    torch.manual_seed(settings.seed)
    model = GPTJ(settings.shape)
    if run.start is not None:
        load_weights(run.start, model)
    optimiser = MuonAdamW(model, settings.muon_rate, settings.adam_rate)
    average = WeightAverage(model, settings.average_power)
    state = RunState(model, average, optimiser)
    taken = load_checkpoint(run.checkpoint, state, settings)
    if log is not None and not taken:  # from here on the folder is this run's
        save_checkpoint(run.checkpoint, state, 0, settings)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    stream = Stream(settings, Mixture.load(run.real_text), tokenizer)
    for step in range(taken, settings.steps):
        while (lane := gradients.take(step - taken)) is not None:
            gradients.put(lane, model, _backward(model, stream.batch(step, lane)))
        loss = gradients.add_up(model)
        optimiser.step(settings.rate_factor(step))
        average.add(model, step + 1)
        if log is not None:
            log.add(step + 1, loss)
            if (step + 1) % settings.checkpoint_steps == 0 or step + 1 == settings.steps:
                save_checkpoint(run.checkpoint, state, step + 1, settings)
    model.load_state_dict(average.tensors)
    return model


def _backward(model: GPTJ, rows: Tensor) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_dtype() == torch.bfloat16):
        loss = model.loss(rows)
    torch.autograd.backward(loss)
    return loss.item()


class _Log:
    """Append a line to metrics.jsonl and call `progress` every LOG_STEPS steps."""

    def __init__(self, run: PretrainingRun, progress: Callable[[PretrainingProgress], None]) -> None:
        self.run, self.progress = run, progress
        self.began = time.monotonic()
        self.steps = 0
        self.losses: list[float] = []

    def add(self, step: int, loss: float) -> None:
        self.losses.append(loss)
        self.steps += 1
        if step % LOG_STEPS and step != self.run.settings.steps:
            return
        line = self._line(step)
        self.losses.clear()
        with (self.run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        self.progress(line)

    def _line(self, step: int) -> PretrainingProgress:
        settings, seconds = self.run.settings, time.monotonic() - self.began
        step_tokens = settings.lanes * settings.lane_tokens
        return PretrainingProgress(
            step=step,
            steps=settings.steps,
            loss=sum(self.losses) / len(self.losses),
            rate_factor=settings.rate_factor(step - 1),
            tokens=step * step_tokens,
            tokens_per_second=self.steps * step_tokens / seconds,
            seconds=seconds,
        )
