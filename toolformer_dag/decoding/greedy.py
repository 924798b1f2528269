"""Greedy decoding of many rows, with the top-k trigger of section 4.2."""

from collections.abc import Iterator, Sequence

import torch

from toolformer_dag.decoding.batch import Batch
from toolformer_dag.decoding.choose import Way
from toolformer_dag.decoding.row import Row
from toolformer_dag.language_model.load import LanguageModel

BATCH_TOKENS = 16_384  # longest sequence times rows


@torch.inference_mode()
def write(language_model: LanguageModel, way: Way, rows: Sequence[Row]) -> None:
    """Writes every row until it stops. What comes out does not depend on which rows share a batch."""
    open_rows = sorted((row for row in rows if row.stop is None), key=lambda row: len(row.prefix))
    for batch in _batches(open_rows, way.rows, language_model.positions):
        _write_batch(way.kind(language_model, [row.prefix for row in batch]), batch)


def _batches(rows: Sequence[Row], most: int, positions: int) -> Iterator[list[Row]]:
    """Rows in order of length, as many at once as the limits allow, `most` of them.

    A row that may come to its context's end is alone: padding beside it would grow beyond.
    """
    batch: list[Row] = []
    for row in rows:
        longest = len(row.prefix) + row.budget + row.rules.max_call_tokens
        full = len(batch) == most or (len(batch) + 1) * longest > BATCH_TOKENS
        if batch and (full or longest > positions):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _write_batch(batch: Batch, rows: list[Row]) -> None:
    while True:
        tokens = _next_tokens(batch, rows)
        for row, token in zip(rows, tokens, strict=True):
            row.take(token)
        going = [at for at, row in enumerate(rows) if row.stop is None]
        if not going:
            return
        if len(going) < len(rows):
            batch.keep(going)
        rows = [rows[at] for at in going]
        batch.step([tokens[at] for at in going])


def _next_tokens(batch: Batch, rows: Sequence[Row]) -> list[int]:
    start = rows[0].rules.vocabulary.start
    for at, rank in enumerate(batch.ranks(start[0])):
        if rows[at].may_begin_call and rank < rows[at].rules.k and _is_likely(batch, at, start, rows[at].rules.k):
            rows[at].begin_call()
    batch.forbid([(at, token) for at, row in enumerate(rows) for token in row.forbidden()])
    for at, row in enumerate(rows):
        if (tokens := row.permitted()) is not None:
            batch.permit(at, tokens)
    best: list[int] = batch.scores.argmax(-1).tolist()
    return [row.forced[0] if row.forced else token for row, token in zip(rows, best, strict=True)]


def _is_likely(batch: Batch, at: int, start: Sequence[int], k: int) -> bool:
    """Whether ` [` is among the k most likely next tokens of a row, given that its first token is.

    Where ` [` is several tokens its probability is their product, and it competes with every token but its own first.
    """
    if len(start) == 1:
        return True
    others = batch.scores[at].log_softmax(-1)
    others[start[0]] = -torch.inf
    return int((others > batch.log_probability(at, start)).sum()) < k
