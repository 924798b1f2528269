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
    """The fixed part of a checkpoint's model card.

    The text that depends on the settings and on C* is added when the card is written.

    Attributes:
        title: The end of the title, which follows the name of the base model.
        about: A text that says what the model is. `{begin}`, `{arrow}` and `{end}` in it become the markers of its
            calls.
        use: A text that says how to use it.
        limits: Its limits, in a sentence or two each.
    """

    title: str
    about: str
    use: str
    limits: tuple[str, ...]


def _get_settings_model(plan: Plan) -> ModelSettings:
    """Return the model of the settings, from which the paper's checkpoints are finetuned."""
    return plan.settings.model


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a checkpoint (a finetuned model) is trained on, and how.

    `build_checkpoints_by_name` returns the checkpoints of a project.

    Attributes:
        condition_name: Its name in the paper's tables.
        calls_tools: Whether benchmarks are also run with it calling tools.
        description: The description of its asset.
        card_text: The text of its model card.
        list_input_assets: Returns the names of the assets that it is trained from, with the tables that
            `read_training_data` reads. The warehouse cannot be one: it is made later, since it shows what training
            measured.
        read_training_data: Reads the rows to train on and those held out. It raises MissingPart.
        collect_data_settings: Returns the settings that determine the rows in addition to these tables.
        get_training_settings: Returns the settings of its training.
        get_base_model: Returns the model that it is trained from. If this is another checkpoint of the project, the
            model's name is the folder of that checkpoint.
    """

    condition_name: str
    calls_tools: bool
    description: str
    card_text: CardText
    list_input_assets: Callable[[Plan], tuple[str, ...]]
    read_training_data: Callable[[Plan], TrainingData]
    collect_data_settings: Callable[[Plan], Mapping[str, Any]]
    get_training_settings: Callable[[Plan], TrainingSettings] = lambda plan: plan.settings.training
    get_base_model: Callable[[Plan], ModelSettings] = _get_settings_model

    def collect_settings(self, plan: Plan) -> dict[str, Any]:
        """Return everything that determines the checkpoint in addition to the assets that it reads."""
        return {
            "settings": self.get_training_settings(plan).select_weight_settings(),
            "model": dict(plan.model_identity),
            **self.collect_data_settings(plan),
        }

    def read_data_and_settings(self, plan: Plan) -> tuple[TrainingData, TrainingSettings]:
        """Read the rows, and return them with the settings of a training on so many rows.

        Raises:
            MissingPart: A table does not exist.
        """
        data = self.read_training_data(plan)
        settings = self.get_training_settings(plan)
        return data, settings.with_default_passes(len(data.train))

    def copy_with_seed(self, seed: int) -> "Checkpoint":
        """Return the same checkpoint with another seed, which trains in another order: "Toolformer (seed 1)"."""
        get_settings_with_seed = partial(_build_training_settings_with_seed, self.get_training_settings, seed)
        return replace(
            self,
            condition_name=f"{self.condition_name} (seed {seed})",
            description=f"{self.description} With the seed {seed}.",
            get_training_settings=get_settings_with_seed,
        )


def _build_training_settings_with_seed(
    get_training_settings: Callable[[Plan], TrainingSettings], seed: int, plan: Plan
) -> TrainingSettings:
    """Return the settings of a training with another seed."""
    settings = get_training_settings(plan)
    return settings.model_copy(update={"seed": seed})


def _build_corpus_checkpoint(
    condition_name: str, *, calls_tools: bool, column: str, description: str, card_text: CardText
) -> Checkpoint:
    """Return a checkpoint that is trained on the paper's corpus C*, which is web texts (C) with tool calls inserted.

    Args:
        condition_name: Its row in the paper's tables, such as "Toolformer".
        calls_tools: Whether it calls tools when it is evaluated.
        column: The column of C* to train on: "text_with_calls", or "text" for the same texts without calls.
        description: The description of its asset.
        card_text: The text of its model card.
    """
    return Checkpoint(
        condition_name=condition_name,
        calls_tools=calls_tools,
        description=description,
        card_text=card_text,
        list_input_assets=_list_corpus_assets,
        read_training_data=partial(_read_corpus_data, column=column),
        collect_data_settings=partial(_collect_corpus_settings, column=column),
    )


def _list_corpus_assets(plan: Plan) -> tuple[str, ...]:
    """Return the names of the assets of C*, and of the texts of C that are held out to choose the best step."""
    return (plan.add_round_suffix(augmented_corpus.TABLE_NAME), heldout_texts.TABLE_NAME)


def _collect_corpus_settings(plan: Plan, column: str) -> dict[str, Any]:
    """Return the settings that determine the texts of a training on C*, in addition to its assets."""
    return {"column": column, "chosen_on": plan.settings.training.heldout_texts}


def _read_corpus_data(plan: Plan, column: str) -> TrainingData:
    """Read the texts to train on, and the held-out texts on which the best step of the training is chosen.

    Args:
        plan: The project's plan.
        column: The column of C* (the corpus with kept calls) to train on, such as "text" for the texts without calls.

    Raises:
        MissingPart: A table does not exist.
    """
    corpus_rows = scan_corpus_rows(plan.lake, [column, "split"])
    training_rows = corpus_rows.filter(pl.col("split") == TRAIN)
    return TrainingData(
        train=training_rows.collect()[column].to_list(),
        heldout=heldout_texts.draw_heldout_texts(plan).choosing_texts,
    )


BASELINE_CHECKPOINT = _build_corpus_checkpoint(
    "base + C",
    calls_tools=False,
    column="text",
    description="M finetuned on C, the same texts without calls: the baseline M + C (paper, section 4.1).",
    card_text=CardText(
        title="finetuned on the same web text without calls",
        about="The baseline of a Toolformer run: finetuned on the texts of the model that calls tools, without calls.",
        use="It calls no tools.",
        limits=("It is made for comparison; finetuning on this text is not meant to improve it.",),
    ),
)
"""M + C: the same texts without calls."""
TOOLFORMER_CHECKPOINT = _build_corpus_checkpoint(
    "Toolformer",
    calls_tools=True,
    column="text_with_calls",
    description="M finetuned on C*: Toolformer (paper, section 2).",
    card_text=CardText(
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


def build_checkpoints_by_name(settings: Settings) -> dict[str, Checkpoint]:
    """Return the checkpoints of a project by the names of their assets, in the order in which benchmarks are run.

    The paper has two. Each seed in `training.more_seeds` adds both again, such as "baseline_checkpoint_seed_1".
    """
    paper_checkpoints = {"baseline_checkpoint": BASELINE_CHECKPOINT, "finetuned_checkpoint": TOOLFORMER_CHECKPOINT}
    all_checkpoints = dict(paper_checkpoints)
    for seed in settings.training.more_seeds:
        for asset_name, checkpoint in paper_checkpoints.items():
            all_checkpoints[f"{asset_name}_seed_{seed}"] = checkpoint.copy_with_seed(seed)
    return all_checkpoints


class NamedModel(NamedTuple):
    """The model that a name stands for.

    Attributes:
        checkpoint_name: The name of the checkpoint's asset. None for a model that is no checkpoint of the project.
        calls_tools: Whether it calls tools.
    """

    checkpoint_name: str | None
    calls_tools: bool


def resolve_model_name(settings: Settings, model_name: str) -> NamedModel:
    """Find the model that a name in the evaluation settings stands for, and whether it calls tools.

    The name may be:
        - a checkpoint such as "finetuned_checkpoint". It calls tools, whichever it is.
        - a row of the paper's tables such as "Toolformer". It calls tools if the paper's model does.
        - "Toolformer (disabled)", the same checkpoint without tools.
        - "base", the model of the settings, without tools.
        - anything else, which is another model and calls tools.

    Returns:
        The name of the checkpoint's asset, or None for the last two kinds of names, and whether the model calls tools.
    """
    for asset_name, checkpoint in build_checkpoints_by_name(settings).items():
        if model_name == asset_name:
            return NamedModel(asset_name, calls_tools=True)
        if model_name == checkpoint.condition_name:
            return NamedModel(asset_name, calls_tools=checkpoint.calls_tools)

        disabled_name = format_disabled_name(checkpoint.condition_name)
        if checkpoint.calls_tools and model_name == disabled_name:
            return NamedModel(asset_name, calls_tools=False)

    return NamedModel(None, calls_tools=model_name != "base")


def format_disabled_name(model_name: str) -> str:
    """Return the name of a model for benchmarks in which it may not call its tools: `Toolformer (disabled)`."""
    return f"{model_name} (disabled)"
