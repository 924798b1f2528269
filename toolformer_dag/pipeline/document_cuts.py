"""Cut each document into texts once, for all tools and C*, and store where it was cut.

Cuts are stored by the document's place (see `raw_shards.iter_documents`) and the hash of its text. Rows are sorted by
place, so that a lookup of neighboring documents reads one or two row groups. Equal documents in several places are cut
in each.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.settings.setting_types import select_determining_settings
from toolformer_dag.texts.segments import (
    CUTTING_VERSION,
    Segment,
    TokenCounter,
    build_segments,
    compute_text_digest,
    iter_pieces,
)

CUT_KEY_COLUMNS = ("place", "document", "max_tokens")
CUT_SCHEMA = pl.Schema(
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


def collect_cutting_settings(plan: Plan) -> Mapping[str, Any]:
    """Return the settings that determine where documents are cut, apart from the length of a tool's prompt."""
    return {
        "cutting": CUTTING_VERSION,
        **select_determining_settings(plan.settings.corpus, "segment_tokens"),
        "model": collect_tokenizer_identity(plan),
    }


def collect_tokenizer_identity(plan: Plan) -> dict[str, object]:
    """Return the model's properties that determine the tokens of a text: all but its first token and call markers."""
    return {name: value for name, value in plan.model_identity.items() if name not in ("markers", "bos")}


class Cut(NamedTuple):
    """A piece of a document: a text, or a word that fits no text.

    Attributes:
        offset: The character of the document at which the piece begins.
        length: The length of the piece in characters.
        unfit_token_count: The tokens of a word that fits no text. None for a text.
    """

    offset: int
    length: int
    unfit_token_count: int | None

    @property
    def is_text(self) -> bool:
        """Whether the piece is a text."""
        return self.unfit_token_count is None


class DocumentTexts(NamedTuple):
    """The texts that a document was cut into, and how many of its words fit no text."""

    texts: list[Segment]
    unfit_word_count: int


class _DocumentKey(NamedTuple):
    """The key under which the cuts of a document are stored, together with `max_tokens`.

    Attributes:
        place: The name of a group of neighboring documents (see `raw_shards.iter_documents`).
        document: The hash of the document's text.
    """

    place: str
    document: str


class DocumentCuts:
    """Cuts documents into texts of at most `max_tokens` tokens, and stores the cuts.

    Tools whose texts may be equally long share the stored cuts.

    Attributes:
        store_name: The name of the row store, which goes into the records of tables whose rows come from it.
    """

    def __init__(self, worker: Worker, max_tokens: int, count_tokens: TokenCounter) -> None:
        # If one of these changes, documents are cut anew, into another store.
        identity = {
            "cutting": CUTTING_VERSION,
            "model": collect_tokenizer_identity(worker.plan),
            "key": CUT_KEY_COLUMNS,
        }
        self._cut_store = worker.open_row_store("ccnet/cuts", identity, CUT_KEY_COLUMNS, CUT_SCHEMA)
        self._max_tokens = max_tokens
        self._count_tokens = count_tokens
        self.store_name = self._cut_store.name

    def iter_document_texts(self, placed_texts: Sequence[tuple[str, str]]) -> Iterator[DocumentTexts]:
        """Yield the texts that each document is cut into, in the order of the documents.

        Documents that were never cut are cut, and their cuts are stored, before the first document is yielded.

        Args:
            placed_texts: The place and the text of each document. A place names up to raw_shards.DOCUMENTS_PER_PLACE
                neighboring documents of the corpus, whose cuts are stored together. It is fastest to pass all
                of these at once.

        Raises:
            WriteError: The cuts cannot be stored.
        """
        keyed_texts = [(_DocumentKey(place, compute_text_digest(text)), text) for place, text in placed_texts]
        cuts_by_key = self._read_or_make_cuts(dict(keyed_texts))

        for key, text in keyed_texts:
            yield _build_document_texts(text, cuts_by_key[key])

    def _read_or_make_cuts(self, text_by_key: Mapping[_DocumentKey, str]) -> dict[_DocumentKey, list[Cut]]:
        """Look up the cuts of documents. Documents that were never cut are cut now, and their cuts are stored."""
        stored_cuts = self._read_stored_cuts(list(text_by_key))
        new_texts = {key: text for key, text in text_by_key.items() if key not in stored_cuts}
        return stored_cuts | self._cut_and_store(new_texts)

    def _read_stored_cuts(self, document_keys: Sequence[_DocumentKey]) -> dict[_DocumentKey, list[Cut]]:
        """Read the stored cuts of documents. The result has no entry for documents that were never cut."""
        stored_rows = self._cut_store.read_stored_rows(self._build_store_keys(document_keys))

        cuts_by_key = {}
        for row in stored_rows.iter_rows(named=True):
            key = _DocumentKey(row["place"], row["document"])
            cuts_by_key[key] = _build_cuts(row)
        return cuts_by_key

    def _build_store_keys(self, document_keys: Sequence[_DocumentKey]) -> pl.DataFrame:
        """Return the keys of documents as the row store needs them, with `max_tokens`."""
        key_schema = {name: CUT_SCHEMA[name] for name in _DocumentKey._fields}
        key_rows = pl.DataFrame(document_keys, schema=key_schema, orient="row")
        return key_rows.with_columns(max_tokens=pl.lit(self._max_tokens, pl.Int32()))

    def _cut_and_store(self, text_by_key: Mapping[_DocumentKey, str]) -> dict[_DocumentKey, list[Cut]]:
        """Cut documents, store the cuts and return them."""
        cuts_by_key = {key: self._cut_document(text) for key, text in text_by_key.items()}
        new_rows = [self._build_cut_row(key, cuts) for key, cuts in cuts_by_key.items()]
        self._cut_store.append_rows(pl.DataFrame(new_rows, schema=CUT_SCHEMA, orient="row"))
        return cuts_by_key

    def _build_cut_row(self, document_key: _DocumentKey, cuts: Sequence[Cut]) -> tuple[object, ...]:
        """Return a document's cuts as a row of CUT_SCHEMA, with a list per field of `Cut`."""
        offsets = [cut.offset for cut in cuts]
        lengths = [cut.length for cut in cuts]
        unfit_tokens = [cut.unfit_token_count for cut in cuts]
        return (document_key.place, document_key.document, self._max_tokens, offsets, lengths, unfit_tokens)

    def _cut_document(self, text: str) -> list[Cut]:
        """Cut a document into pieces of at most `max_tokens` tokens.

        A single word with more tokens becomes a piece of its own, which is marked as unfit.
        """
        cuts = []
        for piece in iter_pieces(text, self._max_tokens, self._count_tokens):
            is_too_long = piece.token_count > self._max_tokens
            unfit_tokens = piece.token_count if is_too_long else None
            length = piece.end - piece.start
            cuts.append(Cut(offset=piece.start, length=length, unfit_token_count=unfit_tokens))
        return cuts


def open_corpus_cuts(worker: Worker) -> DocumentCuts:
    """Open the cuts of documents for C*, whose texts have at most `corpus.segment_tokens` tokens."""
    max_tokens = worker.plan.settings.corpus.segment_tokens
    return DocumentCuts(worker, max_tokens, worker.get_encoding().count_tokens)


def _build_cuts(row: Mapping[str, Any]) -> list[Cut]:
    """Return the cuts of a document from its stored row, which has a list per field of `Cut`."""
    cut_fields = zip(row["offsets"], row["lengths"], row["unfit_tokens"], strict=True)
    return [Cut(*fields) for fields in cut_fields]


def _build_document_texts(text: str, cuts: Sequence[Cut]) -> DocumentTexts:
    """Build the texts of a document from its cuts, and count the words that fit no text."""
    spans_of_texts = [(cut.offset, cut.length) for cut in cuts if cut.is_text]
    unfit_words = len(cuts) - len(spans_of_texts)
    return DocumentTexts(build_segments(text, spans_of_texts), unfit_word_count=unfit_words)
