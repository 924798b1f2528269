"""Read a warehouse that is rebuilt under the reader: every answer comes from the file as it is now."""

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from toolformer_dag.lake.warehouse import CLOSED, WarehouseError, opened

Row = dict[str, Any]
"""A row of an answer by column, of values that JSON can hold."""


class WarehouseReader:
    """A connection to a warehouse, opened anew when the file was replaced. Safe for several threads.

    Nothing is written, no other file is reached, and no extension is loaded.

    - `database`: the file, which need not be there until it is read.
    - `about`: what the page calls what it shows.
    """

    def __init__(self, database: Path, about: str = "") -> None:
        self.database = database
        self.about = about
        self._lock = threading.Lock()  # guards the members below
        self._opened = ExitStack()  # closes the connection
        self._connection: duckdb.DuckDBPyConnection
        self._stamp: _Stamp | None = None  # of the file that the connection is to; None without a connection

    def version(self) -> str:
        """Return a name of the file's content, another one after each rebuild. Raises WarehouseError."""
        self._current()
        stamp = self._stamp
        return f"{stamp.inode}-{stamp.modified}" if stamp else ""

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query and return its rows as dicts of plain values, which JSON can hold.

        parameters: values for `$NAME` in the query. Raises WarehouseError.
        """
        try:
            cursor = self._current().execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            rows = []
            for values in cursor.fetchall():
                rows.append(dict(zip(names, map(_plain, values), strict=True)))
            return rows
        except duckdb.Error as error:
            raise WarehouseError(str(error)) from error

    def _current(self) -> duckdb.DuckDBPyConnection:
        """Return a new cursor, for the caller's thread alone; where the file was replaced, open it again first."""
        with self._lock:
            stamp = self._stamp_of_file()
            if stamp is None or stamp != self._stamp:
                self._stamp = None
                self._opened.close()  # while it is open, connecting again would give the old file
                self._connection = self._opened.enter_context(opened(self.database, CLOSED))
                self._stamp = stamp
            return self._connection.cursor()

    def _stamp_of_file(self) -> "_Stamp | None":
        """Return the stamp of the file; None where there is no file."""
        try:
            status = self.database.stat()
        except FileNotFoundError:
            return None
        return _Stamp(status.st_ino, status.st_mtime_ns)


class _Stamp(NamedTuple):
    """What tells a rebuilt file from the one before: its inode, and when it was modified in ns."""

    inode: int
    modified: int


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it: None in place of NaN and infinity, dates and times as ISO text.

    An integer beyond 64 bits, which orjson refuses, becomes text.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    return value
