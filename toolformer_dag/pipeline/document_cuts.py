"""Documents are cut into texts once, for all lanes and C*: where they are cut is stored by the hash of the document.

The first column of the key is the document's place (see `raw_shards.documents`), by which rows are sorted: documents
that follow each other are looked up in one or two row groups, however many there are. Of equal documents in several
places each is cut.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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
"""`offsets`, `lengths`: of the pieces, in characters; `unfit_tokens`: of a word that fits no text, null for a text."""


def cutting(plan: Plan) -> Mapping[str, Any]:
    """Return what determines how a document is cut, beside prompt and call of a lane."""
    return {"cutting": CUTTING, **determining(plan.settings.corpus, "segment_tokens"), "model": tokenizing(plan)}


def tokenizing(plan: Plan) -> dict[str, object]:
    """Return what determines the tokens of a text: the model, whatever begins it and however calls are written."""
    return {name: value for name, value in plan.model.items() if name not in ("markers", "bos")}


class DocumentCuts:
    """The stored cuts into texts of at most `max_tokens` tokens under one model's tokenizer, which `count` applies.

    Lanes whose texts may be equally long share them. `name`: of the row store, for the records of what is made with it.
    """

    def __init__(self, worker: Worker, max_tokens: int, count: TokenCounter) -> None:
        identity = {"cutting": CUTTING, "model": tokenizing(worker.plan), "key": KEY}
        self._store = worker.rows("ccnet/cuts", identity, KEY, CUTS)
        self._max_tokens, self._count = max_tokens, count
        self.name = self._store.name

    def of(self, documents: Sequence[tuple[str, str]]) -> Iterator[tuple[list[Segment], int]]:
        """Yield the texts of each document, as `pieces` cuts it, and how many of its words fit none.

        What is not stored is cut and stored. `documents`: (place, text), BATCH at a time. Raises WriteError.
        """
        digests = [(place, text_digest(text)) for place, text in documents]
        most = pl.lit(self._max_tokens, pl.Int32()).alias("max_tokens")
        keys = pl.DataFrame(digests, schema=CUTS.to_frame().select(KEY[:2]).schema, orient="row").with_columns(most)
        stored = self._store.stored(keys).iter_rows()
        cut = {(place, digest): list(zip(*columns, strict=True)) for place, digest, _, *columns in stored}
        fresh = []
        for key, (_, text) in zip(digests, documents, strict=True):
            if key not in cut:
                cut[key] = self._cut(text)
                columns = [[piece[column] for piece in cut[key]] for column in range(3)]
                fresh.append((*key, self._max_tokens, *columns))
        self._store.append(pl.DataFrame(fresh, schema=CUTS, orient="row"))
        for key, (_, text) in zip(digests, documents, strict=True):
            fitting = [(offset, length) for offset, length, unfit_tokens in cut[key] if unfit_tokens is None]
            yield segments(text, fitting), len(cut[key]) - len(fitting)

    def _cut(self, text: str) -> list[tuple[int, int, int | None]]:
        """Return the pieces of a document as CUTS holds them."""
        most, cut = self._max_tokens, pieces(text, self._max_tokens, self._count)
        return [(piece.start, piece.end - piece.start, piece.tokens if piece.tokens > most else None) for piece in cut]
