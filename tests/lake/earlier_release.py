"""Turns a lake into what an earlier release wrote: a sealed pointer per part, row files that name their kind."""

from dataclasses import asdict

from toolformer_dag.files import file_name, sealed
from toolformer_dag.lake.inventory import inventory
from toolformer_dag.lake.table import Lake


def turn_back(lake: Lake) -> None:
    """Replace every manifest by pointers, and rename the files of rows."""
    for item in list(inventory(lake.storage)):
        if item.kind == "manifest":
            table = lake.table(item.owner)
            for part, pointer in table.pointers().items():
                value = asdict(pointer)
                del value["published"]
                path = table.folder / f"{file_name(part)}.json"
                lake.storage.mark(path, sealed(table.name, {"layout": 2, **value}))
            lake.storage.remove(item.path)
        elif item.kind == "rows" and item.path.suffix == ".parquet":
            age, digest, size = item.path.name.split("-")
            lake.storage.add(item.path.with_name(f"{age}-chunk-{digest}-{size}"), item.path.read_bytes())
            lake.storage.remove(item.path)
