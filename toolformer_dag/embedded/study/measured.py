"""One seed of a study: what is measured once its line has run."""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from toolformer_dag.embedded.study.asked import ask
from toolformer_dag.embedded.study.plain_text import plain_text_table, plain_texts
from toolformer_dag.embedded.study.settings import Study
from toolformer_dag.embedded.study.unfiltered import CORPUS, unfiltered_texts
from toolformer_dag.evaluation.results import OUTCOMES
from toolformer_dag.evaluation.table import outcome_table
from toolformer_dag.lane import lanes
from toolformer_dag.settings.settings import Settings
from toolformer_dag.stages.split import HELDOUT, heldout_texts
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.training.finetune import finetune
from toolformer_dag.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Measured:
    """`outcomes` as of `outcome_table`, `plain` as of `plain_text_table`."""

    outcomes: pl.DataFrame
    plain: pl.DataFrame


def measure(settings: Settings, study: Study, seed: int) -> Measured:
    """Finetunes on the unfiltered corpus and asks; the line of `settings` must have run."""
    lake, tools = Lake(settings.paths.lake), lanes(settings)
    unfiltered = finetune_unfiltered(settings, unfiltered_texts(lake, tools, seed))
    own = lake.table(OUTCOMES).read(WHOLE)
    asked = [outcome_table(found) for found in ask(settings, tools, str(unfiltered))]
    plain = plain_text_table(settings, plain_texts(settings.corpus.small_web.seed, study.real_text))
    return Measured(pl.concat([own, *asked]), plain)


def finetune_unfiltered(settings: Settings, texts: list[str]) -> Path:
    """The folder of M finetuned as Toolformer is, but on these texts."""
    section, out = settings.training, settings.paths.lake / "training" / "unfiltered"
    heldout = Lake(settings.paths.lake).table(CORPUS).read(WHOLE).filter(pl.col("split") == HELDOUT)["text"]
    some = heldout_texts(heldout.to_list(), section.heldout_texts).choosing
    finetune(settings.model, texts, some, TrainingSettings.of(section), out)
    return out
