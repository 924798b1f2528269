"""Read a warehouse that is rebuilt under the reader: every answer comes from the file that lies there now."""

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import date
from pathlib import Path
from typing import Any

import duckdb

from toolformer_dag.lake.warehouse import CLOSED, WarehouseError, opened

Row = dict[str, Any]


class WarehouseReader:
    """A connection to the file, opened anew when the file was replaced. Safe for several threads.

    Nothing is written, no other file is reached, and no extension is loaded. `about`: what the page says it shows.
    """

    def __init__(self, database: Path, about: str = "") -> None:
        self.database, self.about = database, about
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._connection: duckdb.DuckDBPyConnection
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

    def _current(self) -> duckdb.DuckDBPyConnection:
        """A cursor of its own for the caller's thread."""
        with self._lock:
            stamp = None
            with suppress(FileNotFoundError):
                status = self.database.stat()
                stamp = status.st_ino, status.st_mtime_ns
            if stamp is None or stamp != self._stamp:
                self._stamp = None
                self._opened.close()  # while it is open, connecting again would give the old file
                self._connection = self._opened.enter_context(opened(self.database, CLOSED))
                self._stamp = stamp
            return self._connection.cursor()


def _plain(value: Any) -> Any:
    """A value as JSON holds it; NaN and infinity have no place there."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.isoformat() if isinstance(value, date) else value
