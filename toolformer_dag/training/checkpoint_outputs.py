"""The two checkpoints of a plan: their training texts, their settings, and why they are out of date."""

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from toolformer_dag.files import StorageError, unsealed
from toolformer_dag.lake.record import changes
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline.augmented_corpus import NAME as CORPUS
from toolformer_dag.pipeline.merging import HELDOUT, TRAIN, heldout_texts
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.training.training_report import RECORD, checkpoint_folder, read_report
from toolformer_dag.training.training_run import run_identity

CHECKPOINTS = {
    "finetuned_checkpoint": ("text_with_calls", "M finetuned on C*: Toolformer (paper, section 2)."),
    "baseline_checkpoint": (
        "text",
        "M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
    ),
}
"""Name -> (column of C* that it is trained on, description)."""


def checkpoint_settings(plan: Plan, name: str) -> dict[str, Any]:
    """Return what determines a checkpoint besides C*."""
    return {
        "settings": plan.settings.training.determining(),
        "model": dict(plan.model),
        "column": CHECKPOINTS[name][0],
        "chosen_on": plan.settings.training.heldout_texts,
    }


def training_texts(plan: Plan, name: str) -> tuple[list[str], list[str]]:
    """Return the training texts, and the held-out texts that choose the best checkpoint. Raises MissingPart."""
    corpus = plan.lake.table(CORPUS).read(WHOLE)
    train, heldout = (corpus.filter(pl.col("split") == split) for split in (TRAIN, HELDOUT))
    choosing = heldout_texts(heldout["text"].to_list(), plan.settings.training.heldout_texts).choosing
    return train[CHECKPOINTS[name][0]].to_list(), choosing


def checkpoint_reasons(plan: Plan, name: str) -> list[str]:
    """Return why a checkpoint is missing or out of date; empty if it is up to date."""
    folder = checkpoint_folder(plan.settings, name)
    if not folder.exists():
        return ["never made"]
    if read_report(folder) is None:
        return [f"{folder} is gone or not whole"]
    try:
        texts = training_texts(plan, name)
    except StorageError:  # C* is missing, which the reasons of C* report
        return []
    now = run_identity(plan.settings.model, *texts, plan.settings.training)
    stored = unsealed((folder / RECORD).read_bytes())
    return [str(change) for change in changes(_record(stored), _record(json.loads(json.dumps(now))))]


def _record(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the identity of a finetuning run to the form of a record."""
    return {
        "settings": {**run["settings"], "base": run["base"]},
        "inputs": {"texts": run["texts"], "heldout": run["heldout"]},
    }
