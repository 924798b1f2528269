"""What the asset of a table shows and says, as plain values: nothing here knows Dagster, and nothing draws.

A stage returns them (`StageAsset` in stage.py); toolformer_dag/assets turns them into metadata, Markdown and plots.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl


@dataclass(frozen=True, slots=True)
class DeltaHistogram:
    """How the deltas of a lane's scored calls are distributed, and which of them the threshold keeps.

    A delta is by how many nats the result of a call reduces the loss of the text after it.

    Attributes:
        deltas: A frame with the column `delta`, in nats.
        tau_f: The threshold, in nats. None if no call is kept.
    """

    deltas: pl.DataFrame
    tau_f: float | None


@dataclass(frozen=True, slots=True)
class ChanceCurves:
    """The false discovery rate for each threshold tau_f.

    Attributes:
        rates: A frame with the columns tau_f, fdr and fdr_high.
    """

    rates: pl.DataFrame


@dataclass(frozen=True, slots=True)
class CostFrontier:
    """How many nats calls gain, and what they cost, for each threshold tau_f.

    Attributes:
        points: A frame with the columns tau_f, today, nats and cost.
    """

    points: pl.DataFrame


Plot = DeltaHistogram | ChanceCurves | CostFrontier
ShownValue = int | float | str | pl.DataFrame | Plot
Shown = Mapping[str, ShownValue]
"""What the page of an asset shows in addition to what it shows of every table, by name, in order.

A number, a text, a frame (all of its rows) or the data of a plot.
"""


class LogLine(NamedTuple):
    """A line for the log of a run.

    Attributes:
        text: The line.
        is_warning: Whether a person should act on it.
    """

    text: str
    is_warning: bool
