"""loss_deltas: by how much each call with its result helps to predict what follows (paper, section 2, "Filtering")."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.errors import StaleInput
from toolformer_dag.stages.loss_store import losses_identity
from toolformer_dag.stages.made_from import made_from
from toolformer_dag.stages.paid_losses import paid_losses
from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.rejections import counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import columns
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine

STAGE = "loss_deltas"
TEXT = ("shard", "digest", "segment")
KEPT_OUT = "tool_keeps_out"


def settings(lane: Lane, model: Mapping[str, object]) -> dict[str, Any]:
    """What determines the rows beside the calls and their results; an option may be there for `Tool.keeps` alone."""
    return {**losses_identity(lane, model), "version": lane.tool.version, "identity": dict(lane.tool.identity())}


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
    clock = Clock()
    versions, texts, calls = _calls(lake, lane, partition)
    by_digest = dict(texts.select("text_digest", "text").iter_rows())
    scored, work = paid_losses(
        lake, lane, calls, by_digest, engine=engine, model=model, chunk_texts=chunk_texts, progress=progress
    )
    table = _table(lane, scored, by_digest)
    output = Output(lake, STAGE, lane.key, partition, lane.key)
    return output.publish([table], settings(lane, model), versions, counted(table), clock, work)


def _calls(lake: Lake, lane: Lane, partition: str) -> tuple[dict[str, str], pl.DataFrame, pl.DataFrame]:
    """Data versions of the inputs, the texts, and the candidate calls with their results."""
    read = ("heuristic_subset", "scored_candidates", "tool_results")
    tables = {stage: lake.table(f"{lane.key}/{stage}") for stage in read}
    versions = {stage: table.pointer(partition).data_version for stage, table in tables.items()}
    subset, candidates, results = tables.values()
    if not made_from(candidates, subset, partition):
        raise StaleInput(STAGE, partition, "candidates of texts that are gone", f"{lane.key}/scored_candidates")
    texts = subset.read(partition)
    calls = candidates.read(partition).filter(pl.col("input").is_not_null()).drop("reason")
    places = texts.select(*TEXT, "text_digest", "context", "offset")
    answers = results.read(partition).select("input", "context", "result", answered=pl.lit(True))
    calls = calls.join(places, on=TEXT, how="left").join(answers, on=("input", "context"), how="left")
    if calls["answered"].has_nulls():
        raise StaleInput(STAGE, partition, "calls that have not been run", f"{lane.key}/tool_results")
    return versions, texts, calls.filter(pl.col("result").is_not_null())


def _table(lane: Lane, scored: pl.DataFrame, texts: Mapping[str, str]) -> pl.DataFrame:
    places = scored.select("text_digest", "char_offset", "offset", "input").iter_rows()
    kept = [lane.tool.keeps(texts[digest], place - offset, call) for digest, place, offset, call in places]
    kept_out = pl.when(~pl.Series("kept", kept, dtype=pl.Boolean)).then(pl.lit(KEPT_OUT))
    marked = scored.with_columns(pl.coalesce("reason", kept_out).alias("reason"))
    return marked.select(columns(STAGE).names()).sort(*TEXT, "position", "sample")
