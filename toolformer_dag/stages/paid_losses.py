"""Calls with their losses, of which only those go through the model that nobody has paid for."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import polars as pl

from toolformer_dag.lane import Lane
from toolformer_dag.stages.lazy_engine import LazyEngine
from toolformer_dag.stages.loss_store import KEY, computed_losses, loss_store
from toolformer_dag.stages.publish import Work
from toolformer_dag.stages.report import Progress
from toolformer_dag.stages.text_chunks import text_chunks
from toolformer_dag.storage.errors import StorageError
from toolformer_dag.storage.lake import Lake

if TYPE_CHECKING:
    from toolformer_dag.model.engine import Engine


def paid_losses(
    lake: Lake,
    lane: Lane,
    calls: pl.DataFrame,
    texts: Mapping[str, str],
    *,
    engine: "Callable[[], Engine]",
    model: Mapping[str, object],
    chunk_texts: int,
    progress: Progress,
) -> tuple[pl.DataFrame, Work]:
    """`calls` (KEY and other columns) with the three losses, L-, L+, delta and reason; and what it took.

    `texts`: text by digest; `chunk_texts` of them are committed together. `work` counts distinct losses. Losses and
    delta are null where there is a reason: does_not_fit, not_finite. Raises StorageError, WriteError.
    """
    lazy, store = LazyEngine(engine), loss_store(lake, lane, model)
    keys = calls.select(KEY).unique(maintain_order=True)
    missing = store.missing(keys)
    for chunk in _by_text(keys, missing, chunk_texts, progress):
        store.append(computed_losses(lazy.get(), lane, chunk, texts))
    losses = store.stored(keys)
    if losses.height < keys.height:
        raise StorageError(f"{keys.height - losses.height} losses of {lane.key} were damaged while read; run again")
    work = Work(lazy.tokens(), {"losses": (missing.height, keys.height - missing.height)}, [store])
    return _with_delta(calls.join(losses, on=KEY)), work


def _by_text(keys: pl.DataFrame, missing: pl.DataFrame, size: int, progress: Progress) -> Iterator[pl.DataFrame]:
    """The missing keys of `size` texts at a time."""
    texts = keys.select("text_digest").unique(maintain_order=True)
    stored = keys.join(missing, on=KEY, how="anti").select("text_digest")
    partial = missing.select("text_digest").unique().join(stored, on="text_digest", how="semi")
    untouched = texts.join(stored, on="text_digest", how="anti")
    for chunk in text_chunks(texts, untouched, partial, size, progress):
        yield missing.join(chunk, on="text_digest", how="semi", maintain_order="left")


def _with_delta(scored: pl.DataFrame) -> pl.DataFrame:
    minus = pl.min_horizontal("loss_empty", "loss_call")
    return scored.with_columns(loss_minus=minus, loss_plus="loss_result").with_columns(
        delta=pl.col("loss_minus") - pl.col("loss_plus")
    )
