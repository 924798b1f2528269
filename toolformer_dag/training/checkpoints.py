"""The checkpoints of a project: what each is trained on, from which model, and under which settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.pipeline import augmented_corpus, heldout_texts
from toolformer_dag.pipeline.augmented_corpus import scan_corpus_rows
from toolformer_dag.pipeline.merging import TRAIN
from toolformer_dag.settings.model_settings import ModelSettings
from toolformer_dag.settings.sections import Settings
from toolformer_dag.settings.training_settings import TrainingSettings
from toolformer_dag.training.training_report import TrainingData


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


def _get_model_of_settings(plan: Plan) -> ModelSettings:
    """Return the model of the settings, from which the paper's checkpoints are finetuned."""
    return plan.settings.model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint is trained on, and how. `checkpoints` returns those of a project.

    - `condition`: its name in the paper's tables.
    - `calls`: whether benchmarks are also run with it calling tools.
    - `description`: that of its asset. `card`: the text of its model card.
    - `reads`: returns the names of the assets that it is trained from, the tables of `rows` among them. The warehouse
      cannot be one: it is made later, since it shows what training measured.
    - `rows`: reads the rows to train on and those held out. Raises MissingPart.
    - `determined_by`: returns what determines the rows beside these tables.
    - `recipe`: returns the settings that it is trained under.
    - `base`: returns the model that it is trained from; for another checkpoint of the project, its folder is the name.
    """

    condition: str
    calls: bool
    description: str
    card: CardText
    reads: Callable[[Plan], tuple[str, ...]]
    rows: Callable[[Plan], TrainingData]
    determined_by: Callable[[Plan], Mapping[str, Any]]
    recipe: Callable[[Plan], TrainingSettings] = lambda plan: plan.settings.training
    base: Callable[[Plan], ModelSettings] = _get_model_of_settings

    def settings(self, plan: Plan) -> dict[str, Any]:
        """Return what determines the checkpoint beside the assets that it reads: recipe, M, and the rest."""
        return {
            "settings": self.recipe(plan).determining(),
            "model": dict(plan.model),
            **self.determined_by(plan),
        }

    def read_data_and_recipe(self, plan: Plan) -> tuple[TrainingData, TrainingSettings]:
        """Return the rows, and the settings as they are for so many rows. Raises MissingPart."""
        data = self.rows(plan)
        return data, self.recipe(plan).over(len(data.train))

    def with_seed(self, seed: int) -> "Checkpoint":
        """Return the same checkpoint, trained with another order of the sequences: "Toolformer (seed 1)"."""
        return replace(
            self,
            condition=f"{self.condition} (seed {seed})",
            description=f"{self.description} With the seed {seed}.",
            recipe=partial(_build_recipe_with_seed, self.recipe, seed),
        )


def _build_recipe_with_seed(recipe: Callable[[Plan], TrainingSettings], seed: int, plan: Plan) -> TrainingSettings:
    """Return the settings of a recipe with another seed."""
    return recipe(plan).model_copy(update={"seed": seed})


def _build_corpus_checkpoint(
    condition: str, *, calls: bool, column: str, description: str, card: CardText
) -> Checkpoint:
    """Describe a checkpoint that is trained on the paper's corpus C*, which is web texts (C) with tool calls inserted.

    Args:
        condition: Its row in the paper's tables, such as "Toolformer".
        calls: Whether it calls tools when it is evaluated.
        column: The column of C* to train on: "text_with_calls", or "text" for the same texts without calls.
        description: The description of its asset.
        card: The text of its model card.
    """
    return Checkpoint(
        condition=condition,
        calls=calls,
        description=description,
        card=card,
        # The assets it depends on: C*, and the texts of C that are held out to choose the best step.
        reads=lambda plan: (plan.named(augmented_corpus.NAME), heldout_texts.NAME),
        rows=partial(_read_corpus_data, column=column),
        # What its rows depend on besides these assets; if it changes, the checkpoint is out of date.
        determined_by=lambda plan: {"column": column, "chosen_on": plan.settings.training.heldout_texts},
    )


def _read_corpus_data(plan: Plan, column: str) -> TrainingData:
    """Read the texts to train on from a column of C*, and the held-out texts of C. Raises MissingPart."""
    train_rows = scan_corpus_rows(plan.lake, [column, "split"]).filter(pl.col("split") == TRAIN)
    return TrainingData(
        train=train_rows.collect()[column].to_list(),
        heldout=heldout_texts.heldout_texts(plan).choosing,
    )


BASELINE = _build_corpus_checkpoint(
    "base + C",
    calls=False,
    column="text",
    description="M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
    card=CardText(
        title="finetuned on the same web text without calls",
        about="The baseline of a Toolformer run: finetuned on the texts of the model that calls tools, without calls.",
        use="It calls no tools.",
        limits=("It is made for comparison; finetuning on this text is not meant to improve it.",),
    ),
)
"""M + C: the same texts without calls."""
TOOLFORMER = _build_corpus_checkpoint(
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
)
"""M + C*: the texts with their calls."""


def checkpoints(settings: Settings) -> dict[str, Checkpoint]:
    """List the checkpoints of a project by the names of their assets, in the order in which benchmarks are run.

    The paper has two. Each seed in `training.more_seeds` adds both again, such as "baseline_checkpoint_seed_1".
    """
    paper_checkpoints = {"baseline_checkpoint": BASELINE, "finetuned_checkpoint": TOOLFORMER}
    all_checkpoints = dict(paper_checkpoints)
    for seed in settings.training.more_seeds:
        for name, checkpoint in paper_checkpoints.items():
            all_checkpoints[f"{name}_seed_{seed}"] = checkpoint.with_seed(seed)
    return all_checkpoints


class NamedModel(NamedTuple):
    """What a name of a model stands for.

    - `checkpoint`: the name of its asset; None for the base model, or a model of another name.
    - `calls`: whether it calls tools.
    """

    checkpoint: str | None
    calls: bool


def resolve_model_name(settings: Settings, name: str) -> NamedModel:
    """Find the model that a name in the evaluation settings stands for, and whether it calls tools.

    The name may be:
        - a checkpoint such as "finetuned_checkpoint". It calls tools, whichever it is.
        - a row of the paper's tables such as "Toolformer". It calls tools if the paper's model does.
        - "Toolformer (disabled)", the same checkpoint without tools.
        - "base", the model of the settings, without tools.
        - anything else, which is another model and calls tools.
    """
    for asset_name, checkpoint in checkpoints(settings).items():
        if name == asset_name:
            return NamedModel(asset_name, calls=True)
        if name == checkpoint.condition:
            return NamedModel(asset_name, calls=checkpoint.calls)
        if checkpoint.calls and name == disabled(checkpoint.condition):
            return NamedModel(asset_name, calls=False)
    return NamedModel(None, calls=name != "base")


def disabled(model: str) -> str:
    """Return the name of a model for benchmarks in which it may not call its tools: `Toolformer (disabled)`."""
    return f"{model} (disabled)"
