"""Judge recorded conversations: bring their tables up to date, and show them in a DuckDB file of their own.

The tables are those of `trace_stages`; `judge FILE...` is a plan over them that is run without Dagster. The file is
built from them anew where a row, a view or the share has changed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import duckdb
import polars as pl

from toolformer_dag.computing.plan import Plan
from toolformer_dag.computing.spending import token_count
from toolformer_dag.computing.stage import REJECTIONS, TableOutput, Work
from toolformer_dag.computing.update import update
from toolformer_dag.computing.worker import Worker
from toolformer_dag.computing.workers import Workers, executor_of
from toolformer_dag.files import UserError, WriteError, beside, replace_whole
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.database_files import NO_SPACE, reason_of, write_out
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.queries import OFFLINE, quoted, sql_text
from toolformer_dag.lake.session import session
from toolformer_dag.lake.warehouse import WarehouseError, query
from toolformer_dag.settings.sections import Settings
from toolformer_dag.traces import call_losses, exchanged_results, recorded_calls, recorded_conversations
from toolformer_dag.traces.judge import load_variant_writer
from toolformer_dag.traces.recorded_conversations import REJECTED_RECORDS
from toolformer_dag.traces.trace_stages import trace_tables

TABLES = sql_text(__package__, "trace_tables.sql")
"""The tables of the file."""
VIEWS = sql_text(__package__, "trace_views.sql")
"""What is said of the calls, over these tables."""
SHOWN = (
    recorded_conversations.NAME,
    REJECTED_RECORDS,
    recorded_calls.NAME,
    exchanged_results.NAME,
    call_losses.NAME,
)
"""The tables of the lake that the file shows."""
MEMORY = "1GB"
"""What DuckDB may hold in memory while it builds the file; the rest is spilled beside it."""
Advance = Callable[[TableOutput, int, int], None]
"""Called as `advance(table, done, total)` while a table is brought up to date; the stage's `unit` is counted."""


@dataclass(frozen=True)
class Judgement:
    """What was judged.

    - `plan`: with the conversations and their tables
    - `database`: the file that shows it
    - `conversations`: how many there are
    - `rejected`: how much of the records could not be used as it was recorded
    - `summary`: how many calls help, do not, cannot be told and failed, in all and by tool, in a line
    - `work`: what was computed now and what was stored
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
    """Judge the calls of all sources, and replace `database` by what was measured; see `judged`."""
    with judged(settings, sources, database, advance) as judgement:
        pass
    return replace(judgement, database=database)


@contextmanager
def judged(
    settings: Settings, sources: Sequence[str], database: Path, advance: Advance = lambda table, done, total: None
) -> Iterator[Judgement]:
    """Judge the calls of all sources with the workers that the settings name, and yield what came of it.

    The file of the judgement is of this process alone inside the block, so that no other command replaces it; then it
    takes the place of `database`. Where nothing changed it is `database` itself.

    Raises UserError where a source is missing or holds no conversation, ModelError, StorageError.
    """
    plan = conversation_plan(settings, sources)
    work = update_tables(plan, advance)
    version = traces_version(plan)
    if made_from(database) == version:
        yield _judgement(plan, database, work)
        return
    fresh = beside(database, ".duckdb")
    try:
        build_file(plan, fresh, version)
        try:
            yield _judgement(plan, fresh, work)
        finally:
            replace_whole(fresh, database)
    finally:
        for path in (fresh, fresh.with_name(f"{fresh.name}.wal")):
            path.unlink(missing_ok=True)


def conversation_plan(settings: Settings, sources: Sequence[str]) -> Plan:
    """Return a plan of conversations alone, without the tools of the settings. Raises ModelError, StorageError."""
    traces = settings.traces.model_copy(update={"source": tuple(sources)})
    rounds = settings.rounds.model_copy(update={"count": 1})  # conversations are judged by the model of the settings
    return Plan.of(settings.model_copy(update={"traces": traces, "tools": {}, "rounds": rounds, "proposer": None}))


def update_tables(plan: Plan, advance: Advance, *, with_losses: bool = True) -> Work:
    """Bring the tables of a plan's conversations up to date, without Dagster; return what that cost.

    with_losses: whether the last table is among them, the only one that a model is loaded for.

    Other commands may do the same over the same lake meanwhile. Raises UserError where no conversation could be read.
    """
    tables = [table for table in trace_tables(plan) if with_losses or table.name != call_losses.NAME]
    worker = Worker(plan)
    work = Work()
    with closing(
        Workers(worker, {table.name: table for table in tables}, partial(executor_of, trace_tables))
    ) as workers:
        for table in tables:
            work += update(worker, workers, table, partial(advance, table)).work
            refuse_unread(plan)
            if table.name == recorded_calls.NAME:
                refuse_without_calls(plan)
    return work


def refuse_unread(plan: Plan) -> None:
    """Raise UserError where no conversation could be read; the message has the first of the reasons."""
    if any(pointer.rows for pointer in _conversations_read(plan)):
        return
    rejections = plan.lake.table(REJECTED_RECORDS)
    why = ""
    for shard in plan.conversations:
        for rejection in rejections.read(shard).head(1).iter_rows(named=True):
            why = why or f" ({rejection['reason']}: {rejection['detail']})"
    raise UserError(f"{', '.join(plan.settings.traces.source)}: no conversation could be read{why}")


def refuse_without_calls(plan: Plan) -> None:
    """Raise UserError where no conversation holds a call of the assistant; the message shows what was read instead."""
    with session():
        calls = [plan.lake.table(recorded_calls.NAME).pointer(shard) for shard in plan.conversations]
    if any(pointer.rows for pointer in calls):
        return
    conversations = plan.lake.table(recorded_conversations.NAME)
    first = conversations.scan(plan.conversations).select("conversation", "form", "messages").head(1).collect()
    [(name, form, messages)] = first.rows()
    rejections = plan.lake.table(REJECTED_RECORDS).scan(plan.conversations).head(1).collect().to_dicts()
    why = f"; not understood: {rejections[0]['detail']}" if rejections else ""
    raise UserError(
        f"{', '.join(plan.settings.traces.source)}: no call of a tool was found in the conversations. The first, "
        f"{name}, was read as {form}: {messages[:300]}{why}. "
        "`toolformer-dag judge --forms` lists the forms that are read"
    )


def _conversations_read(plan: Plan) -> list[Pointer]:
    """Return what is published of each shard's conversations."""
    table = plan.lake.table(recorded_conversations.NAME)
    with session():
        return [table.pointer(shard) for shard in plan.conversations]


def _judgement(plan: Plan, database: Path, work: Work) -> Judgement:
    """Return the judgement that a file shows. work: what its tables cost."""
    pointers = _conversations_read(plan)
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


def traces_version(plan: Plan) -> str:
    """Return what the file would be made from now: the rows of a plan's tables, the views, the share."""
    with session():
        versions = {}
        for name in SHOWN:
            table = plan.lake.table(name)
            versions[name] = {shard: table.part_version(shard) for shard in plan.conversations}
    return fingerprint([versions, TABLES, VIEWS, plan.settings.traces.share, _judge_names(plan)])


def _judge_names(plan: Plan) -> dict[str, str]:
    """Return the model's name and dtype, which the file shows."""
    model = plan.settings.model
    return {"model": model.name, "dtype": model.dtype}


def made_from(database: Path) -> str | None:
    """Return what the file was made from, as `traces_version` tells it; None where there is no file."""
    with suppress(WarehouseError):
        return str(query(database, "SELECT made_from FROM trace_settings").item())
    return None


def build_file(plan: Plan, file: Path, version: str) -> None:
    """Write a new file from the tables of a plan. Raises StorageError, RenderingError; WriteError on a full disk.

    version: what it is made from.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fill(plan, file, version)
    except NO_SPACE as error:
        raise WriteError(file, OSError(reason_of(error))) from error


def _fill(plan: Plan, file: Path, version: str) -> None:
    config = {**OFFLINE, "memory_limit": MEMORY, "temp_directory": str(file.with_suffix(".spilled"))}
    with session(), duckdb.connect(file, config=config) as connection:
        connection.execute("SET preserve_insertion_order = false")
        connection.register("judge_settings", _judge_settings(plan, version).to_arrow())
        for name in SHOWN:
            _, _, view = name.partition("/")
            files = ", ".join(map(quoted, plan.lake.table(name).all_files(plan.conversations)))
            connection.execute(f"CREATE TEMP VIEW {view} AS FROM read_parquet([{files}], hive_partitioning = false)")
        connection.execute(TABLES)
        connection.execute(VIEWS.replace("$share", repr(plan.settings.traces.share)))
        write_out(connection)


def _judge_settings(plan: Plan, version: str) -> pl.DataFrame:
    """Return the row of trace_settings."""
    rendering = load_variant_writer(plan.settings).rendering
    return pl.DataFrame(
        [
            {
                **plan.settings.traces.model_dump(exclude={"source"}),
                **_judge_names(plan),
                "made_from": version,
                "rendering": rendering.name,
                "rendering_fingerprint": rendering.fingerprint,
            }
        ]
    )


def refuse_other_judge(settings: Settings, database: Path) -> None:
    """Refuse to replace a file that another judge has written than the model of the settings, or in another dtype.

    For commands that name no judge. Files written before the dtype was stored are compared by the model's name. Raises
    UserError, with how to name either judge.
    """
    try:
        recorded = query(database, "FROM trace_settings").row(0, named=True)
    except WarehouseError:  # nothing was judged yet
        return
    model = settings.model
    dtype = recorded.get("dtype", model.dtype)
    if (recorded["model"], dtype) == (model.name, model.dtype):
        return
    named_dtype = "" if dtype == model.dtype else f" --set model.dtype={dtype}"
    raise UserError(
        f"{database} was judged by {recorded['model']} in dtype {dtype}, and this command names no judge: the model of "
        f"the settings, {model.name} in dtype {model.dtype}, would judge again and replace it; write "
        f"`--model {recorded['model']}{named_dtype}` to stay with the judge, or `--model {model.name}` to change it"
    )


def traces_database(settings: Settings) -> Path:
    """Return where `judge` writes: traces.duckdb beside the warehouse."""
    return settings.warehouse.with_name("traces.duckdb")


def judged_file(settings: Settings) -> Path:
    """Return the file that `judge` has written. Raises UserError where there is none yet."""
    if not (database := traces_database(settings)).is_file():
        raise UserError(f"there is no {database} yet; run `toolformer-dag judge` with recorded conversations")
    return database
