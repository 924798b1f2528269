"""The checkpoints of a plan: what each is trained on, what determines it, and why it is out of date.

A plan is the settings with the tables and the model that follow from them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
    Point,
    TrainingData,
    TrainingReport,
    card_is_lost,
    read_report,
    run_identity,
)


@dataclass(frozen=True, slots=True)
class CardText:
    """The fixed part of a checkpoint's model card; what depends on the settings and on C* is added when it is written.

    - `title`: follows the name of the base model.
    - `about`: what the model is; `{begin}`, `{arrow}` and `{end}` in it become the markers of its calls.
    - `use`: how to use it.
    - `limits`: a sentence or two per limit.
    """

    title: str
    about: str
    use: str
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint is trained on, and how; another checkpoint is another entry of CHECKPOINTS.

    - `condition`: its name in the paper's tables.
    - `calls`: whether benchmarks are also run with it calling tools.
    - `description`: that of its asset. `card`: the text of its model card.
    - `reads`: returns the names of the tables that `rows` reads. They cannot be of the warehouse, which is made later
      since it shows what training measured.
    - `rows`: reads the rows to train on and those held out. Raises MissingPart.
    - `determined_by`: returns what determines the rows beside these tables.
    - `recipe`: returns the settings that it is trained under.
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
        """Return what determines the checkpoint beside the tables that it reads: recipe, base model, and the rest."""
        return {
            "settings": self.recipe(plan).determining(),
            "model": dict(plan.model),
            **self.determined_by(plan),
        }

    def trained_on(self, plan: Plan) -> tuple[TrainingData, TrainingSettings]:
        """Return the rows, and the settings as they are for so many rows. Raises MissingPart."""
        data = self.rows(plan)
        return data, self.recipe(plan).over(len(data.train))


def _on_corpus(condition: str, *, calls: bool, column: str, description: str, card: CardText) -> Checkpoint:
    """Return a checkpoint that is trained on texts of C*, the corpus with calls in it.

    - `condition`: the row of the paper's tables that it stands for, such as "Toolformer".
    - `calls`: whether it calls tools when it is evaluated.
    - `column`: the column of the corpus that is trained on: the texts with their calls, or the same without (C).

    Held-out texts of C choose the best of the checkpoints along the way.
    """
    return Checkpoint(
        condition=condition,
        calls=calls,
        description=description,
        card=card,
        reads=lambda plan: (plan.named(augmented_corpus.NAME), heldout_texts.NAME),
        rows=partial(_corpus_data, column=column),
        determined_by=lambda plan: {"column": column, "chosen_on": plan.settings.training.heldout_texts},
    )


def _corpus_data(plan: Plan, column: str) -> TrainingData:
    """Read the texts to train on from a column of C*, and the held-out texts of C. Raises MissingPart."""
    train_rows = corpus_rows(plan.lake, [column, "split"]).filter(pl.col("split") == TRAIN)
    return TrainingData(
        train=train_rows.collect()[column].to_list(),
        heldout=heldout_texts.heldout_texts(plan).choosing,
    )


CHECKPOINTS = {
    "baseline_checkpoint": _on_corpus(
        "base + C",
        calls=False,
        column="text",
        description="M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
        card=CardText(
            title="finetuned on the same web text without calls",
            about="The baseline of a Toolformer run: finetuned on the texts of the model that calls tools, without "
            "calls.",
            use="It calls no tools.",
            limits=("It is made for comparison; finetuning on this text is not meant to improve it.",),
        ),
    ),
    "finetuned_checkpoint": _on_corpus(
        "Toolformer",
        calls=True,
        column="text_with_calls",
        description="M finetuned on C*: Toolformer (paper, section 2).",
        card=CardText(
            title="finetuned on web text with calls to tools",
            about="A language model that was finetuned on texts with calls to tools in them, which it had proposed "
            "itself and which lowered its own loss on the text that follows. It writes `{begin}Tool(input){arrow}`; a "
            "program then runs the tool, inserts the result and `{end}`, and lets it go on.",
            use="Without such a program, results are invented. `toolformer-dag generate TEXT --model FOLDER` runs the "
            "tools.",
            limits=(
                "Whether to call depends on the exact wording of the input; results may be wrong, and the text follows "
                "them.",
                "A tool that is reached over a network sees what the model writes into the call.",
            ),
        ),
    ),
}
"""By name of the asset, in the order in which benchmarks are run with them."""


class NamedModel(NamedTuple):
    """What a name of a model stands for.

    - `checkpoint`: a name in CHECKPOINTS; None for the base model, or a model of another name.
    - `calls`: whether it calls tools.
    """

    checkpoint: str | None
    calls: bool


def checkpoint_of(name: str) -> NamedModel:
    """Return the model that a name in the settings of evaluation stands for, and whether it calls tools.

    - a checkpoint, such as "finetuned_checkpoint": it calls tools, whichever it is
    - a condition, a row of the paper's tables such as "Toolformer": its checkpoint, which calls tools if the paper's
      does
    - "Toolformer (disabled)": the same checkpoint without tools
    - "base": the model of the settings, without tools
    - anything else: another model, which calls tools
    """
    for checkpoint, declared in CHECKPOINTS.items():
        if name in (checkpoint, declared.condition):
            return NamedModel(checkpoint, calls=declared.calls or name == checkpoint)
        if declared.calls and name == disabled(declared.condition):
            return NamedModel(checkpoint, calls=False)
    return NamedModel(None, calls=name != "base")


def disabled(model: str) -> str:
    """Return the name of a model for benchmarks in which it may not call its tools: `Toolformer (disabled)`."""
    return f"{model} (disabled)"


def too_few_to_train(plan: Plan) -> str | None:
    """Return a message with a remedy if C* has fewer texts to train on than `training.min_texts`; else None.

    Raises DamagedPart, and MissingPart where there is no C*.
    """
    counts = training_text_counts(plan)
    min_texts = plan.settings.training.min_texts
    if counts.texts >= min_texts:
        return None
    kept_per_thousand = 1000 * counts.texts / max(1, counts.documents)
    return (
        f"{counts.texts} texts in C*: too few to train on (minimum {min_texts}: training.min_texts); lower tau_f, "
        f"raise k, or add shards: these keep about {kept_per_thousand:,.0f} per 1,000 documents"
    )


class TextCounts(NamedTuple):
    """Texts of C* to train on, and the documents of all shards, of which they were made."""

    texts: int
    documents: int


def training_text_counts(plan: Plan) -> TextCounts:
    """Count the texts of C* to train on, and the documents. Raises MissingPart, DamagedPart."""
    train_rows = corpus_rows(plan.lake, ["split"]).filter(pl.col("split") == TRAIN)
    shards = plan.lake.table(raw_shards.NAME).pointers().values()
    return TextCounts(
        texts=train_rows.select(pl.len()).collect().item(),
        documents=sum(shard.rows for shard in shards),
    )


def checkpoint_reasons(plan: Plan, name: str) -> list[str]:
    """Return why a checkpoint is missing or out of date, a sentence per reason; empty if it is up to date.

    Also empty where its tables are missing, which have reasons of their own.
    """
    folder = checkpoint_folder(plan.settings, name)
    lost = _lost_files(folder)
    if lost is not None:
        return [lost]
    try:
        data, recipe = CHECKPOINTS[name].trained_on(plan)
    except StorageError:  # C* or the held-out texts are missing, which their own reasons report
        return []
    if plan.lake.table(CURVE).whole_pointer(name) is None:
        return [f"{CURVE} lacks it"]
    return _changes_since(folder, run_identity(plan.settings.model, data, recipe))


def _changes_since(folder: Path, identity: Mapping[str, object]) -> list[str]:
    """Return what is different in the identity of a run now from the run of the checkpoint in `folder`."""
    run_now = json.loads(json.dumps(identity))  # as it is read from a file
    stored_run = unsealed((folder / RECORD).read_bytes())
    return [str(change) for change in changes(_record(stored_run), _record(run_now))]


def _lost_files(folder: Path) -> str | None:
    """Return what is missing or damaged of a checkpoint in a folder; None where it is whole."""
    if not folder.exists():
        return "never made"
    if read_report(folder) is None:
        return f"{folder} is gone or not whole"
    if card_is_lost(folder):
        return f"{folder / CARD} is gone or not what was written; the weights are whole"
    return None


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
    """Publish the training curve of a checkpoint in the table CURVE; return its rows, with CURVE_COLUMNS.

    Raises WriteError.
    """
    training_rows = _curve_rows(name, report, "training", report.losses)
    rows = [*training_rows, *_curve_rows(name, report, "held-out", report.heldout)]
    schema = {column: declared.dtype for column, declared in CURVE_COLUMNS.items()}
    curve_rows = pl.DataFrame(rows, schema=schema)
    inputs = {name: report.fingerprint}
    plan.lake.table(CURVE).publish(name, [curve_rows], lambda: record({}, inputs, stage="training_curve", tool=None))
    return curve_rows


def _curve_rows(name: str, report: TrainingReport, kind: str, points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the rows of one of the curves of the checkpoint `name`. kind: "training" or "held-out"."""
    rows = []
    for point in points:
        rows.append(
            {
                "checkpoint": name,
                "step": point.step,
                "measure": f"{kind} {point.measure}",
                "value": point.value,
                "published": point.step == report.best_step,
            }
        )
    return rows


def _record(run: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the identity of a finetuning run in the form of the lake's records, which `changes` compares.

    The base model and the markers of calls count as settings, the texts as inputs.
    """
    settings = dict(run["settings"])
    for key in ("base", "markers", "calls_end"):
        if key in run:
            settings[key] = run[key]
    return {"settings": settings, "inputs": {"texts": run["texts"], "heldout": run["heldout"]}}
