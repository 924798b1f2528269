"""heuristic_subset: the texts that a tool wants, cut so that the prompt and two copies fit the model's context."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.chunks import chunked
from toolformer_dag.stages.cut import Cut
from toolformer_dag.stages.publish import Output
from toolformer_dag.stages.rejections import Rejected, counted
from toolformer_dag.stages.report import Clock, Progress, StageReport, silent
from toolformer_dag.stages.schema import columns
from toolformer_dag.stages.text_digest import text_digest
from toolformer_dag.storage.lake import Lake
from toolformer_dag.texts.calls import holds_call
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.segments import CUTTING, Segment, Unfit, segments

STAGE = "heuristic_subset"
BATCH = 500

Row = tuple[str, str, str, int, int, str, str, str, str]


def settings(lane: Lane, cut: Cut, texts_per_shard: int | None) -> dict[str, Any]:
    """What determines the rows beside the documents."""
    return {
        "tool": lane.tool.name,
        "version": lane.tool.version,
        "identity": dict(lane.tool.selection()),
        "cutting": CUTTING,
        "max_tokens": cut.max_tokens,
        "tokenizer": dict(cut.tokenizer),
        "texts_per_shard": texts_per_shard,
    }


def heuristic_subset(
    lake: Lake,
    lane: Lane,
    partition: str,
    *,
    cut: Cut,
    texts_per_shard: int | None,
    progress: Progress = silent,
) -> StageReport:
    """Chooses texts that hold no call of this tool yet; calls of other tools are refused where lanes meet, in C*.

    Of more than `texts_per_shard` texts of a shard, those with the smallest hashes are taken: a larger number adds
    texts and drops none. Rejected, with reasons: document_not_wanted, text_not_wanted, holds_call, word_too_long (a
    piece that cannot be cut to fit), not_sampled.
    """
    clock = Clock()
    raw = lake.table("ccnet/raw_shards")
    choice = _Choice(lane, cut)
    frames = (choice.texts(batch) for rows in raw.batches(partition) for batch in chunked(rows, BATCH, progress))
    chosen = _sampled(frames, texts_per_shard, choice.rejected)
    made, inputs = settings(lane, cut, texts_per_shard), {"raw_shards": raw.pointer(partition).data_version}
    return Output(lake, STAGE, lane.key, partition, lane.key).publish(chosen, made, inputs, choice.rejected, clock)


class _Choice:
    """The texts one tool wants; counts those it does not."""

    def __init__(self, lane: Lane, cut: Cut) -> None:
        self.rejected: Rejected = Counter()
        self._tool, self._cut = lane.tool, cut

    def texts(self, documents: pl.DataFrame) -> pl.DataFrame:
        """The wanted texts of a batch of documents."""
        rows = [row for values in documents.iter_rows(named=True) for row in self._of(Document(**values))]
        return pl.DataFrame(rows, schema=columns(STAGE), orient="row")

    def _of(self, document: Document) -> Iterator[Row]:
        if self._tool.wants_document(document) is None:
            self._reject(document, "document_not_wanted")
            return
        context = self._tool.context(document)
        for piece in segments(document.text, self._cut.max_tokens, self._cut.count_tokens):
            if isinstance(piece, Unfit):
                self._reject(document, "word_too_long")
            elif wanted := self._wanted(piece, document):
                place = (self._tool.key, document.shard, document.digest, piece.index, piece.offset)
                yield (*place, piece.text, text_digest(piece.text), wanted, context)

    def _wanted(self, piece: Segment, document: Document) -> str | None:
        """Why the tool wants this text; None, after counting the reason, where it does not."""
        if holds_call(piece.text, [self._tool.name]):
            self._reject(document, "holds_call")
            return None
        wanted = self._tool.wants(piece.text, document)
        if wanted is None:
            self._reject(document, "text_not_wanted")
        return wanted

    def _reject(self, document: Document, reason: str) -> None:
        self.rejected[document.shard, reason] += 1


def _sampled(frames: Iterator[pl.DataFrame], limit: int | None, rejected: Rejected) -> Iterator[pl.DataFrame]:
    """The texts in their order; of a shard with more than `limit`, those with the smallest hashes."""
    yield columns(STAGE).to_frame()
    if limit is None:
        yield from frames
        return
    kept = columns(STAGE).to_frame()
    for frame in frames:
        both = pl.concat([kept, frame])
        ranked = both.with_columns(pl.col("text_digest").rank("ordinal").over("shard").alias("rank"))
        kept = ranked.filter(pl.col("rank") <= limit).drop("rank")
        dropped = ranked.filter(pl.col("rank") > limit).with_columns(pl.lit("not_sampled").alias("reason"))
        rejected.update(counted(dropped))
    yield kept
