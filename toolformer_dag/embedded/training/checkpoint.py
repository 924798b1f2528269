"""The state of a run in one safetensors file: weights, their average, optimiser, step and settings."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from toolformer_dag.embedded.training.average import WeightAverage
from toolformer_dag.embedded.training.gptj import GPTJ
from toolformer_dag.embedded.training.muon import MuonAdamW
from toolformer_dag.embedded.training.settings import EmbeddedTraining
from toolformer_dag.errors import UserError

MAY_CHANGE = ("steps", "checkpoint_steps")  # a run may be made longer or shorter while it is under way


class CheckpointError(UserError):
    """The checkpoint belongs to another run."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a step changes."""

    model: GPTJ
    average: WeightAverage
    optimiser: MuonAdamW

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """By part and name."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.tensors,
            "optimiser": self.optimiser.tensors(),
        }

    def load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        """Take over what `tensors` gave."""
        self.model.load_state_dict(tensors["model"])
        self.average.tensors = tensors["average"]
        self.optimiser.load(tensors["optimiser"])


def save_checkpoint(path: Path, state: RunState, step: int, settings: EmbeddedTraining) -> None:
    """Replace the file as a whole; `step` steps have been taken."""
    tensors = {f"{part}.{name}": tensor for part, own in state.tensors().items() for name, tensor in own.items()}
    beside = path.with_suffix(".part")
    save_file(tensors, beside, {"step": str(step), "settings": json.dumps(asdict(settings))})
    beside.replace(path)


def load_checkpoint(path: Path, state: RunState, settings: EmbeddedTraining) -> int:
    """Take over a state that `save_checkpoint` wrote; returns its step, 0 where there is no file.

    Raises CheckpointError where the file's settings differ in more than MAY_CHANGE, or where it has taken more steps.
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
    """Raises CheckpointError where the file's settings differ in more than MAY_CHANGE; no file is no other run."""
    if not path.exists():
        return
    with safe_open(path, "pt") as file:
        stored = json.loads(file.metadata()["settings"])
    changed = [key for key, value in asdict(settings).items() if key not in MAY_CHANGE and stored.get(key) != value]
    if changed:
        raise CheckpointError(
            f"{path.parent} is of a run with other settings ({', '.join(changed)}); remove it or choose another folder"
        )
