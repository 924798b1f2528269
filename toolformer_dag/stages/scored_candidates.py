"""scored_candidates: where the model would call the tool, and what it would ask (paper, section 2, "Sampling")."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.model.requests import Sampling
from toolformer_dag.stages.lazy_engine import LazyEngine
from toolformer_dag.stages.publish import Output, Work
from toolformer_dag.stages.rejections import Rejected, counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.sample_store import SAMPLE_KEY, SampleStore, Wanted, samples_identity
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.text_chunks import text_chunks
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake
from toolformer_dag.texts.calls import MalformedCall, parse_call

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

STAGE = "scored_candidates"
PARSING = 2  # raised by hand when `parse_call` takes the same bodies otherwise; no sample is paid for again
BODIES = {"body": pl.String, "input": pl.String, "malformed": pl.String}


def settings(lane: Lane, model: Mapping[str, object], sampling: Sampling) -> dict[str, Any]:
    """What determines the rows beside the texts."""
    thresholds = {"tau_s": lane.tau_s, "k": lane.k, "m": lane.m}
    return {**samples_identity(lane, model, sampling), **thresholds, "tool": lane.tool.name, "parsing": PARSING}


def scored_candidates(
    lake: Lake,
    lane: Lane,
    partition: str,
    *,
    engine: "Callable[[], Engine]",
    model: Mapping[str, object],
    sampling: Sampling,
    chunk_texts: int,
    progress: Progress = silent,
) -> StageReport:
    """Samples calls for the texts of a partition, `chunk_texts` texts at a time, and publishes every sample.

    A row is a sampled call, or a discarded sample with its reason: no_end, those of `parse_call`, other_tool. Texts
    without a row are counted as no_position, does_not_fit, not_finite or empty. `work` counts texts (p_i) and samples.
    """
    clock, lazy = Clock(), LazyEngine(engine)
    subset = lake.table(f"{lane.key}/heuristic_subset")
    version, rows = subset.pointer(partition).data_version, subset.read(partition)
    texts = rows.select("text_digest", "text").unique("text_digest", maintain_order=True)
    store = SampleStore(lake, lane, model, sampling)
    before = store.wanted(texts)
    reusable = before.keys.height - store.missing(before.keys).height
    for chunk in _unpaid(store, texts, before, chunk_texts, progress):
        store.pay(lazy.get(), *chunk)
    after = store.wanted(texts)
    table = _table(lane, rows, store, after)
    work = Work(
        lazy.tokens(),
        {
            "texts": (before.unknown.height, texts.height - before.unknown.height),
            "samples": (after.keys.height - reusable, reusable),
        },
        store.stores,
    )
    rejected = counted(table) + _without_rows(rows, after, store.refused(texts))
    output = Output(lake, STAGE, lane.key, partition, lane.key)
    made = settings(lane, model, sampling)
    return output.publish([table], made, {"heuristic_subset": version}, rejected, clock, work)


def _unpaid(
    store: SampleStore, texts: pl.DataFrame, wanted: Wanted, size: int, progress: Progress
) -> Iterator[tuple[pl.DataFrame, dict[str, frozenset[tuple[int, int]]]]]:
    """Chunks of the texts that lack something, each with the samples that its texts have already."""
    missing = store.missing(wanted.keys)
    partial = missing.select("text_digest").unique()
    present = wanted.keys.join(missing, on=SAMPLE_KEY, how="anti")
    for chunk in text_chunks(texts, wanted.unknown, partial, size, progress):
        stored = present.join(chunk, on="text_digest", how="semi").select(SAMPLE_KEY)
        pairs: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for digest, position, sample in stored.iter_rows():
            pairs[digest].add((position, sample))
        yield chunk, {digest: frozenset(found) for digest, found in pairs.items()}


def _table(lane: Lane, rows: pl.DataFrame, store: SampleStore, wanted: Wanted) -> pl.DataFrame:
    samples = store.samples(wanted.keys)
    if samples.height < wanted.keys.height:
        lost = wanted.keys.height - samples.height
        raise StorageError(f"{lost} samples of {lane.key} were damaged while they were read; run again")
    parsed = pl.DataFrame([_parsed(lane, body) for body in samples["body"].unique()], schema=BODIES, orient="row")
    samples = samples.join(parsed, on="body", how="left", nulls_equal=True)
    placed = rows.join(wanted.chosen, on="text_digest").join(samples, on=("text_digest", "position"))
    return (
        placed.with_columns(
            (pl.col("offset") + pl.col("char")).alias("char_offset"), pl.coalesce("reason", "malformed").alias("reason")
        )
        .select(columns(STAGE).names())
        .sort("shard", "digest", "segment", "position", "sample")
    )


def _parsed(lane: Lane, body: str | None) -> tuple[str | None, str | None, str | None]:
    """(body, input or None, why it is no call of this tool)."""
    if body is None:
        return None, None, None
    try:
        call = parse_call(body)
    except MalformedCall as error:
        return body, None, error.reason
    return (body, call.input, None) if call.tool == lane.tool.name else (body, None, "other_tool")


def _without_rows(rows: pl.DataFrame, wanted: Wanted, refused: pl.DataFrame) -> Rejected:
    """Texts that gave no row, by shard and reason."""
    barren = rows.join(wanted.chosen, on="text_digest", how="anti").join(refused, on="text_digest", how="left")
    return counted(barren.with_columns(pl.col("reason").fill_null("no_position")))
