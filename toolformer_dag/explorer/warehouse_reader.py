"""Read a warehouse file that may be replaced at any time: every answer comes from the present file."""

import math
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import duckdb

from toolformer_dag.lake.warehouse import NO_EXTERNAL_ACCESS_CONFIG, WarehouseError, open_warehouse

Row = dict[str, Any]
"""A row of an answer by column, of values that JSON can hold."""


class WarehouseReader:
    """Reads a warehouse file, and opens it again when it was replaced. Safe for several threads.

    Queries cannot write, reach other files or load extensions.

    Attributes:
        database_path: The file, which may be missing until it is read.
        heading: The heading of the page for the data.
    """

    def __init__(self, database_path: Path, heading: str = "") -> None:
        self.database_path = database_path
        self.heading = heading
        self._lock = threading.Lock()  # guards the members below
        self._connection_stack = ExitStack()  # closes the connection
        self._connection: duckdb.DuckDBPyConnection
        self._file_stamp: _FileStamp | None = None  # of the connected file; None without a connection

    def get_version(self) -> str:
        """Return a text that identifies the present content of the file. It differs after each rebuild.

        Raises:
            WarehouseError: The file cannot be opened.
        """
        self._open_cursor()
        stamp = self._file_stamp
        return f"{stamp.inode}-{stamp.modified_ns}" if stamp else ""

    def query_rows(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Run a query and return its rows as dictionaries of JSON data.

        Args:
            sql: The query.
            parameters: The values of `$name` in the query, by name.

        Raises:
            WarehouseError: The file cannot be opened, or the query fails.
        """
        rows = []
        try:
            cursor = self._open_cursor().execute(sql, parameters)
            column_names = [column[0] for column in cursor.description]
            for values in cursor.fetchall():
                json_values = map(_convert_to_json_value, values)
                rows.append(dict(zip(column_names, json_values, strict=True)))
        except duckdb.Error as error:
            raise WarehouseError(str(error)) from error
        return rows

    def _open_cursor(self) -> duckdb.DuckDBPyConnection:
        """Return a new cursor for the caller's thread. If the file was replaced, it is opened again first.

        Raises:
            WarehouseError: The file is missing or cannot be opened.
        """
        with self._lock:
            present_stamp = self._read_stamp()
            if present_stamp is None or present_stamp != self._file_stamp:
                self._reopen_file(present_stamp)
            return self._connection.cursor()

    def _reopen_file(self, present_stamp: "_FileStamp | None") -> None:
        """Close the connection and connect to the present file. The caller holds the lock.

        Args:
            present_stamp: Identifies the present file. None if it is missing.

        Raises:
            WarehouseError: The file is missing or cannot be opened.
        """
        # None until the file is open again, because opening it may fail.
        self._file_stamp = None

        # Close first: while the old file is open, DuckDB would connect to it again.
        self._connection_stack.close()
        warehouse = open_warehouse(self.database_path, NO_EXTERNAL_ACCESS_CONFIG)
        self._connection = self._connection_stack.enter_context(warehouse)
        self._file_stamp = present_stamp

    def _read_stamp(self) -> "_FileStamp | None":
        """Return what identifies the present version of the file, or None without a file."""
        try:
            status = self.database_path.stat()
        except FileNotFoundError:
            return None
        return _FileStamp(status.st_ino, status.st_mtime_ns)


class _FileStamp(NamedTuple):
    """Identifies a version of a file.

    Attributes:
        inode: The number that the file system gives the file.
        modified_ns: When the file was modified, in nanoseconds since 1970.
    """

    inode: int
    modified_ns: int


def _convert_to_json_value(value: Any) -> Any:
    """Return a value as JSON data: None for NaN and infinity, text for dates, times and integers beyond 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and not -(2**63) <= value < 2**64:  # orjson refuses such an integer
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    return value
