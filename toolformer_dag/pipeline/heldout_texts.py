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
    RejectionCounts,
    Stage,
    TableOutput,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.lake.table import WHOLE_TABLE_PART, MissingPart
from toolformer_dag.pipeline import raw_shards, removed_documents
from toolformer_dag.pipeline.augmented_corpus import iter_corpus_batches
from toolformer_dag.pipeline.document_cuts import DocumentCuts, collect_cutting_settings, open_corpus_cuts
from toolformer_dag.pipeline.merging import HELDOUT, HELDOUT_SHARE, TRAIN, choose_split
from toolformer_dag.texts.segments import Segment, compute_text_digest

TABLE_NAME = "ccnet/heldout_texts"
MIN_HELDOUT_TEXTS = 100
"""Below this number of texts a warning says that they choose or measure only roughly."""


def settings(plan: Plan, lane: None) -> Mapping[str, Any]:
    """Return the settings that the rows depend on, apart from the documents."""
    return {**collect_cutting_settings(plan), "heldout_share": HELDOUT_SHARE}


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Cut the held-out documents of a shard into texts, in the same way as the training corpus C* is cut.

    Returns:
        A row per text. `rejection_counts` counts words that are too long for any text, with the reason word_too_long.
        It is filled while the frames are read.
    """
    cuts = open_corpus_cuts(worker)
    cutting = _ShardCutting(shard, cuts)

    remaining_documents = removed_documents.iter_kept_documents(worker.plan, shard)  # without the removed ones
    frames = cutting.iter_frames(remaining_documents)  # a generator: it fills `cutting.rejected` while it is read
    return PartRows(frames, rejection_counts=cutting.rejected, store_names=[cuts.store_name])


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

    `rejected` counts words that fit no text, by (shard, reason). It is complete after the last frame of `iter_frames`.
    """

    def __init__(self, shard: str, document_cuts: DocumentCuts) -> None:
        self.rejected: RejectionCounts = Counter()
        self._shard = shard
        self._document_cuts = document_cuts

    def iter_frames(self, documents: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
        """Build the rows for the texts of those documents that are held out, in the order of the documents.

        Args:
            documents: All documents of the shard (digest, place, text, ...), in several frames.

        Yields:
            Frames with the columns of STAGE.
        """
        for frame in documents:
            heldout = frame.filter(_is_heldout(frame["text"]))
            # Batches, so that not all texts of a frame are in memory. Their size does not change the rows.
            for batch in heldout.iter_slices(raw_shards.DOCUMENTS_PER_PLACE):
                yield pl.DataFrame(self._cut_documents(batch), schema=STAGE.schema, orient="row")

    def _cut_documents(self, documents: pl.DataFrame) -> list[_HeldoutRow]:
        """Cut held-out documents into texts, and count in `rejected` the words that fit no text.

        Args:
            documents: The documents, in the columns digest, place and text.
        """
        heldout_rows = []
        placed_texts = list(documents.select("place", "text").iter_rows())
        cut_documents = self._document_cuts.iter_document_texts(placed_texts)

        for digest, cut_document in zip(documents["digest"], cut_documents, strict=True):
            self.rejected[self._shard, "word_too_long"] += cut_document.unfit_word_count
            heldout_rows += [self._build_row(digest, text) for text in cut_document.texts]
        return heldout_rows

    def _build_row(self, digest: str, text: Segment) -> _HeldoutRow:
        """Build the row of the table for one text of a document."""
        return _HeldoutRow(
            shard=self._shard,
            digest=digest,
            segment=text.index,
            offset=text.offset,
            text=text.text,
            text_digest=compute_text_digest(text.text),
        )


def _is_heldout(document_texts: pl.Series) -> pl.Series:
    """Return for each document's text whether the document is held out."""
    splits = pl.Series([choose_split(text) for text in document_texts], dtype=pl.String)
    return splits == HELDOUT


@dataclass(frozen=True, slots=True)
class HeldoutTexts:
    """Texts that are not trained on. No text is in both lists, unless there is only one.

    Attributes:
        choosing_texts: The texts on which the best checkpoint is chosen.
        measuring_texts: The texts on which its perplexity is measured.
    """

    choosing_texts: list[str]
    measuring_texts: list[str]


def draw_heldout_texts(plan: Plan) -> HeldoutTexts:
    """Draw held-out texts: some to choose the best checkpoint, and others to measure its perplexity.

    The texts are sorted by their hashes, without those that are trained on as well. The first `training.heldout_texts`
    choose, and the last `evaluation.perplexity_texts` measure. Neither number exceeds half of the texts (rounded up for
    measuring), unless there is a single text, which does both.

    Raises:
        MissingPart: A table that is read, or a part of it, does not exist yet.
        DamagedPart: A part of such a table cannot be read.
    """
    texts = _scan_heldout_texts(plan)
    drawn = _draw_text_digests(plan, texts)

    text_by_digest = _read_texts_by_digest(texts, digests=[*drawn.choosing_digests, *drawn.measuring_digests])
    return HeldoutTexts(
        choosing_texts=[text_by_digest[digest] for digest in drawn.choosing_digests],
        measuring_texts=[text_by_digest[digest] for digest in drawn.measuring_digests],
    )


def _read_texts_by_digest(texts: pl.LazyFrame, digests: Sequence[str]) -> dict[str, str]:
    """Return the texts with some hashes, by their hash."""
    is_wanted = pl.col("text_digest").is_in(digests)
    wanted_texts = texts.filter(is_wanted).select("text_digest", "text").collect()
    return dict(wanted_texts.iter_rows())


def _scan_heldout_texts(plan: Plan) -> pl.LazyFrame:
    """Return a lazy frame of the held-out texts of all shards.

    Raises:
        MissingPart: No part of the table was made yet.
    """
    heldout_table = plan.lake.get_table(TABLE_NAME)
    if not heldout_table.list_part_names():
        raise MissingPart(TABLE_NAME, WHOLE_TABLE_PART)
    return heldout_table.scan_parts()


class _DrawnDigests(NamedTuple):
    """Held-out texts by their hashes, sorted.

    Attributes:
        untrained_digests: All held-out texts that are not trained on as well.
        choosing_digests: The first of them, on which the checkpoint is chosen.
        measuring_digests: The last of them, on which it is measured.
    """

    untrained_digests: list[str]
    choosing_digests: list[str]
    measuring_digests: list[str]


def _draw_text_digests(plan: Plan, texts: pl.LazyFrame) -> _DrawnDigests:
    """Draw held-out texts by their hashes: some to choose the best checkpoint, others to measure its perplexity.

    At most half of the texts choose. No text does both, unless there is only one.

    Args:
        texts: All held-out texts, with the column `text_digest`. Texts that are trained on as well are not drawn.
    """
    untrained = _list_untrained_digests(plan, texts)  # sorted by hash
    half = len(untrained) // 2

    max_choosing = max(half, 1)  # a single text chooses too
    choosing_count = min(plan.settings.training.heldout_texts, max_choosing)

    max_measuring = len(untrained) - half
    measuring_count = min(plan.settings.evaluation.perplexity_texts, max_measuring)
    first_measuring = len(untrained) - measuring_count

    return _DrawnDigests(
        untrained_digests=untrained,
        choosing_digests=untrained[:choosing_count],
        measuring_digests=untrained[first_measuring:],
    )


def _list_untrained_digests(plan: Plan, texts: pl.LazyFrame) -> list[str]:
    """Return the distinct hashes of the held-out texts that stand in no training text of C*, sorted."""
    digests = texts.select("text_digest").unique().collect()["text_digest"].sort()
    is_trained = digests.is_in(_collect_training_digests(plan))
    return digests.filter(~is_trained).to_list()


def _collect_training_digests(plan: Plan) -> set[str]:
    """Return the hashes of the texts that C* trains on."""
    digests: set[str] = set()
    for batch in iter_corpus_batches(plan.lake):
        training_rows = batch.filter(pl.col("split") == TRAIN)
        digests.update(compute_text_digest(text) for text in training_rows["text"])
    return digests


def draw_heldout_documents(plan: Plan) -> pl.DataFrame:
    """Draw distinct held-out documents, on which perplexity can be measured.

    No text of a drawn document is trained on. Documents with a text that chooses the best checkpoint are only drawn if
    all documents without trained texts have such a text.

    Returns:
        The documents in the columns shard, digest and text_digests, sorted by the last. `text_digests` holds the hashes
        of the document's texts, such as "0a.. 7f..".

    Raises:
        MissingPart: A table that is read, or a part of it, does not exist yet.
        DamagedPart: A part of such a table cannot be read.
    """
    texts = _scan_heldout_texts(plan)
    drawn = _draw_text_digests(plan, texts)
    documents = _select_distinct_documents(texts)

    untrained_texts = set(drawn.untrained_digests)  # the held-out texts that are not trained on
    texts_not_choosing = untrained_texts - set(drawn.choosing_digests)  # without those that choose the checkpoint
    candidates = _select_documents_within_digests(documents, texts_not_choosing)
    if candidates.is_empty():
        candidates = _select_documents_within_digests(documents, untrained_texts)

    # The last ones, as for texts, of which the first choose the checkpoint and the last measure perplexity.
    return candidates.tail(plan.settings.evaluation.perplexity_texts)


def _select_distinct_documents(texts: pl.LazyFrame) -> pl.DataFrame:
    """Group held-out texts by their document, and leave out documents that are equal to another one.

    Documents are equal if they have the same texts. The first of them stays, in the order of shard and digest.

    Returns:
        A row per document with the columns shard, digest and text_digests (the hashes of its texts, such as
        "0a.. 7f.."), sorted by text_digests.
    """
    hashed_texts = texts.select("shard", "digest", "segment", "text_digest").sort("segment").collect()
    # Within a group the rows keep their order, so the hashes are joined in the order of the texts in the document.
    documents = hashed_texts.group_by("shard", "digest").agg(text_digests=pl.col("text_digest").str.join(" "))
    sorted_documents = documents.sort("text_digests", "shard", "digest")
    return sorted_documents.unique("text_digests", keep="first", maintain_order=True)


def _select_documents_within_digests(documents: pl.DataFrame, allowed_digests: set[str]) -> pl.DataFrame:
    """Return the `documents` (text_digests, ...) whose texts are all among the allowed hashes, in the same order."""
    is_allowed = [allowed_digests.issuperset(digests.split()) for digests in documents["text_digests"]]
    return documents.filter(pl.Series(is_allowed, dtype=pl.Boolean))


def read_document_texts(plan: Plan, documents: pl.DataFrame) -> list[str]:
    """Read the whole texts of some documents.

    Args:
        documents: The documents, in the columns shard and digest.

    Returns:
        The texts shard by shard, and in the order of the corpus within each shard.

    Raises:
        MissingPart: A shard of the corpus does not exist.
        DamagedPart: A shard of the corpus cannot be read.
    """
    texts: list[str] = []
    for (shard,), wanted_documents in documents.group_by("shard", maintain_order=True):
        for batch in raw_shards.iter_documents(plan, str(shard)):
            wanted_of_batch = batch.join(wanted_documents, on="digest", how="semi", maintain_order="left")
            texts += wanted_of_batch["text"].to_list()
    return texts


def build_few_texts_warning(text_count: int, purpose: str) -> str | None:
    """Build a warning if too few held-out texts were drawn, that is fewer than MIN_HELDOUT_TEXTS.

    Args:
        text_count: The number of drawn texts.
        purpose: What the texts do, in the words of the message: "choose the checkpoint".

    Returns:
        The warning, or None if there are enough texts.
    """
    if text_count >= MIN_HELDOUT_TEXTS:
        return None
    return (
        f"{text_count} held-out texts {purpose}, fewer than {MIN_HELDOUT_TEXTS}, "
        "so that the figure is rough; add shards: "
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
    key_columns=TEXT_KEY,
    collect_settings=settings,
    reads=removed_documents.DOCUMENT_TABLES,
    inputs=removed_documents.inputs,
    group="ccnet",
    row_maker=ByShard(rows),
    warehouse_form=InWarehouse(hidden_columns=("text",), added_columns={"characters": CHARACTERS}),
)
