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

from toolformer_dag.files import ReadError, StorageError, build_temporary_path, locked, unseal_record
from toolformer_dag.identity import stream_hash
from toolformer_dag.lake.descriptions import described
from toolformer_dag.lake.local_outputs import LocalOutput
from toolformer_dag.lake.queries import OFFLINE, quote_sql, rows
from toolformer_dag.lake.table import Lake
from toolformer_dag.settings.sections import Settings

CLOSED: dict[str, str | bool | int | float | list[str]] = {"enable_external_access": False, "lock_configuration": True}
"""A query reads the warehouse and nothing else: no file, no address, no extension."""
QUERIES = ("SELECT", "EXPLAIN", "MULTI")
"""Types of statements: DESCRIBE, SUMMARIZE, FROM and WITH count as SELECT, PIVOT as MULTI."""
QUERIES_OVER_FOLDERS = ("SELECT", "MULTI")
"""The same where folders may be read: EXPLAIN ANALYZE runs what it explains, a COPY into a folder too."""
MAGIC = b"DUCK"
"""What stands in a DuckDB file behind the checksum of its first block, eight bytes."""
STORAGE_VERSIONS = 2**16
"""More than DuckDB will ever have; the number after the magic bytes would be far larger in a text."""
TABLES_OF_EVERY_WAREHOUSE = frozenset({"table lanes", "table rejections"})
"""Tables of every warehouse, by which a file is known whose seal is lost."""
NAMES = """
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
REMEDIES = {
    "Corrupt database file": "run `toolformer-dag run`, which builds it anew from the lake",
    "not a valid DuckDB database file": "move it away, and run what writes it again",
    "Loading external extensions": "it is a file of another database; move it away, and run what writes it again",
    "Out of Memory Error": "ask for less at once, or give queries more with `--set execution.query_gib=16`",
}
"""What to do about an error of DuckDB while a warehouse is read, by words of it."""
INTERRUPT_SECONDS = 5
"""In so many seconds an interrupted query has to end; after them its process is killed."""
POLL_SECONDS = 0.1
"""How long a query is waited for before signals are looked at again."""


class WarehouseError(StorageError):
    """No warehouse yet, or SQL that it cannot answer."""


def query(database: Path, sql: str, gib: float | None = None, folders: Sequence[Path] = ()) -> pl.DataFrame:
    """Run one read-only query over the warehouse, a DuckDB file.

    DESCRIBE also shows the comments of tables and columns. Ctrl-C ends the query. If DuckDB does not stop
    in time, it ends this process.

    Args:
        database: The warehouse file.
        sql: The query.
        gib: The most memory that it may use, in GiB, and as much space on the disk. None sets no limit.
        folders: Folders with files that the query may read too. It can read no other files.

    Raises:
        WarehouseError: There is no warehouse, or it cannot answer the query.
    """
    _refuse_half_characters(sql)
    config = _build_limits(gib)

    if not folders:
        with open_warehouse(database, config | CLOSED) as connection:  # no access to other files
            return _answer_or_stop(connection, sql, QUERIES, database)
    with open_warehouse(database, config) as connection:
        # Forbids access to all other files, and any further change of settings.
        _close_all_but(connection, folders)
        return _answer_or_stop(connection, sql, QUERIES_OVER_FOLDERS, database)


def _answer_or_stop(
    connection: duckdb.DuckDBPyConnection, sql: str, kinds: Collection[str], database: Path
) -> pl.DataFrame:
    """Run one SQL statement in a thread, so that Ctrl-C is noticed meanwhile.

    Ctrl-C interrupts the statement, and ends this process if DuckDB does not stop in time.

    Args:
        connection: An open connection.
        sql: The statement.
        kinds: The types of statements that are allowed, such as SELECT.
        database: The warehouse file.
    """
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(_answer_query, connection, sql, kinds)
        try:
            # Python raises KeyboardInterrupt only between short waits: a thread of DuckDB may have got the signal.
            while not answer.done():
                wait([answer], POLL_SECONDS)
        except KeyboardInterrupt:
            _stop_or_die(connection, answer, database)
            raise
        return answer.result()


def _refuse_half_characters(sql: str) -> None:
    """Raise WarehouseError where a query holds a lone surrogate, which DuckDB cannot read."""
    try:
        sql.encode()
    except UnicodeEncodeError as error:
        raise WarehouseError(f"the query holds half of a character at {error.start}; remove it") from error


def _build_limits(gib: float | None) -> dict[str, Any]:
    """Return DuckDB's settings for the most memory, and the most space on the disk, of a query; None: no limit."""
    if gib is None:
        return {}
    return {"memory_limit": f"{gib}GiB", "max_temp_directory_size": f"{gib}GiB"}


def _stop_or_die(connection: duckdb.DuckDBPyConnection, answer: "Future[pl.DataFrame]", database: Path) -> None:
    """Interrupt a query. If DuckDB does not stop within INTERRUPT_SECONDS, end this process.

    Args:
        connection: The connection of the query.
        answer: Done as soon as the query has ended.
        database: The warehouse file.
    """
    for _ in range(round(INTERRUPT_SECONDS / POLL_SECONDS)):
        connection.interrupt()  # more than once: it may be between two statements
        if wait([answer], POLL_SECONDS).done:
            return

    # Remove what the query has spilled to the disk, then end the process as Ctrl-C does by default.
    shutil.rmtree(_get_spill_folder(database), ignore_errors=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _close_all_but(connection: duckdb.DuckDBPyConnection, folders: Sequence[Path]) -> None:
    """Let a connection read the files in some folders and below, and no others, for good.

    Raises:
        WarehouseError: A folder does not exist.
    """
    allowed: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise WarehouseError(f"--read {folder}: there is no such folder; name one that holds your files")
        allowed.append(quote_sql(folder.absolute()))
        allowed.append(quote_sql(folder.resolve()))  # DuckDB follows no link before it compares

    connection.execute(f"SET allowed_directories = [{', '.join(allowed)}]")
    for setting, value in CLOSED.items():
        connection.execute(f"SET {setting} = {value}")


def _answer_query(connection: duckdb.DuckDBPyConnection, sql: str, kinds: Collection[str]) -> pl.DataFrame:
    """Run one statement whose type is among `kinds`. Raises WarehouseError for any other text."""
    statements = connection.extract_statements(sql)
    if len(statements) > 1 or any(statement.type.name not in kinds for statement in statements):
        raise WarehouseError("only one read-only query is answered: select, from, with, pivot, describe or summarize")
    description = described(connection, sql)
    return rows(connection, sql) if description is None else description


@contextmanager
def open_warehouse(
    database: Path, config: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open the warehouse, a DuckDB file, for reading. Only temporary tables can be made in it.

    Args:
        database: The file.
        config: Settings of DuckDB, such as CLOSED.

    Yields:
        The connection.

    Raises:
        WarehouseError: There is no such file, or DuckDB raised an error, also in the `with` block.
    """
    if not database.is_file():
        raise WarehouseError(
            f"there is no warehouse at {database} yet; run `toolformer-dag run`, or materialize "
            "warehouse/toolformer_duckdb"
        )

    try:
        # The order counts: before `enable_external_access` = False, DuckDB refuses `temp_directory`.
        settings = {**OFFLINE, **config, "temp_directory": str(_get_spill_folder(database))}
        with duckdb.connect(database, read_only=True, config=settings) as connection:
            yield connection
    except duckdb.Error as error:
        raise WarehouseError(_format_message_with_remedy(database, error)) from error


def _format_message_with_remedy(database: Path, error: duckdb.Error) -> str:
    """Format the message of a DuckDB error.

    What to do about the error is added if it is known.
    """
    message = str(error)
    if isinstance(error, duckdb.CatalogException) and not _query_names(database):
        return f"{database} holds no tables yet; run `toolformer-dag run`"

    for words, remedy in REMEDIES.items():
        if words in message:
            return f"{database}: {message.splitlines()[0]}; {remedy}"

    if NO_ACCESS_WORDS in message:
        return f"{message}; {NO_ACCESS_REMEDY}"
    return message


@cache
def _get_spill_folder(database: Path) -> Path:
    """Return the folder for what does not fit into memory: one of this process, which `clean` knows by its name."""
    return build_temporary_path(database)


def refuse_other_file(database: Path) -> None:
    """Check that a file can be replaced by the warehouse: it has to be missing, or built by this project.

    A damaged file with a seal beside it can be replaced too, unless it is another database.

    Raises:
        WarehouseError: Something else is in the place of the warehouse.
    """
    if not database.exists():
        return
    if database.is_dir():
        raise _build_other_file_error(database, "a folder")

    seal = read_seal(database) if database.is_file() else None
    if seal and seal["bytes"] == database.stat().st_size:
        return

    # The file is damaged, has lost its seal, or is another one.
    if not (seal or _is_duckdb_file(database)):
        raise _build_other_file_error(database, "no DuckDB file and will not be replaced")
    _refuse_other_tables(database)  # a damaged file, whose tables nobody can read, passes


def _refuse_other_tables(database: Path) -> None:
    """Raise WarehouseError for a database that holds tables, but not those that every warehouse has."""
    names = _query_names(database)
    if names and not TABLES_OF_EVERY_WAREHOUSE.issubset(names):
        raise _build_other_file_error(database, f"a database with the {names[0]}, which was not built here and stays")


def _build_other_file_error(database: Path, kind: str) -> WarehouseError:
    """Return the error for a file in the warehouse's place. kind: what it is, in words."""
    return WarehouseError(
        f"paths.warehouse: {database} is {kind}; move it away, or name another file, as in "
        "paths.warehouse = 'lake/toolformer.duckdb'"
    )


def _query_names(database: Path) -> list[str]:
    """Return what a database holds, each with its kind, as in `table letters`; nothing where it cannot be read."""
    with suppress(duckdb.Error), duckdb.connect(database, read_only=True, config={**OFFLINE, **CLOSED}) as connection:
        return [name for (name,) in connection.sql(NAMES).fetchall()]
    return []


def _is_duckdb_file(file: Path) -> bool:
    """Return whether the first bytes of a file are those of a DuckDB file.

    They are a checksum (8 bytes), MAGIC (4 bytes), and the version of the format (8 bytes).

    Raises:
        ReadError: The file cannot be read.
    """
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            head = stream.read(20)
    except OSError as error:
        raise ReadError(file, error) from error

    # In a text that happens to have MAGIC in this place, this number would be huge.
    storage_version = int.from_bytes(head[12:], "little")
    return head[8:12] == MAGIC and storage_version < STORAGE_VERSIONS


def damage(database: Path) -> str | None:
    """Read the whole warehouse file, and compare it with the hash in its seal.

    Returns:
        What is wrong with the file, or None if it is as it was built.
    """
    # Another build first renames its file, then writes the seal. Do not look between the two.
    with lock_builds(database):
        seal = read_seal(database)
        if seal is None:
            return f"cannot be verified: {get_seal_path(database)} is missing or damaged"

        try:
            content_hash = stream_hash(database)
        except OSError as error:
            return f"cannot be verified ({error})"

    is_as_built = content_hash == seal["hash"]
    return None if is_as_built else "is damaged: its content is not what was built"


def read_seal(database: Path) -> dict[str, Any] | None:
    """Return `hash`, `bytes` and `content` of the file that was built last; None without a seal that is whole."""
    try:
        return unseal_record(get_seal_path(database).read_bytes())
    except (OSError, ValueError):
        return None


def get_seal_path(database: Path) -> Path:
    """Return where the seal of a warehouse lies."""
    return database.with_name(f".{database.name}.seal")


def lock_builds(database: Path) -> AbstractContextManager[bool]:
    """Return the lock that builds of this file hold, so that they wait for each other."""
    return locked(database.with_name(f".{database.name}.lock"))


def build_warehouse_output(lake: Lake, database: Path) -> LocalOutput:
    """Return the file and its seal, as the lake shares them among machines."""
    names = (database.name, get_seal_path(database).name)
    return LocalOutput(lake.storage, f"warehouse{lake.suffix}/toolformer_duckdb", database.parent, names)


def received(settings: Settings) -> Path:
    """Return the warehouse that the settings name, after bringing it up to what another machine has built."""
    lake = Lake.of(settings.paths, settings.rounds.suffix)
    build_warehouse_output(lake, settings.warehouse).receive()
    return settings.warehouse
