"""heldout_texts: texts of C on which nothing is trained; they choose the checkpoint and measure its perplexity."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.stage import (
    CHARACTERS,
    DIGEST,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    ByShard,
    Column,
    InWarehouse,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE, MissingPart
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.document_cuts import DocumentCuts, cutting
from toolformer_dag.pipeline.merging import HELDOUT, HELDOUT_SHARE, TRAIN, split_of
from toolformer_dag.texts.segments import text_digest

NAME = "ccnet/heldout_texts"
MINIMUM = 100
"""Fewer texts than this choose or measure only roughly, and are warned of."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the documents; not how many texts are drawn later."""
    return {**cutting(plan), "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Cut the held-out documents of a shard as C* is cut, whether a tool wants them or not.

    Rejected: word_too_long (a piece that cannot be cut to fit).
    """
    cuts = DocumentCuts(worker, worker.plan.settings.corpus.segment_tokens, worker.encoding().lengths)
    cutting_shard = _ShardCutting(shard, cuts)
    documents = removed_documents.documents(worker.plan, shard)
    frames = cutting_shard.frames(documents)
    return PartRows(frames, rejected=cutting_shard.rejected, stores=[cuts.name])


class _HeldoutRow(NamedTuple):
    """A row of the table; STAGE describes the columns."""

    shard: str
    digest: str
    segment: int
    offset: int
    text: str
    text_digest: str


class _ShardCutting:
    """The cutting of a shard's held-out documents into texts.

    `rejected` counts words that fit no text, by (shard, reason). It is empty at first, grows while `frames` is read,
    and is complete after its last frame.
    """

    def __init__(self, shard: str, cuts: DocumentCuts) -> None:
        self.rejected: Rejected = Counter()
        self._shard = shard
        self._cuts = cuts

    def frames(self, documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Yield rows (STAGE.columns) for the texts of those documents that are held out, in their order.

        documents: frames of the shard's documents (digest, place, text, ...); those in the split TRAIN are skipped.
        """
        for frame in documents:
            splits = pl.Series([split_of(text) for text in frame["text"]], dtype=pl.String)
            heldout = frame.filter(splits == HELDOUT)
            for batch in heldout.iter_slices(raw_shards.BATCH):
                yield pl.DataFrame(self._rows(batch), schema=STAGE.schema, orient="row")

    def _rows(self, documents: pl.DataFrame) -> list[_HeldoutRow]:
        """Cut held-out documents (digest, place, text) into texts; count in `rejected` the words that fit no text."""
        rows = []
        cut_documents = self._cuts.texts_of(list(documents.select("place", "text").iter_rows()))
        for digest, document in zip(documents["digest"], cut_documents, strict=True):
            self.rejected[self._shard, "word_too_long"] += document.unfit_words
            for segment in document.texts:
                rows.append(
                    _HeldoutRow(
                        shard=self._shard,
                        digest=digest,
                        segment=segment.index,
                        offset=segment.offset,
                        text=segment.text,
                        text_digest=text_digest(segment.text),
                    )
                )
        return rows


@dataclass(frozen=True, slots=True)
class HeldoutTexts:
    """`choosing`: the texts on which the best checkpoint is chosen; `measuring`: those on which it is measured.

    No text is in both, unless there is only one, and none is in C*'s training texts.
    """

    choosing: list[str]
    measuring: list[str]


def heldout_texts(plan: Plan) -> HeldoutTexts:
    """Draw the held-out texts that choose the best checkpoint, and those on which its perplexity is measured.

    The distinct held-out texts are sorted by their hashes. The first `training.heldout_texts` of them choose, the last
    `evaluation.perplexity_texts` measure. Each are at most half of the texts, so that neither setting changes the other
    texts. Names, sizes and order of shards change nothing. Texts that C* (the training corpus with calls) also trains
    on, in another document, are left out.

    Memory: hashes, a file of C* at a time, and the texts that are drawn. Raises MissingPart, DamagedPart.
    """
    texts = _texts(plan)
    drawn = _drawn(plan, texts)
    size_of_second_half = len(drawn.untrained) - len(drawn.untrained) // 2
    measuring_count = min(plan.settings.evaluation.perplexity_texts, size_of_second_half)
    measuring = drawn.untrained[-measuring_count:]
    is_needed = pl.col("text_digest").is_in([*drawn.choosing, *measuring])
    text_of = dict(texts.filter(is_needed).select("text_digest", "text").collect().iter_rows())
    return HeldoutTexts(
        choosing=[text_of[digest] for digest in drawn.choosing],
        measuring=[text_of[digest] for digest in measuring],
    )


def _texts(plan: Plan) -> pl.LazyFrame:
    """Scan the held-out texts of all shards. Raises MissingPart where there are none."""
    table = plan.lake.table(NAME)
    if not table.parts():
        raise MissingPart(NAME, WHOLE)
    return table.scan()


class _Drawn(NamedTuple):
    """Held-out texts by their hashes, in the order of these."""

    untrained: list[str]  # all that stand in no training text
    choosing: list[str]  # the first of them, on which the checkpoint is chosen


def _drawn(plan: Plan, texts: pl.LazyFrame) -> _Drawn:
    """Return the hashes of the held-out `texts` that may be used, and of the texts that choose the checkpoint.

    texts: a lazy frame with the column `text_digest`. A text that C* trains on in another document may not be used. At
    most half of the usable texts choose the checkpoint, but at least one.
    """
    training_texts: set[str] = set()  # hashes
    for batch in corpus_batches(plan.lake):
        training_texts.update(text_digest(text) for text in batch.filter(pl.col("split") == TRAIN)["text"])
    digests = texts.select("text_digest").unique().collect()["text_digest"].sort()
    untrained = digests.filter(~digests.is_in(training_texts)).to_list()
    size_of_first_half = max(len(untrained) // 2, 1)  # where there is a single text, it chooses and measures
    choosing_count = min(plan.settings.training.heldout_texts, size_of_first_half)
    return _Drawn(untrained, choosing=untrained[:choosing_count])


def heldout_documents(plan: Plan) -> pl.DataFrame:
    """Draw `evaluation.perplexity_texts` distinct held-out documents, to measure perplexity on whole documents.

    Returns (shard, digest, text_digests), a row per document, in the order of `text_digests`: the hashes of the texts
    that the document was cut into, separated by spaces, as "0a.. 7f..". The last documents of that order are drawn.

    No text of a drawn document is a training text of C* (the training corpus with calls), and none chooses the best
    checkpoint; where no document is free of the latter, texts that choose are allowed.

    Memory: the hashes of all held-out texts. Raises MissingPart, DamagedPart.
    """
    texts = _texts(plan)
    drawn = _drawn(plan, texts)
    documents = _distinct_documents(texts)
    usable = set(drawn.untrained)  # texts on which C* is not trained
    free = _with_texts_in(documents, usable - set(drawn.choosing))
    if free.is_empty():
        free = _with_texts_in(documents, usable)
    return free.tail(plan.settings.evaluation.perplexity_texts)


def _distinct_documents(texts: pl.LazyFrame) -> pl.DataFrame:
    """Return (shard, digest, text_digests), a row per different held-out document, sorted by `text_digests`.

    Equal documents have the same texts; the first of them by shard and digest stands for all.
    """
    hashed = texts.select("shard", "digest", "segment", "text_digest").sort("segment").collect()
    documents = hashed.group_by("shard", "digest").agg(text_digests=pl.col("text_digest").str.join(" "))
    ordered = documents.sort("text_digests", "shard", "digest")
    return ordered.unique("text_digests", keep="first", maintain_order=True)


def _with_texts_in(documents: pl.DataFrame, allowed_texts: set[str]) -> pl.DataFrame:
    """Return the `documents` (text_digests, ...) whose texts are all among the allowed hashes, in the same order."""
    is_allowed = [allowed_texts.issuperset(digests.split()) for digests in documents["text_digests"]]
    return documents.filter(pl.Series(is_allowed, dtype=pl.Boolean))


def document_texts(plan: Plan, documents: pl.DataFrame) -> list[str]:
    """Return the characters of whole `documents` (shard, digest), shard by shard, in the order of the corpus.

    Raises MissingPart, DamagedPart where the table of documents was not published or is damaged.
    """
    texts: list[str] = []
    for (shard,), digests in documents.group_by("shard", maintain_order=True):
        for batch in raw_shards.documents(plan, str(shard)):
            drawn = batch.join(digests, on="digest", how="semi", maintain_order="left")
            texts += drawn["text"].to_list()
    return texts


def too_few(texts: int, purpose: str) -> str | None:
    """Return a warning where fewer than MINIMUM held-out texts were drawn; None where there are enough.

    texts: how many were drawn. purpose: what they do, as it stands in the message: "choose the checkpoint".
    """
    if texts >= MINIMUM:
        return None
    return (
        f"{texts} held-out texts {purpose}, fewer than {MINIMUM}, so that the figure is rough; add shards: "
        f"{HELDOUT_SHARE:.0%} of the documents are held out, and at most half of their texts choose the checkpoint"
    )


STAGE = Stage(
    name="heldout_texts",
    description="Texts of C that are never trained on: a few choose the checkpoint, others measure perplexity.",
    columns={
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "offset": Column(pl.Int64(), "character of the document at which the text begins"),
        "text": Column(pl.String(), "a text of C, cut as C* is"),
        "text_digest": Column(pl.String(), "hash of the text, in whose order texts are drawn"),
    },
    key=TEXT_KEY,
    settings=settings,
    reads=removed_documents.READS,
    inputs=removed_documents.inputs,
    group="ccnet",
    make=ByShard(rows),
    in_warehouse=InWarehouse(hidden=("text",), added={"characters": CHARACTERS}),
)
