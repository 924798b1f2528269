"""Read a warehouse that is rebuilt under the reader: every answer comes from the file that lies there now."""

import math
import threading
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import duckdb

from toolformer_dag.lake.queries import OFFLINE
from toolformer_dag.lake.warehouse import CLOSED, WarehouseError

Row = dict[str, Any]


class WarehouseReader:
    """A connection to the file, opened anew when the file was replaced. Safe for several threads.

    Nothing is written, no other file is reached, and no extension is loaded.
    """

    def __init__(self, database: Path) -> None:
        self.database = database
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._stamp: tuple[int, int] | None = None

    def version(self) -> str:
        """Return a name of the file's content: another one after each rebuild. Raises WarehouseError."""
        self._current()
        return "-".join(map(str, self._stamp or ()))

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Return the answer to a query, plain values that JSON can hold. Raises WarehouseError."""
        try:
            cursor = self._current().execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, map(_plain, row), strict=True)) for row in cursor.fetchall()]
        except duckdb.Error as error:
            raise WarehouseError(str(error)) from error

    def has(self, table: str) -> bool:
        """Whether there is a table or view of this name."""
        found = "SELECT count(*) AS n FROM information_schema.tables WHERE table_name = $name"
        return bool(self.rows(found, {"name": table})[0]["n"])

    def _current(self) -> duckdb.DuckDBPyConnection:
        """A cursor of its own for the caller's thread."""
        with self._lock:
            try:
                found = self.database.stat()
            except FileNotFoundError as error:
                raise WarehouseError(
                    f"there is no warehouse at {self.database} yet; run `toolformer-dag run`"
                ) from error
            stamp = (found.st_ino, found.st_mtime_ns)
            if self._connection is None or stamp != self._stamp:
                if self._connection is not None:
                    self._connection.close()  # while it is open, connecting again would give the old file
                try:
                    self._connection = duckdb.connect(self.database, read_only=True, config={**OFFLINE, **CLOSED})
                except duckdb.Error as error:
                    self._connection = None
                    raise WarehouseError(str(error)) from error
                self._stamp = stamp
            return self._connection.cursor()


def _plain(value: Any) -> Any:
    """A value as JSON holds it; NaN and infinity have no place there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.isoformat() if isinstance(value, date) else value
