"""Cut each document into texts once, for all tools and C*, and store where it was cut.

Cuts are stored by the document's place (see `raw_shards.documents`) and the hash of its text. Rows are sorted by place,
so that a lookup of neighbouring documents reads one or two row groups. Equal documents in several places are cut in
each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.settings.setting_types import determining
from toolformer_dag.texts.segments import CUTTING, Segment, TokenCounter, pieces, segments, text_digest

CUTS_KEY = ("place", "document", "max_tokens")
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


def cutting_settings(plan: Plan) -> Mapping[str, Any]:
    """Return the settings that determine where documents are cut, apart from the length of a tool's prompt."""
    return {
        "cutting": CUTTING,
        **determining(plan.settings.corpus, "segment_tokens"),
        "model": tokenizer_identity(plan),
    }


def tokenizer_identity(plan: Plan) -> dict[str, object]:
    """Return the model's properties that determine the tokens of a text: all but its first token and call markers."""
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
    """The key under which the cuts of a document are stored, together with `max_tokens`."""

    place: str  # see `raw_shards.documents`
    document: str  # the hash of its text


class DocumentCuts:
    """Cuts documents into texts of at most `max_tokens` tokens, and stores the cuts.

    Tools whose texts may be equally long share the stored cuts.

    - `name`: the name of the row store, which goes into the records of tables whose rows come from it
    """

    def __init__(self, worker: Worker, max_tokens: int, count: TokenCounter) -> None:
        identity = {"cutting": CUTTING, "model": tokenizer_identity(worker.plan), "key": CUTS_KEY}
        self._store = worker.rows("ccnet/cuts", identity, CUTS_KEY, CUTS)
        self._max_tokens = max_tokens
        self._count = count
        self.name = self._store.name

    def texts_of(self, documents: Sequence[tuple[str, str]]) -> Iterator[DocumentTexts]:
        """Yield the texts that each document is cut into, in the order of the documents.

        Documents that were never cut are cut, and their cuts are stored, before the first document is yielded.

        Args:
            documents: The place and the text of each document. A place names up to raw_shards.DOCUMENTS_PER_PLACE
                neighbouring documents of the corpus, whose cuts are stored together. It is fastest to pass all
                of these at once.

        Raises:
            WriteError: The cuts cannot be stored.
        """
        keyed_texts = [(_DocumentKey(place, text_digest(text)), text) for place, text in documents]
        cuts_by_key = self._read_or_make_cuts(dict(keyed_texts))

        for key, text in keyed_texts:
            yield _build_document_texts(text, cuts_by_key[key])

    def _read_or_make_cuts(self, text_by_key: Mapping[_DocumentKey, str]) -> dict[_DocumentKey, list[Cut]]:
        """Look up the cuts of documents. Documents that were never cut are cut now, and their cuts are stored."""
        stored_cuts = self._read_stored_cuts(list(text_by_key))
        new_texts = {key: text for key, text in text_by_key.items() if key not in stored_cuts}
        return stored_cuts | self._cut_and_store(new_texts)

    def _read_stored_cuts(self, keys: Sequence[_DocumentKey]) -> dict[_DocumentKey, list[Cut]]:
        """Read the stored cuts of documents. The result has no entry for documents that were never cut."""
        stored_rows = self._store.stored(self._build_store_keys(keys))

        cuts_by_key = {}
        for row in stored_rows.iter_rows(named=True):
            key = _DocumentKey(row["place"], row["document"])
            cuts_by_key[key] = _build_cuts(row)
        return cuts_by_key

    def _build_store_keys(self, keys: Sequence[_DocumentKey]) -> pl.DataFrame:
        """Return the keys of documents as the row store needs them, with `max_tokens`."""
        schema = {name: CUTS[name] for name in _DocumentKey._fields}
        frame = pl.DataFrame(keys, schema=schema, orient="row")
        return frame.with_columns(max_tokens=pl.lit(self._max_tokens, pl.Int32()))

    def _cut_and_store(self, text_by_key: Mapping[_DocumentKey, str]) -> dict[_DocumentKey, list[Cut]]:
        """Cut documents, store the cuts and return them."""
        cuts_by_key = {key: self._cut_document(text) for key, text in text_by_key.items()}
        new_rows = [self._build_row(key, cuts) for key, cuts in cuts_by_key.items()]
        self._store.append(pl.DataFrame(new_rows, schema=CUTS, orient="row"))
        return cuts_by_key

    def _build_row(self, key: _DocumentKey, cuts: Sequence[Cut]) -> tuple[object, ...]:
        """Return a document's cuts as a row of CUTS, with a list per field of `Cut`."""
        offsets = [cut.offset for cut in cuts]
        lengths = [cut.length for cut in cuts]
        unfit_tokens = [cut.unfit_tokens for cut in cuts]
        return (key.place, key.document, self._max_tokens, offsets, lengths, unfit_tokens)

    def _cut_document(self, text: str) -> list[Cut]:
        """Cut a document into pieces of at most `max_tokens` tokens.

        A single word with more tokens becomes a piece of its own, which is marked as unfit.
        """
        cuts = []
        for piece in pieces(text, self._max_tokens, self._count):
            is_too_long = piece.tokens > self._max_tokens
            unfit_tokens = piece.tokens if is_too_long else None
            length = piece.end - piece.start
            cuts.append(Cut(offset=piece.start, length=length, unfit_tokens=unfit_tokens))
        return cuts


def open_corpus_cuts(worker: Worker) -> DocumentCuts:
    """Open the cuts of documents for C*, whose texts have at most `corpus.segment_tokens` tokens."""
    max_tokens = worker.plan.settings.corpus.segment_tokens
    return DocumentCuts(worker, max_tokens, worker.encoding().lengths)


def _build_cuts(row: Mapping[str, Any]) -> list[Cut]:
    """Return the cuts of a document from its stored row, which has a list per field of `Cut`."""
    fields = zip(row["offsets"], row["lengths"], row["unfit_tokens"], strict=True)
    return [Cut(*values) for values in fields]


def _build_document_texts(text: str, cuts: Sequence[Cut]) -> DocumentTexts:
    """Build the texts of a document from its cuts, and count the words that fit no text."""
    spans_of_texts = [(cut.offset, cut.length) for cut in cuts if cut.is_text]
    unfit_words = len(cuts) - len(spans_of_texts)
    return DocumentTexts(segments(text, spans_of_texts), unfit_words=unfit_words)
