"""Run the real stages over a few texts, in a temporary lake.

This annotates a text that a person types as a run would, and measures on a sample what all texts would cost.
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
    """The result of a trial.

    - `worker`: has the model and the tools of the worker that was passed in, and the trial's lake
    - `outputs`, `reports`: the tables, and what making each of them cost
    - `appended`: computed rows that were new, by row store
    """

    worker: Worker
    outputs: Sequence[TableOutput]
    reports: Sequence[TableReport]
    appended: Mapping[str, list[pl.DataFrame]]


@contextmanager
def trial(
    worker: Worker,
    lane: Lane,
    texts: pl.DataFrame,
    stages: Sequence[Stage],
    progress: Progress,
    row_lake: Lake | None,
) -> Iterator[Trial]:
    """Run stages of a lane (a tool with its settings) over a few texts, and yield the tables and what they cost.

    The stages have run when the `with` block begins. The tables are in a temporary lake (a folder of tables), which is
    deleted at its end.

    texts: rows of the table heuristic_subset, of any shards; they become the only shard of the temporary lake.
    row_lake: a lake whose computed rows (samples, results, losses) are reused and added to; None for no such lake.

    Raises what the stages raise.
    """
    with TemporaryDirectory() as folder:
        lake = _TrialLake(Path(folder), row_lake, worker.plan.suffix)
        plan = _build_trial_plan(worker.plan, lane, lake)
        _publish_texts(plan, lane, texts)
        trial_worker = copy(worker)  # shares the loaded model and the tools
        trial_worker.plan = plan
        outputs = [TableOutput(stage, plan, lane) for stage in stages]
        reports = [_make_table(trial_worker, output, progress) for output in outputs]
        yield Trial(trial_worker, outputs, reports, lake.appended)  # appended: the rows that were newly computed


def _publish_texts(plan: Plan, lane: Lane, texts: pl.DataFrame) -> None:
    """Publish texts (rows of heuristic_subset) as the texts of the only shard."""
    rows = texts.with_columns(shard=pl.lit(ALL)).unique(TEXT_KEY).sort(TEXT_KEY)
    output = TableOutput(heuristic_subset.STAGE, plan, lane)
    output.publish(ALL, PartRows([rows]))


def _make_table(worker: Worker, output: TableOutput, progress: Progress) -> TableReport:
    """Make a table in this process; return what that cost."""
    workers = Workers(worker, {output.name: output}, in_process)
    return update(worker, workers, output, progress)


class _TrialLake(Lake):
    """A lake in a folder, with the row stores of another lake if there is one.

    `appended`: the rows that were appended to its row stores so far, by the name of the store.
    """

    def __init__(self, root: Path, row_lake: Lake | None, suffix: str) -> None:
        """Open a lake in the folder `root`.

        row_lake: another lake, whose row stores are used; None for row stores in `root`, which are gone afterwards.
        """
        super().__init__(root, suffix=suffix)
        self._row_lake = row_lake
        self.appended: dict[str, list[pl.DataFrame]] = {}

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """Open a row store of `row_lake`, or of this lake, that notes appended rows in `appended`.

        So a trial can tell which rows it computed anew. The arguments are those of `Lake.rows`.
        """
        if self._row_lake is None:
            store = super().rows(name, identity, key, schema)
        else:
            store = self._row_lake.rows(name, identity, key, schema)
        noting_store = _NotingStore(store.storage, store.name, store.key, store.schema)
        noting_store.appended = self.appended  # one dictionary for all stores: name of the store -> frames
        return noting_store


class _NotingStore(RowStore):
    """A row store that also notes appended rows in `appended`, a dictionary that its lake gives it."""

    appended: dict[str, list[pl.DataFrame]]

    def append(self, rows: pl.DataFrame) -> None:
        """Store rows, and note them."""
        self.appended.setdefault(self.name, []).append(rows)
        super().append(rows)


class _TrialPlan(Plan):
    """A plan whose only shard is ALL."""

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """The shard of the texts; no stage of a lane reads its file, which does not exist."""
        return {ALL: ShardFile(ALL, self.lake.root / ALL)}


def _build_trial_plan(plan: Plan, lane: Lane, lake: Lake) -> _TrialPlan:
    """Return a plan with the same settings and models, for one lane, in another lake."""
    return _TrialPlan(
        settings=plan.settings,
        lanes=(lane,),
        model=plan.model,
        lake=lake,
        proposer=plan.proposer,
        start=plan.start,
    )
