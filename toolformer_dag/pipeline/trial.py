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
from toolformer_dag.computing.update import ProgressCallback, TableReport, update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_in_process_executor
from toolformer_dag.lake.row_store import RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline import heuristic_subset

TRIAL_SHARD = "sample"
"""The only shard of a trial."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a trial: stages that were run over a few texts.

    Attributes:
        worker: It has the model and the tools of the worker that was passed in, and the trial's lake.
        outputs: The tables that were made.
        reports: What making each of the tables cost, in the same order.
        frames_by_store: The rows that were computed anew, by the name of their row store.
    """

    worker: Worker
    outputs: Sequence[TableOutput]
    reports: Sequence[TableReport]
    frames_by_store: Mapping[str, list[pl.DataFrame]]


@contextmanager
def run_trial(
    worker: Worker,
    lane: Lane,
    texts: pl.DataFrame,
    stages: Sequence[Stage],
    progress: ProgressCallback,
    row_lake: Lake | None,
) -> Iterator[Trial]:
    """Run stages of a lane (a tool with its settings) over a few texts, and yield the tables and what they cost.

    The stages have run when the `with` block begins. The tables are in a temporary lake (a folder of tables), which is
    deleted at the end of the block. An error of a stage is passed on.

    Args:
        texts: Rows of the table heuristic_subset, from any shards. They become the only shard of the temporary lake.
        stages: The stages, in the order in which they are to run.
        progress: Called as `progress(done, total)` after every committed chunk of a table.
        row_lake: A lake whose computed rows (samples, results, losses) are reused and added to. None for no such lake.
    """
    with TemporaryDirectory() as folder:
        lake = _TrialLake(Path(folder), row_lake, worker.plan.round_suffix)
        plan = _build_trial_plan(worker.plan, lane, lake)
        _publish_texts(plan, lane, texts)

        trial_worker = copy(worker)  # shares the loaded model and the tools
        trial_worker.plan = plan

        outputs = [TableOutput(stage, plan, lane) for stage in stages]
        reports = [_update_table(trial_worker, output, progress) for output in outputs]
        yield Trial(trial_worker, outputs, reports, lake.frames_by_store)


def _publish_texts(plan: Plan, lane: Lane, texts: pl.DataFrame) -> None:
    """Publish texts (rows of heuristic_subset) as the texts of the only shard, TRIAL_SHARD."""
    trial_texts = texts.with_columns(shard=pl.lit(TRIAL_SHARD)).unique(TEXT_KEY).sort(TEXT_KEY)
    output = TableOutput(heuristic_subset.STAGE, plan, lane)
    output.publish(TRIAL_SHARD, PartRows([trial_texts]))


def _update_table(worker: Worker, output: TableOutput, progress: ProgressCallback) -> TableReport:
    """Make a table in this process, and return what it cost."""
    workers = Workers(worker, {output.name: output}, build_in_process_executor)
    return update_table(worker, workers, output, progress)


class _TrialLake(Lake):
    """A lake (a folder of tables) with the row stores of another lake, if there is one.

    Attributes:
        frames_by_store: The rows that were appended to its row stores so far, by the name of the store.
    """

    def __init__(self, root: Path, row_lake: Lake | None, round_suffix: str) -> None:
        """Open a lake in the folder `root`.

        Args:
            row_lake: Another lake, whose row stores are used. None for row stores in `root`, which are deleted with it.
        """
        super().__init__(root, round_suffix=round_suffix)
        self._row_lake = row_lake
        self.frames_by_store: dict[str, list[pl.DataFrame]] = {}

    def open_row_store(
        self,
        folder_name: str,
        identity: Mapping[str, object],
        key_columns: Sequence[str],
        schema: Mapping[str, pl.DataType],
    ) -> RowStore:
        """Open a store of computed rows that also notes appended rows in `frames_by_store`.

        So a trial (a run over a few texts) can tell which rows it computed anew. The store is that of the lake whose
        rows are reused, if there is one. The arguments are those of `Lake.open_row_store`.
        """
        if self._row_lake is None:
            store = super().open_row_store(folder_name, identity, key_columns, schema)
        else:
            store = self._row_lake.open_row_store(folder_name, identity, key_columns, schema)

        recording_store = _RecordingStore(store.storage, store.name, store.key_columns, store.schema)
        recording_store.frames_by_store = self.frames_by_store  # one dictionary for all stores
        return recording_store


class _RecordingStore(RowStore):
    """A row store that also notes appended rows.

    Attributes:
        frames_by_store: The appended rows, by the name of the store. The lake sets this dictionary and shares it
            between its stores.
    """

    frames_by_store: dict[str, list[pl.DataFrame]]

    def append_rows(self, rows: pl.DataFrame) -> None:
        """Store rows, and note them in `frames_by_store`."""
        self.frames_by_store.setdefault(self.name, []).append(rows)
        super().append_rows(rows)


class _TrialPlan(Plan):
    """A plan whose only shard is TRIAL_SHARD."""

    @cached_property
    def shards_by_name(self) -> Mapping[str, Shard]:
        """The shard of the texts. Its file does not exist, but no stage of a lane reads it."""
        return {TRIAL_SHARD: ShardFile(TRIAL_SHARD, self.lake.root / TRIAL_SHARD)}


def _build_trial_plan(plan: Plan, lane: Lane, lake: Lake) -> _TrialPlan:
    """Return a plan with the same settings and models, for one lane (a tool), in another lake."""
    return _TrialPlan(
        settings=plan.settings,
        lanes=(lane,),
        model_identity=plan.model_identity,
        lake=lake,
        proposer_identity=plan.proposer_identity,
        previous_plan=plan.previous_plan,
    )
