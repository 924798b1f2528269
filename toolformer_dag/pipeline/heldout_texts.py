"""heldout_texts: keep texts of C out of training, to choose the checkpoint and measure its perplexity."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from toolformer_dag.pipeline.augmented_corpus import iter_corpus_batches
from toolformer_dag.pipeline.document_cuts import DocumentCuts, cutting_settings, open_corpus_cuts
from toolformer_dag.pipeline.merging import HELDOUT, HELDOUT_SHARE, TRAIN, choose_split
from toolformer_dag.texts.segments import Segment, text_digest

NAME = "ccnet/heldout_texts"
FEWEST_TEXTS = 100
"""Below this number of texts a warning says that they choose or measure only roughly."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the documents."""
    return {**cutting_settings(plan), "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Cut the held-out documents of a shard as C*, the training corpus, is cut; return a row per text.

    Rejected: word_too_long (a piece that cannot be cut to fit).
    """
    cuts = open_corpus_cuts(worker)
    cutting_shard = _ShardCutting(shard, cuts)
    documents = removed_documents.documents(worker.plan, shard)  # those that are not removed
    frames = cutting_shard.frames(documents)  # lazy: `rejected` is filled while they are read
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
    """Cuts a shard's held-out documents into texts.

    `rejected` counts words that fit no text, by (shard, reason). It is complete after the last frame of `frames`.
    """

    def __init__(self, shard: str, cuts: DocumentCuts) -> None:
        self.rejected: Rejected = Counter()
        self._shard = shard
        self._cuts = cuts

    def frames(self, documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Yield rows (STAGE.columns) for the texts of the documents that are held out, in their order.

        documents: frames of the shard's documents (digest, place, text, ...), held out or not.
        """
        for frame in documents:
            heldout = frame.filter(_is_heldout(frame["text"]))
            for batch in heldout.iter_slices(raw_shards.DOCUMENTS_PER_PLACE):
                yield pl.DataFrame(self._cut_documents(batch), schema=STAGE.schema, orient="row")

    def _cut_documents(self, documents: pl.DataFrame) -> list[_HeldoutRow]:
        """Cut held-out documents (digest, place, text) into texts; count in `rejected` the words that fit no text."""
        rows = []
        placed_texts = list(documents.select("place", "text").iter_rows())
        cut_documents = self._cuts.texts_of(placed_texts)
        for digest, document in zip(documents["digest"], cut_documents, strict=True):
            self.rejected[self._shard, "word_too_long"] += document.unfit_words
            rows += [self._build_row(digest, text) for text in document.texts]
        return rows

    def _build_row(self, digest: str, text: Segment) -> _HeldoutRow:
        """Return the row of a text of a document."""
        return _HeldoutRow(
            shard=self._shard,
            digest=digest,
            segment=text.index,
            offset=text.offset,
            text=text.text,
            text_digest=text_digest(text.text),
        )


def _is_heldout(texts: pl.Series) -> pl.Series:
    """Return for each document's text whether the document is held out."""
    splits = pl.Series([choose_split(text) for text in texts], dtype=pl.String)
    return splits == HELDOUT


@dataclass(frozen=True, slots=True)
class HeldoutTexts:
    """Texts that are not trained on. No text does both, unless there is only one.

    - `choosing`: the texts on which the best checkpoint is chosen
    - `measuring`: the texts on which its perplexity is measured
    """

    choosing: list[str]
    measuring: list[str]


def heldout_texts(plan: Plan) -> HeldoutTexts:
    """Draw the held-out texts that choose the best checkpoint, and the texts that measure its perplexity.

    In the order of hashes, the first `training.heldout_texts` choose and the last `evaluation.perplexity_texts`
    measure, each at most half.

    Raises MissingPart, DamagedPart.
    """
    texts = _scan_texts(plan)
    drawn = _draw_texts(plan, texts)
    text_of = _read_texts_by_digest(texts, digests=[*drawn.choosing, *drawn.measuring])
    return HeldoutTexts(
        choosing=[text_of[digest] for digest in drawn.choosing],
        measuring=[text_of[digest] for digest in drawn.measuring],
    )


def _read_texts_by_digest(texts: pl.LazyFrame, digests: Sequence[str]) -> dict[str, str]:
    """Read the texts with some hashes: text_digest -> text."""
    is_wanted = pl.col("text_digest").is_in(digests)
    wanted = texts.filter(is_wanted).select("text_digest", "text").collect()
    return dict(wanted.iter_rows())


def _scan_texts(plan: Plan) -> pl.LazyFrame:
    """Scan the held-out texts of all shards. Raises MissingPart if there are none."""
    table = plan.lake.table(NAME)
    if not table.parts():
        raise MissingPart(NAME, WHOLE)
    return table.scan()


class _Drawn(NamedTuple):
    """Held-out texts by their hashes, sorted."""

    untrained: list[str]  # all that stand in no training text
    choosing: list[str]  # the first of them, on which the checkpoint is chosen
    measuring: list[str]  # the last of them, on which it is measured


def _draw_texts(plan: Plan, texts: pl.LazyFrame) -> _Drawn:
    """Draw held-out texts by their hashes: the first choose the best checkpoint, the last measure its perplexity.

    At most half of the texts choose, and none that does also measures, but for a single text.

    texts: a lazy frame with the column `text_digest`.
    """
    untrained = _list_untrained_texts(plan, texts)  # sorted by hash
    half = len(untrained) // 2
    choosing_count = min(plan.settings.training.heldout_texts, max(half, 1))  # a single text chooses too
    measuring_count = min(plan.settings.evaluation.perplexity_texts, len(untrained) - half)
    return _Drawn(
        untrained=untrained,
        choosing=untrained[:choosing_count],
        measuring=untrained[-measuring_count:],
    )


def _list_untrained_texts(plan: Plan, texts: pl.LazyFrame) -> list[str]:
    """Return the distinct hashes of the held-out texts that stand in no training text of C*, sorted."""
    digests = texts.select("text_digest").unique().collect()["text_digest"].sort()
    is_trained = digests.is_in(_collect_training_texts(plan))
    return digests.filter(~is_trained).to_list()


def _collect_training_texts(plan: Plan) -> set[str]:
    """Return the hashes of the texts that C* trains on."""
    digests: set[str] = set()
    for batch in iter_corpus_batches(plan.lake):
        training_rows = batch.filter(pl.col("split") == TRAIN)
        digests.update(text_digest(text) for text in training_rows["text"])
    return digests


def draw_heldout_documents(plan: Plan) -> pl.DataFrame:
    """Draw distinct held-out documents, to measure perplexity on them: (shard, digest, text_digests), sorted.

    text_digests: the hashes of the document's texts, as "0a.. 7f..". None of them is trained on, and none chooses the
        best checkpoint if that can be avoided.

    Raises MissingPart, DamagedPart.
    """
    texts = _scan_texts(plan)
    drawn = _draw_texts(plan, texts)
    documents = _select_distinct_documents(texts)
    untrained_texts = set(drawn.untrained)
    not_choosing = _select_documents_with_texts(documents, untrained_texts - set(drawn.choosing))
    candidates = _select_documents_with_texts(documents, untrained_texts) if not_choosing.is_empty() else not_choosing
    return candidates.tail(plan.settings.evaluation.perplexity_texts)  # the last ones, as `_draw_texts` takes texts


def _select_distinct_documents(texts: pl.LazyFrame) -> pl.DataFrame:
    """Return (shard, digest, text_digests), a row per different held-out document, sorted by `text_digests`.

    Equal documents have the same texts; only the first of them, by shard and digest, is returned.
    """
    hashed = texts.select("shard", "digest", "segment", "text_digest").sort("segment").collect()
    documents = hashed.group_by("shard", "digest").agg(text_digests=pl.col("text_digest").str.join(" "))
    ordered = documents.sort("text_digests", "shard", "digest")
    return ordered.unique("text_digests", keep="first", maintain_order=True)


def _select_documents_with_texts(documents: pl.DataFrame, allowed_texts: set[str]) -> pl.DataFrame:
    """Return the `documents` (text_digests, ...) whose texts are all among the allowed hashes, in the same order."""
    is_allowed = [allowed_texts.issuperset(digests.split()) for digests in documents["text_digests"]]
    return documents.filter(pl.Series(is_allowed, dtype=pl.Boolean))


def read_document_texts(plan: Plan, documents: pl.DataFrame) -> list[str]:
    """Return the texts of whole `documents` (shard, digest), shard by shard, in the order of the corpus.

    Raises MissingPart, DamagedPart.
    """
    texts: list[str] = []
    for (shard,), digests in documents.group_by("shard", maintain_order=True):
        for batch in raw_shards.documents(plan, str(shard)):
            documents_of_batch = batch.join(digests, on="digest", how="semi", maintain_order="left")
            texts += documents_of_batch["text"].to_list()
    return texts


def too_few(text_count: int, purpose: str) -> str | None:
    """Return a warning if fewer than FEWEST_TEXTS held-out texts were drawn, else None.

    purpose: what the texts do, as the message says it: "choose the checkpoint".
    """
    if text_count >= FEWEST_TEXTS:
        return None
    return (
        f"{text_count} held-out texts {purpose}, fewer than {FEWEST_TEXTS}, so that the figure is rough; add shards: "
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
