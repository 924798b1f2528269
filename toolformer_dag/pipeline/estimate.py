"""What a run will cost, forecast from a sample of its texts that is annotated for real.

The rows of the sample are stored, so the run that follows does not compute them again. Covered: tokens, storage and
time of annotating. Not covered: finetuning, evaluation, C* and the warehouse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import polars as pl

from toolformer_dag.lake.row_store import RowStore
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
from toolformer_dag.pipeline.file_sizes import Appended, FileSizes, chunk_files, stored_bytes
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.shards import Shard, ShardFile
from toolformer_dag.pipeline.spending import token_count
from toolformer_dag.pipeline.stage import TEXT_KEY, PartRows, TableOutput
from toolformer_dag.pipeline.update import difference, update
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.settings.sections import Settings

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
"""The last is the control, which takes a number of texts of each shard and swaps results among them."""
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
    lane = _Lane.of(tables)
    texts = lane.placed.unique("text_digest", keep="first", maintain_order=True).sort("text_digest")
    texts = texts.sample(fraction=1, shuffle=True, seed=seed)
    if texts.height <= GROUPS:
        nothing = Range(0, 0, 0)
        return LaneForecast(lane.subset.lane.key, texts.height, 0, nothing, nothing, nothing, 0)
    size = max(1, min(TEXTS, texts.height // SHARE) // GROUPS)
    groups, rest = [texts[at : at + size] for at in range(0, GROUPS * size, size)], texts[GROUPS * size :]
    with TemporaryDirectory() as scratch:
        sample = _annotated(worker, lane, groups, Path(scratch), progress)
    units = [int(group["characters"].sum()) for group in groups]
    average = sum(units) / (GROUPS * size)

    def scaled(cost: Callable[[_Cost], float]) -> Range:
        left = int(rest["characters"].sum())
        control = cost(sample.control) / (average * sample.controlled) * lane.control_characters
        costs = [sum(map(cost, group)) for group in sample.groups]
        shares = [part.height * GROUPS / (sample.control.published.height or 1) for part in sample.control_groups]
        by_group = [one / unit * left + control * share for one, unit, share in zip(costs, units, shares, strict=True)]
        return _range(sum(costs) / sum(units) * left + control, by_group)

    published = [sum(one.published.height for one in group) for group in sample.groups]
    size_of_files = _published_bytes(lane, sample, groups) + _stored_bytes(lane, sample, groups, rest)
    return LaneForecast(
        lane=lane.subset.lane.key,
        texts=texts.height,
        sampled=GROUPS * size,
        tokens=scaled(lambda cost: cost.tokens),
        bytes=_range(size_of_files, published),
        seconds=scaled(lambda cost: cost.seconds),
        spent=sum(cost.tokens for group in (*sample.groups, [sample.control]) for cost in group),
    )


def _range(value: float, by_group: Sequence[float]) -> Range:
    """Return `value` with the interval that what the groups differ by tells."""
    spread = STUDENT * stdev(by_group) / (mean(by_group) or 1.0) / GROUPS**0.5
    return Range(value, value * max(0.0, 1 - spread), value * (1 + spread))


@dataclass(frozen=True, slots=True, eq=False)
class _Lane:
    """What a lane has to take in. `placed`: CHOSEN rows of the stale shards, where a text may stand in several.

    `stale`: shard -> the stages that publish it anew; `controlled`: shard -> texts whose calls the control takes;
    `control_characters`: of all these, of equal shards once; `new`: stage -> shards of which it published nothing.
    """

    subset: TableOutput
    placed: pl.DataFrame
    stale: Mapping[str, Sequence[str]]
    controlled: Mapping[str, int]
    control_characters: float
    new: Mapping[str, int]

    @property
    def texts_of_a_shard(self) -> float:
        """How many texts the shard of a text has, on average."""
        counts = self.placed.group_by("shard").agg(texts=pl.col("text_digest").n_unique())["texts"].to_list()
        return float(sum(count * count for count in counts) / sum(counts))

    @staticmethod
    def of(tables: Mapping[str, TableOutput]) -> "_Lane":
        subset, names = tables[heuristic_subset.STAGE.name], [stage.name for stage in ANNOTATING]
        with subset.plan.lake.storage.at_a_glance():
            first = {part: _first_stale([tables[name] for name in names], part) for part in subset.parts}
        stale = {part: names[at:] for part, at in first.items() if at < len(names)}
        new = {name: sum(not tables[name].table.has(part) for part in stale) for name in names}
        columns = ("shard", "text_digest", pl.col("text").str.len_chars().alias("characters"))
        placed = subset.table.scan(list(stale)).select(columns).collect() if stale else CHOSEN.to_frame()
        limit = subset.plan.settings.evaluation.swapped_texts
        by_shard = placed.unique(["shard", "text_digest"]).group_by("shard")
        held = by_shard.agg(pl.col("text_digest").sort(), pl.col("characters").sum())
        taken = held.with_columns(taken=pl.col("text_digest").list.len().clip(upper_bound=limit))
        distinct = taken.unique("text_digest")
        characters = (distinct["characters"] * distinct["taken"] / distinct["text_digest"].list.len()).sum()
        return _Lane(subset, placed, stale, dict(taken.select("shard", "taken").iter_rows()), float(characters), new)


def _first_stale(outputs: Sequence[TableOutput], part: str) -> int:
    """The number of the first stage that publishes a part anew; those behind it follow."""
    return next((at for at, output in enumerate(outputs) if difference(output, part)), len(outputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Cost:
    """What a stage cost: the rows that it published, and those that it stored, by row store; `pointer`: its bytes."""

    tokens: int
    seconds: float
    published: pl.DataFrame
    stored: Mapping[str, pl.DataFrame]
    pointer: int


@dataclass(frozen=True, slots=True, eq=False)
class _Sample:
    """What each group of texts cost, by stage, and the control, whose results are swapped among all of them.

    `control_groups`: a part of its rows each; `controlled`: the texts that it took; `waiting`: the bytes of the chunks
    of each row store that are not merged yet.
    """

    groups: Sequence[Sequence[_Cost]]
    control: _Cost
    control_groups: Sequence[pl.DataFrame]
    controlled: int
    waiting: Mapping[str, Sequence[int]]


def _published_bytes(lane: _Lane, sample: _Sample, groups: Sequence[pl.DataFrame]) -> float:
    """Return the bytes of a file per shard and stage, with its pointer where there is none yet."""
    texts = sum(group.height for group in groups)
    average = sum(int(group["characters"].sum()) for group in groups) / texts
    counts = lane.placed.group_by("shard").agg(pl.col("characters").sum())
    shards = {shard: characters / average for shard, characters in counts.iter_rows()}
    total = 0.0
    for at, stage in enumerate(ANNOTATING[:-1]):
        sizes = FileSizes.of([group[at].published for group in sample.groups], texts)
        total += sizes.total([(1, shards.get(one, 0)) for one, stages in lane.stale.items() if stage.name in stages])
        total += sample.groups[0][at].pointer * lane.new[stage.name]
    sizes = FileSizes.of(sample.control_groups, sample.controlled)
    empty = len(lane.stale) - len(lane.controlled)
    total += sizes.total([(empty, 0), *((1, count) for count in lane.controlled.values())])
    return total + sample.control.pointer * lane.new[swapped_results.STAGE.name]


def _stored_bytes(lane: _Lane, sample: _Sample, groups: Sequence[pl.DataFrame], rest: pl.DataFrame) -> float:
    """Return the bytes that the row stores will take in for the texts that are not sampled."""
    settings, texts = lane.subset.plan.settings, sum(group.height for group in groups)
    left = rest["shard"].value_counts()["count"].to_list()
    kinds: dict[str, list[Appended]] = {}
    for at in range(len(ANNOTATING) - 1):
        for name in dict.fromkeys(name for group in sample.groups for name in group[at].stored):
            rows = [group[at].stored[name] for group in sample.groups if name in group[at].stored]
            kinds.setdefault(name, []).append(_appended(rows, texts, left, settings))
    for name, stored in sample.control.stored.items():
        split, shards = [stored[at::GROUPS] for at in range(GROUPS)], list(lane.controlled.values())
        kinds.setdefault(name, []).append(_appended(split, sample.controlled, shards, settings))
    return sum(stored_bytes([one for one in some if one.texts], sample.waiting[name]) for name, some in kinds.items())


def _appended(rows: Sequence[pl.DataFrame], texts: int, shards: Sequence[int], settings: Settings) -> Appended:
    """Return what `shards`, by their texts, will append. `rows`: what groups appended that together have `texts`."""
    groups = [*rows, *[rows[0].clear()] * (GROUPS - len(rows))]
    key, size, share = rows[0].columns[0], settings.execution.chunk_calls, 0.0
    units = sum(group.height for group in groups)
    if key == "text_digest":
        units, size = pl.concat(groups)[key].n_unique(), chunk_size(settings)
        share = units / texts
    elif units and sum(shards):  # calls: those that are new grow fewer
        share = units * ((1 + sum(shards) / texts) ** _growth(groups) - 1) / sum(shards)
    return Appended(groups, key, units, [file for left in shards for file in chunk_files(left * share, size)])


def _growth(groups: Sequence[pl.DataFrame]) -> float:
    """Return the power of the texts with which distinct rows grow (Heaps' law), from the first half of them to all."""
    half = sum(group.height for group in groups[: len(groups) // 2])
    return min(1.0, log2(sum(group.height for group in groups) / half)) if half else 1.0


def _annotated(
    worker: Worker, lane: _Lane, groups: Sequence[pl.DataFrame], scratch: Path, progress: Progress
) -> _Sample:
    """Annotate groups of texts, each as a shard of its own; then the control of all, in shards as large as the lane's.

    In a small shard few calls find a result of another document.
    """
    worker.engine()  # loaded before anything is timed
    subset, together = lane.subset, pl.concat(groups)
    count = max(1, round(together.height / lane.texts_of_a_shard))
    parts = [together[at::count] for at in range(count)]
    costs: list[list[_Cost]] = []
    waiting: dict[str, list[int]] = {}
    for number, shards in enumerate((*([group] for group in groups), parts)):
        lake = _SampleLake(scratch / str(number), worker.plan.lake)
        plan = _SamplePlan(
            worker.plan.settings, (subset.lane,), worker.plan.model, worker.plan.sampling, lake, len(shards)
        )
        outputs = {stage.name: TableOutput(stage, plan, subset.lane) for stage in (heuristic_subset.STAGE, *ANNOTATING)}
        for shard, texts in zip(plan.shards, shards, strict=True):
            outputs[heuristic_subset.STAGE.name].publish(shard, PartRows([_rows(subset, texts, shard)]))
        sharing = _SampleWorker(plan, worker)
        stages = ANNOTATING if shards is parts else ANNOTATING[:-1]
        costs.append([_stage_cost(sharing, outputs[stage.name], progress) for stage in stages])
        waiting |= {name: store.chunks() for name, store in lake.opened.items()}
    control, limit = costs.pop()[-1], worker.plan.settings.evaluation.swapped_texts
    controlled = sum(min(limit, part.height) for part in parts)
    return _Sample(costs, control, [control.published[at::GROUPS] for at in range(GROUPS)], controlled, waiting)


def _rows(subset: TableOutput, texts: pl.DataFrame, shard: str) -> pl.DataFrame:
    """The rows of these texts as one shard, each text once."""
    frames = [
        subset.table.read(str(place)).join(own, on="text_digest", how="semi")
        for (place,), own in texts.group_by("shard")
    ]
    rows = pl.concat(frames).unique("text_digest").with_columns(shard=pl.lit(shard))
    return rows.unique(TEXT_KEY).sort(TEXT_KEY)


def _stage_cost(worker: "_SampleWorker", output: TableOutput, progress: Progress) -> _Cost:
    lake = worker.plan.lake
    lake.appended.clear()
    report = update(worker, InProcess(worker, {output.name: output}), output, progress)
    stored = {name: pl.concat(frames) for name, frames in lake.appended.items()}
    published = pl.concat([output.table.read(shard) for shard in output.parts])
    pointer = len(output.table.pointer(output.parts[0]).encode(output.name))
    return _Cost(token_count(report.work.tokens), report.seconds, published, stored, pointer)


SAMPLE = "sample"


class _Appended(RowStore):
    """Notes what is appended."""

    appended: dict[str, list[pl.DataFrame]]

    def append(self, rows: pl.DataFrame) -> None:
        self.appended.setdefault(self.name, []).append(rows)
        super().append(rows)


class _SampleLake(Lake):
    """Tables of its own over the computed rows of another lake. `appended`: rows by store; `opened`: the stores."""

    def __init__(self, root: Path, lake: Lake) -> None:
        super().__init__(root)
        self._lake = lake
        self.appended: dict[str, list[pl.DataFrame]] = {}
        self.opened: dict[str, RowStore] = {}

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        store = self._lake.rows(name, identity, key, schema)
        noted = _Appended(store.storage, store.name, store.key, store.schema)
        noted.appended, self.opened[store.name] = self.appended, store
        return noted


@dataclass(frozen=True)
class _SamplePlan(Plan):
    """A plan over the sample's shards."""

    sample_lake: _SampleLake
    count: int

    @property
    def lake(self) -> _SampleLake:
        return self.sample_lake

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        names = [f"{SAMPLE} {number}" for number in range(self.count)]
        return {name: ShardFile(name, self.sample_lake.root / name) for name in names}


class _SampleWorker(Worker):
    """A worker of the sample that shares the model of another."""

    def __init__(self, plan: _SamplePlan, worker: Worker) -> None:
        super().__init__(plan)
        self.plan: _SamplePlan = plan
        self.engine = worker.engine  # type: ignore[method-assign]
        self.runner = worker.runner  # type: ignore[method-assign]
