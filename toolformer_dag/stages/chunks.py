"""Work in chunks: a killed run loses the chunk it was at."""

from collections.abc import Iterator

import polars as pl

from toolformer_dag.stages.report import Progress


def chunked(rows: pl.DataFrame, size: int, progress: Progress) -> Iterator[pl.DataFrame]:
    """`rows` in pieces of `size`; tells `progress` when the caller comes back for the next one."""
    for begin in range(0, rows.height, size):
        chunk = rows[begin : begin + size]
        yield chunk
        progress(begin + chunk.height, rows.height)
