"""What a run will cost, forecast from a sample of its texts that is annotated for real.

The rows of the sample are stored, so the run that follows does not compute them again. Covered: tokens, storage and
time of annotating. Not covered: finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import polars as pl

from toolformer_dag.lake import parquet
from toolformer_dag.lake.row_store import MERGE_AT, RowStore
from toolformer_dag.lake.table import Lake
from toolformer_dag.pipeline import (
    heuristic_subset,
    loss_deltas,
    raw_shards,
    removed_documents,
    scored_candidates,
    screened_documents,
    swapped_results,
    tool_results,
)
from toolformer_dag.pipeline.chunks import InProcess, Progress, Workers, chunk_size
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.shards import Shard, ShardFile
from toolformer_dag.pipeline.spending import token_count
from toolformer_dag.pipeline.stage import TEXT_KEY, PartRows, TableOutput
from toolformer_dag.pipeline.update import difference, update
from toolformer_dag.pipeline.worker import Worker

GROUPS = 4
"""Parts of the sample: how much they differ tells the range."""
STUDENT = 3.18
"""The 97.5 % point of Student's distribution with GROUPS - 1 degrees of freedom."""
TEXTS = 256
"""Texts of a lane that are annotated, at most."""
SHARE = 5
"""At most one in so many texts is annotated, of few texts one in each group."""
CHOOSING = (raw_shards.STAGE, screened_documents.STAGE, removed_documents.STAGE, heuristic_subset.STAGE)
"""Stages that run as they will: they tell which texts there are."""
ANNOTATING = (scored_candidates.STAGE, tool_results.STAGE, loss_deltas.STAGE, swapped_results.STAGE)
CHOSEN = pl.Schema({"shard": pl.String(), "text_digest": pl.String(), "characters": pl.UInt32()})


@dataclass(frozen=True, slots=True)
class Range:
    """A forecast with its 95 % interval."""

    value: float
    low: float
    high: float

    def __add__(self, other: "Range") -> "Range":
        """Return the range of a sum; the intervals are added, as if both erred to the same side."""
        return Range(self.value + other.value, self.low + other.low, self.high + other.high)


@dataclass(frozen=True, slots=True)
class LaneForecast:
    """What annotating a lane will cost. `texts`: distinct texts of its stale shards; `sampled` of them are annotated.

    `tokens` will go through the model, `bytes` be added to the lane's tables and row stores, and `seconds` pass on one
    worker, for the texts that are not sampled. `spent`: tokens of the sample. Of four texts or fewer there is no
    sample, and everything but `texts` is 0.
    """

    lane: str
    texts: int
    sampled: int
    tokens: Range
    bytes: Range
    seconds: Range
    spent: int


def estimate(
    worker: Worker, workers: Workers, outputs: Sequence[TableOutput], progress: Progress, seed: int | None = None
) -> list[LaneForecast]:
    """Read the shards, choose the texts and annotate a sample of those whose shards are stale; forecast the rest.

    Up to 256 texts of a lane are annotated, at most every fifth. They are drawn anew each time, so that texts whose
    rows are stored already are in the sample as often as in the rest; `seed` draws the same ones. Raises what the
    stages raise.
    """
    for output in outputs:
        if output.stage in CHOOSING:
            update(worker, workers, output, progress)
    by_lane: dict[str, dict[str, TableOutput]] = {}
    for output in outputs:
        if output.lane_or_none is not None:
            by_lane.setdefault(output.lane.key, {})[output.stage.name] = output
    return [_lane_forecast(worker, tables, progress, seed) for tables in by_lane.values()]


def _lane_forecast(
    worker: Worker, tables: Mapping[str, TableOutput], progress: Progress, seed: int | None
) -> LaneForecast:
    subset = tables[heuristic_subset.STAGE.name]
    texts = _texts(subset, [tables[stage.name] for stage in ANNOTATING])
    texts = texts.sample(fraction=1, shuffle=True, seed=seed)
    size = max(1, min(TEXTS, texts.height // SHARE) // GROUPS)
    if texts.height <= GROUPS:
        nothing = Range(0, 0, 0)
        return LaneForecast(subset.lane.key, texts.height, 0, nothing, nothing, nothing, 0)
    groups = [texts[at : at + size] for at in range(0, GROUPS * size, size)]
    sampled, rest = pl.concat(groups), texts[GROUPS * size :]
    limit = worker.plan.settings.evaluation.swapped_texts
    control = _controlled(rest, limit) / rest.height * size / min(limit, size)
    with TemporaryDirectory() as scratch:
        costs = [
            _cost(worker, subset, group, Path(scratch) / str(number), progress) for number, group in enumerate(groups)
        ]
    units = [int(group["characters"].sum()) for group in groups]
    left, everything = int(rest["characters"].sum()), int(texts["characters"].sum())
    together = _together(costs)

    def scaled(of: Callable[[_Cost], float], wanted: int) -> Range:
        ratios = [cost.total(of, control) / unit for cost, unit in zip(costs, units, strict=True)]
        spread = STUDENT * stdev(ratios) / (mean(ratios) or 1.0) / GROUPS**0.5
        value = together.total(of, control) / sum(units) * wanted
        return Range(value, value * max(0.0, 1 - spread), value * (1 + spread))

    chunks = min(MERGE_AT, -(-rest.height // chunk_size(worker.plan.settings)))
    files = together.total(lambda cost: _file_bytes(cost, texts["shard"].n_unique(), chunks), 1)
    return LaneForecast(
        lane=subset.lane.key,
        texts=texts.height,
        sampled=sampled.height,
        tokens=scaled(lambda cost: cost.tokens, left),
        bytes=scaled(_published_bytes, everything) + scaled(_stored_bytes, left) + Range(files, files, files),
        seconds=scaled(lambda cost: cost.seconds, left),
        spent=int(together.total(lambda cost: cost.tokens, 1)),
    )


def _texts(subset: TableOutput, annotating: Sequence[TableOutput]) -> pl.DataFrame:
    """The distinct texts of the shards that some stage has to take in."""
    stale = [part for part in subset.parts if any(difference(output, part) for output in annotating)]
    if not stale:
        return CHOSEN.to_frame()
    columns = (pl.col("shard"), pl.col("text_digest"), pl.col("text").str.len_chars().alias("characters"))
    return subset.table.scan(stale).select(columns).collect().unique("text_digest").sort("text_digest")


def _controlled(texts: pl.DataFrame, limit: int) -> int:
    """How many of `texts` the control takes: at most `limit` of each shard."""
    return int(texts.group_by("shard").len().select(pl.col("len").clip(upper_bound=limit).sum()).item())


@dataclass(frozen=True, slots=True, eq=False)
class _Cost:
    """What a stage cost: the rows that it published, and those that it stored, by row store."""

    tokens: int
    seconds: float
    published: pl.DataFrame
    stored: Mapping[str, pl.DataFrame]


@dataclass(frozen=True, slots=True, eq=False)
class _GroupCost:
    """What a group cost; `control`: the swapped results, which not every text has."""

    annotating: Sequence[_Cost]
    control: _Cost

    def total(self, of: Callable[[_Cost], float], control: float) -> float:
        """Sum what the stages cost, with so much of the control."""
        return sum(map(of, self.annotating)) + control * of(self.control)


def _together(groups: Sequence[_GroupCost]) -> _GroupCost:
    """The cost of all groups, with their rows in one file each, as a run writes them."""
    by_stage = zip(*([*group.annotating, group.control] for group in groups), strict=True)
    *annotating, control = [
        _Cost(
            sum(cost.tokens for cost in costs),
            sum(cost.seconds for cost in costs),
            pl.concat([cost.published for cost in costs]),
            _joined([cost.stored for cost in costs]),
        )
        for costs in by_stage
    ]
    return _GroupCost(annotating, control)


def _joined(stored: Sequence[Mapping[str, pl.DataFrame]]) -> dict[str, pl.DataFrame]:
    names = dict.fromkeys(name for one in stored for name in one)
    return {name: pl.concat([one[name] for one in stored if name in one]) for name in names}


def _published_bytes(cost: _Cost) -> int:
    return _encoded(cost.published) - _encoded(cost.published.head(1))


def _stored_bytes(cost: _Cost) -> int:
    return sum(_encoded(rows) - _encoded(rows.head(1)) for rows in cost.stored.values())


def _file_bytes(cost: _Cost, shards: int, chunks: int) -> int:
    """Return the bytes that files take beside their rows: a file per shard of a table and per chunk of a row store."""
    return (
        _encoded(cost.published.head(1)) * shards
        + sum(_encoded(rows.head(1)) for rows in cost.stored.values()) * chunks
    )


def _encoded(rows: pl.DataFrame) -> int:
    return len(parquet.encode(rows))


def _cost(worker: Worker, subset: TableOutput, texts: pl.DataFrame, scratch: Path, progress: Progress) -> _GroupCost:
    """Annotate texts as a shard of their own, in a lake of their own whose computed rows are those of the lake."""
    worker.engine()  # loaded before anything is timed
    plan = worker.plan
    sample = _SamplePlan(plan.settings, (subset.lane,), plan.model, plan.sampling, _SampleLake(scratch, plan.lake))
    outputs = {stage.name: TableOutput(stage, sample, subset.lane) for stage in (heuristic_subset.STAGE, *ANNOTATING)}
    frames = [
        subset.table.read(str(shard)).join(own, on="text_digest", how="semi")
        for (shard,), own in texts.group_by("shard")
    ]
    rows = pl.concat(frames).unique("text_digest").with_columns(shard=pl.lit(SAMPLE)).unique(TEXT_KEY).sort(TEXT_KEY)
    outputs[heuristic_subset.STAGE.name].publish(SAMPLE, PartRows([rows]))
    sharing = _SampleWorker(sample, worker)
    *annotating, control = [_stage_cost(sharing, outputs[stage.name], progress) for stage in ANNOTATING]
    return _GroupCost(annotating, control)


def _stage_cost(worker: "_SampleWorker", output: TableOutput, progress: Progress) -> _Cost:
    appended = worker.plan.lake.appended
    appended.clear()
    report = update(worker, InProcess(worker, {output.name: output}), output, progress)
    stored = {name: pl.concat(frames) for name, frames in appended.items()}
    return _Cost(token_count(report.work.tokens), report.seconds, output.table.read(SAMPLE), stored)


SAMPLE = "sample"


class _Appended(RowStore):
    """Notes what is appended."""

    appended: dict[str, list[pl.DataFrame]]

    def append(self, rows: pl.DataFrame) -> None:
        self.appended.setdefault(self.name, []).append(rows)
        super().append(rows)


class _SampleLake(Lake):
    """Tables of its own over the computed rows of another lake. `appended`: rows by store."""

    def __init__(self, root: Path, lake: Lake) -> None:
        super().__init__(root)
        self._lake = lake
        self.appended: dict[str, list[pl.DataFrame]] = {}

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        store = self._lake.rows(name, identity, key, schema)
        noted = _Appended(store.storage, store.name, store.key, store.schema)
        noted.appended = self.appended
        return noted


@dataclass(frozen=True)
class _SamplePlan(Plan):
    """A plan over one shard, the sample."""

    sample_lake: _SampleLake

    @property
    def lake(self) -> _SampleLake:
        return self.sample_lake

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        return {SAMPLE: ShardFile(SAMPLE, self.sample_lake.root / SAMPLE)}


class _SampleWorker(Worker):
    """A worker of the sample that shares the model of another."""

    def __init__(self, plan: _SamplePlan, worker: Worker) -> None:
        super().__init__(plan)
        self.plan: _SamplePlan = plan
        self.engine = worker.engine  # type: ignore[method-assign]
        self.runner = worker.runner  # type: ignore[method-assign]
