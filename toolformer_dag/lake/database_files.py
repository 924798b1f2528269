"""Writing a DuckDB file that is whole, or leaving the old one as it is.

DuckDB writes changes to a log beside the file (`.wal`) and moves them into the file at a checkpoint. Where the disk is
full, the checkpoint at closing fails without an error: the file is then empty, and all rows are in the log.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from toolformer_dag.files import WriteError, build_temporary_path, replace_whole
from toolformer_dag.lake.queries import OFFLINE

NO_SPACE = (duckdb.IOException, duckdb.OutOfMemoryException, duckdb.FatalException)
"""What DuckDB raises where a disk is full, or memory could not be spilled to it; a failed checkpoint is fatal."""
REASON_BEGINS = ("Original error: ", "because of error: ")
"""What DuckDB writes before the reason of a checkpoint that failed."""


def write_out(connection: duckdb.DuckDBPyConnection, name: str = "") -> None:
    """Move every change of a connection's database into its file. Raises duckdb.Error where the disk takes no more.

    name: of an attached database.
    """
    connection.execute(f"CHECKPOINT {name}")


def parse_error_reason(error: Exception) -> str:
    """Return what went wrong, in DuckDB's words: the first line, without what it writes before the reason."""
    message = str(error)
    for words in REASON_BEGINS:
        message = message.rpartition(words)[2]
    return message.splitlines()[0].strip()


@contextmanager
def replace_database(database: Path) -> Iterator[duckdb.DuckDBPyConnection]:
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
    fresh = build_temporary_path(database, ".duckdb")
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        with duckdb.connect(fresh, config=OFFLINE) as connection:
            yield connection
            write_out(connection)
        replace_whole(fresh, database)
    except NO_SPACE as error:
        raise WriteError(database, OSError(parse_error_reason(error))) from error
    except OSError as error:
        raise WriteError(database, error) from error
    finally:
        _remove_with_log(fresh)


def _remove_with_log(database: Path) -> None:
    """Remove a DuckDB file and the log beside it, where they are there."""
    for path in (database, database.with_name(f"{database.name}.wal")):
        with suppress(OSError):
            path.unlink()
