"""heldout_texts: texts of C on which nothing is trained; they choose the checkpoint and measure its perplexity."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolformer_dag.lake.table import WHOLE, MissingPart
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.augmented_corpus import corpus_batches
from toolformer_dag.pipeline.document_cuts import Cut, DocumentCuts, cutting
from toolformer_dag.pipeline.merging import HELDOUT, HELDOUT_SHARE, TRAIN, split_of
from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.stage import (
    DIGEST,
    SEGMENT,
    SHARD,
    TEXT_KEY,
    Column,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
)
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.segments import Segment, text_digest

NAME = "ccnet/heldout_texts"
MINIMUM = 100
"""Fewer texts than this choose or measure only roughly, and are warned of."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return what determines the rows beside the documents; how many are drawn is no part of it."""
    return {**cutting(plan), "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Cut the held-out documents of a shard as C* is cut, whether a tool wants them or not.

    Rejected: word_too_long (a piece that cannot be cut to fit).
    """
    rejected: Rejected = Rejected()
    cuts = DocumentCuts(worker, Cut(worker.plan.settings.corpus.segment_tokens, worker.tokens().count))
    return PartRows(_frames(worker.plan, shard, cuts, rejected, output.stage.schema), rejected, [cuts.name])


def _frames(
    plan: Plan, shard: str, cuts: DocumentCuts, rejected: Rejected, schema: pl.Schema
) -> Iterator[pl.DataFrame]:
    yield schema.to_frame()
    for documents in removed_documents.documents(plan, shard):
        held = [row for row in documents.select("digest", "place", "text").iter_rows() if split_of(row[2]) == HELDOUT]
        for at in range(0, len(held), raw_shards.BATCH):
            some, found = held[at : at + raw_shards.BATCH], []
            for (digest, *_), pieces in zip(some, cuts.of([(place, text) for _, place, text in some]), strict=True):
                for piece in pieces:
                    if isinstance(piece, Segment):
                        found.append((shard, digest, piece.index, piece.offset, piece.text, text_digest(piece.text)))
                    else:
                        rejected[shard, "word_too_long"] += 1
            yield pl.DataFrame(found, schema=schema, orient="row")


@dataclass(frozen=True, slots=True)
class HeldoutTexts:
    """`choosing`: the texts on which the best checkpoint is chosen; `measuring`: those on which it is measured.

    No text is in both, unless there is only one, and none is in C*'s training texts.
    """

    choosing: list[str]
    measuring: list[str]


def heldout_texts(plan: Plan) -> HeldoutTexts:
    """Draw `training.heldout_texts` and `evaluation.perplexity_texts` distinct texts in the order of their hashes.

    The first ones choose, the last ones measure, so that neither number changes the other texts; each takes at most
    half. Names, sizes and order of shards change nothing. Texts that also stand in C*'s training texts, in another
    document, are left out. Memory: hashes, a file of C* at a time, and the texts that are drawn. Raises MissingPart,
    DamagedPart.
    """
    table = plan.lake.table(NAME)
    if not table.parts():
        raise MissingPart(NAME, WHOLE)
    corpus = corpus_batches(plan.lake)
    trained = {text_digest(text) for batch in corpus for text in batch.filter(pl.col("split") == TRAIN)["text"]}
    texts = table.scan()
    found = texts.select("text_digest").unique().collect()["text_digest"].sort()
    order = found.filter(~found.is_in(trained)).to_list()
    choosing, measuring = _drawn(order, plan.settings.training.heldout_texts, plan.settings.evaluation.perplexity_texts)
    wanted = texts.filter(pl.col("text_digest").is_in([*choosing, *measuring])).select("text_digest", "text")
    by_digest = dict(wanted.collect().iter_rows())
    return HeldoutTexts([by_digest[one] for one in choosing], [by_digest[one] for one in measuring])


def _drawn(order: list[str], choosing: int, measuring: int) -> tuple[list[str], list[str]]:
    """Return the first `choosing` and the last `measuring`, at most half each; one alone is both."""
    if len(order) < 2:
        return order, order
    half = len(order) // 2
    return order[: min(choosing, half)], order[-min(measuring, len(order) - half) :]


def too_few(texts: int, purpose: str) -> str | None:
    """Return a warning where fewer than MINIMUM texts were drawn; None where there are enough."""
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
    reads=(raw_shards.NAME,),
    plan_reads=removed_documents.reads,
    inputs=removed_documents.inputs,
    group="ccnet",
    select="SELECT * EXCLUDE (text), length(text) AS characters FROM rows",
    added_columns={"characters": 'length of the text, which is substr(documents.text, "offset" + 1, characters)'},
    shard_rows=rows,
)
