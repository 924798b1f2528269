"""Where the measurements lie in the lake. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl

from toolformer_dag.evaluation.table import accuracy_by_condition
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.record import STORES, record

ACCURACY = "evaluation/accuracy"
"""The table of scores, as `score_table` makes it; its only partition is WHOLE, as in the tables below."""
OUTCOMES = "evaluation/outcomes"
"""Every question under every condition, as `outcome_table` makes it."""
PERPLEXITY = "evaluation/perplexity"
"""Source, condition, texts, perplexity, bits_per_byte."""


def publish(
    lake: Lake,
    table: str,
    rows: pl.DataFrame,
    settings: Mapping[str, object],
    checkpoints: Mapping[str, str],
    stores: Sequence[str] = (),
) -> str:
    """Replaces a table of measurements; returns the version of its content. Raises WriteError.

    `checkpoints`: name -> fingerprint of those that were measured. `stores`: names of the row stores that it was made
    from, which `clean` then keeps.
    """
    made = record(settings, checkpoints, **{STORES: list(stores)})
    return lake.table(table).publish(WHOLE, [rows], made).data_version


def read_accuracy(lake: Path) -> pl.DataFrame:
    """A row per benchmark, a column per condition. Raises MissingPartition where nothing was measured yet."""
    return accuracy_by_condition(Lake(lake).table(ACCURACY).read(WHOLE))
