"""The warehouse as its readers see it: one DuckDB file with every decision and its reason, for people and their SQL.

A query reads this file and nothing else. Beside the file lie a lock, which builds hold, and a seal: the hash of the
file that was built last, its size and what it was built from. `warehouse_building` has how the file is built.
"""

import os
import shutil
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.files import ReadError, StorageError, build_temporary_path, hold_file_lock, unseal_record
from toolformer_dag.identity import compute_file_content_hash
from toolformer_dag.lake.descriptions import answer_describe_statement
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import OFFLINE_CONFIG, query_frame, quote_sql
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.sections import Settings

NO_EXTERNAL_ACCESS_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,
    "lock_configuration": True,
}
"""A query reads the warehouse and nothing else: no file, no address, no extension."""
QUERY_STATEMENT_TYPES = ("SELECT", "EXPLAIN", "MULTI")
"""Types of statements: DESCRIBE, SUMMARIZE, FROM and WITH count as SELECT, PIVOT as MULTI."""
FOLDER_QUERY_STATEMENT_TYPES = ("SELECT", "MULTI")
"""The same where folders may be read: EXPLAIN ANALYZE runs what it explains, a COPY into a folder too."""
DUCKDB_MAGIC_BYTES = b"DUCK"
"""What stands in a DuckDB file behind the checksum of its first block, eight bytes."""
MAX_STORAGE_VERSION = 2**16
"""More than DuckDB will ever have; the number after the magic bytes would be far larger in a text."""
TABLES_OF_EVERY_WAREHOUSE = frozenset({"table lanes", "table rejections"})
"""Tables of every warehouse, by which a file is known whose seal is lost."""
OBJECT_NAMES_SQL = """
SELECT 'table ' || table_name FROM duckdb_tables() UNION ALL
SELECT 'view ' || view_name FROM duckdb_views() WHERE NOT internal UNION ALL
SELECT 'macro ' || function_name FROM duckdb_functions() WHERE NOT internal UNION ALL
SELECT 'sequence ' || sequence_name FROM duckdb_sequences() UNION ALL
SELECT 'type ' || type_name FROM duckdb_types() WHERE NOT internal
"""
"""What a person may have made in a database."""
NO_ACCESS_WORDS = "disabled by configuration"
"""What DuckDB says of a file that a query may not read."""
NO_ACCESS_REMEDY = (
    "a query reads the warehouse alone; name the folder of a file of your own with `toolformer-dag sql --read FOLDER`, "
    "or attach the warehouse in Python (docs/howto/ask-in-sql.md, Join data of your own)"
)
REMEDIES_BY_ERROR_WORDS = {
    "Corrupt database file": "run `toolformer-dag run`, which builds it anew from the lake",
    "not a valid DuckDB database file": "move it away, and run what writes it again",
    "Loading external extensions": "it is a file of another database; move it away, and run what writes it again",
    "Out of Memory Error": "ask for less at once, or give queries more with `--set execution.query_gib=16`",
}
"""What to do about an error of DuckDB while a warehouse is read, by words of it."""
INTERRUPT_SECONDS = 5
"""In so many seconds an interrupted query has to end; after them its process is killed."""
POLL_INTERVAL_SECONDS = 0.1
"""How long a query is waited for before signals are looked at again."""


class WarehouseError(StorageError):
    """Raised if the warehouse is missing or cannot be built, or for SQL that it cannot answer."""


def query(
    database_path: Path, sql: str, max_memory_gib: float | None = None, readable_folders: Sequence[Path] = ()
) -> pl.DataFrame:
    """Run one read-only query over the warehouse, a DuckDB file.

    DESCRIBE also shows the comments of tables and columns. Ctrl-C ends the query. If DuckDB does not stop
    in time, it ends this process.

    Args:
        database_path: The warehouse file.
        sql: The query.
        max_memory_gib: The most memory that it may use, in GiB, and as much space on the disk. None sets no limit.
        readable_folders: Folders with files that the query may read too. It can read no other files.

    Raises:
        WarehouseError: There is no warehouse, or it cannot answer the query.
    """
    _refuse_lone_surrogates(sql)
    memory_config = _build_memory_limits(max_memory_gib)

    if not readable_folders:
        with open_warehouse(database_path, memory_config | NO_EXTERNAL_ACCESS_CONFIG) as connection:
            return _run_interruptible_query(connection, sql, QUERY_STATEMENT_TYPES, database_path)

    with open_warehouse(database_path, memory_config) as connection:
        # Forbids access to all other files, and any further change of settings.
        _restrict_file_access(connection, readable_folders)
        return _run_interruptible_query(connection, sql, FOLDER_QUERY_STATEMENT_TYPES, database_path)


def _run_interruptible_query(
    connection: duckdb.DuckDBPyConnection, sql: str, allowed_statement_types: Collection[str], database_path: Path
) -> pl.DataFrame:
    """Run one SQL statement in a thread, so that Ctrl-C is noticed meanwhile.

    Ctrl-C interrupts the statement, and ends this process if DuckDB does not stop in time.

    Args:
        connection: An open connection.
        sql: The statement.
        allowed_statement_types: The types of statements that are allowed, such as SELECT.
        database_path: The warehouse file.

    Raises:
        WarehouseError: The text is not one statement of an allowed type.
        duckdb.Error: The statement fails.
    """
    with ThreadPoolExecutor(1) as pool:
        query_future = pool.submit(_run_read_only_query, connection, sql, allowed_statement_types)
        try:
            # Wait in short steps: if another thread has got the signal of Ctrl-C, Python raises KeyboardInterrupt here
            # only between two waits.
            while not query_future.done():
                wait([query_future], POLL_INTERVAL_SECONDS)
        except KeyboardInterrupt:
            _interrupt_or_kill(connection, query_future, database_path)
            raise
        return query_future.result()


def _refuse_lone_surrogates(sql: str) -> None:
    """Check that a query is valid Unicode text, without half of a character (a lone surrogate).

    Raises:
        WarehouseError: It is not, so that DuckDB could not read it.
    """
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise WarehouseError(f"the query holds half of a character at {error.start}; remove it") from error


def _build_memory_limits(max_memory_gib: float | None) -> dict[str, Any]:
    """Return DuckDB's settings that limit the memory, and the space on the disk, that a query may use.

    Args:
        max_memory_gib: The limit of each in GiB, or None for no limit.
    """
    if max_memory_gib is None:
        return {}
    limit = f"{max_memory_gib}GiB"
    return {"memory_limit": limit, "max_temp_directory_size": limit}


def _interrupt_or_kill(
    connection: duckdb.DuckDBPyConnection, query_future: "Future[pl.DataFrame]", database_path: Path
) -> None:
    """Interrupt a query. If DuckDB does not stop within INTERRUPT_SECONDS, end this process.

    Args:
        connection: The connection of the query.
        query_future: Done as soon as the query has ended.
        database_path: The warehouse file.
    """
    attempt_count = round(INTERRUPT_SECONDS / POLL_INTERVAL_SECONDS)
    for _ in range(attempt_count):
        connection.interrupt()  # more than once, because it may be between two statements
        if wait([query_future], POLL_INTERVAL_SECONDS).done:
            return

    # Remove what the query has spilled to the disk, then end the process as Ctrl-C does by default.
    shutil.rmtree(_get_spill_folder(database_path), ignore_errors=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _restrict_file_access(connection: duckdb.DuckDBPyConnection, readable_folders: Sequence[Path]) -> None:
    """Let a connection read the files in some folders and below, and no others, for good.

    Raises:
        WarehouseError: A folder does not exist.
    """
    quoted_folders: list[str] = []
    for folder in readable_folders:
        if not folder.is_dir():
            raise WarehouseError(f"--read {folder}: there is no such folder; name one that holds your files")

        # DuckDB compares paths without following links, so both forms of the path are allowed.
        quoted_folders.append(quote_sql(folder.absolute()))
        quoted_folders.append(quote_sql(folder.resolve()))

    # First the allowed folders: after the settings below, nothing can be changed any more.
    connection.execute(f"SET allowed_directories = [{', '.join(quoted_folders)}]")
    for setting, value in NO_EXTERNAL_ACCESS_CONFIG.items():
        connection.execute(f"SET {setting} = {value}")


def _run_read_only_query(
    connection: duckdb.DuckDBPyConnection, sql: str, allowed_statement_types: Collection[str]
) -> pl.DataFrame:
    """Run a single SQL statement and return its answer.

    Args:
        connection: An open connection.
        sql: The statement.
        allowed_statement_types: The types of statements that are allowed, such as SELECT.

    Raises:
        WarehouseError: There are several statements, or one of another type.
        duckdb.Error: The statement fails, or there is none.
    """
    statements = connection.extract_statements(sql)
    all_are_allowed = all(statement.type.name in allowed_statement_types for statement in statements)
    if len(statements) > 1 or not all_are_allowed:
        raise WarehouseError("only one read-only query is answered: select, from, with, pivot, describe or summarize")

    # DESCRIBE is answered here, with comments. None for any other statement.
    description = answer_describe_statement(connection, sql)
    if description is not None:
        return description
    return query_frame(connection, sql)


@contextmanager
def open_warehouse(
    database_path: Path, config: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the warehouse, a DuckDB file, for reading. Only temporary tables can be made in it.

    Args:
        database_path: The file.
        config: Settings of DuckDB, such as NO_EXTERNAL_ACCESS_CONFIG.

    Yields:
        The connection.

    Raises:
        WarehouseError: There is no such file, or DuckDB raised an error, also in the `with` block.
    """
    if not database_path.is_file():
        raise WarehouseError(
            f"there is no warehouse at {database_path} yet; run `toolformer-dag run`, or materialize "
            "warehouse/toolformer_duckdb"
        )

    try:
        # The order counts: DuckDB refuses `temp_directory` if it stands before `enable_external_access`.
        spill_folder = str(_get_spill_folder(database_path))
        full_config = {**OFFLINE_CONFIG, **config, "temp_directory": spill_folder}
        with duckdb.connect(database_path, read_only=True, config=full_config) as connection:
            yield connection
    except duckdb.Error as error:
        raise WarehouseError(_format_message_with_remedy(database_path, error)) from error


def _format_message_with_remedy(database_path: Path, error: duckdb.Error) -> str:
    """Format the message of a DuckDB error, with what to do about it if that is known."""
    message = str(error)
    is_name_unknown = isinstance(error, duckdb.CatalogException)
    if is_name_unknown and not _query_object_names(database_path):
        return f"{database_path} holds no tables yet; run `toolformer-dag run`"

    for words, remedy in REMEDIES_BY_ERROR_WORDS.items():
        if words in message:
            first_line = message.splitlines()[0]
            return f"{database_path}: {first_line}; {remedy}"

    if NO_ACCESS_WORDS in message:
        return f"{message}; {NO_ACCESS_REMEDY}"
    return message


@cache
def _get_spill_folder(database_path: Path) -> Path:
    """Return the folder for what does not fit into memory.

    Each process has its own. If the process is killed, `clean` recognizes the folder by its name.
    """
    return build_temporary_path(database_path)


def refuse_foreign_file(database_path: Path) -> None:
    """Check that a file can be replaced by the warehouse: it has to be missing, or built by this project.

    A damaged file with a seal beside it can be replaced too, unless it is another database.

    Raises:
        WarehouseError: Something else is in the place of the warehouse.
    """
    if not database_path.exists():
        return
    if database_path.is_dir():
        raise _build_foreign_file_error(database_path, "a folder")

    seal = read_seal(database_path) if database_path.is_file() else None
    if seal and seal["bytes"] == database_path.stat().st_size:  # built by this project
        return

    # The file is damaged, has lost its seal, or is another one.
    if seal is None and not _is_duckdb_file(database_path):
        raise _build_foreign_file_error(database_path, "no DuckDB file and will not be replaced")
    _refuse_foreign_tables(database_path)  # a damaged file, whose tables nobody can read, passes


def _refuse_foreign_tables(database_path: Path) -> None:
    """Check that a database has the tables that every warehouse has, or nothing at all, or cannot be read.

    Raises:
        WarehouseError: It has other tables, so it was not built by this project.
    """
    object_names = _query_object_names(database_path)
    if object_names and not TABLES_OF_EVERY_WAREHOUSE.issubset(object_names):
        raise _build_foreign_file_error(
            database_path, f"a database with the {object_names[0]}, which was not built here and stays"
        )


def _build_foreign_file_error(database_path: Path, file_description: str) -> WarehouseError:
    """Return the error for another file in the place of the warehouse.

    Args:
        database_path: The path of the file.
        file_description: What the file is, such as "a folder".
    """
    return WarehouseError(
        f"paths.warehouse: {database_path} is {file_description}; move it away, or name another file, as in "
        "paths.warehouse = 'lake/toolformer.duckdb'"
    )


def _query_object_names(database_path: Path) -> list[str]:
    """Return the tables, views, macros and other objects in a database, each with its kind.

    Returns:
        Such as ["table letters", "view funnel"]. Empty if the database cannot be read.
    """
    config = {**OFFLINE_CONFIG, **NO_EXTERNAL_ACCESS_CONFIG}
    with suppress(duckdb.Error), duckdb.connect(database_path, read_only=True, config=config) as connection:
        return [name for (name,) in connection.sql(OBJECT_NAMES_SQL).fetchall()]
    return []


def _is_duckdb_file(file_path: Path) -> bool:
    """Return whether the first bytes of a file are those of a DuckDB file.

    They are a checksum (8 bytes), DUCKDB_MAGIC_BYTES (4 bytes), and the version of the format (8 bytes).

    Raises:
        ReadError: The file cannot be read.
    """
    if not file_path.is_file():
        return False

    try:
        with file_path.open("rb") as stream:
            first_bytes = stream.read(20)
    except OSError as error:
        raise ReadError(file_path, error) from error

    # In a text that happens to have the magic bytes in this place, the version would be a huge number.
    magic_bytes = first_bytes[8:12]
    storage_version = int.from_bytes(first_bytes[12:], "little")
    return magic_bytes == DUCKDB_MAGIC_BYTES and storage_version < MAX_STORAGE_VERSION


def find_warehouse_damage(database_path: Path) -> str | None:
    """Read the whole warehouse file, and compare it with the hash in its seal.

    Returns:
        What is wrong with the file, or None if it is as it was built.
    """
    # A build first renames its file and then writes the seal. The lock keeps this from looking between the two.
    with lock_builds(database_path):
        seal = read_seal(database_path)
        if seal is None:
            return f"cannot be verified: {get_seal_path(database_path)} is missing or damaged"

        try:
            content_hash = compute_file_content_hash(database_path)
        except OSError as error:
            return f"cannot be verified ({error})"

    is_as_built = content_hash == seal["hash"]
    return None if is_as_built else "is damaged: its content is not what was built"


def read_seal(database_path: Path) -> dict[str, Any] | None:
    """Read the seal of a warehouse, a small file beside it that describes the file that was built last.

    Returns:
        `hash` and `bytes` (size) of the file, and `content`, the versions of what it was built from. None if the seal
        is missing or damaged.
    """
    try:
        return unseal_record(get_seal_path(database_path).read_bytes())
    except (OSError, ValueError):
        return None


def get_seal_path(database_path: Path) -> Path:
    """Return the path of the seal of a warehouse, the hidden file beside it that has its hash."""
    return database_path.with_name(f".{database_path.name}.seal")


def lock_builds(database_path: Path) -> AbstractContextManager[bool]:
    """Return a context that holds the lock of a warehouse file, so that builds of it wait for each other."""
    return hold_file_lock(database_path.with_name(f".{database_path.name}.lock"))


def build_warehouse_output(lake: Lake, database_path: Path) -> LocalOutput:
    """Return the warehouse file and its seal as a local output, by which machines share them in an object store."""
    asset_name = f"warehouse{lake.round_suffix}/toolformer_duckdb"
    file_names = (database_path.name, get_seal_path(database_path).name)
    return LocalOutput(lake.storage, asset_name, database_path.parent, file_names)


def receive_warehouse(settings: Settings) -> Path:
    """Download the warehouse if another machine has built a newer one, and return its path by the settings.

    Raises:
        ObjectStoreError: The object store cannot be read.
        WriteError: The file cannot be written.
    """
    lake = Lake.from_settings(settings.paths, settings.rounds.name_suffix)
    build_warehouse_output(lake, settings.warehouse_file).receive_files()
    return settings.warehouse_file
