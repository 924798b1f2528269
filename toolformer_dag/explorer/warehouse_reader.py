"""Read a warehouse file that may be replaced at any time: every answer comes from the present file."""

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from toolformer_dag.lake.warehouse import CLOSED, WarehouseError, open_warehouse

Row = dict[str, Any]
"""A row of an answer by column, of values that JSON can hold."""


class WarehouseReader:
    """Reads a warehouse; opens the file again when it was replaced. Safe for several threads.

    Queries cannot write, reach other files or load extensions.

    - `database`: the file, which may be missing until it is read.
    - `about`: the page's heading for the data.
    """

    def __init__(self, database: Path, about: str = "") -> None:
        self.database = database
        self.about = about
        self._lock = threading.Lock()  # guards the members below
        self._opened = ExitStack()  # closes the connection
        self._connection: duckdb.DuckDBPyConnection
        self._stamp: _Stamp | None = None  # of the connected file; None without a connection

    def version(self) -> str:
        """Return a name of the file's content, which differs after each rebuild. Raises WarehouseError."""
        self._open_cursor()
        stamp = self._stamp
        return f"{stamp.inode}-{stamp.modified}" if stamp else ""

    def rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query, and return its rows by column, as JSON data.

        Args:
            parameters: The values for `$NAME` in the query.

        Raises:
            WarehouseError: The file cannot be opened, or the query fails.
        """
        try:
            cursor = self._open_cursor().execute(sql, parameters)
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, map(_to_json_value, values), strict=True)) for values in cursor.fetchall()]
        except duckdb.Error as error:
            raise WarehouseError(str(error)) from error

    def _open_cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new cursor for the caller's thread; open the file again first if it was replaced."""
        with self._lock:
            stamp = self._read_stamp()  # of the file as it is now; None without a file
            was_replaced = stamp is None or stamp != self._stamp
            if was_replaced:
                self._stamp = None  # until the file is open again: opening may fail, as without a file
                self._opened.close()  # while it is open, connecting again would give the old file
                self._connection = self._opened.enter_context(open_warehouse(self.database, CLOSED))
                self._stamp = stamp
            return self._connection.cursor()

    def _read_stamp(self) -> "_Stamp | None":
        """Return the stamp of the file, or None without a file."""
        try:
            status = self.database.stat()
        except FileNotFoundError:
            return None
        return _Stamp(status.st_ino, status.st_mtime_ns)


class _Stamp(NamedTuple):
    """Identifies a version of the file: its inode, and when it was modified, in ns."""

    inode: int
    modified: int


def _to_json_value(value: Any) -> Any:
    """Return a value as JSON data: None for NaN and infinity, text for dates, times and integers beyond 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:  # orjson refuses it
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    return value
