"""Writes rows and a part where no file may grow beyond 4 KiB, as on a full disk. Argument: the lake."""

import random
import resource
import sys

import polars as pl

from toolformer_dag.files import WriteError
from toolformer_dag.lake.table import Lake

SCHEMA = {"key": pl.Int64, "text": pl.String}
lake = Lake(sys.argv[1])
store = lake.open_row_store("r", {"model": "m"}, ("key",), SCHEMA)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
noise = random.Random(0).randbytes(50_000).hex()  # does not compress to a file that fits
large = pl.DataFrame({"key": [2], "text": [noise]}, schema=SCHEMA)
for write in (lambda: store.append_rows(large), lambda: lake.get_table("t").publish("s", [large], dict)):
    try:
        write()
    except WriteError as error:
        print(error)  # noqa: T201
