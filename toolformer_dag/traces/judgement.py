"""Judge recorded conversations: bring their tables in the lake up to date, and show them in a DuckDB file.

The tables are the ones of `trace_stages`. The command `toolformer-dag judge` updates them without Dagster. The DuckDB
file is built anew if a row, a view or the setting `traces.share` has changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import sum_token_counts
from toolformer_dag.computing.stage import REJECTIONS_FIELD, ByChunk, TableOutput, Work
from toolformer_dag.computing.update import update_table
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, build_configured_executor
from toolformer_dag.files import UserError, WriteError, build_temporary_path, replace_file
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.database_files import FULL_DISK_ERRORS, checkpoint_database, parse_error_reason
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.queries import OFFLINE_CONFIG, quote_sql, read_sql_file
from toolformer_dag.lake.session import enter_session
from toolformer_dag.lake.warehouse import WarehouseError, query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces import recorded_calls, recorded_conversations
from toolformer_dag.traces.judge import load_variant_writer
from toolformer_dag.traces.recorded_conversations import REJECTED_RECORDS_TABLE_NAME
from toolformer_dag.traces.trace_stages import SHOWN_TABLE_NAMES, build_trace_tables

TABLES_SQL = read_sql_file(__package__, "trace_tables.sql")
"""SQL that creates the tables of the file from views over the tables of the lake."""
VIEWS_SQL = read_sql_file(__package__, "trace_views.sql")
"""SQL that creates the views of the file, such as trace_calls with the verdicts, over its tables."""
MEMORY_LIMIT = "1GB"
"""The memory that DuckDB may use while it builds the file; the rest is written to a temporary folder."""
Advance = Callable[[TableOutput, int, int], None]
"""A function that shows progress, called as `advance(table, done, total)` while a table is brought up to date.

`done` and `total` count the `unit` of the table's stage, such as calls.
"""


@dataclass(frozen=True)
class Judgement:
    """The outcome of judging conversations.

    Attributes:
        plan: the plan with the conversations and their tables.
        database: the DuckDB file that shows the outcome.
        conversation_count: the number of conversations.
        rejection_count: the number of rejections: records, or parts of them, that could not be used.
        summary_line: a line with how many calls help, do not help, cannot be told and failed, in all and by tool.
        work: what was computed now, and what was reused.
    """

    plan: Plan
    database: Path
    conversation_count: int
    rejection_count: int
    summary_line: str
    work: Work

    @property
    def loss_counts(self) -> Mapping[str, int]:
        """How many losses were "computed" now, and how many were "reused" from earlier runs."""
        return {
            "computed": self.work.computed_rows_by_kind["losses"],
            "reused": self.work.reused_rows_by_kind["losses"],
        }

    @property
    def model_token_count(self) -> int:
        """How many tokens went through the model now."""
        return sum_token_counts(self.work.tokens_by_kind)


def judge_traces(
    settings: Settings, sources: Sequence[str], database: Path, advance: Advance = lambda table, done, total: None
) -> Judgement:
    """Judge the calls of recorded conversations, and replace a DuckDB file with one that shows the verdicts.

    Args:
        settings: The settings, which name the judge (a language model).
        sources: The files with conversations.
        database: The path of the DuckDB file.
        advance: Shows the progress.

    Raises:
        UserError: A source is missing, or no source has a conversation with a call.
        ModelError: The model cannot be used.
        StorageError: The lake cannot be used.
    """
    with open_judgement(settings, sources, database, advance) as judgement:
        pass  # if a new file was made, the end of the block moves it to `database`
    return replace(judgement, database=database)


@contextmanager
def open_judgement(
    settings: Settings, sources: Sequence[str], database: Path, advance: Advance = lambda table, done, total: None
) -> Iterator[Judgement]:
    """Judge the calls of recorded conversations, and write the verdicts into a DuckDB file.

    Inside the `with` block the verdicts are in a new file beside `database`, which no other command replaces. At the
    end of the block, even after an error, that file is moved over `database`. If nothing has changed since `database`
    was built, no new file is made, and the verdicts are read from `database`.

    Args:
        settings: The settings, which name the judge (a language model).
        sources: The files with conversations.
        database: The path of the DuckDB file.
        advance: Shows the progress.

    Raises:
        UserError: A source is missing, or no source has a conversation with a call.
        ModelError: The model cannot be used.
        StorageError: The lake cannot be used.
    """
    plan = build_conversation_plan(settings, sources)
    # This stores the losses, from which the verdicts follow, in the lake (the folder of all tables).
    work = update_trace_tables(plan, advance)

    version = compute_traces_version(plan)  # a hash of these tables and of what else the file is built from
    if read_database_version(database) == version:
        yield _build_judgement(plan, database, work)
        return

    with _use_temporary_file(database) as new_file:
        build_traces_database(plan, new_file, version)
        with _move_file_at_end(new_file, database):
            yield _build_judgement(plan, new_file, work)


@contextmanager
def _use_temporary_file(database: Path) -> Iterator[Path]:
    """Choose a temporary path beside a DuckDB file, and delete what is there when the `with` block ends."""
    temporary_file = build_temporary_path(database, ".duckdb")
    write_ahead_log = temporary_file.with_name(f"{temporary_file.name}.wal")  # DuckDB leaves one after an error
    try:
        yield temporary_file
    finally:
        temporary_file.unlink(missing_ok=True)
        write_ahead_log.unlink(missing_ok=True)


@contextmanager
def _move_file_at_end(new_file: Path, database: Path) -> Iterator[None]:
    """Move the file `new_file` over `database` when the block ends, even after an error."""
    try:
        yield
    finally:
        replace_file(new_file, database)


def build_conversation_plan(settings: Settings, sources: Sequence[str]) -> Plan:
    """Return a plan that only judges the conversations of some files, without the tools and rounds of the settings.

    Raises:
        ModelError: The model cannot be used.
        StorageError: The lake cannot be used.
    """
    traces = settings.traces.model_copy(update={"source": tuple(sources)})
    rounds = settings.rounds.model_copy(update={"count": 1})  # conversations are judged by the model of the settings
    changed_settings = settings.model_copy(
        update={"traces": traces, "tools": {}, "rounds": rounds, "proposer": None},
    )
    return Plan.from_settings(changed_settings)


def update_trace_tables(plan: Plan, advance: Advance, *, with_losses: bool = True) -> Work:
    """Bring the tables of recorded conversations up to date, without Dagster.

    Other commands may update the same tables at the same time.

    Args:
        plan: The plan with the conversations.
        advance: Shows the progress of each table.
        with_losses: Whether tables with losses are updated too. Only these need the model.

    Returns:
        How much was computed and how much was reused.

    Raises:
        UserError: No conversation could be read, or no conversation has a call.
    """
    tables = _list_tables_to_update(plan, with_losses=with_losses)
    table_by_name = {table.name: table for table in tables}
    # Worker processes find their table with `build_trace_tables`.
    start_executor = partial(build_configured_executor, build_trace_tables)
    worker = Worker(plan)

    total_work = Work()
    with closing(Workers(worker, table_by_name, start_executor)) as workers:
        for table in tables:
            report = update_table(worker, workers, table, partial(advance, table))
            total_work += report.work
            # Without conversations or calls the later tables, which need the model, are not begun.
            _require_rows(plan, table.name)
    return total_work


def _list_tables_to_update(plan: Plan, *, with_losses: bool) -> Sequence[TableOutput]:
    """Return the tables of a plan's conversations, each after the tables that it reads."""
    tables = build_trace_tables(plan)
    if with_losses:
        return tables
    return [table for table in tables if not _has_losses(table)]


def _has_losses(table: TableOutput) -> bool:
    """Return whether a table holds losses: only these are made in chunks, by a model."""
    return isinstance(table.stage.row_maker, ByChunk)


def _require_rows(plan: Plan, updated_table_name: str) -> None:
    """Raise UserError if no conversation could be read or, once the table of calls is updated, if there is no call."""
    require_conversations(plan)
    if updated_table_name == recorded_calls.TABLE_NAME:
        require_calls(plan)


def require_conversations(plan: Plan) -> None:
    """Check that some conversation could be read.

    Raises:
        UserError: There is no conversation. The message has the reason of the first rejection.
    """
    has_conversations = any(pointer.row_count > 0 for pointer in _read_conversation_pointers(plan))
    if has_conversations:
        return

    rejection = _find_first_rejection(plan)
    reason = "" if rejection is None else f" ({rejection['reason']}: {rejection['detail']})"
    raise UserError(f"{', '.join(plan.settings.traces.source)}: no conversation could be read{reason}")


def require_calls(plan: Plan) -> None:
    """Check that some conversation has a call of a tool.

    Raises:
        UserError: There is no call. The message shows how the first conversation was read.
    """
    calls_table = plan.lake.get_table(recorded_calls.TABLE_NAME)  # a row per call
    with enter_session():  # the manifest of the table is read once for all shards
        pointers = [calls_table.read_pointer(shard) for shard in plan.conversation_shards_by_name]
    has_calls = any(pointer.row_count > 0 for pointer in pointers)
    if has_calls:
        return

    raise UserError(
        f"{', '.join(plan.settings.traces.source)}: no call of a tool was found in the conversations. The first, "
        f"{_describe_first_conversation(plan)}{_describe_first_rejection(plan)}. "
        "`toolformer-dag judge --forms` lists the forms that are read"
    )


def _describe_first_conversation(plan: Plan) -> str:
    """Return how the first conversation was read: its name, its form and the beginning of its messages."""
    table = plan.lake.get_table(recorded_conversations.TABLE_NAME)
    conversations = table.scan_parts(plan.conversation_shards_by_name)
    first = conversations.select("conversation", "form", "messages").head(1).collect()
    [(name, form, messages_json)] = first.rows()
    return f"{name}, was read as {form}: {messages_json[:300]}"


def _describe_first_rejection(plan: Plan) -> str:
    """Return a clause that says what was rejected first, or "" if nothing was rejected."""
    rejection = _find_first_rejection(plan)
    return "" if rejection is None else f"; not understood: {rejection['detail']}"


def _find_first_rejection(plan: Plan) -> dict[str, Any] | None:
    """Return the first row of the table of rejected records, in the order of the shards.

    Returns:
        The row by column, or None if nothing was rejected.
    """
    table = plan.lake.get_table(REJECTED_RECORDS_TABLE_NAME)
    first = table.scan_parts(plan.conversation_shards_by_name).head(1).collect()
    return first.row(0, named=True) if first.height else None


def _read_conversation_pointers(plan: Plan) -> list[Pointer]:
    """Return, for each shard, the pointer to its published conversations, which has their number and their record.

    A shard is one large file of conversations, or a group of small ones.
    """
    table = plan.lake.get_table(recorded_conversations.TABLE_NAME)
    with enter_session():
        return [table.read_pointer(shard) for shard in plan.conversation_shards_by_name]


def _build_judgement(plan: Plan, database: Path, work: Work) -> Judgement:
    """Summarize the outcome of judging.

    Args:
        plan: The plan with the conversations, whose tables are up to date.
        database: The DuckDB file with the verdicts.
        work: How much was computed and reused to update the tables.
    """
    pointers = _read_conversation_pointers(plan)  # one for each shard
    rejection_count = 0
    for pointer in pointers:
        rejection_count += sum(rejection["count"] for rejection in pointer.record[REJECTIONS_FIELD])

    return Judgement(
        plan=plan,
        database=database,
        conversation_count=sum(pointer.row_count for pointer in pointers),
        rejection_count=rejection_count,
        summary_line=str(query(database, "FROM trace_summary").item()),
        work=work,
    )


def compute_traces_version(plan: Plan) -> str:
    """Return a hash of all that the DuckDB file is built from.

    That is the versions of its tables, the SQL, the setting `traces.share`, and the judge's name and dtype. If the hash
    is unchanged, the file need not be built again.
    """
    with enter_session():
        versions_by_table = {}
        for name in SHOWN_TABLE_NAMES:
            table = plan.lake.get_table(name)
            version_by_shard = {shard: table.find_part_version(shard) for shard in plan.conversation_shards_by_name}
            versions_by_table[name] = version_by_shard

    share = plan.settings.traces.share
    return fingerprint([versions_by_table, TABLES_SQL, VIEWS_SQL, share, _get_judge_description(plan)])


def _get_judge_description(plan: Plan) -> dict[str, str]:
    """Return the model's name and dtype, which the file shows."""
    model = plan.settings.model
    return {"model": model.name, "dtype": model.dtype}


def read_database_version(database: Path) -> str | None:
    """Return the version (`compute_traces_version`) from which a file was built, or None if it cannot be read."""
    with suppress(WarehouseError):
        return str(query(database, "SELECT made_from FROM trace_settings").item())
    return None


def build_traces_database(plan: Plan, database_file: Path, version: str) -> None:
    """Write a new DuckDB file that shows the tables of recorded conversations.

    Args:
        plan: The plan with the conversations, whose tables are up to date.
        database_file: The path of the file.
        version: The hash of what the file is built from (`compute_traces_version`). It is stored in the file.

    Raises:
        WriteError: The disk is full.
        StorageError: A table cannot be read.
        RenderingError: No chat template fits the model.
    """
    database_file.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fill_database(plan, database_file, version)
    except FULL_DISK_ERRORS as error:  # the exceptions of DuckDB that may mean a full disk
        raise WriteError(database_file, OSError(parse_error_reason(error))) from error


def _fill_database(plan: Plan, database_file: Path, version: str) -> None:
    """Create a DuckDB file with the tables and views that show recorded conversations.

    Args:
        plan: The plan with the conversations.
        database_file: The path of the new file.
        version: The hash of what the file is built from.
    """
    # VIEWS_SQL has the placeholder $share.
    create_views = VIEWS_SQL.replace("$share", repr(plan.settings.traces.share))
    with enter_session(), _create_database(database_file) as connection:
        # TABLES_SQL reads judge_settings and a temporary view over the Parquet files of each table in the lake.
        connection.register("judge_settings", _build_judge_settings(plan, version).to_arrow())
        for name in SHOWN_TABLE_NAMES:
            connection.execute(_build_view_sql(plan, name))
        connection.execute(TABLES_SQL)

        connection.execute(create_views)
        checkpoint_database(connection)


def _create_database(database_file: Path) -> duckdb.DuckDBPyConnection:
    """Open a new DuckDB file. What takes more than MEMORY_LIMIT goes to a temporary folder beside the file."""
    config = {
        **OFFLINE_CONFIG,
        "memory_limit": MEMORY_LIMIT,
        "temp_directory": str(database_file.with_suffix(".spilled")),
    }
    connection = duckdb.connect(database_file, config=config)
    connection.execute("SET preserve_insertion_order = false")
    return connection


def _build_view_sql(plan: Plan, table_name: str) -> str:
    """Return SQL that creates a temporary view over a table of the lake: `call_losses` for traces/call_losses."""
    view_name = table_name.partition("/")[2]
    table = plan.lake.get_table(table_name)
    files = table.list_all_files(plan.conversation_shards_by_name)
    quoted_files = ", ".join(quote_sql(file) for file in files)
    return f"CREATE TEMP VIEW {view_name} AS FROM read_parquet([{quoted_files}], hive_partitioning = false)"


def _build_judge_settings(plan: Plan, version: str) -> pl.DataFrame:
    """Build the table trace_settings, whose only row says how the calls were judged.

    Args:
        plan: The plan with the settings.
        version: The hash of what the DuckDB file is built from.

    Returns:
        A table with the settings of recorded conversations (without their files), the judge (a language model), the
        chat template with which it reads conversations, and the version.
    """
    rendering = load_variant_writer(plan.settings).rendering
    row = {
        **plan.settings.traces.model_dump(exclude={"source"}),
        **_get_judge_description(plan),
        "made_from": version,
        "rendering": rendering.name,
        "rendering_fingerprint": rendering.fingerprint,
    }
    return pl.DataFrame([row])


def require_same_judge(settings: Settings, database: Path) -> None:
    """Check that a file was judged by the model that the settings name, in the same dtype.

    This is for commands that name no judge, so that they do not replace the file by accident. Files of earlier releases
    have no dtype. For them only the name of the model is compared.

    Args:
        settings: The settings.
        database: The file. It need not exist yet.

    Raises:
        UserError: The file has another judge. The message says how to name either of the two.
    """
    model = settings.model
    recorded_judge = _query_recorded_judge(database, default_dtype=model.dtype)
    if recorded_judge is None or recorded_judge == (model.name, model.dtype):
        return

    judge_name, dtype = recorded_judge
    dtype_option = "" if dtype == model.dtype else f" --set model.dtype={dtype}"
    raise UserError(
        f"{database} was judged by {judge_name} in dtype {dtype}, and this command names no judge: the model of "
        f"the settings, {model.name} in dtype {model.dtype}, would judge again and replace it; write "
        f"`--model {judge_name}{dtype_option}` to stay with the judge, or `--model {model.name}` to change it"
    )


def _query_recorded_judge(database: Path, default_dtype: str) -> tuple[str, str] | None:
    """Read from the file that `judge` writes which language model judged the calls in it.

    Args:
        database: The DuckDB file.
        default_dtype: The dtype to return for files of earlier releases, which have none.

    Returns:
        The name and the dtype of the model, or None if there is no such file yet.
    """
    try:
        settings_row = query(database, "FROM trace_settings").row(0, named=True)
    except WarehouseError:  # nothing was judged yet
        return None
    return settings_row["model"], settings_row.get("dtype", default_dtype)


def get_traces_database_path(settings: Settings) -> Path:
    """Return the path of the file that `judge` writes: traces.duckdb in the folder of the warehouse."""
    return settings.warehouse_file.with_name("traces.duckdb")


def require_judged_file(settings: Settings) -> Path:
    """Return the path of the file that `judge` has written. Raises UserError if there is none yet."""
    database = get_traces_database_path(settings)
    if not database.is_file():
        raise UserError(f"there is no {database} yet; run `toolformer-dag judge` with recorded conversations")
    return database
