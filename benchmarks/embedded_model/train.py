"""Train the embedded model, from scratch or from another model: boot camp, then the mix."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel
from transformers import GPTJForCausalLM

from benchmarks.embedded_model.export import export_model, train_tokenizer
from benchmarks.embedded_model.network import EmbeddedTraining, new_model
from benchmarks.embedded_model.stream import batch, tokenizer_texts
from toolformer_dag.files import UserError, write_file_atomically
from toolformer_dag.identity import file_hash
from toolformer_dag.model.loading import choose_fast_dtype

MAY_CHANGE = ("steps", "checkpoint_steps")  # a run may be made longer or shorter while it is under way
LOG_STEPS = 10
WEIGHTS = "model.safetensors"
MUON_DECAY = 0.01  # of the weights, times the learning rate


def optimisers(model: GPTJForCausalLM, muon_rate: float, adam_rate: float) -> tuple[Optimizer, ...]:
    """Return Muon for the matrices and AdamW for the rest; the bias of the output, which stays 0, is in neither."""
    model.lm_head.bias.requires_grad_(False)
    matrices = []
    others = []
    for name, parameter in model.named_parameters():
        is_embedding = "wte" in name
        if parameter.dim() == 2 and not is_embedding:
            matrices.append(parameter)
        elif parameter.requires_grad:
            others.append(parameter)
    muon = Muon(matrices, muon_rate, weight_decay=MUON_DECAY, adjust_lr_fn="original")
    return muon, AdamW(others, adam_rate, betas=(0.9, 0.95), weight_decay=0.0)


def averaged(model: nn.Module, power: float) -> AveragedModel:
    """Return the average of the weights with polynomial decay (Shamir and Zhang 2013), which each step updates.

    Weights after step t count like t (t + 1) ... (t + power - 1); their mean age is 1 / (power + 2) of all steps so
    far, however long the run will be.
    """

    def mean(average: Tensor, weights: Tensor, steps: Tensor | int) -> Tensor:
        return torch.lerp(average, weights, float((power + 1) / (power + steps + 1)))

    return AveragedModel(model, avg_fn=mean)


class Run:
    """Hold what a step changes; `taken`: the steps done."""

    def __init__(self, settings: EmbeddedTraining, folder: Path, start: Path | None) -> None:
        """Begin, or restore what `save` wrote. Raises UserError for a folder of another run."""
        self.settings = settings
        self.path = folder / "checkpoint.pt"
        stored = checkpoint(self.path, settings)
        torch.manual_seed(settings.seed)
        self.model = new_model(settings.shape) if start is None else _loaded(start)
        self.average = averaged(self.model, settings.average_power)
        self.optimisers = optimisers(self.model, settings.muon_rate, settings.adam_rate)
        self.taken = stored["step"] if stored else 0
        if stored:
            self.model.load_state_dict(stored["model"])
            self.average.load_state_dict(stored["average"])
            for optimiser, state in zip(self.optimisers, stored["optimisers"], strict=True):
                optimiser.load_state_dict(state)
        self.rates = [LambdaLR(one, settings.rate_factor, self.taken - 1) for one in self.optimisers]

    def step(self, tokenizer: Tokenizer) -> float:
        """Take a step; return its loss in nats per token."""
        settings = self.settings
        losses = list[float]()
        for lane in range(settings.lanes):
            rows = batch(settings, tokenizer, self.taken, lane)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=choose_fast_dtype() == torch.bfloat16):
                loss = self.model(rows, labels=rows, use_cache=False).loss
            torch.autograd.backward(loss / settings.lanes)
            losses.append(loss.item())
        for optimiser, rate in zip(self.optimisers, self.rates, strict=True):
            optimiser.step()
            optimiser.zero_grad()
            rate.step()
        self.average.update_parameters(self.model)
        self.taken += 1
        return fmean(losses)

    def save(self) -> None:
        """Replace the checkpoint atomically."""
        content = BytesIO()
        parts = {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [one.state_dict() for one in self.optimisers],
        }
        torch.save({**parts, "step": self.taken, "settings": asdict(self.settings)}, content)
        write_file_atomically(self.path, content.getvalue())


def checkpoint(path: Path, settings: EmbeddedTraining) -> dict[str, Any] | None:
    """Return what `Run.save` wrote, None where there is no file.

    Raises UserError where the file's settings differ in more than MAY_CHANGE, or where it has done more steps.
    """
    if not path.exists():
        return None
    stored: dict[str, Any] = torch.load(path, weights_only=True)
    known = stored["settings"]
    changed = [key for key, value in asdict(settings).items() if key not in MAY_CHANGE and known.get(key) != value]
    if changed:
        raise UserError(
            f"{path.parent} is of a run with other settings ({', '.join(changed)}); remove it or choose another folder"
        )
    if stored["step"] > settings.steps:
        raise UserError(
            f"{path.parent} has taken {stored['step']} steps, more than {settings.steps}; give at least as many"
        )
    return stored


@dataclass(frozen=True, slots=True)
class PretrainingProgress:
    """Hold a line of metrics.jsonl; `loss`, in nats per token, is the mean over LOG_STEPS steps."""

    step: int
    steps: int
    loss: float
    tokens: int
    tokens_per_second: float  # since the run was started or continued


def train(
    settings: EmbeddedTraining,
    out: Path,
    progress: Callable[[PretrainingProgress], None] = lambda line: None,
    start: Path | None = None,
) -> Path:
    """Train a model and export it to the folder `out`; return `out`. An interrupted run in `out` continues.

    `start`, a model folder, provides the first weights, shape and tokenizer; then there is no boot camp.

    `out/training` keeps the tokenizer, checkpoint.pt and metrics.jsonl. An interruption does not change the weights.
    Raises UserError for a folder of another run, and for a `start` without a model.
    """
    if start is not None:
        require_model(start)
        settings = replace(settings, start=file_hash(start / WEIGHTS), boot_steps=0)
    folder = out / "training"
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(settings, folder, start)
    tokenizer = _tokenizer(settings, folder / "tokenizer.json", start)
    if not run.taken:  # from here on the folder is this run's
        run.save()
    before = run.taken
    began = time.monotonic()
    losses = list[float]()
    while run.taken < settings.steps:
        losses.append(run.step(tokenizer))
        if run.taken == settings.steps or run.taken % LOG_STEPS == 0:
            tokens = settings.lanes * settings.lane_tokens
            rate = (run.taken - before) * tokens / (time.monotonic() - began)
            line = PretrainingProgress(run.taken, settings.steps, fmean(losses), run.taken * tokens, rate)
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")
            progress(line)
            losses.clear()
        if run.taken == settings.steps or run.taken % settings.checkpoint_steps == 0:
            run.save()
    export_model(run.average.module, tokenizer, out)
    return out


def require_model(folder: Path) -> None:
    """Raise UserError where a folder holds no model that `train` wrote."""
    missing = [name for name in ("config.json", "tokenizer.json", WEIGHTS) if not (folder / name).is_file()]
    kind = None if missing else json.loads((folder / "config.json").read_text("utf-8")).get("model_type")
    if kind != "gptj":
        what = f"has no {', '.join(missing)}" if missing else f"holds another kind of model ({kind})"
        raise UserError(f"{folder} {what}; name a folder that `python -m benchmarks.embedded_model train` wrote")


def _loaded(folder: Path) -> GPTJForCausalLM:
    return GPTJForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def _tokenizer(settings: EmbeddedTraining, path: Path, start: Path | None) -> Tokenizer:
    if start is not None:
        shutil.copyfile(start / "tokenizer.json", path)
    elif not path.exists():
        train_tokenizer(tokenizer_texts(settings.seed), settings.shape.vocab_size).save(str(path))
    return Tokenizer.from_file(str(path))
