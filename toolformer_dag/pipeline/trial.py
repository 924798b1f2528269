"""The real stages over a few texts, in a lake of their own in a temporary folder.

So a text that a person types gets what the line would give it, and a sample tells what all texts would cost.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shards import Shard, ShardFile
from toolformer_dag.computing.stage import TEXT_KEY, PartRows, Stage, TableOutput
from toolformer_dag.computing.update import Progress, TableReport, update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, in_process
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline import heuristic_subset

ALL = "sample"
"""The only shard of a trial."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trial made: `outputs`, each with its report. `appended`: computed rows that were new, by row store.

    `worker`: with the model and the tools of the one that tries, over the trial's lake.
    """

    worker: Worker
    outputs: Sequence[TableOutput]
    reports: Sequence[TableReport]
    appended: Mapping[str, list[pl.DataFrame]]


@contextmanager
def trial(
    worker: Worker, lane: Lane, texts: pl.DataFrame, stages: Sequence[Stage], progress: Progress, known: Lake | None
) -> Iterator[Trial]:
    """Run stages over `texts` (columns of heuristic_subset) for as long as the block lasts.

    `known`: the lake whose computed rows are used, and which gets those that are new; None keeps nothing. Raises what
    the stages raise.
    """
    with TemporaryDirectory() as folder:
        given = worker.plan
        lake = _TrialLake(Path(folder), known, given.suffix)
        plan = _TrialPlan(given.settings, (lane,), given.model, lake, given.proposer, given.start)
        rows = texts.with_columns(shard=pl.lit(ALL)).unique(TEXT_KEY).sort(TEXT_KEY)
        TableOutput(heuristic_subset.STAGE, plan, lane).publish(ALL, PartRows([rows]))
        own = copy(worker)
        own.plan = plan
        outputs = [TableOutput(stage, plan, lane) for stage in stages]
        reports = [update(own, Workers(own, {one.name: one}, in_process), one, progress) for one in outputs]
        yield Trial(own, outputs, reports, lake.appended)


class _TrialLake(Lake):
    """Tables of its own, over the computed rows of another lake where there is one."""

    def __init__(self, root: Path, known: Lake | None, suffix: str) -> None:
        super().__init__(root, suffix=suffix)
        self._known = known
        self.appended: dict[str, list[pl.DataFrame]] = {}

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        keeping = super().rows if self._known is None else self._known.rows
        store = keeping(name, identity, key, schema)
        noted = _Noting(store.storage, store.name, store.key, store.schema)
        noted.appended = self.appended
        return noted


class _Noting(RowStore):
    """Notes what is appended."""

    appended: dict[str, list[pl.DataFrame]]

    def append(self, rows: pl.DataFrame) -> None:
        self.appended.setdefault(self.name, []).append(rows)
        super().append(rows)


class _TrialPlan(Plan):
    """A plan over the sample as its only shard."""

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        return {ALL: ShardFile(ALL, self.lake.root / ALL)}
