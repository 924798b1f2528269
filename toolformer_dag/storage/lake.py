"""The lake: one folder, or one prefix of an object store, with all tables and all rows that were paid for."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import polars as pl
from upath import UPath

from toolformer_dag.fingerprint import fingerprint
from toolformer_dag.storage.files import write_whole
from toolformer_dag.storage.plain_json import as_json
from toolformer_dag.storage.rows import RowStore
from toolformer_dag.storage.table import Table

IDENTITY = "identity.json"


class Lake:
    """`root` is a path or a URL that fsspec knows; only local folders are tested. Nothing is created before a write."""

    def __init__(self, root: str | Path | UPath) -> None:
        self.root = UPath(root)

    def table(self, name: str) -> Table:
        """The table of that name, such as "calculator/loss_deltas", published or not."""
        return Table(self.root / name, name)

    def rows(
        self, name: str, identity: Mapping[str, object], key: Sequence[str], schema: Mapping[str, pl.DataType]
    ) -> RowStore:
        """The rows of stage `name` that hold under `identity`: everything that determines their values.

        Another identity is another folder, so a row of another model or prompt is never found. Opening marks the rows
        as in use, which `clean` respects. Raises WriteError; NotPlain or TypeError for an identity that cannot be
        written down or has no fingerprint.
        """
        path = f"{name}/{fingerprint(identity)}"
        folder = self.root / path
        written = folder / IDENTITY
        if written.is_file():
            written.touch()
        else:
            write_whole(written, as_json(path, identity, sort_keys=True))
        return RowStore(folder, path, key, pl.Schema(schema))
