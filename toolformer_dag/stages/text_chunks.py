"""Which texts go through the model together.

A number out of a batch depends in its last bits on what else was in the batch. So a chunk of which nothing is stored is
always the same texts, and a run that was killed and started again gives the bits of an undisturbed one. Texts that lack
something in other chunks are pooled, so that few of them do not make many small batches.
"""

from collections.abc import Iterator

import polars as pl

from toolformer_dag.stages.chunks import chunked
from toolformer_dag.stages.report import Progress


def text_chunks(
    texts: pl.DataFrame, untouched: pl.DataFrame, partial: pl.DataFrame, size: int, progress: Progress
) -> Iterator[pl.DataFrame]:
    """`texts` that lack something, at most `size` at a time: `untouched` have nothing stored, `partial` have something.

    `texts` (text_digest, ...) has every text of the partition once, in a fixed order; the other two name text_digests.
    """
    lacking = pl.concat([untouched.select("text_digest", whole=True), partial.select("text_digest", whole=False)])
    chunk = pl.int_range(pl.len()) // size
    numbered = texts.with_columns(chunk=chunk).join(lacking, on="text_digest", how="left", maintain_order="left")
    whole = numbered.filter(pl.col("whole").fill_null(False).all().over("chunk"))
    pooled = numbered.filter(pl.col("whole").is_not_null() & ~pl.col("chunk").is_in(whole["chunk"].unique().implode()))
    ordered = pl.concat([whole, pooled]).drop("chunk", "whole")
    yield from chunked(ordered, size, progress)
