"""What a stage declares, once: columns, key, inputs, the settings that determine it, its functions.

A stage is a step of the method, such as loss_deltas. A `Stage` declares it; a `TableOutput` is the stage for a run and,
where it has lanes (tools with their settings), for one of them: a table of the lake. The asset, `stale --why`, the
warehouse's tables and comments, the data dictionary and the checks follow from the two.

A table consists of parts: one per shard, or a single one. Shards are those of the corpus, or files of conversations.
The rows of a part are `PartRows`.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol

import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.shown import LogLine, Shown
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError, encode_json
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import STORES_FIELD
from toolformer_dag.lake.record import build_record as build_output_record
from toolformer_dag.lake.session import News
from toolformer_dag.lake.table import WHOLE_TABLE_PART, DamagedPart, Table, format_part_phrase
from toolformer_dag.lake.warehouse_table import ALL_ROWS_SQL, WarehouseTable

RejectionCounts = Counter[tuple[str, str]]
"""How many documents, texts or calls were left out, by shard and reason."""
REJECTIONS_FIELD = "rejections"
"""The field of a part's record that holds what was left out, as `encode_rejections` returns it."""
VIOLATIONS_FIELD = "violations"
"""The field of a part's record that holds the number of rows that fail a check, by check."""
MADE_BY_FIELD = "stage"
"""The field of a part's record that says which stage left out what REJECTIONS_FIELD counts."""
RETRY_FIELD = "retry"
"""The field of a part's record that says why the next run computes it again although nothing changed; null for most."""
BY_SHARD_FIELD = "by_shard"
"""The field of the record of a table over all shards that holds a fingerprint of what concerns each shard."""
BACKENDS_FIELD = "backends"
"""The field of a part's record that names the backends that computed the rows that the run did not reuse."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a stage's table.

    Attributes:
        dtype: Its Polars type.
        description: What it says, in a line. The warehouse shows it as a comment.
        sql_expression: The SQL expression that computes the column from the columns before it. None if the stage makes
            the column itself.
        is_optional: Whether the stage may make rows without the column, which is null then.
    """

    dtype: pl.DataType
    description: str
    sql_expression: str | None = None
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A promise about the rows of a stage's table.

    Attributes:
        promise: What holds for every row, in a sentence.
        count_broken_rows: Counts the rows of a frame for which it does not hold.
    """

    promise: str
    count_broken_rows: Callable[[pl.DataFrame, "TableOutput"], int]


@dataclass(frozen=True, slots=True)
class Work:
    """What the computation of a table, a part or a chunk cost.

    Two can be added. The sum has no `news`.

    Attributes:
        tokens_by_kind: How many tokens went through the model, by kind.
        computed_rows_by_kind: How many rows were computed, by kind, such as samples.
        reused_rows_by_kind: How many rows an earlier run had computed and stored.
        damage_messages: A sentence for each damaged file that was set aside.
        backend_identities: The identities of the backends (what runs the model) that computed rows.
        news: What a worker in another process has written to the lake.
    """

    tokens_by_kind: Counter[str] = field(default_factory=Counter)
    computed_rows_by_kind: Counter[str] = field(default_factory=Counter)
    reused_rows_by_kind: Counter[str] = field(default_factory=Counter)
    damage_messages: tuple[str, ...] = ()
    backend_identities: frozenset[str] = frozenset()
    news: tuple[News, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens_by_kind + other.tokens_by_kind,
            self.computed_rows_by_kind + other.computed_rows_by_kind,
            self.reused_rows_by_kind + other.reused_rows_by_kind,
            (*self.damage_messages, *other.damage_messages),
            self.backend_identities | other.backend_identities,
        )


class StaleInput(UserError):
    """An input was published anew after another input had been made from it."""

    def __init__(self, table_name: str, part: str, mismatch: str, asset_name: str) -> None:
        """Build the error message.

        Example: "calculator/chained_candidates, shard 'en_head_0000': calls that were not run; materialize
        calculator/tool_results first, or all with `toolformer-dag stale --run`".

        Args:
            table_name: The table that cannot be made.
            part: The part of the table. If the table has a single part, the message does not name it.
            mismatch: Which input was made from other rows than the present ones, as a phrase, such as "calls that were
                not run".
            asset_name: This input, which has to be made again, such as "calculator/tool_results".
        """
        where = format_part_phrase(", shard", part)
        super().__init__(
            f"{table_name}{where}: {mismatch}; materialize {asset_name} first, or all with `toolformer-dag stale --run`"
        )


class UnusableRows(Exception):
    """Raised by the frames of PartRows, after the last one, when the whole part must be discarded."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of a part, and what belongs into its record. It has two states.

    - Until `frames` has been iterated over, once and to its end, `rejection_counts` and `record_fields` may be
      incomplete, because a stage may make its frames one by one and count meanwhile what it leaves out. Nobody reads
      them yet.
    - After that, they are complete. `TableOutput.publish`, which iterates over the frames, reads them then.

    Attributes:
        frames: The rows, in any number of frames. If the iteration ends with UnusableRows, the part is published
            without rows, and with `rejection_counts` and `record_fields` as they are then.
        rejection_counts: What was left out.
        store_names: The names of the row stores (computed rows) from which the rows come. The command `clean` keeps
            them.
        record_fields: Further fields of the record, such as RETRY_FIELD.
        sibling_rows_by_table: The rows of this part in the tables that are published together with this one, by the
            name of the table in `Stage.sibling_table_names`.
    """

    frames: Iterable[pl.DataFrame]
    rejection_counts: RejectionCounts = field(default_factory=Counter)
    store_names: Sequence[str] = ()
    record_fields: Mapping[str, Any] = field(default_factory=dict)
    sibling_rows_by_table: Mapping[str, pl.DataFrame] = field(default_factory=dict)


class Chunk(NamedTuple):
    """The work that a worker computes and commits at once.

    Attributes:
        unit_count: How many texts or calls it has, to show progress.
        payload: What to compute, as the stage itself describes it. It is sent to the worker process.
        estimated_tokens: Roughly how many tokens the model will process for it.
    """

    unit_count: int
    payload: Any
    estimated_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of how to compute the missing rows of a part.

    Attributes:
        chunks: What workers have to compute.
        work: Counts the rows to compute, and the stored rows to reuse.
    """

    chunks: Sequence[Chunk]
    work: Work


ClaimedKeys = dict[str, list[pl.DataFrame]]
"""For each row store, the keys of the rows that unpublished shards of this run compute: a frame per shard, in order.

`claim_keys` adds to it, and `release_earliest_keys` removes the keys of a shard that was published.
"""
RowsMaker = Callable[[Worker, "TableOutput", str], PartRows]
"""Makes or reads the rows of a part, given the worker, the table and the name of the part."""


@dataclass(frozen=True, slots=True)
class ByShard:
    """Each part is one chunk. A worker makes the rows of the part, which is a shard, and publishes them.

    Attributes:
        make_rows: Makes the rows, in a worker.
    """

    make_rows: RowsMaker


@dataclass(frozen=True, slots=True)
class ByChunk:
    """Workers compute the missing rows of a part in chunks and store them. The part is then read from stored rows.

    Attributes:
        plan_part: Plans the chunks of a part, in the process of the run. It adds the keys of the rows to compute to
            those that earlier shards have claimed.
        compute_chunk: Computes the payload of a chunk in a worker, and stores the rows. Returns what that cost.
        make_rows: Reads the rows of the part from the row stores, in the process of the run.
    """

    plan_part: "Callable[[Worker, TableOutput, str, ClaimedKeys], Planned]"
    compute_chunk: "Callable[[Worker, TableOutput, Any], Work]"
    make_rows: RowsMaker


@dataclass(frozen=True, slots=True)
class ByPart:
    """The process of the run makes one part after the other.

    Attributes:
        make_rows: Makes the rows of a part.
    """

    make_rows: RowsMaker


@dataclass(frozen=True, slots=True)
class ByParts:
    """The process of the run makes several small parts together, because making each alone is slow.

    Attributes:
        make_rows: Makes the rows of parts, and returns them by the name of the part.
    """

    make_rows: "Callable[[Worker, TableOutput, Sequence[str]], Mapping[str, PartRows]]"


@dataclass(frozen=True, slots=True)
class InWarehouse:
    """How a stage's table in the warehouse, a DuckDB database, differs from its table in the lake.

    Attributes:
        name: Its name in the warehouse. Empty if that is the name of the stage.
        hidden_columns: The columns of the lake that it lacks.
        added_columns: The columns that it has in addition, with the SQL that computes them.
        select_query: The SQL query that makes its rows from those in the lake, which are called `rows`. It is not used
            if columns are hidden.
        keeps_places: Whether its rows must keep their numbers in the file (`WarehouseTable.keeps_row_numbers`).
    """

    name: str = ""
    hidden_columns: tuple[str, ...] = ()
    added_columns: Mapping[str, Column] = field(default_factory=dict)
    select_query: str = ALL_ROWS_SQL
    keeps_places: bool = False


def _return_nothing(output: "TableOutput") -> tuple[()]:
    """Return an empty tuple: the stage has nothing to say, and calls no tools."""
    return ()


def _show_nothing(output: "TableOutput") -> Shown:
    """Return an empty mapping: the stage has nothing to show."""
    return {}


def _refuse_nothing(output: "TableOutput") -> None:
    """Return None: the stage never ends a run."""
    return


@dataclass(frozen=True, slots=True)
class StageAsset:
    """What the asset of a stage shows and does in addition to what the asset of every table does.

    All of it is optional. The functions take the TableOutput of the stage, and return plain values.

    Attributes:
        collect_shown_values: Returns what the page of the asset shows, once the table is up to date.
        list_warnings: Returns sentences for the log, before anything is computed.
        list_final_log_lines: Returns lines for the log, once the table is up to date.
        find_fatal_error: Returns the error with which the run ends after this table, because going on would be useless.
            None if the run goes on.
        list_called_lanes: Returns the lanes (tools with their settings) whose tools the stage calls. These tools are
            prepared first.
        has_kept_calls: Whether the rows are the calls that the filter keeps. The table `changes` then says how many
            there were before and after.
    """

    collect_shown_values: Callable[["TableOutput"], Shown] = _show_nothing
    list_warnings: Callable[["TableOutput"], Sequence[str]] = _return_nothing
    list_final_log_lines: Callable[["TableOutput"], Sequence[LogLine]] = _return_nothing
    find_fatal_error: Callable[["TableOutput"], UserError | None] = _refuse_nothing
    list_called_lanes: Callable[["TableOutput"], Iterable[Lane]] = _return_nothing
    has_kept_calls: bool = False


class Shard(Protocol):
    """What a part of a table is made from, if the table has a part per shard: files, or rows of a data set."""

    @property
    def location(self) -> str:
        """Where it lies, for messages."""

    def read_stamp(self) -> Mapping[str, Any]:
        """Return values that differ after the shard has changed, such as the size and time of a file."""


def _get_corpus_shards(plan: Plan) -> Mapping[str, Shard]:
    """Return the shards of the corpus."""
    return plan.shards_by_name


@dataclass(frozen=True)
class Stage:
    """The declaration of a stage, which is a step of the method.

    A part of its table is made again if its settings or its inputs are not the ones in its record anymore.

    Attributes:
        name: The name of the stage, and the last part of the names of its tables.
        description: What a row is, in a line.
        columns: The columns of the table by name, in order.
        key_columns: The columns that tell rows apart. A part that has a key twice violates the check `unique_keys`.
        collect_settings: Returns what determines the rows apart from other tables: settings, prompts, versions of code,
            constants of the method, SQL text. It gets the plan, and the lane or None. The columns are added to the
            result.
        row_maker: Who makes the rows of a part, and in which pieces: ByShard, ByChunk, ByPart or ByParts.
        reads: The names of the tables that it reads, which come before it in the asset graph, or a function of the plan
            and the lane that returns them. "loss_deltas" is a table of the same lane, "*/loss_deltas" this table of
            every lane, and "ccnet/documents" a full name.
        inputs: Which versions are compared with the record. Empty for all tables that it reads, the same part of each
            if it is sharded. A tuple of names for these tables alone, if the others follow from them or do not change
            its rows. A function is called with the TableOutput once per update, and returns the function that computes
            the inputs of a part, such as the size of a file.
        inner_stages: Stages of the same lane that are brought up to date before it, and only for it. They compute what
            the parts of a sharded table have to know of each other. They are neither assets nor in the warehouse.
        group: The first part of the name of its table, such as "ccnet". None if the stage has a table for each lane,
            such as "calculator/loss_deltas".
        is_sharded: Whether the table has a part per shard. Otherwise it has the single part WHOLE_TABLE_PART.
        shards: Returns the shards of a plan by name: those of the corpus, or others such as files of conversations.
        shared: Whether other plans over the lake have shards of their own in the table. These are never removed.
        pool: The resource that only one run at a time may use. Each lane has its own pool "tools".
        kinds: The labels that Dagster shows beside the asset.
        volatile_columns: The columns that measure a run, such as seconds, and do not count in the data version.
        checks: Promises about the rows, by name.
        sibling_table_names: The names of tables that are published together with this one, part for part. A name
            without a group is a table of the same lane. A part that one of them lacks is made again, and a part that is
            withdrawn here is withdrawn there.
        warehouse_form: How its table in the warehouse differs.
        asset: What its asset shows and does in addition to what the asset of every table does.
    """

    name: str
    description: str
    columns: Mapping[str, Column]
    key_columns: tuple[str, ...]
    collect_settings: Callable[[Plan, Any], Mapping[str, Any]]
    row_maker: ByShard | ByChunk | ByPart | ByParts
    reads: Callable[[Plan, Any], tuple[str, ...]] | tuple[str, ...] = ()
    inputs: "Callable[[TableOutput], InputsFinder] | tuple[str, ...]" = ()
    inner_stages: "tuple[Stage, ...]" = ()
    group: str | None = None
    is_sharded: bool = True
    shards: Callable[[Plan], Mapping[str, Shard]] = _get_corpus_shards
    shared: bool = False
    pool: Literal["gpu", "tools", "lake"] = "lake"
    kinds: frozenset[str] = frozenset({"python", "parquet"})
    volatile_columns: tuple[str, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    sibling_table_names: tuple[str, ...] = ()
    warehouse_form: InWarehouse = InWarehouse()
    asset: StageAsset = StageAsset()

    @property
    def progress_unit(self) -> str:
        """What the progress of the stage counts: "shards", "calls" or "texts"."""
        if not isinstance(self.row_maker, ByChunk):
            return "shards"
        return "calls" if self.pool == "tools" else "texts"

    @property
    def schema(self) -> pl.Schema:
        """The Polars schema of its rows."""
        return pl.Schema({name: column.dtype for name, column in self.columns.items()})

    def shape_frame(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Bring rows into the form of the table: exactly its columns, in their order.

        Missing optional columns are filled with nulls. Columns that declare an SQL expression are computed from the
        others.
        """
        shaped_frame = self._add_optional_columns(frame)

        # One after the other, since a column may be computed from an earlier computed one.
        for name, column in self.columns.items():
            if column.sql_expression is not None:
                computed_column = pl.sql_expr(column.sql_expression).cast(column.dtype)
                shaped_frame = shaped_frame.with_columns(computed_column.alias(name))
        return shaped_frame.select(self.schema.names())

    def _add_optional_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Add the optional columns that a frame lacks, filled with nulls."""
        for name, column in self.columns.items():
            if column.is_optional and name not in frame.columns:
                null_column = pl.lit(None, column.dtype).alias(name)
                frame = frame.with_columns(null_column)
        return frame


InputsFinder = Callable[[str], Mapping[str, Any]]
"""Returns the versions of the inputs of a part by name, to compare with its record. None for a missing input."""


@dataclass(frozen=True, eq=False)
class TableOutput:
    """A stage in a run, which is a table of the lake and an asset of the graph.

    Attributes:
        stage: The declaration of the stage.
        plan: What the run is made of.
        lane_or_none: The lane, which is a tool with its settings. None if the stage has one table for all lanes.
    """

    stage: Stage
    plan: Plan
    lane_or_none: Lane | None = None

    @property
    def lane(self) -> Lane:
        """The lane. Only for a stage that has a table for each lane."""
        assert self.lane_or_none is not None
        return self.lane_or_none

    @property
    def group(self) -> str:
        """The first part of the table's name, such as "calculator" or "ccnet"."""
        return self.stage.group or self.lane.key

    @property
    def name(self) -> str:
        """The name of the table and of the asset, such as "calculator/loss_deltas"."""
        return self.plan.add_round_suffix(f"{self.group}/{self.stage.name}")

    @cached_property
    def table(self) -> Table:
        """The table of the lake, published or not."""
        return self.plan.lake.get_table(self.name)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Everything, except for the inputs, that determines the rows of the table. It can be compared with a record.

        Raises:
            NotPlain: A value cannot be written as JSON.
        """
        schema = {name: [str(column.dtype), column.sql_expression] for name, column in self.stage.columns.items()}
        collected_settings = self.stage.collect_settings(self.plan, self.lane_or_none)
        settings = {**collected_settings, "columns": fingerprint(schema)}

        # Through JSON, as in a record, where for example tuples become lists.
        json_text = encode_json(self.name, settings)
        return dict(json.loads(json_text))

    @cached_property
    def code_version(self) -> str:
        """The fingerprint of the settings, which Dagster compares."""
        return fingerprint(self.settings)

    @property
    def scored_tables(self) -> list[Table]:
        """The lane's tables of scored calls: of single calls, and of chains of calls if it has some."""
        return [self.get_lane_table(name) for name in self.lane.scored_table_names]

    def get_lane_table(self, table_name: LaneTable) -> Table:
        """Return another table of the lane by its short name, such as "heuristic_subset"."""
        return self.plan.get_lane_table(self.lane, table_name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The full names of all tables that are read."""
        reads = self.stage.reads
        names = reads(self.plan, self.lane_or_none) if callable(reads) else reads
        return self._expand_table_names(names)

    @property
    def parts(self) -> list[str]:
        """The names of the parts that the table should have."""
        return list(self.shards_by_name) if self.stage.is_sharded else [WHOLE_TABLE_PART]

    @property
    def shards_by_name(self) -> Mapping[str, Shard]:
        """The shards by name. Only for a stage with a part per shard."""
        return self.stage.shards(self.plan)

    @property
    def removed_parts(self) -> list[str]:
        """The published parts that the table should not have, sorted. Empty if other plans may have made them."""
        if self.stage.shared:
            return []
        return sorted(set(self.table.list_part_names()) - set(self.parts))

    def read_pointers(self) -> dict[str, Pointer]:
        """Return what is published of each part of the table, by its name: its files, version and record (a Pointer).

        Several plans may share the table. Then only the parts of this plan are returned.

        Raises:
            DamagedPart: The entry of a part in the lake is damaged.
            ReadError: The lake cannot be read.
        """
        pointers = self.table.read_pointers_by_part()
        has_parts_of_other_plans = self.stage.shared
        if not has_parts_of_other_plans:
            return pointers  # with parts that the table should not have any more (`removed_parts`)
        return {part: pointers[part] for part in self.parts if part in pointers}

    def compute_version(self) -> str | None:
        """Return a version of the table, which changes whenever one of its parts is added, removed or changed.

        If other plans have parts in the same table, these are not looked at.

        Returns:
            None if the table has no parts, or one of them is damaged.
        """
        has_parts_of_other_plans = self.stage.shared
        if not has_parts_of_other_plans:
            return self.table.find_version()

        try:
            own_pointers = self.read_pointers()
        except DamagedPart:
            return None

        version_by_part = {part: pointer.data_version for part, pointer in own_pointers.items()}
        return fingerprint(version_by_part) if version_by_part else None

    @property
    def sibling_tables(self) -> list[Table]:
        """The tables that are published with this one, part for part."""
        return [self.plan.lake.get_table(name) for name in self._expand_table_names(self.stage.sibling_table_names)]

    @property
    def inner_outputs(self) -> list["TableOutput"]:
        """The tables that are brought up to date before this one, for it alone."""
        return [TableOutput(stage, self.plan, self.lane_or_none) for stage in self.stage.inner_stages]

    def build_inputs_finder(self) -> InputsFinder:
        """Return a function that tells from which versions of other tables a part would be made now.

        The function takes the name of a part: a shard, or WHOLE_TABLE_PART for a table that has a single part.

        Example:
            find_inputs = output.build_inputs_finder()
            find_inputs("en_head_0000")  # {"loss_deltas": "<version of this shard's rows>"}
        """
        inputs = self.stage.inputs
        if callable(inputs):  # the stage has a function for this
            return inputs(self)

        names = self._expand_table_names(inputs) or self.depends_on  # such as "calculator/loss_deltas"
        tables = {name: self.plan.lake.get_table(name) for name in names}

        if self.stage.is_sharded:
            # A part is made from the parts of the same shard in the other tables.
            tables_by_short_name = {_drop_group(name): table for name, table in tables.items()}  # "loss_deltas"
            return build_versions_finder(tables_by_short_name)

        # The single part is made from all parts of the other tables.
        return partial(_read_versions_of_all_parts, tables)

    def publish(self, part: str, rows: PartRows) -> Pointer:
        """Write the rows of a part into the table, with a record of what they were made from.

        If other tables are published together with this one, their part is written first.

        Args:
            part: The name of a shard, or WHOLE_TABLE_PART.
            rows: The rows, as frames that are iterated over once. The counts of what was rejected are complete only
                after the last frame, and are then written into the record. If the frames end with UnusableRows, for
                example because a file is damaged near its end, the part is published without rows.

        Returns:
            What was published.

        Raises:
            WriteError: A file cannot be written.
            Exception: Anything else that `Table.publish` or the frames raise.
        """
        # Read before the first frame, so that the part is made again if an input changes in the meantime.
        find_inputs = self.build_inputs_finder()
        inputs = find_inputs(part)

        for table_name, sibling_rows in rows.sibling_rows_by_table.items():
            self._publish_sibling_table(table_name, part, sibling_rows, inputs)

        try:
            return self._publish_rows(part, rows, inputs)
        except UnusableRows:
            without_frames = replace(rows, frames=())
            return self._publish_rows(part, without_frames, inputs)

    def _publish_rows(self, part: str, rows: PartRows, inputs: Mapping[str, Any]) -> Pointer:
        """Write the rows of a part and their record, and return the part's entry in the table's list of parts.

        Args:
            part: The name of the part.
            rows: Its rows.
            inputs: The versions of what the rows were made from.
        """
        # `publish` writes all frames, which are counted meanwhile. Then it calls `build_record`, which has the counts.
        published_rows = _PublishedRows(self, rows, inputs)
        frames = published_rows.iter_frames()
        return self.table.publish(part, frames, published_rows.build_record, self.stage.volatile_columns)

    def _publish_sibling_table(self, table_name: str, part: str, rows: pl.DataFrame, inputs: Mapping[str, Any]) -> None:
        """Publish a part of a table that the same step makes beside this one, as decided_calls beside filtered_calls.

        Its record contains no settings, because the settings of this table determine it.

        Args:
            table_name: The name of the other table, as in `Stage.sibling_table_names`.
            part: The name of the part.
            rows: Its rows.
            inputs: The versions of what the rows were made from.
        """
        [full_name] = self._expand_table_names([table_name])
        lane_key = self.lane_or_none.key if self.lane_or_none else None

        no_settings: Mapping[str, Any] = {}
        record_fields = {MADE_BY_FIELD: table_name, "tool": lane_key}

        # `publish` calls it without arguments, once the rows are written.
        make_record = partial(build_output_record, no_settings, inputs, **record_fields)
        self.plan.lake.get_table(full_name).publish(part, [rows], make_record)

    def build_warehouse_table(
        self, source_names: Sequence[str], score_by_lane_key: Mapping[str, str]
    ) -> WarehouseTable:
        """Describe the table of this stage in the warehouse, the DuckDB database that shows the results of a run.

        Args:
            source_names: The names of the tables in the lake that provide its rows.
            score_by_lane_key: For tools with another score than the paper's, the SQL of that score by the key of the
                lane.
        """
        stage = self.stage
        warehouse_form = stage.warehouse_form  # how it differs from the tables in the lake
        comments = _map_column_to_comment(stage)
        shows_shard = "shard" in comments  # every shown column has a comment
        holds_scored_calls = "delta_is_bound" in stage.columns  # only tables with scored calls have this column

        return WarehouseTable(
            name=warehouse_form.name or stage.name,
            comment=stage.description,
            comments_by_column=comments,
            schema=stage.schema,
            source_names=tuple(source_names),
            select_sql=_build_warehouse_select(warehouse_form),
            has_part_per_shard=stage.is_sharded and shows_shard,
            keeps_row_numbers=warehouse_form.keeps_places,
            score_sql_by_lane=score_by_lane_key if holds_scored_calls else {},
        )

    def _expand_table_names(self, table_names: Sequence[str]) -> tuple[str, ...]:
        """Return the full names of the tables that short names stand for. "*/loss_deltas" stands for several."""
        full_names: list[str] = []
        for table_name in table_names:
            full_names += self._expand_table_name(table_name)
        return tuple(full_names)

    def _expand_table_name(self, table_name: str) -> list[str]:
        """Return the full names of the tables that a short name stands for.

        A lane is a tool with its settings. In the lane "calculator":

        - "loss_deltas" is the table of this lane: "calculator/loss_deltas"
        - "*/loss_deltas" is this table of every lane
        - "ccnet/documents" is a full name already
        """
        group, slash, short_name = table_name.rpartition("/")
        if group == "*":
            return [f"{lane.key}/{short_name}" for lane in self.plan.lanes]

        is_full_name = bool(slash)
        return [table_name] if is_full_name else [f"{self.lane.key}/{table_name}"]


def _drop_group(table_name: str) -> str:
    """Return the name of a table without its group: "calculator/loss_deltas" -> "loss_deltas"."""
    return table_name.rpartition("/")[2]


def _map_column_to_comment(stage: Stage) -> dict[str, str]:
    """Return the description of each column that a stage's table has in the warehouse."""
    columns = {**stage.columns, **stage.warehouse_form.added_columns}
    hidden_columns = stage.warehouse_form.hidden_columns
    return {name: column.description for name, column in columns.items() if name not in hidden_columns}


def _build_warehouse_select(warehouse_form: InWarehouse) -> str:
    """Build the SQL query that makes the rows of a warehouse table from those in the lake, which are called `rows`.

    If columns are hidden, the query leaves them out and computes the added columns. Such a form sets no `select_query`.
    """
    if not warehouse_form.hidden_columns:
        return warehouse_form.select_query

    hidden_columns = ", ".join(warehouse_form.hidden_columns)
    added_columns = "".join(
        f", {column.sql_expression} AS {name}" for name, column in warehouse_form.added_columns.items()
    )
    return f"SELECT * EXCLUDE ({hidden_columns}){added_columns} FROM rows"


class _PublishedRows:
    """The rows of a part while they are written into its files, and the counts of broken checks for its record.

    First, `iter_frames` has to be iterated over to its end. Then the counts are complete, and `build_record` may be
    called.
    """

    def __init__(self, output: TableOutput, rows: PartRows, inputs: Mapping[str, Any]) -> None:
        """Prepare to write the rows of a part. None of them is counted yet.

        Args:
            output: The table.
            rows: The rows of the part.
            inputs: The versions of what the rows were made from.
        """
        self._output = output
        self._rows = rows
        self._inputs = inputs

        # A series for each frame, with a hash of 64 bits for each row: 8 MB for a million rows.
        self._key_hashes: list[pl.Series] = []

        # How many rows break a check, by the name of the check.
        self._violations = dict.fromkeys(output.stage.checks, 0)

    def iter_frames(self) -> Iterator[pl.DataFrame]:
        """Yield the frames of the part, or an empty one if there are none. Count keys and broken checks in each."""
        for frame in self._rows.frames:
            self._count_frame(frame)
            yield frame

        has_frames = bool(self._key_hashes)
        if not has_frames:
            yield self._output.stage.schema.to_frame()

    def _count_frame(self, frame: pl.DataFrame) -> None:
        """Remember the hashes of a frame's keys, and count the rows that break a check."""
        stage = self._output.stage
        key_hashes = frame.select(stage.key_columns).hash_rows()
        self._key_hashes.append(key_hashes)

        for check_name, check in stage.checks.items():
            self._violations[check_name] += check.count_broken_rows(frame, self._output)

    def build_record(self) -> Mapping[str, Any]:
        """Build the record of the part: from what it was made, what was rejected, and how many rows break a check.

        The counts are complete only after the last frame.
        """
        lane = self._output.lane_or_none
        record_fields = {
            MADE_BY_FIELD: self._output.stage.name,
            "tool": lane.key if lane else None,
            RETRY_FIELD: None,
            **self._rows.record_fields,  # may replace the value of RETRY_FIELD by a reason to make the part again
        }
        record_of_sources = build_output_record(self._output.settings, self._inputs, **record_fields)
        return {
            **record_of_sources,
            STORES_FIELD: list(self._rows.store_names),
            REJECTIONS_FIELD: encode_rejections(self._rows.rejection_counts),
            VIOLATIONS_FIELD: {"unique_keys": self._count_rows_with_shared_key(), **self._violations},
        }

    def _count_rows_with_shared_key(self) -> int:
        """Return how many rows have a key that another row has too."""
        if not self._key_hashes:
            return 0
        return int(pl.concat(self._key_hashes).is_duplicated().sum())


def build_versions_finder(tables_by_name: Mapping[str, Table], all_shards_table: Table | None = None) -> InputsFinder:
    """Return a function that tells from which versions of other tables a shard's part would be made now.

    Args:
        tables_by_name: The other tables, by the name under which the version of the shard's rows is returned.
        all_shards_table: One more table, which has a single part for all shards. Its record has a fingerprint for each
            shard, which is used as the version.

    Example:
        find_inputs = build_versions_finder({"raw_shards": raw_shards}, all_shards_table=removed_documents)
        find_inputs("en_head_0000")  # {"raw_shards": "<version>", "removed_documents": "<fingerprint>"}
    """
    fingerprint_by_shard = _read_fingerprints_by_shard(all_shards_table) if all_shards_table else {}

    def find_inputs(shard_name: str) -> Mapping[str, Any]:
        version_by_name = {name: table.find_part_version(shard_name) for name, table in tables_by_name.items()}

        if all_shards_table and shard_name in fingerprint_by_shard:
            short_name = _drop_group(all_shards_table.name)
            version_by_name[short_name] = fingerprint_by_shard[shard_name]
        return version_by_name

    return find_inputs


def _read_fingerprints_by_shard(table: Table) -> Mapping[str, Any]:
    """Read the fingerprint of each shard from the record of a table that has a single part for all shards.

    The result is empty if the table has no part yet.
    """
    pointer = table.find_checked_pointer(WHOLE_TABLE_PART)
    return pointer.record[BY_SHARD_FIELD] if pointer else {}


def _read_versions_of_all_parts(tables_by_name: Mapping[str, Table], part: str) -> Mapping[str, Any]:
    """Return the version of every part of several tables, by the name of the table and of the part.

    These are the inputs of a table with a single part. Its name `part` is not used.
    """
    return {name: _read_part_versions(table) for name, table in tables_by_name.items()}


def _read_part_versions(table: Table) -> dict[str, str | None]:
    """Return the version of each part of a table."""
    return {part: table.find_part_version(part) for part in table.list_part_names()}


def encode_rejections(rejection_counts: RejectionCounts) -> list[dict[str, Any]]:
    """Convert counts of rejections to the form in which a record holds them, sorted and without counts of 0.

    Example:
        encode_rejections(Counter({("en_head_0000", "too_short"): 2}))
        # [{"shard": "en_head_0000", "reason": "too_short", "count": 2}]
    """
    rejections = []
    for (shard, reason), count in sorted(rejection_counts.items()):
        if count:
            rejections.append({"shard": shard, "reason": reason, "count": count})
    return rejections


def count_rejected_rows(frame: pl.DataFrame, reason_column: str = "reason") -> RejectionCounts:
    """Count the rows of a table that were rejected, by shard and reason.

    Args:
        frame: The table, with the column `shard` and a column for the reason.
        reason_column: The name of the column for the reason, which is null if a row was not rejected.
    """
    rejected_rows = frame.filter(pl.col(reason_column).is_not_null())
    counted_rows = rejected_rows.group_by("shard", reason_column).len()

    rejection_counts = RejectionCounts()
    for shard_name, reason, row_count in counted_rows.rows():
        rejection_counts[shard_name, reason] = row_count
    return rejection_counts


# Columns that several stages have.
TOOL = Column(pl.String(), "key of the lane: calculator")
SHARD = Column(pl.String(), "name of the shard: its path below the folder that `corpus.shards` names")
DIGEST = Column(pl.String(), "the corpus' id of the document, CCNet's digest for one; a hash of the text without an id")
SEGMENT = Column(pl.Int32(), "number of the text within the document")
CHAR_OFFSET = Column(
    pl.Int64(), "character of the document before which the call is written, with the white space before x_i"
)
P_API = Column(pl.Float32(), "p_i: probability that a call begins here")
INPUT = Column(pl.String(), "input of the call, as sampled")
SAMPLED_INPUT = Column(pl.String(), "input of the call, as sampled; null where the sample is no call of the lane")
RESULT = Column(pl.String(), "result of the call")
CHARACTERS = Column(
    pl.Int64(), 'length of the text, which is substr(documents.text, "offset" + 1, characters)', "length(text)"
)
SOURCE = Column(pl.String(), "who proposed the call: model, rule, or the name of a file")
WORDS = Column(
    pl.String(), "what a rule saw the text say after the call, which its result and its echo hold; null for most"
)
CALL_ID_COLUMNS = {
    "tool": TOOL,
    "shard": SHARD,
    "digest": DIGEST,
    "segment": SEGMENT,
    "position": Column(pl.Int32(), "i: the call stands before token x_i, counted from 0"),
    "sample": Column(pl.Int32(), "j: number of the sample at this position; from -1 down where nobody sampled it"),
}
"""What tells calls apart."""
CALL_KEY = tuple(CALL_ID_COLUMNS)
CHAIN = Column(
    pl.String(),
    "the calls of a chain with their results as JSON, this one last; null for a single call",
    is_optional=True,
)
TEXT_KEY = ("shard", "digest", "segment")
"""What tells texts apart."""
SCORED_COLUMNS = {
    **CALL_ID_COLUMNS,
    "source": SOURCE,
    "char_offset": CHAR_OFFSET,
    "input": INPUT,
    "result": RESULT,
    "p_api": P_API,
    "loss_empty": Column(pl.Float64(), "L_i(empty), nats; null where the call was not judged"),
    "loss_call": Column(
        pl.Float64(), "L_i(e(c)): the call without its result; null where it was not judged, or delta is a bound"
    ),
    "loss_result": Column(pl.Float64(), "L_i(e(c, r)): the call with its result; null where the call was not judged"),
    "chain": CHAIN,
    "loss_before": Column(
        pl.Float64(), "smallest L_i of the calls before it with their results; null for a single call", is_optional=True
    ),
    "need": Column(
        pl.Float64(),
        "nats by which the calls before it made its input likelier; null for a single call",
        is_optional=True,
    ),
    "loss_minus": Column(
        pl.Float64(),
        "L-: the smallest of loss_empty, loss_call and loss_before; null where the call was not judged",
        "least(loss_empty, loss_call, loss_before)",
    ),
    "loss_plus": Column(pl.Float64(), "L+: loss_result; null where the call was not judged", "loss_result"),
    "delta": Column(
        pl.Float64(),
        "L- - L+: by how much the result helps; in the warehouse the lane's score, which is another where one is set; "
        "null where the call was not judged",
        "loss_minus - loss_plus",
    ),
    "echo": Column(
        pl.Float64(),
        "L- less L+ with the result of another input that holds the same words; null but for rules that look ahead",
        is_optional=True,
    ),
    "delta_is_bound": Column(
        pl.Boolean(),
        "whether delta is an upper bound, because L(c) was not computed (filtering.loss_floor)",
        "loss_call IS NULL AND loss_empty IS NOT NULL",
    ),
    "reason": Column(pl.String(), "why the call may not stay whatever its delta; null where it may"),
}
"""The columns of scored calls."""
