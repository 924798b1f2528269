"""Documents are cut into texts once, for all lanes and C*: where they are cut is stored by the hash of the document."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from toolformer_dag.pipeline.plan import Plan
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.segments import CUTTING, Segment, Unfit, segments, text_digest

KEY = ("document", "max_tokens")
CUTS = pl.Schema(
    {
        "document": pl.String(),
        "max_tokens": pl.Int32(),
        "offsets": pl.List(pl.Int64()),
        "lengths": pl.List(pl.Int64()),
        "unfit_tokens": pl.List(pl.Int32()),
    }
)
"""`offsets` and `lengths`: of the pieces, in characters; `unfit_tokens`: null for a text, the tokens of an Unfit."""
BATCH = 500
"""Documents that are cut and looked up together."""
Pieces = list[Segment | Unfit]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How documents are cut into texts: at most `max_tokens` tokens each, as `count_tokens` counts them."""

    max_tokens: int
    count_tokens: Callable[[Sequence[str]], Sequence[int]]


def cutting(plan: Plan) -> Mapping[str, Any]:
    """Return what determines how a document is cut, beside prompt and call of a lane."""
    return {"cutting": CUTTING, "segment_tokens": plan.settings.corpus.segment_tokens, "model": dict(plan.model)}


class DocumentCuts:
    """The stored cuts under one model's tokenizer; lanes whose texts may be equally long share them."""

    def __init__(self, worker: Worker, cut: Cut) -> None:
        identity = {"cutting": CUTTING, "model": dict(worker.plan.model)}
        self._store = worker.rows("ccnet/cuts", identity, KEY, CUTS)
        self._cut = cut

    @property
    def name(self) -> str:
        """Name of the row store, for the records of what is made with it."""
        return self._store.name

    def of(self, texts: Sequence[str]) -> Iterator[Pieces]:
        """Yield the pieces of each document, as `segments` cuts it; those that are not stored are cut and stored.

        Call it with BATCH documents at a time. Raises WriteError.
        """
        digests = [text_digest(text) for text in texts]
        most = pl.lit(self._cut.max_tokens, pl.Int32()).alias("max_tokens")
        keys = pl.DataFrame({"document": digests}, schema={"document": pl.String()}).with_columns(most)
        stored = self._store.stored(keys)
        known = {digest: places for digest, _, *places in stored.iter_rows()}
        lacking = {digest: text for digest, text in zip(digests, texts, strict=True) if digest not in known}
        cut = {digest: list(_places(self._pieces(text))) for digest, text in lacking.items()}
        fresh = [(digest, self._cut.max_tokens, *_columns(places)) for digest, places in cut.items()]
        self._store.append(pl.DataFrame(fresh, schema=CUTS, orient="row"))
        for digest, text in zip(digests, texts, strict=True):
            places = cut[digest] if digest in cut else zip(*known[digest], strict=True)
            yield list(_cut_at(text, places))

    def _pieces(self, text: str) -> Pieces:
        return segments(text, self._cut.max_tokens, self._cut.count_tokens)


Place = tuple[int, int, int | None]


def _places(pieces: Pieces) -> Iterator[Place]:
    for piece in pieces:
        if isinstance(piece, Unfit):
            yield piece.offset, piece.length, piece.tokens
        else:
            yield piece.offset, len(piece.text), None


def _columns(places: Sequence[Place]) -> tuple[list[int], list[int], list[int | None]]:
    return [place[0] for place in places], [place[1] for place in places], [place[2] for place in places]


def _cut_at(text: str, places: Iterator[Place] | Sequence[Place]) -> Iterator[Segment | Unfit]:
    index = 0
    for offset, length, unfit_tokens in places:
        if unfit_tokens is None:
            yield Segment(index, offset, text[offset : offset + length])
            index += 1
        else:
            yield Unfit(offset, length, unfit_tokens)
