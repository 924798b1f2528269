"""Documents are cut into texts once, for all lanes and C*: where they are cut is stored by the hash of the document.

The first column of the key is the document's place (see `raw_shards.documents`), by which rows are sorted: documents
that follow each other are looked up in one or two row groups, however many there are. Of equal documents in several
places each is cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.segments import CUTTING, Segment, TokenCounter, pieces, segments, text_digest

KEY = ("place", "document", "max_tokens")
CUTS = pl.Schema(
    {
        "place": pl.String(),
        "document": pl.String(),
        "max_tokens": pl.Int32(),
        "offsets": pl.List(pl.Int64()),
        "lengths": pl.List(pl.Int64()),
        "unfit_tokens": pl.List(pl.Int32()),
    }
)
"""A row per document. The lists have an entry per piece, whose fields `Cut` describes."""


def cutting(plan: Plan) -> Mapping[str, Any]:
    """Return the settings on which the cutting of documents depends, apart from the length of a lane's prompt."""
    return {"cutting": CUTTING, **determining(plan.settings.corpus, "segment_tokens"), "model": tokenizing(plan)}


def tokenizing(plan: Plan) -> dict[str, object]:
    """Return what the tokens of a text depend on: the model, without its first token and the markers of calls."""
    return {name: value for name, value in plan.model.items() if name not in ("markers", "bos")}


class Cut(NamedTuple):
    """A piece of a document: a text, or a word that fits no text."""

    offset: int  # the character of the document at which it begins
    length: int  # in characters
    unfit_tokens: int | None  # the tokens of a word that fits no text; None for a text

    @property
    def is_text(self) -> bool:
        """Whether the piece is a text."""
        return self.unfit_tokens is None


class DocumentTexts(NamedTuple):
    """The texts that a document was cut into, and how many of its words fit no text."""

    texts: list[Segment]
    unfit_words: int


class _DocumentKey(NamedTuple):
    """What the cuts of a document are stored under, beside `max_tokens`."""

    place: str  # see `raw_shards.documents`
    document: str  # the hash of its text


class DocumentCuts:
    """Cuts documents into texts of at most `max_tokens` tokens, and stores the cuts.

    Lanes (tools with their settings) whose texts may be equally long share the stored cuts. `name` is the name of the
    row store, which the records of tables mention whose rows come from it.
    """

    def __init__(self, worker: Worker, max_tokens: int, count: TokenCounter) -> None:
        identity = {"cutting": CUTTING, "model": tokenizing(worker.plan), "key": KEY}
        self._store = worker.rows("ccnet/cuts", identity, KEY, CUTS)
        self._max_tokens = max_tokens
        self._count = count
        self.name = self._store.name

    def texts_of(self, documents: Sequence[tuple[str, str]]) -> Iterator[DocumentTexts]:
        """Yield for each document the texts that it is cut into, in order.

        documents: (place, text) of each; the place is what `raw_shards.documents` gives. Hand over raw_shards.BATCH at
        a time: their cuts are stored side by side and looked up together.

        A document that was cut before is not tokenized again. New cuts are stored before the first document is yielded.
        Raises WriteError.
        """
        keys = [_DocumentKey(place, text_digest(text)) for place, text in documents]
        cuts_of = self._stored(keys)  # the pieces of each document: texts, and words that fit no text
        new_rows = []
        for key, (_, text) in zip(keys, documents, strict=True):
            if key not in cuts_of:
                cuts_of[key] = self._cut(text)
                new_rows.append(self._row(key, cuts_of[key]))
        self._store.append(pl.DataFrame(new_rows, schema=CUTS, orient="row"))
        for key, (_, text) in zip(keys, documents, strict=True):
            cuts = cuts_of[key]
            text_spans = [(cut.offset, cut.length) for cut in cuts if cut.is_text]
            yield DocumentTexts(segments(text, text_spans), unfit_words=len(cuts) - len(text_spans))

    def _stored(self, keys: Sequence[_DocumentKey]) -> dict[_DocumentKey, list[Cut]]:
        """Look up the cuts of documents; those that were not cut before are missing in the result."""
        max_tokens = pl.lit(self._max_tokens, pl.Int32()).alias("max_tokens")
        key_schema = {name: CUTS[name] for name in _DocumentKey._fields}
        stored = self._store.stored(pl.DataFrame(keys, schema=key_schema, orient="row").with_columns(max_tokens))
        cuts_of = {}
        for row in stored.iter_rows(named=True):
            columns = zip(row["offsets"], row["lengths"], row["unfit_tokens"], strict=True)
            cuts_of[_DocumentKey(row["place"], row["document"])] = [Cut(*values) for values in columns]
        return cuts_of

    def _row(self, key: _DocumentKey, cuts: Sequence[Cut]) -> tuple[object, ...]:
        """Return a document's cuts as a row of CUTS, with a list per field of `Cut`."""
        offsets = [cut.offset for cut in cuts]
        lengths = [cut.length for cut in cuts]
        unfit_tokens = [cut.unfit_tokens for cut in cuts]
        return (key.place, key.document, self._max_tokens, offsets, lengths, unfit_tokens)

    def _cut(self, text: str) -> list[Cut]:
        """Cut a document into pieces that fit `max_tokens`; a single word that is longer is marked as unfit."""
        cuts = []
        for piece in pieces(text, self._max_tokens, self._count):
            is_unfit = piece.tokens > self._max_tokens
            cuts.append(
                Cut(
                    offset=piece.start,
                    length=piece.end - piece.start,
                    unfit_tokens=piece.tokens if is_unfit else None,
                )
            )
        return cuts
