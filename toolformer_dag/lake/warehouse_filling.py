"""Writing the tables of the warehouse into its file: all from nothing, or in a copy of it the rows of some shards.

Verdicts are of a shard, as what shards have to know of each other stands in filtered_calls. What is counted over all
verdicts, `swapped_places` and `curves`, is counted again.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import polars as pl

from toolformer_dag.lake.queries import in_memory, quoted, rows, run_sql, sql_text
from toolformer_dag.lake.scoring import COSTS, IDENTITY, kept_as, reads_cost, relation
from toolformer_dag.settings.tool_settings import MODEL

RULE = sql_text(__package__, "rule.sql")
"""Does a call stay? The filter, the warehouse and the page ask this."""
JUDGED = sql_text(__package__, "judged.sql")
VERDICTS = sql_text(__package__, "verdicts.sql")
DECISIONS = sql_text(__package__, "decisions.sql")
SWAPPED_PLACES = sql_text(__package__, "swapped_places.sql")
CURVES = sql_text(__package__, "curves.sql")
CHANCE = sql_text(__package__, "chance.sql")
"""Views over `decisions` and `swapped_places`; the filter makes these of one lane, the warehouse of all."""
LOSS_DELTAS = (
    "* EXCLUDE (unfit, eligible, best, kept, tau_f, distance, text_offset, domain, date, document) "
    "REPLACE (unfit AS reason)"
)
"""A scored call as it is without the verdict on it; `$loss_deltas` in views.sql."""
VIEWS = CHANCE + sql_text(__package__, "views.sql").replace("$loss_deltas", LOSS_DELTAS)
COST_FRONTIER = sql_text(__package__, "cost_frontier.sql")
SCORED = "loss_deltas"
"""The table whose rows stand in `decisions`, each with its verdict; in the warehouse it is a view of them."""
DOCUMENTS = "documents"
"""The table whose row numbers stand in `decisions`: its rows stay where they are as long as the file is copied."""
DERIVED_FROM = {"decisions": [SCORED], "swapped_places": ["decisions"], "curves": ["decisions"]}
"""Tables that follow from the others, each with what its columns without a comment of their own come from."""
READ_BY_VIEW = re.compile(r'\b(?:FROM|JOIN)\s+\(*"?(\w+)"?', re.IGNORECASE)
"""What a view reads, in the SQL as DuckDB keeps it; names of its own WITH clause are among them."""
MEMORY = "3GB"
"""What building may hold in memory; the rest is spilled beside the file."""
ROWS = "FROM rows"
ASKED = "tool, input, context"
SAMPLED = ("candidates", "chained_candidates")
"""How the names of the tables of samples begin."""
REJECTIONS = pl.Schema(
    {"stage": pl.String(), "tool": pl.String(), "shard": pl.String(), "reason": pl.String(), "count": pl.Int64()}
)
LANES = pl.Schema({"tool": pl.String(), "tau_f": pl.Float64(), "name": pl.String(), "round": pl.Int64()})
MADE_WITH = pl.Schema({"stage": pl.String(), "tool": pl.String(), "setting": pl.String(), "value": pl.String()})
FILTER_RULES = pl.Schema({"tool": pl.String(), "by_chance": pl.Float64(), "verdict": pl.String()})
SOURCES = pl.Schema({"source": pl.String(), "version": pl.String()})


@dataclass(frozen=True, slots=True)
class WarehouseTable:
    """A table of the warehouse: the rows of lake tables, through `select` (which reads from `rows`).

    `columns`: name -> comment; `schema`: of the rows in the lake; `sources`: names of the lake tables; `views`: further
    statements, run after those of views.sql. `measured`: whether the rows are measurements, which a later job makes
    anew: until then parts of an earlier release may lack columns, which are null. `by_shard`: whether the parts are
    shards, which the column `shard` names. `scores`: of a table of scored calls those of its tools that are not the
    paper's, which its `delta` is.
    """

    name: str
    comment: str
    columns: Mapping[str, str]
    schema: pl.Schema
    sources: tuple[str, ...]
    select: str = ROWS
    views: str = ""
    measured: bool = False
    by_shard: bool = False
    scores: Mapping[str, str] = field(default_factory=dict)

    def determining(self) -> Mapping[str, object]:
        """Return what the copy depends on beside the rows."""
        schema = {name: str(dtype) for name, dtype in self.schema.items()}
        declared = {"comment": self.comment, "columns": dict(self.columns), "schema": schema, "select": self.select}
        scores = {"scores": dict(self.scores), "score_sql": IDENTITY} if self.scores else {}
        return {**declared, "views": self.views, **scores}

    @property
    def has_costs(self) -> bool:
        """Whether its rows are results of calls, with what they cost."""
        return "tool_version" in self.columns


OWN_TABLES = (
    WarehouseTable(
        "rejections",
        "What was left out: how many of what, by stage, tool, shard and reason.",
        {
            "stage": "the stage that left it out",
            "tool": "key of the lane; null for raw_shards, augmented_corpus and outcomes",
            "shard": "name of the shard file; of the benchmark where a question was left out of outcomes",
            "reason": "short name of the reason",
            "count": "how many",
        },
        REJECTIONS,
        (),
    ),
    WarehouseTable(
        "lanes",
        "The tools, each with the tau_f that its filtered_calls were made with.",
        {
            "tool": "key of the lane",
            "tau_f": "the applied threshold; null where there was none yet, or none certified",
            "name": "name of the tool as it stands in a call: Calculator",
            "round": "the round of annotation, from 1",
        },
        LANES,
        (),
    ),
    WarehouseTable(
        "settings",
        "What determined the rows of the stages, as their records have it: model, k, m, tau_s, tau_f, prompts.",
        {
            "stage": "the stage; null for the names of profile and model, which determine nothing by themselves",
            "tool": "key of the lane; null for stages of all lanes",
            "setting": "the setting, with the names of its tables before it",
            "value": "its value: text as it is, anything else as JSON",
        },
        MADE_WITH,
        (),
    ),
    WarehouseTable(
        "filter_rules",
        "How the tau_f of each tool was chosen: by chance, with what came out, or as a number of the settings.",
        {
            "tool": "key of the lane",
            "by_chance": "the false discovery rate that was asked for; null for a number",
            "verdict": "as in chance_thresholds; where none is certified the fallback was taken, or nothing was kept; "
            "null for a number",
        },
        FILTER_RULES,
        (),
    ),
    WarehouseTable(
        "sources",
        "The tables of the lake that were copied, each with the version of its rows, rejections and tau_f.",
        {"source": "name of the table in the lake", "version": "version that was copied"},
        SOURCES,
        (),
    ),
)


Files = Mapping[str, list[str]]
"""Part files by table; an empty file goes last because DuckDB takes statistics from the first."""


def fill(
    file: Path, spilled: Path, tables: Sequence[WarehouseTable], files: Files, shards: Collection[str] | None
) -> dict[str, int]:
    """Write tables, comments and views into a new file, or in a copy replace the rows of `shards`; table -> rows.

    `files`: of a copy those of `shards` alone for tables by shard; of `documents`, which keep their places, those of
    shards that the file does not have; of other tables all. Any DuckDB from 1.0 on can open the file.
    """
    with _attached(file, spilled) as connection:
        replaced = "CREATE TEMP TABLE replaced AS SELECT unnest($shards::VARCHAR[]) AS shard"
        connection.execute(replaced, {"shards": list(shards or ())})
        run_sql(connection, f"CREATE OR REPLACE {RULE}")
        for table in sorted(tables, key=lambda one: bool(one.scores)):  # what calls cost is read from the others
            read = _read(table, files[table.name], tables)
            if table.name == SCORED:
                connection.execute(f"CREATE TEMP {kept_as(table.scores)} scored AS {read}")
                continue
            verb = f'CREATE TABLE "{table.name}" AS'
            if shards is not None:
                verb = f'INSERT INTO "{table.name}"'
                of_shards = (
                    f"WHERE {table.name != DOCUMENTS} AND {'shard IN (FROM replaced)' if table.by_shard else 'true'}"
                )
                connection.execute(f'DELETE FROM "{table.name}" {of_shards}')
            connection.execute(f"{verb} WITH rows AS ({read}) {table.select}")
        run_sql(connection, JUDGED + VERDICTS)
        run_sql(connection, DECISIONS if shards is None else "DELETE FROM decisions WHERE shard IN (FROM replaced)")
        _decide(connection)
        run_sql(
            connection, "DROP TABLE IF EXISTS swapped_places; DROP TABLE IF EXISTS curves;" + SWAPPED_PLACES + CURVES
        )
        if shards is None:
            run_sql(connection, views_sql(tables))
        return _finished(connection, tables)


@contextmanager
def _attached(file: Path, spilled: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    with in_memory() as connection:
        connection.execute(f"SET memory_limit = {quoted(MEMORY)}")
        connection.execute(f"SET temp_directory = {quoted(spilled)}")
        connection.execute("SET preserve_insertion_order = false")  # of copied rows; with it they are compressed twice
        connection.execute(f"ATTACH {quoted(file)} AS warehouse (STORAGE_VERSION 'v1.0.0')")
        connection.execute("USE warehouse")
        yield connection
        connection.execute("USE memory")
        connection.execute("DETACH warehouse")


def _read(table: WarehouseTable, files: Sequence[str], tables: Sequence[WarehouseTable]) -> str:
    """The query for the rows of part files; of loss_deltas they are numbered."""
    if table.scores or table.name == SCORED:
        asked = f"tool_costs AS ({_costs_asked(tables)})" if reads_cost(table.scores) else ""
        query = relation(files, table.scores, asked, swaps="swap" in table.columns)
        return query if table.name == SCORED else f"SELECT * EXCLUDE (row) FROM ({query})"
    named = ", ".join(map(quoted, files))
    return f"FROM read_parquet([{named}], hive_partitioning = false, union_by_name = {table.measured})"


def views_sql(tables: Sequence[WarehouseTable]) -> str:
    """Return the text of every view over the tables, but for `loss_deltas`."""
    own = _sampled(tables) + VIEWS + _tool_costs(tables) + COSTS + COST_FRONTIER
    return own + "".join(table.views for table in tables)


def _sampled(tables: Sequence[WarehouseTable]) -> str:
    """The text of a view over all samples, those of calls after others among them, which the model alone samples."""
    selects = []
    for table in tables:
        if table.name.startswith(SAMPLED):
            source = "source" if "source" in table.columns else quoted(MODEL)
            selects.append(f"SELECT tool, input, {source} AS source FROM {table.name}")
    comment = "Every sample, of calls after others too."
    return f"CREATE VIEW sampled AS {' UNION ALL '.join(selects)};COMMENT ON VIEW sampled IS {quoted(comment)};"


def _tool_costs(tables: Sequence[WarehouseTable]) -> str:
    """The text of a view over all tables of results, those of calls after others among them."""
    query = _costs_asked(tables)
    return f"CREATE VIEW tool_costs AS {query};COMMENT ON VIEW tool_costs IS 'What every distinct call cost.';"


def _costs_asked(tables: Sequence[WarehouseTable]) -> str:
    results = [f'SELECT {ASKED}, cost, seconds FROM "{one.name}"' for one in tables if one.has_costs]
    return (
        f"SELECT {ASKED}, max(cost) AS cost, max(seconds) AS seconds FROM ({' UNION ALL '.join(results)}) GROUP BY ALL"
    )


def _decide(connection: duckdb.DuckDBPyConnection) -> None:
    for tool in rows(connection, "SELECT DISTINCT tool FROM scored ORDER BY tool")["tool"]:
        connection.execute(f"INSERT INTO decisions FROM verdicts WHERE tool = {quoted(tool)} ORDER BY delta")


def _finished(connection: duckdb.DuckDBPyConnection, tables: Sequence[WarehouseTable]) -> dict[str, int]:
    _comment(connection, tables)
    names = (*(table.name for table in tables), *DERIVED_FROM)
    return {name: rows(connection, f'SELECT count(*) FROM "{name}"').item() for name in names}


def _comment(connection: duckdb.DuckDBPyConnection, tables: Sequence[WarehouseTable]) -> None:
    """Write the declared comments.

    A column of a view that has none takes the comment of the same column in the first table or view that the view
    reads and that has one: in another table a column of this name may hold something else.
    """
    for table in tables:
        kind = "VIEW" if table.name == SCORED else "TABLE"
        connection.execute(f'COMMENT ON {kind} "{table.name}" IS {quoted(table.comment)}')
        _comment_columns(connection, table.name, table.columns)
    for name, sources in {**DERIVED_FROM, **_sources_of_views(connection)}.items():
        _inherit_comments(connection, name, sources)


def _sources_of_views(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Return for each view what stands behind FROM and JOIN in it; a view comes after the views that it reads."""
    query = (
        "SELECT view_name, sql FROM duckdb_views() WHERE database_name = 'warehouse' AND NOT internal ORDER BY view_oid"
    )
    return {name: READ_BY_VIEW.findall(sql) for name, sql in connection.execute(query).fetchall()}


def _inherit_comments(connection: duckdb.DuckDBPyConnection, name: str, sources: Sequence[str]) -> None:
    query = "SELECT column_name FROM duckdb_columns() WHERE table_name = ? AND comment IS NULL"
    lacking = {column for (column,) in connection.execute(query, [name]).fetchall()}
    for source in sources:
        comments = _comments(connection, source)
        inherited = {column: comments[column] for column in lacking if column in comments}
        _comment_columns(connection, name, inherited)
        lacking -= inherited.keys()


def _comments(connection: duckdb.DuckDBPyConnection, name: str) -> dict[str, str]:
    query = "SELECT column_name, comment FROM duckdb_columns() WHERE table_name = ? AND comment IS NOT NULL"
    return dict(connection.execute(query, [name]).fetchall())


def _comment_columns(connection: duckdb.DuckDBPyConnection, name: str, comments: Mapping[str, str]) -> None:
    for column, comment in comments.items():
        connection.execute(f'COMMENT ON COLUMN "{name}"."{column}" IS {quoted(comment)}')
