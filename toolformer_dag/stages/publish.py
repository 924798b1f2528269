"""The last step of every stage: rows, record and report in one go."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import polars as pl

from toolformer_dag.stages import rejections
from toolformer_dag.stages.rejections import Rejected
from toolformer_dag.stages.report import Clock, StageReport
from toolformer_dag.storage.lake import Lake
from toolformer_dag.storage.partition import WHOLE
from toolformer_dag.storage.record import STORES, record
from toolformer_dag.storage.rows import RowStore


@dataclass(frozen=True, slots=True)
class Work:
    """What a stage did to get its rows; see StageReport. `stores`: the paid rows it took them from."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stores: Sequence[RowStore] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """Where rows go. `group` is the first part of the table's name: a lane, `ccnet` or `training`."""

    lake: Lake
    stage: str
    group: str
    partition: str
    tool: str | None = None

    def publish(
        self,
        frames: Iterable[pl.DataFrame],
        settings: Mapping[str, Any],
        inputs: Mapping[str, Any],
        rejected: Rejected,
        clock: Clock,
        work: Work = Work(),
        volatile: Collection[str] = (),
        facts: Mapping[str, Any] = MappingProxyType({}),
    ) -> StageReport:
        """Publishes and reports. `rejected` is read after the last frame, so frames may count into it.

        Raises WriteError.
        """
        table = self.lake.table(f"{self.group}/{self.stage}")
        made = record(settings, inputs, stage=self.stage, tool=self.tool, partition=self.partition, **facts)
        made[STORES] = [store.name for store in work.stores]
        published = table.publish(self.partition, _counting(frames, made, rejected), made, volatile)
        return StageReport(
            self.stage,
            self.tool,
            None if self.partition == WHOLE else self.partition,
            published.rows,
            published.data_version,
            clock.seconds,
            work.tokens,
            rejections.by_reason(rejected.items()),
            work.counts,
            tuple(note for store in work.stores for note in store.damaged),
        )


def _counting(frames: Iterable[pl.DataFrame], made: dict[str, Any], rejected: Rejected) -> Iterator[pl.DataFrame]:
    yield from frames
    made["rejections"] = rejections.encode(rejected)
