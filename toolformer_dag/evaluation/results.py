"""Where the measurements lie in the lake. Imports no torch."""

from pathlib import Path

import polars as pl

from toolformer_dag.evaluation.table import accuracy_by_condition
from toolformer_dag.storage.lake import Lake

ACCURACY = "evaluation/accuracy"
"""The table of scores, as `score_table` makes it; partition "all"."""


def read_accuracy(lake: Path) -> pl.DataFrame:
    """A row per benchmark, a column per condition. Raises MissingPartition where nothing was measured yet."""
    return accuracy_by_condition(Lake(lake).table(ACCURACY).read("all"))
