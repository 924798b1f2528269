"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.lazy_engine import LazyEngine
from toolformer_dag.stages.loss_store import KEY, computed_losses, loss_store, losses_identity
from toolformer_dag.stages.publish import Output, Work
from toolformer_dag.stages.rejections import counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.text_chunks import text_chunks
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.language_model.engine import Engine

STAGE = "loss_deltas"
TEXT = ("shard", "digest", "segment")
KEPT_OUT = "tool_keeps_out"


def settings(lane: Lane, model: Mapping[str, object]) -> dict[str, Any]:
    """What determines the rows beside the calls and their results."""
    return {**losses_identity(lane, model), "version": lane.tool.version}


def loss_deltas(
    lake: Lake,
    lane: Lane,
    partition: str,
    *,
    engine: "Callable[[], Engine]",
    model: Mapping[str, object],
    chunk_texts: int,
    progress: Progress = silent,
) -> StageReport:
    """Scores every candidate call that has a result, `chunk_texts` texts at a time; one row per candidate.

    Candidates of a text that share position, input and result share one computation. `reason` marks what may not stay
    whatever its delta: does_not_fit and not_finite (their losses are null), tool_keeps_out (`Tool.keeps`). `work`
    counts distinct losses.
    """
    clock, lazy = Clock(), LazyEngine(engine)
    versions, texts, calls = _calls(lake, lane, partition)
    store = loss_store(lake, lane, model)
    keys = calls.select(KEY).unique(maintain_order=True)
    missing = store.missing(keys)
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    for chunk in _by_text(keys, missing, chunk_texts, progress):
        store.append(computed_losses(lazy.get(), lane, chunk, by_digest))
    losses = store.stored(keys)
    if losses.height < keys.height:
        raise StorageError(f"{keys.height - losses.height} losses of {lane.key} were damaged while read; run again")
    table = _table(lane, calls.join(losses, on=KEY), by_digest)
    work = Work(lazy.tokens(), {"losses": (missing.height, keys.height - missing.height)}, [store])
    output = Output(lake, STAGE, lane.key, partition, lane.key)
    return output.publish([table], settings(lane, model), versions, counted(table), clock, work)


def _calls(lake: Lake, lane: Lane, partition: str) -> tuple[dict[str, str], pl.DataFrame, pl.DataFrame]:
    """Data versions of the inputs, the texts, and the candidate calls with their results."""
    candidates, results = lake.table(f"{lane.key}/scored_candidates"), lake.table(f"{lane.key}/tool_results")
    versions = {table.name.split("/")[1]: table.pointer(partition).data_version for table in (candidates, results)}
    texts = lake.table(f"{lane.key}/heuristic_subset").read(partition)
    calls = candidates.read(partition).filter(pl.col("input").is_not_null()).drop("reason")
    places = texts.select(*TEXT, "text_digest", "context", "offset")
    answers = results.read(partition).select("input", "context", "result", answered=pl.lit(True))
    calls = calls.join(places, on=TEXT, how="left").join(answers, on=("input", "context"), how="left")
    if calls["text_digest"].has_nulls():
        raise StaleInput(STAGE, partition, "candidates of texts that are gone", f"{lane.key}/scored_candidates")
    if calls["answered"].has_nulls():
        raise StaleInput(STAGE, partition, "calls that have not been run", f"{lane.key}/tool_results")
    return versions, texts, calls.filter(pl.col("result").is_not_null())


def _by_text(keys: pl.DataFrame, missing: pl.DataFrame, size: int, progress: Progress) -> Iterator[pl.DataFrame]:
    """The missing keys of `size` texts at a time."""
    texts = keys.select("text_digest").unique(maintain_order=True)
    stored = keys.join(missing, on=KEY, how="anti").select("text_digest")
    partial = missing.select("text_digest").unique().join(stored, on="text_digest", how="semi")
    untouched = texts.join(stored, on="text_digest", how="anti")
    for chunk in text_chunks(texts, untouched, partial, size, progress):
        yield missing.join(chunk, on="text_digest", how="semi", maintain_order="left")


def _table(lane: Lane, scored: pl.DataFrame, texts: Mapping[str, str]) -> pl.DataFrame:
    places = scored.select("text_digest", "char_offset", "offset", "input").iter_rows()
    kept = [lane.tool.keeps(texts[digest], place - offset, call) for digest, place, offset, call in places]
    kept_out = pl.when(~pl.Series("kept", kept, dtype=pl.Boolean)).then(pl.lit(KEPT_OUT))
    minus = pl.min_horizontal("loss_empty", "loss_call")
    return (
        scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"), loss_minus=minus, loss_plus="loss_result")
        .with_columns(delta=pl.col("loss_minus") - pl.col("loss_plus"))
        .select(columns(STAGE).names())
        .sort(*TEXT, "position", "sample")
    )
