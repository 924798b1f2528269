"""Save and restore what a run needs besides divided weights: each process writes its share of the moments."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import TrainerCallback

from toolformer_dag.training.training_run import SHARES


def save_shares(args: Any, folder: Path, model: Any, optimizer: Any, schedule: Any) -> None:
    """Write moments, schedule and random states to the folder of a checkpoint; every process calls this.

    The Trainer saves an optimizer as one process sees it, which is a share here.
    """
    save(_state(args, model, optimizer, schedule), checkpoint_id=folder / SHARES)


class RestoredShares(TrainerCallback):  # type: ignore[misc]  # mypy does not follow transformers
    """Restores what `save_shares` wrote when a run goes on.

    The number of processes may differ; random states of further processes then begin anew.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **trained: Any) -> None:
        """Read the shares of the checkpoint that the run goes on from."""
        if not state.global_step:
            return
        model, optimizer, schedule = (trained[name] for name in ("model", "optimizer", "lr_scheduler"))
        restored = _state(args, model, optimizer, schedule)
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}" / SHARES
        load(restored, checkpoint_id=folder, planner=DefaultLoadPlanner(allow_partial_load=True))
        set_optimizer_state_dict(model, _plain(optimizer), restored["optimizer"])
        schedule.load_state_dict(restored["schedule"])
        torch.set_rng_state(restored[_random(args)])
        if args.device.type == "cuda":
            torch.cuda.set_rng_state(restored[f"{_random(args)} on its GPU"].cpu())


def _state(args: Any, model: Any, optimizer: Any, schedule: Any) -> dict[str, Any]:
    state = {
        "optimizer": get_optimizer_state_dict(model, _plain(optimizer)),
        "schedule": schedule.state_dict(),
        _random(args): torch.get_rng_state(),
    }
    if args.device.type == "cuda":
        state[f"{_random(args)} on its GPU"] = torch.cuda.get_rng_state()
    return state


def _plain(optimizer: Any) -> Any:
    """Accelerate's wrapper hides the optimizer that torch knows."""
    return getattr(optimizer, "optimizer", optimizer)


def _random(args: Any) -> str:
    return f"random state of process {args.process_index}"
