"""What came of a finetuning run: its record beside the weights, and putting both in place. Imports no torch."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolformer_dag.storage.files import sync

RECORD = "training.json"


@dataclass(frozen=True, slots=True)
class LossPoint:
    """The mean training loss (nats per token) of the steps up to `step`."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class HeldoutPoint:
    """Held-out perplexity after `step` steps; step 0 is the base model."""

    step: int
    perplexity: float


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """`best_step`: the checkpoint that was kept. `tokens`: of one pass over the examples. `seconds`: of the last start.

    `reused`: the run was finished before and nothing was trained. `examples`: sequences; `split_texts`: texts longer
    than a sequence, which became several; `empty_texts`: left out.
    """

    fingerprint: str
    steps: int
    best_step: int
    texts: int
    examples: int
    split_texts: int
    empty_texts: int
    tokens: int
    seconds: float
    device: str
    losses: tuple[LossPoint, ...]
    heldout: tuple[HeldoutPoint, ...]
    reused: bool = False

    @property
    def perplexity(self) -> float:
        """Held-out perplexity of the checkpoint that was kept."""
        return next(point.perplexity for point in self.heldout if point.step == self.best_step)


def curves(log: Sequence[Mapping[str, Any]]) -> tuple[tuple[LossPoint, ...], tuple[HeldoutPoint, ...]]:
    """Both curves out of the Trainer's log history; a step that was measured again counts once."""
    losses = {entry["step"]: entry["loss"] for entry in log if "loss" in entry}
    heldout = {entry["step"]: entry["eval_perplexity"] for entry in log if "eval_perplexity" in entry}
    return (
        tuple(LossPoint(step, loss) for step, loss in sorted(losses.items())),
        tuple(HeldoutPoint(step, perplexity) for step, perplexity in sorted(heldout.items())),
    )


def write_record(folder: Path, report: TrainingReport, identity: Mapping[str, object]) -> None:
    """training.json: the report, and what the run was made of (settings, base, texts, versions)."""
    record = {"report": asdict(report), **identity, "files": _sizes(folder)}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_base(folder: Path) -> Mapping[str, str] | None:
    """The identity of the model that a finished run started from; None where the folder holds no finished run."""
    record = _whole_record(folder)
    return None if record is None else record.get("base")


def read_report(folder: Path) -> TrainingReport | None:
    """The report of a finished run; None where the folder holds none."""
    record = _whole_record(folder)
    if record is None:
        return None
    values = record["report"]
    losses = tuple(LossPoint(**point) for point in values.pop("losses"))
    heldout = tuple(HeldoutPoint(**point) for point in values.pop("heldout"))
    return TrainingReport(**values, losses=losses, heldout=heldout)


def _whole_record(folder: Path) -> dict[str, Any] | None:
    """None where somebody copied, cleared or cut the folder in part."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if not isinstance(record, dict) or "report" not in record or not any(folder.glob("*.safetensors")):
        return None
    return record if record.get("files", {}).items() <= _sizes(folder).items() else None


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of the files beside the record."""
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != RECORD}


def publish(folder: Path, out: Path) -> None:
    """`folder` becomes `out`: everything is on disk before a rename makes it visible.

    Between putting an old folder aside and the rename there is a moment with none; never one with half a model.
    """
    for file in folder.iterdir():
        sync(file)
    sync(folder)
    aside = out.with_name(f"{out.name}.replaced")
    shutil.rmtree(aside, ignore_errors=True)
    if out.exists():
        out.rename(aside)
    folder.rename(out)
    sync(out.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_partial(out: Path) -> None:
    """Every unfinished run beside `out`: a published one makes them pointless."""
    for folder in out.parent.glob(f"{out.name}.partial-*"):
        shutil.rmtree(folder, ignore_errors=True)
