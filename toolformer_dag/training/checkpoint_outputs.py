"""The checkpoints of a plan: what each is trained on, what determines it, and why it is out of date."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import Column
from toolformer_dag.files import StorageError, unsealed
from toolformer_dag.lake.record import changes, record
from toolformer_dag.model.weights import checkpoint_folder
from toolformer_dag.pipeline import augmented_corpus, heldout_texts, raw_shards
from toolformer_dag.pipeline.augmented_corpus import corpus_rows
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.training_report import (
    CARD,
    RECORD,
    TrainingData,
    TrainingReport,
    card_is_lost,
    read_report,
    run_identity,
)


@dataclass(frozen=True, slots=True)
class CardText:
    """What the model card says of every such checkpoint; `{begin}` and such in `about` are the markers of its calls.

    What depends on the settings and on C* is added where the card is written.
    """

    title: str
    about: str
    use: str
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint is trained on, and how; another one is one more in CHECKPOINTS.

    - `reads`: the tables that `rows` reads; the warehouse is none, since it shows what training measured.
    - `determined_by`: what determines the rows beside these tables. `recipe`: the settings that it is trained under.
    - `condition`: its name in the paper's tables; `calls`: whether it is asked with tools too.
    """

    condition: str
    calls: bool
    description: str
    card: CardText
    reads: Callable[[Plan], tuple[str, ...]]
    rows: Callable[[Plan], TrainingData]
    determined_by: Callable[[Plan], Mapping[str, Any]]
    recipe: Callable[[Plan], TrainingSettings] = lambda plan: plan.settings.training

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return what determines it beside the tables that it reads."""
        model = {"settings": self.recipe(plan).determining(), "model": dict(plan.model)}
        return {**model, **self.determined_by(plan)}

    def trained_on(self, plan: Plan) -> tuple[TrainingData, TrainingSettings]:
        """Return the rows, and how it is trained on so many. Raises MissingPart."""
        data = self.rows(plan)
        return data, self.recipe(plan).over(len(data.train))


def _on_corpus(condition: str, calls: bool, column: str, description: str, card: CardText) -> Checkpoint:
    """Return the checkpoint that is trained on a column of C*; held-out texts of C choose its step."""

    def rows(plan: Plan) -> TrainingData:
        train = corpus_rows(plan.lake, [column, "split"]).filter(pl.col("split") == TRAIN)
        return TrainingData(train.collect()[column].to_list(), heldout_texts.heldout_texts(plan).choosing)

    return Checkpoint(
        condition,
        calls,
        description,
        card,
        lambda plan: (plan.named(augmented_corpus.NAME), heldout_texts.NAME),
        rows,
        lambda plan: {"column": column, "chosen_on": plan.settings.training.heldout_texts},
    )


CHECKPOINTS = {
    "baseline_checkpoint": _on_corpus(
        "base + C",
        False,
        "text",
        "M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
        CardText(
            "finetuned on the same web text without calls",
            "The baseline of a Toolformer run: finetuned on the texts of the model that calls tools, without calls.",
            "It calls no tools.",
            ("It is made for comparison; finetuning on this text is not meant to improve it.",),
        ),
    ),
    "finetuned_checkpoint": _on_corpus(
        "Toolformer",
        True,
        "text_with_calls",
        "M finetuned on C*: Toolformer (paper, section 2).",
        CardText(
            "finetuned on web text with calls to tools",
            "A language model that was finetuned on texts with calls to tools in them, which it had proposed itself "
            "and which lowered its own loss on the text that follows. It writes `{begin}Tool(input){arrow}`; a program "
            "then runs the tool, inserts the result and `{end}`, and lets it go on.",
            "Without such a program, results are invented. `toolformer-dag generate TEXT --model FOLDER` runs the "
            "tools.",
            (
                "Whether to call depends on the exact wording of the input; results may be wrong, and the text follows "
                "them.",
                "A tool that is reached over a network sees what the model writes into the call.",
            ),
        ),
    ),
}
"""By name of the asset, in the order in which they are asked."""


def checkpoint_of(name: str) -> tuple[str | None, bool]:
    """Return the checkpoint of a condition of evaluation, or of its own name, and whether tools are called there.

    The condition `base` and a model of another name have no checkpoint.
    """
    for checkpoint, declared in CHECKPOINTS.items():
        if name in (checkpoint, declared.condition):
            return checkpoint, declared.calls or name == checkpoint
        if declared.calls and name == disabled(declared.condition):
            return checkpoint, False
    return None, name != "base"


def disabled(model: str) -> str:
    """Name the condition in which a model that calls tools calls none."""
    return f"{model} (disabled)"


def too_few_to_train(plan: Plan) -> str | None:
    """Say that C* holds fewer texts to train on than `training.min_texts`, and what to do; None where it holds enough.

    Raises DamagedPart, and MissingPart where there is no C*.
    """
    (texts, documents), least = training_text_counts(plan), plan.settings.training.min_texts
    if texts >= least:
        return None
    return (
        f"{texts} texts in C*: too few to train on (minimum {least}: training.min_texts); lower tau_f, raise k, or add "
        f"shards: these keep about {1000 * texts / max(1, documents):,.0f} per 1,000 documents"
    )


def training_text_counts(plan: Plan) -> tuple[int, int]:
    """Return the numbers of texts of C* to train on, and of documents. Raises MissingPart, DamagedPart."""
    rows = corpus_rows(plan.lake, ["split"]).filter(pl.col("split") == TRAIN)
    documents = sum(part.rows for part in plan.lake.table(raw_shards.NAME).pointers().values())
    return rows.select(pl.len()).collect().item(), documents


def checkpoint_reasons(plan: Plan, name: str) -> list[str]:
    """Return why a checkpoint is missing or out of date; empty if it is up to date."""
    folder = checkpoint_folder(plan.settings, name)
    if not folder.exists():
        return ["never made"]
    if read_report(folder) is None:
        return [f"{folder} is gone or not whole"]
    if card_is_lost(folder):
        return [f"{folder / CARD} is gone or not what was written; the weights are whole"]
    try:
        trained_on = CHECKPOINTS[name].trained_on(plan)
    except StorageError:  # C* or the held-out texts are missing, which their own reasons report
        return []
    if plan.lake.table(CURVE).whole_pointer(name) is None:
        return [f"{CURVE} lacks it"]
    now = run_identity(plan.settings.model, *trained_on)
    stored = unsealed((folder / RECORD).read_bytes())
    return [str(change) for change in changes(_record(stored), _record(json.loads(json.dumps(now))))]


CURVE = "training/training_curve"
"""The lake's table of the curves; a part per checkpoint."""
CURVE_COLUMNS = {
    "checkpoint": Column(pl.String(), "finetuned_checkpoint (on C*) or baseline_checkpoint (on C)"),
    "step": Column(pl.Int64(), "optimizer steps so far; 0 is the base model"),
    "measure": Column(
        pl.String(), "training loss (mean of the steps since the row before, nats per token), or held-out perplexity"
    ),
    "value": Column(pl.Float64(), "the figure; of the held-out perplexity, the lowest chooses the checkpoint"),
    "published": Column(pl.Boolean(), "whether the published checkpoint is of this step"),
}


def publish_curve(plan: Plan, name: str, report: TrainingReport) -> pl.DataFrame:
    """Publish the training curve of a checkpoint and return it. Raises WriteError."""
    points = [(point.step, f"training {point.measure}", point.value) for point in report.losses]
    points += [(point.step, f"held-out {point.measure}", point.value) for point in report.heldout]
    rows = [(name, *point, point[0] == report.best_step) for point in points]
    schema = {column: declared.dtype for column, declared in CURVE_COLUMNS.items()}
    curve = pl.DataFrame(rows, schema=schema, orient="row")
    inputs = {name: report.fingerprint}
    plan.lake.table(CURVE).publish(name, [curve], lambda: record({}, inputs, stage="training_curve", tool=None))
    return curve


def _record(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert the identity of a finetuning run to the form of a record."""
    return {
        "settings": {**run["settings"], **{key: run[key] for key in ("base", "markers", "calls_end") if key in run}},
        "inputs": {"texts": run["texts"], "heldout": run["heldout"]},
    }
