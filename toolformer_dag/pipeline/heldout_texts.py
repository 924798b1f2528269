"""heldout_texts: texts of C on which nothing is trained; they choose the checkpoint and measure its perplexity."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

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
    """Return what determines the rows beside the documents; how many are drawn is no part of it."""
    return {**cutting(plan), "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Cut the held-out documents of a shard as C* is cut, whether a tool wants them or not.

    Rejected: word_too_long (a piece that cannot be cut to fit).
    """
    plan, rejected, schema = worker.plan, Rejected(), output.stage.schema
    cuts = DocumentCuts(worker, plan.settings.corpus.segment_tokens, worker.encoding().lengths)

    def frames() -> Iterator[pl.DataFrame]:
        for documents in removed_documents.documents(plan, shard):
            splits = pl.Series(map(split_of, documents["text"]), dtype=pl.String)
            held = documents.filter(splits == HELDOUT)
            for batch in held.iter_slices(raw_shards.BATCH):
                pieces = cuts.of(list(batch.select("place", "text").iter_rows()))
                texts = []
                for digest, (fit, unfit) in zip(batch["digest"], pieces, strict=True):
                    rejected[shard, "word_too_long"] += unfit
                    texts += [(shard, digest, one.index, one.offset, one.text, text_digest(one.text)) for one in fit]
                yield pl.DataFrame(texts, schema=schema, orient="row")

    return PartRows(frames(), rejected, [cuts.name])


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
    texts = _texts(plan)
    order, choosing = _drawn(plan, texts)
    measuring = order[-min(plan.settings.evaluation.perplexity_texts, len(order) - len(order) // 2) :]
    wanted = texts.filter(pl.col("text_digest").is_in([*choosing, *measuring])).select("text_digest", "text")
    by_digest = dict(wanted.collect().iter_rows())
    return HeldoutTexts([by_digest[one] for one in choosing], [by_digest[one] for one in measuring])


def _texts(plan: Plan) -> pl.LazyFrame:
    table = plan.lake.table(NAME)
    if not table.parts():
        raise MissingPart(NAME, WHOLE)
    return table.scan()


def _drawn(plan: Plan, texts: pl.LazyFrame) -> tuple[list[str], list[str]]:
    """Return the hashes of the texts that are not trained on, in order, and those of them that choose."""
    corpus = corpus_batches(plan.lake)
    trained = {text_digest(text) for batch in corpus for text in batch.filter(pl.col("split") == TRAIN)["text"]}
    digests = texts.select("text_digest").unique().collect()["text_digest"].sort()
    order = digests.filter(~digests.is_in(trained)).to_list()
    return order, order[: min(plan.settings.training.heldout_texts, max(len(order) // 2, 1))]  # one alone does both


def heldout_documents(plan: Plan) -> pl.DataFrame:
    """Draw `evaluation.perplexity_texts` distinct held-out documents: (shard, digest, text_digests).

    None of their texts stands in a training text of C*. None chooses the checkpoint either, unless every such document
    has one that does. Memory: hashes. Raises MissingPart, DamagedPart.
    """
    texts = _texts(plan)
    order, choosing = _drawn(plan, texts)
    hashed = texts.select("shard", "digest", "segment", "text_digest").sort("segment").collect()
    grouped = hashed.group_by("shard", "digest").agg(text_digests=pl.col("text_digest").str.join(" "))
    distinct = grouped.sort("text_digests", "shard", "digest").unique("text_digests", keep="first", maintain_order=True)

    def of_texts(allowed: set[str]) -> pl.DataFrame:
        whole = [allowed.issuperset(digests.split()) for digests in distinct["text_digests"]]
        return distinct.filter(pl.Series(whole, dtype=pl.Boolean))

    left = of_texts({*order} - {*choosing})
    return (of_texts({*order}) if left.is_empty() else left).tail(plan.settings.evaluation.perplexity_texts)


def document_texts(plan: Plan, documents: pl.DataFrame) -> list[str]:
    """Read the whole texts of `documents` (shard, digest). Raises MissingPart, DamagedPart."""
    return [
        text
        for (shard,), named in documents.group_by("shard", maintain_order=True)
        for batch in raw_shards.documents(plan, str(shard))
        for text in batch.join(named, on="digest", how="semi", maintain_order="left")["text"]
    ]


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
    reads=removed_documents.READS,
    inputs=removed_documents.inputs,
    group="ccnet",
    make=ByShard(rows),
    in_warehouse=InWarehouse(hidden=("text",), added={"characters": CHARACTERS}),
)
