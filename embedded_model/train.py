"""Train the embedded model, from scratch or from another model: boot camp, then the mix, in any number of processes."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor, multiprocessing

from embedded_model.export import WEIGHTS, export_model, load_weights, shape_of, train_tokenizer
from embedded_model.network import GPTJ, EmbeddedTraining
from embedded_model.optimizer import MuonAdamW, SharedGradients, WeightAverage
from embedded_model.stream import batch, tokenizer_texts
from toolformer_dag.files import UserError, write_whole
from toolformer_dag.identity import file_hash
from toolformer_dag.model.loading import fast_dtype
from toolformer_dag.processes import end_with_parent

MAY_CHANGE = ("steps", "checkpoint_steps")  # a run may be made longer or shorter while it is under way
LOG_STEPS = 10


@dataclass(frozen=True, slots=True)
class RunState:
    """Hold the state that a step changes."""

    model: GPTJ
    average: WeightAverage
    optimiser: MuonAdamW

    def save(self, path: Path, step: int, settings: EmbeddedTraining) -> None:
        """Replace the checkpoint atomically; `step` is the number of steps done."""
        parts = {
            "model": self.model.state_dict(),
            "average": self.average.tensors,
            "optimiser": self.optimiser.tensors(),
        }
        tensors = {f"{part}.{name}": tensor for part, own in parts.items() for name, tensor in own.items()}
        write_whole(path, save(tensors, {"step": str(step), "settings": json.dumps(asdict(settings))}))

    def load(self, path: Path) -> None:
        """Restore a state that `save` wrote."""
        parts: dict[str, dict[str, Tensor]] = {}
        for stored, tensor in load_file(path).items():
            part, name = stored.split(".", 1)
            parts.setdefault(part, {})[name] = tensor
        self.model.load_state_dict(parts["model"])
        self.average.tensors = parts["average"]
        self.optimiser.load(parts["optimiser"])


def steps_taken(path: Path, settings: EmbeddedTraining) -> int:
    """Return the steps of a checkpoint, 0 where there is no file.

    Raises UserError where the file's settings differ in more than MAY_CHANGE, or where it has done more steps.
    """
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    stored = json.loads(metadata["settings"])
    taken = int(metadata["step"])
    changed = [key for key, value in asdict(settings).items() if key not in MAY_CHANGE and stored.get(key) != value]
    if changed:
        raise UserError(
            f"{path.parent} is of a run with other settings ({', '.join(changed)}); remove it or choose another folder"
        )
    if taken > settings.steps:
        raise UserError(f"{path.parent} has taken {taken} steps, more than {settings.steps}; give at least as many")
    return taken


@dataclass(frozen=True, slots=True)
class PretrainingProgress:
    """Hold a line of metrics.jsonl; `loss`, in nats per token, is the mean over LOG_STEPS steps."""

    step: int
    steps: int
    loss: float
    tokens: int
    tokens_per_second: float  # of this process


@dataclass(frozen=True, slots=True)
class PretrainingRun:
    """Hold the settings that every process of a run receives."""

    settings: EmbeddedTraining
    folder: Path
    processes: int
    start: Path | None

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"


def train(
    settings: EmbeddedTraining,
    out: Path,
    progress: Callable[[PretrainingProgress], None] = lambda line: None,
    processes: int = 2,
    start: Path | None = None,
) -> Path:
    """Train a model and export it to the folder `out`; return `out`. An interrupted run in `out` continues.

    `start`, a model folder, provides the first weights, shape and tokenizer; then there is no boot camp.

    `out/training` keeps the tokenizer, checkpoint.safetensors and metrics.jsonl. Neither an interruption nor the
    number of processes changes the weights. Raises UserError for a folder of another run, when a process ends, and for
    a `start` without a model.
    """
    if start is not None:
        settings = replace(settings, shape=shape_of(start), start=file_hash(start / WEIGHTS), boot_steps=0)
    run = PretrainingRun(settings, out / "training", processes, start)
    steps_taken(run.checkpoint, settings)
    run.folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(run)
    context = multiprocessing.get_context("spawn")
    parameters = sum(parameter.numel() for parameter in GPTJ(settings.shape).parameters())
    buffer = torch.zeros(settings.lanes, parameters + 1)
    buffer.untyped_storage().share_memory_()
    gradients = SharedGradients(buffer, context.Barrier(processes))
    others = [context.Process(target=_work, args=(run, gradients, one), daemon=True) for one in range(1, processes)]
    for process in others:
        process.start()
    try:
        model = _work(run, gradients, 0, progress)
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
        train_tokenizer(tokenizer_texts(run.settings.seed), run.settings.shape.vocabulary).save(str(path))
    return Tokenizer.from_file(str(path))


def _work(
    run: PretrainingRun,
    gradients: SharedGradients,
    number: int,
    progress: Callable[[PretrainingProgress], None] = lambda line: None,
) -> GPTJ:
    end_with_parent()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _steps(run, gradients, number, progress)
    finally:
        torch.set_num_threads(threads)


def _steps(
    run: PretrainingRun, gradients: SharedGradients, number: int, progress: Callable[[PretrainingProgress], None]
) -> GPTJ:
    """Run the remaining steps as process `number`, and return the averaged weights; process 0 logs and saves."""
    settings = run.settings
    state, taken = _begun(run, number)
    tokenizer = Tokenizer.from_file(str(run.folder / "tokenizer.json"))
    losses: list[float] = []
    began = time.monotonic()
    for step in range(taken, settings.steps):
        for lane in range(number, settings.lanes, run.processes):
            rows = batch(settings, tokenizer, step, lane)
            gradients.put(lane, state.model, _backward(state.model, rows))
        losses.append(gradients.add_up(state.model))
        state.optimiser.step(settings.rate_factor(step))
        state.average.add(state.model, step + 1)
        is_last = step + 1 == settings.steps
        if number == 0 and (is_last or (step + 1) % LOG_STEPS == 0):
            progress(_log(run, step + 1, taken, losses, began))
            losses.clear()
        if number == 0 and (is_last or (step + 1) % settings.checkpoint_steps == 0):
            state.save(run.checkpoint, step + 1, settings)
    state.model.load_state_dict(state.average.tensors)
    return state.model


def _begun(run: PretrainingRun, number: int) -> tuple[RunState, int]:
    """Return the state from which the run goes on, and the steps taken; process 0 saves that of a new run."""
    settings = run.settings
    torch.manual_seed(settings.seed)
    model = GPTJ(settings.shape)
    if run.start is not None:
        load_weights(run.start, model)
    optimiser = MuonAdamW(model, settings.muon_rate, settings.adam_rate)
    state = RunState(model, WeightAverage(model, settings.average_power), optimiser)
    taken = steps_taken(run.checkpoint, settings)
    if taken:
        state.load(run.checkpoint)
    elif number == 0:  # from here on the folder is this run's
        state.save(run.checkpoint, 0, settings)
    return state, taken


def _backward(model: GPTJ, rows: Tensor) -> float:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_dtype() == torch.bfloat16):
        loss = model.loss(rows)
    torch.autograd.backward(loss)
    return loss.item()


def _log(run: PretrainingRun, step: int, taken: int, losses: Sequence[float], began: float) -> PretrainingProgress:
    """Append a line to metrics.jsonl; this process began at step `taken` and at the time `began`."""
    tokens = run.settings.lanes * run.settings.lane_tokens
    seconds = time.monotonic() - began
    line = PretrainingProgress(
        step, run.settings.steps, fmean(losses), step * tokens, (step - taken) * tokens / seconds
    )
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(asdict(line)) + "\n")
    return line
