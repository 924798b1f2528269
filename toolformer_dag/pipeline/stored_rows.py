"""Rows that are computed once: what a shard lacks of them, which texts go through the model together."""

import polars as pl

from toolformer_dag.files import StorageError
from toolformer_dag.pipeline.stage import Claimed, TableOutput
from toolformer_dag.settings.sections import Settings

CPU_TEXTS, GPU_TEXTS = 64, 512
"""Texts of a chunk: 80 GB hold the keys of some 140 texts of GPT-J at a time, and others wait to take their places."""


def chunk_size(settings: Settings) -> int:
    """Return `execution.chunk_texts`, else what suits the device."""
    if settings.execution.chunk_texts is not None:
        return settings.execution.chunk_texts
    import torch

    return GPU_TEXTS if settings.model.device != "cpu" and torch.cuda.device_count() else CPU_TEXTS


def text_chunks(texts: pl.DataFrame, lacking: pl.DataFrame, size: int) -> list[pl.DataFrame]:
    """Cut the texts that lack something into chunks of at most `size`.

    `texts` (text_digest, ...) has every text of the shard once, in a fixed order; `lacking` (text_digest, whole) those
    that lack something, and whether it is the whole.
    """
    chunk = pl.int_range(pl.len()) // size
    numbered = texts.with_columns(chunk=chunk).join(lacking, on="text_digest", how="left", maintain_order="left")
    whole = numbered.filter(pl.col("whole").fill_null(False).all().over("chunk"))
    pooled = numbered.filter(pl.col("whole").is_not_null() & ~pl.col("chunk").is_in(whole["chunk"].unique().implode()))
    ordered = pl.concat([whole, pooled]).drop("chunk", "whole")
    return [ordered[at : at + size] for at in range(0, ordered.height, size)]


def claim(claimed: Claimed, store: str, keys: pl.DataFrame) -> pl.DataFrame:
    """Return those of `keys` that no earlier shard of this run computes already, and claim them; once per shard."""
    known = claimed.setdefault(store, [])
    free = keys.join(pl.concat(known), on=keys.columns, how="anti", maintain_order="left") if known else keys
    known.append(free)
    return free


def release(claimed: Claimed) -> None:
    """Forget what the earliest shard claimed: its rows are stored, and whoever asks for them finds them there."""
    for keys in claimed.values():
        del keys[:1]


def require_whole(output: TableOutput, what: str, lacking: int) -> None:
    """Raise StorageError where rows that were stored before the part was read are `lacking` by now."""
    if lacking:
        raise StorageError(f"{lacking} {what} of {output.lane.key} were damaged while they were read; run again")
