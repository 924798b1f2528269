"""Whether one table of the lake still belongs to another."""

from toolformer_dag.storage.table import Table


def made_from(table: Table, source: Table, partition: str) -> bool:
    """Whether the rows of `table` were made from the rows that `source` has now. Raises MissingPartition."""
    name = source.name.rpartition("/")[2]
    made: str | None = table.pointer(partition).record["inputs"].get(name)
    return made == source.pointer(partition).data_version
