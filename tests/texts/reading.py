"""Read the documents of one file, for tests of readers."""

from collections.abc import Iterator
from pathlib import Path

from toolformer_dag.texts.columns import Rejection
from toolformer_dag.texts.document import Document
from toolformer_dag.texts.formats import FormatChoice
from toolformer_dag.texts.shard_faults import ShardFault
from toolformer_dag.texts.shard_reader import iter_shard_batches


def read_documents(path: Path | str, shard: str, choice: FormatChoice | None = None) -> Iterator[Document | Rejection]:
    """Yield a file's documents, and what holds none; a fault of the whole file is a last Rejection of line 0."""
    try:
        for batch in iter_shard_batches(path, choice):
            yield from batch.rejections
            yield from (Document(shard, **row) for row in batch.frame.iter_rows(named=True))
    except ShardFault as fault:
        yield Rejection(0, fault.reason, str(fault))
