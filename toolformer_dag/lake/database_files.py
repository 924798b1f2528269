"""Writing a DuckDB file that is whole, or leaving the old one as it is.

DuckDB writes changes to a log beside the file (`.wal`) and moves them into the file at a checkpoint. Where the disk is
full, the checkpoint at closing fails without an error: the file is then empty, and all rows are in the log.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from toolformer_dag.files import WriteError, build_temporary_path, replace_file
from toolformer_dag.lake.queries import OFFLINE_CONFIG

FULL_DISK_ERRORS = (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.FatalException)
"""What DuckDB raises where a disk is full, or memory could not be spilled to it; a failed checkpoint is fatal."""
REASON_PREFIXES = ("Original error: ", "because of error: ")
"""What DuckDB writes before the reason of a checkpoint that failed."""


def checkpoint_database(connection: duckdb.DuckDBPyConnection, database_name: str = "") -> None:
    """Move every change of a database from its log into its file.

    Args:
        connection: A connection to the database.
        database_name: The name of an attached database. "" for the database of the connection.

    Raises:
        duckdb.Error: The file cannot be written, because the disk is full or for another reason.
    """
    connection.execute(f"CHECKPOINT {database_name}")


def parse_error_reason(error: Exception) -> str:
    """Return what went wrong, in DuckDB's words: the first line, without the phrases that it writes before the reason.

    Example:
        "Failed to create checkpoint because of error: No space left" becomes "No space left".
    """
    message = str(error)
    for prefix in REASON_PREFIXES:
        _, _, message = message.rpartition(prefix)
    return message.splitlines()[0].strip()


@contextmanager
def replace_database(database_path: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Write a new DuckDB file, which replaces the old one after the `with` block.

    If the block raises, or the disk is full, the old file stays.

    Yields:
        A connection to the new file, which is empty.

    Raises:
        WriteError: The file cannot be written.

    Example:
        with replace_database(Path("traces.duckdb")) as connection:
            connection.execute("CREATE TABLE calls AS FROM frame")
    """
    temporary_path = build_temporary_path(database_path, ".duckdb")
    try:
        database_path.parent.mkdir(parents=True, exist_ok=True)
        with duckdb.connect(temporary_path, config=OFFLINE_CONFIG) as connection:
            yield connection
            checkpoint_database(connection)  # raises if the disk is full; closing would not
        replace_file(temporary_path, database_path)
    except FULL_DISK_ERRORS as error:
        raise WriteError(database_path, OSError(parse_error_reason(error))) from error
    except OSError as error:
        raise WriteError(database_path, error) from error
    finally:
        _remove_database_and_log(temporary_path)


def _remove_database_and_log(database_path: Path) -> None:
    """Remove a DuckDB file and the log beside it. Errors are ignored, such as for missing files."""
    log_path = database_path.with_name(f"{database_path.name}.wal")
    for path in (database_path, log_path):
        with suppress(OSError):
            path.unlink()
