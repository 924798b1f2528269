"""Judge recorded conversations: bring their tables in the lake up to date, and show them in a DuckDB file.

The tables are the ones of `trace_stages`. `toolformer-dag judge` updates them without Dagster. The DuckDB file is built
anew if a row, a view or the setting `traces.share` has changed.
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
from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.stage import REJECTIONS, ByChunk, TableOutput, Work
from toolformer_dag.computing.update import update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, executor_of
from toolformer_dag.files import UserError, WriteError, build_temporary_path, replace_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.database_files import NO_SPACE, parse_error_reason, write_out
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.queries import OFFLINE, quote_sql, read_sql_file
from toolformer_dag.lake.session import session
from toolformer_dag.lake.warehouse import WarehouseError, query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces import recorded_calls, recorded_conversations
from toolformer_dag.traces.judge import load_variant_writer
from toolformer_dag.traces.recorded_conversations import REJECTED_RECORDS
from toolformer_dag.traces.trace_stages import SHOWN, trace_tables

TABLES = read_sql_file(__package__, "trace_tables.sql")
"""SQL that creates the tables of the file from views over the tables of the lake."""
VIEWS = read_sql_file(__package__, "trace_views.sql")
"""SQL that creates the views of the file, such as trace_calls with the verdicts, over its tables."""
MEMORY = "1GB"
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
        conversations: the number of conversations.
        rejected: the number of rejections: records, or parts of them, that could not be used.
        summary: a line with how many calls help, do not help, cannot be told and failed, in all and by tool.
        work: what was computed now, and what was reused.
    """

    plan: Plan
    database: Path
    conversations: int
    rejected: int
    summary: str
    work: Work

    @property
    def losses(self) -> Mapping[str, int]:
        """How many losses were computed now, and reused for them."""
        return {"computed": self.work.computed["losses"], "reused": self.work.reused["losses"]}

    @property
    def tokens(self) -> int:
        """How many tokens went through the model now."""
        return token_count(self.work.tokens)


def judge_traces(
    settings: Settings, sources: Sequence[str], database: Path, advance: Advance = lambda table, done, total: None
) -> Judgement:
    """Judge the calls of recorded conversations, and replace a DuckDB file with one that shows the verdicts.

    The arguments and the exceptions are those of `judged`.
    """
    with judged(settings, sources, database, advance) as judgement:
        pass  # at the end of the block the new file is moved to `database`
    return replace(judgement, database=database)


@contextmanager
def judged(
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
    work = update_tables(plan, advance)  # stores the losses, from which verdicts follow, in the lake

    version = compute_traces_version(plan)  # a hash of these tables and of what else the file is built from
    if made_from(database) == version:
        yield _build_judgement(plan, database, work)
        return

    with _use_temporary_file(database) as new_file:
        build_traces_database(plan, new_file, version)
        with _move_at_end(new_file, database):
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
def _move_at_end(fresh: Path, database: Path) -> Iterator[None]:
    """Move the file `fresh` over `database` when the block ends, even after an error."""
    try:
        yield
    finally:
        replace_whole(fresh, database)


def build_conversation_plan(settings: Settings, sources: Sequence[str]) -> Plan:
    """Return a plan that only judges the conversations of `sources`; tools and rounds of the settings are left out.

    Raises ModelError, StorageError.
    """
    traces = settings.traces.model_copy(update={"source": tuple(sources)})
    rounds = settings.rounds.model_copy(update={"count": 1})  # conversations are judged by the model of the settings
    return Plan.of(settings.model_copy(update={"traces": traces, "tools": {}, "rounds": rounds, "proposer": None}))


def update_tables(plan: Plan, advance: Advance, *, with_losses: bool = True) -> Work:
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
    start_executor = partial(executor_of, trace_tables)  # worker processes find their table with `trace_tables`
    worker = Worker(plan)

    total_work = Work()
    with closing(Workers(worker, table_by_name, start_executor)) as workers:
        for table in tables:
            report = update(worker, workers, table, partial(advance, table))
            total_work += report.work
            _refuse_without_rows(plan, table.name)
    return total_work


def _list_tables_to_update(plan: Plan, *, with_losses: bool) -> Sequence[TableOutput]:
    """Return the tables of a plan's conversations, each after the tables that it reads."""
    tables = trace_tables(plan)
    return tables if with_losses else [table for table in tables if not _has_losses(table)]


def _has_losses(table: TableOutput) -> bool:
    """Return whether a table holds losses, which a model computes in chunks."""
    return isinstance(table.stage.make, ByChunk)


def _refuse_without_rows(plan: Plan, updated_table: str) -> None:
    """Raise UserError if no conversation could be read or, once the table of calls is updated, if there is no call."""
    refuse_unread(plan)
    if updated_table == recorded_calls.NAME:
        refuse_without_calls(plan)


def refuse_unread(plan: Plan) -> None:
    """Raise UserError if no conversation could be read; the message has the reason of the first rejection."""
    if any(pointer.rows for pointer in _read_conversation_pointers(plan)):
        return
    rejection = _find_first_rejection(plan)
    why = "" if rejection is None else f" ({rejection['reason']}: {rejection['detail']})"
    raise UserError(f"{', '.join(plan.settings.traces.source)}: no conversation could be read{why}")


def refuse_without_calls(plan: Plan) -> None:
    """Check that some conversation has a call of a tool.

    Raises:
        UserError: There is no call. The message shows how the first conversation was read.
    """
    table_of_calls = plan.lake.table(recorded_calls.NAME)  # a row per call
    with session():  # the manifest of the table is read once for all shards
        shard_pointers = [table_of_calls.pointer(shard) for shard in plan.conversations]
    has_calls = any(pointer.rows > 0 for pointer in shard_pointers)
    if has_calls:
        return

    raise UserError(
        f"{', '.join(plan.settings.traces.source)}: no call of a tool was found in the conversations. The first, "
        f"{_describe_first_conversation(plan)}{_describe_first_fault(plan)}. "
        "`toolformer-dag judge --forms` lists the forms that are read"
    )


def _describe_first_conversation(plan: Plan) -> str:
    """Return how the first conversation was read: its name, its form and the beginning of its messages."""
    conversations = plan.lake.table(recorded_conversations.NAME).scan(plan.conversations)
    first = conversations.select("conversation", "form", "messages").head(1).collect()
    [(name, form, messages)] = first.rows()
    return f"{name}, was read as {form}: {messages[:300]}"


def _describe_first_fault(plan: Plan) -> str:
    """Return a clause with what was not understood first; "" if all was."""
    rejection = _find_first_rejection(plan)
    return "" if rejection is None else f"; not understood: {rejection['detail']}"


def _find_first_rejection(plan: Plan) -> dict[str, Any] | None:
    """Return the first row of REJECTED_RECORDS, by the order of the shards; None if nothing was rejected."""
    first = plan.lake.table(REJECTED_RECORDS).scan(plan.conversations).head(1).collect()
    return first.row(0, named=True) if first.height else None


def _read_conversation_pointers(plan: Plan) -> list[Pointer]:
    """Return, for each shard, the pointer to its published conversations: it has their number and their record."""
    table = plan.lake.table(recorded_conversations.NAME)
    with session():
        return [table.pointer(shard) for shard in plan.conversations]


def _build_judgement(plan: Plan, database: Path, work: Work) -> Judgement:
    """Summarize the outcome of judging.

    Args:
        plan: The plan with the conversations, whose tables are up to date.
        database: The DuckDB file with the verdicts.
        work: How much was computed and reused to update the tables.
    """
    pointers = _read_conversation_pointers(plan)  # one for each shard
    rejected = 0
    for pointer in pointers:
        rejected += sum(rejection["count"] for rejection in pointer.record[REJECTIONS])

    return Judgement(
        plan=plan,
        database=database,
        conversations=sum(pointer.rows for pointer in pointers),
        rejected=rejected,
        summary=str(query(database, "FROM trace_summary").item()),
        work=work,
    )


def compute_traces_version(plan: Plan) -> str:
    """Return a hash of all that the file is built from: the versions of its tables, SQL, `share`, the judge's name."""
    with session():
        versions = {}
        for name in SHOWN:
            table = plan.lake.table(name)
            versions[name] = {shard: table.part_version(shard) for shard in plan.conversations}
    return fingerprint([versions, TABLES, VIEWS, plan.settings.traces.share, _get_judge_names(plan)])


def _get_judge_names(plan: Plan) -> dict[str, str]:
    """Return the model's name and dtype, which the file shows."""
    model = plan.settings.model
    return {"model": model.name, "dtype": model.dtype}


def made_from(database: Path) -> str | None:
    """Return the version (`compute_traces_version`) from which the file `database` was built; None without a file."""
    with suppress(WarehouseError):
        return str(query(database, "SELECT made_from FROM trace_settings").item())
    return None


def build_traces_database(plan: Plan, file: Path, version: str) -> None:
    """Write a new DuckDB file that shows the tables of recorded conversations.

    Args:
        plan: The plan with the conversations, whose tables are up to date.
        file: The path of the file.
        version: The hash of what the file is built from (`compute_traces_version`). It is stored in the file.

    Raises:
        WriteError: The disk is full.
        StorageError: A table cannot be read.
        RenderingError: No chat template fits the model.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fill_database(plan, file, version)
    except NO_SPACE as error:  # the exceptions of DuckDB that may mean a full disk
        raise WriteError(file, OSError(parse_error_reason(error))) from error


def _fill_database(plan: Plan, file: Path, version: str) -> None:
    """Create a DuckDB file with the tables and views that show recorded conversations.

    Args:
        plan: The plan with the conversations.
        file: The path of the new file.
        version: The hash of what the file is built from.
    """
    # The SQL in VIEWS has the placeholder $share.
    create_views = VIEWS.replace("$share", repr(plan.settings.traces.share))
    with session(), _create_database(file) as connection:
        # The SQL in TABLES reads judge_settings and a temporary view over the Parquet files of each table in the lake.
        connection.register("judge_settings", _build_judge_settings(plan, version).to_arrow())
        for name in SHOWN:
            connection.execute(_build_view_sql(plan, name))
        connection.execute(TABLES)

        connection.execute(create_views)
        write_out(connection)


def _create_database(file: Path) -> duckdb.DuckDBPyConnection:
    """Open a new DuckDB file. At most MEMORY is used; the rest is written to a temporary folder beside the file."""
    config = {**OFFLINE, "memory_limit": MEMORY, "temp_directory": str(file.with_suffix(".spilled"))}
    connection = duckdb.connect(file, config=config)
    connection.execute("SET preserve_insertion_order = false")
    return connection


def _build_view_sql(plan: Plan, name: str) -> str:
    """Return SQL that creates a temporary view over a table of the lake: `call_losses` for traces/call_losses."""
    view = name.partition("/")[2]
    files = ", ".join(map(quote_sql, plan.lake.table(name).list_all_files(plan.conversations)))
    return f"CREATE TEMP VIEW {view} AS FROM read_parquet([{files}], hive_partitioning = false)"


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
        **_get_judge_names(plan),
        "made_from": version,
        "rendering": rendering.name,
        "rendering_fingerprint": rendering.fingerprint,
    }
    return pl.DataFrame([row])


def refuse_other_judge(settings: Settings, database: Path) -> None:
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

    judge, dtype = recorded_judge
    dtype_option = "" if dtype == model.dtype else f" --set model.dtype={dtype}"
    raise UserError(
        f"{database} was judged by {judge} in dtype {dtype}, and this command names no judge: the model of "
        f"the settings, {model.name} in dtype {model.dtype}, would judge again and replace it; write "
        f"`--model {judge}{dtype_option}` to stay with the judge, or `--model {model.name}` to change it"
    )


def _query_recorded_judge(database: Path, default_dtype: str) -> tuple[str, str] | None:
    """Read which model judged a file.

    Args:
        database: The file.
        default_dtype: The dtype to return for files of earlier releases, which have none.

    Returns:
        The name and the dtype of the model, or None if there is no such file yet.
    """
    try:
        recorded = query(database, "FROM trace_settings").row(0, named=True)
    except WarehouseError:  # nothing was judged yet
        return None
    return recorded["model"], recorded.get("dtype", default_dtype)


def traces_database(settings: Settings) -> Path:
    """Return the path of the file that `judge` writes: traces.duckdb in the folder of the warehouse."""
    return settings.warehouse.with_name("traces.duckdb")


def require_judged_file(settings: Settings) -> Path:
    """Return the path of the file that `judge` has written. Raises UserError if there is none yet."""
    database = traces_database(settings)
    if not database.is_file():
        raise UserError(f"there is no {database} yet; run `toolformer-dag judge` with recorded conversations")
    return database
