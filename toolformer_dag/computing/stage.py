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
from toolformer_dag.files import UserError, as_json
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import STORES
from toolformer_dag.lake.record import record as output_record
from toolformer_dag.lake.session import News
from toolformer_dag.lake.table import WHOLE, DamagedPart, Table, format_part_phrase
from toolformer_dag.lake.warehouse_table import ROWS, WarehouseTable

Rejected = Counter[tuple[str, str]]
"""(shard, reason) -> how many documents, texts or calls were left out."""
REJECTIONS = "rejections"
"""The field of a part's record that holds what was left out (`encoded`)."""
VIOLATIONS = "violations"
"""The field of a part's record that holds the number of rows that fail a check, by check."""
MADE_BY = "stage"
"""The field of a part's record that says which stage left out what REJECTIONS counts."""
RETRY = "retry"
"""The field of a part's record that says why the next run computes it again although nothing changed; null for most."""
BY_SHARD = "by_shard"
"""The field of the record of a table over all shards that holds a fingerprint of what concerns each shard."""
BACKENDS = "backends"
"""The field of a part's record that names the backends that computed the rows that the run did not reuse."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a stage's table.

    - `dtype`: its polars type
    - `description`: what it says, in a line; the warehouse shows it as a comment
    - `sql`: the expression by which the column follows from the columns before it; None where the stage makes it
    - `optional`: whether the stage may make rows without it, which then have null
    """

    dtype: pl.DataType
    description: str
    sql: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """A promise about the rows of a stage's table.

    - `promise`: what holds for every row, in a sentence
    - `broken`: counts the rows of a frame for which it does not hold
    """

    promise: str
    broken: Callable[[pl.DataFrame, "TableOutput"], int]


@dataclass(frozen=True, slots=True)
class Work:
    """What the computation of a table, a part or a chunk cost.

    - `tokens`: tokens that went through the model, by kind
    - `computed`, `reused`: rows that were computed, and rows that an earlier run had stored, by kind, such as samples
    - `damaged`: files that were set aside, with reasons
    - `backends`: `Backend.identity` of the backends that computed
    - `news`: what a worker process has made; the sum of two works has none
    """

    tokens: Counter[str] = field(default_factory=Counter)
    computed: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)
    damaged: tuple[str, ...] = ()
    backends: frozenset[str] = frozenset()
    news: tuple[News, ...] = ()

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.computed + other.computed,
            self.reused + other.reused,
            (*self.damaged, *other.damaged),
            self.backends | other.backends,
        )


class StaleInput(UserError):
    """An input was published anew after another input had been made from it.

    table, part: what cannot be made. what: which input was made from something else. asset: that input.
    """

    def __init__(self, table: str, part: str, what: str, asset: str) -> None:
        where = format_part_phrase(", shard", part)
        super().__init__(f"{table}{where}: {what}; materialize {asset} first, or all with `toolformer-dag stale --run`")


class UnusableRows(Exception):
    """Raised by the frames of PartRows, after the last one, when the whole part must be discarded."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of a part, and what belongs into its record. It has two states.

    - Until `frames` has been iterated over, once and to its end: `rejected` and `facts` may still be filled, because a
      stage may hand out frames that it makes one by one, and count what it leaves out meanwhile. Nobody reads them.
    - After that they are complete. `TableOutput.publish`, which iterates over the frames, reads them then.

    Fields:

    - `frames`: the rows, in any number of frames, of which there may be none. Where the iteration ends with
      UnusableRows, the part is published without rows, and with `rejected` and `facts` as they are then.
    - `rejected`: what was left out
    - `stores`: the names of the row stores (computed rows) that the rows come from, which `clean` then keeps
    - `facts`: further fields of the record, such as RETRY
    - `beside`: the rows of this part in tables that are published with it, by their name in `Stage.beside`
    """

    frames: Iterable[pl.DataFrame]
    rejected: Rejected = field(default_factory=Counter)
    stores: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, pl.DataFrame] = field(default_factory=dict)


class Chunk(NamedTuple):
    """The work that a worker computes and commits at once.

    - `units`: how many texts or calls it has, for progress
    - `payload`: what `ByChunk.compute` gets, and what travels to a worker process
    - `tokens`: about how many tokens the model will run for it
    """

    units: int
    payload: Any
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The chunks that compute the missing rows of a part; `work` counts the rows to compute and those to reuse."""

    chunks: Sequence[Chunk]
    work: Work


Claimed = dict[str, list[pl.DataFrame]]
"""Per row store: keys already being computed by earlier, unpublished shards of this run, a frame per shard in order.

`stored_rows.claim` adds to it, `stored_rows.release` removes what was published.
"""
Rows = Callable[[Worker, "TableOutput", str], PartRows]
"""Makes or reads the rows of the part of that name."""


@dataclass(frozen=True, slots=True)
class ByShard:
    """Each part is one chunk: a worker makes the rows of a shard and publishes them."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class ByChunk:
    """Workers compute the missing rows of a part in chunks and store them; the part is then read from stored rows.

    - `chunks`: plans a part, in the process of the run; gets and changes what earlier shards have claimed
    - `compute`: computes the payload of a chunk and appends to row stores, in a worker; returns what that cost
    - `rows`: reads the part from the row stores, in the process of the run
    """

    chunks: "Callable[[Worker, TableOutput, str, Claimed], Planned]"
    compute: "Callable[[Worker, TableOutput, Any], Work]"
    rows: Rows


@dataclass(frozen=True, slots=True)
class ByPart:
    """The process of the run makes one part after the other."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class ByParts:
    """The process of the run makes small parts together, since one by one they cost more than their rows.

    `rows` returns the rows of each of the parts that it gets.
    """

    rows: "Callable[[Worker, TableOutput, Sequence[str]], Mapping[str, PartRows]]"


@dataclass(frozen=True, slots=True)
class InWarehouse:
    """A stage's table in the warehouse, where it differs from the lake's.

    - `name`: its name there; empty where that is the stage's
    - `hidden`: columns of the lake that it lacks
    - `added`: columns that it has beside them, with the SQL that computes them
    - `select`: the query over `rows` that makes its rows; it is not read where columns are hidden
    - `keeps_places`: whether its rows must keep their places in the file, see `WarehouseTable`
    """

    name: str = ""
    hidden: tuple[str, ...] = ()
    added: Mapping[str, Column] = field(default_factory=dict)
    select: str = ROWS
    keeps_places: bool = False


def _return_nothing(output: "TableOutput") -> tuple[()]:
    """Return nothing to say, or to call."""
    return ()


def _show_nothing(output: "TableOutput") -> Shown:
    """Return nothing to show."""
    return {}


def _refuse_nothing(output: "TableOutput") -> None:
    """Let the run go on."""
    return


@dataclass(frozen=True, slots=True)
class StageAsset:
    """What the asset of a stage shows and does beside what the asset of every table does.

    All of it is optional, takes the stage's TableOutput, and returns plain values:

    - `shows`: what its page shows, once the table is up to date
    - `warns`: sentences for the log before anything is computed
    - `concludes`: lines for the log once the table is up to date
    - `refuses`: the error with which the run ends after this table, since nothing that follows could find more; None
      where the run goes on
    - `calls`: the lanes whose tools the stage calls: what these prepare before their first call comes first

    `keeps_calls`: whether the rows are the calls that a lane keeps; `changes` then tells how many before and after.
    """

    shows: Callable[["TableOutput"], Shown] = _show_nothing
    warns: Callable[["TableOutput"], Sequence[str]] = _return_nothing
    concludes: Callable[["TableOutput"], Sequence[LogLine]] = _return_nothing
    refuses: Callable[["TableOutput"], UserError | None] = _refuse_nothing
    calls: Callable[["TableOutput"], Iterable[Lane]] = _return_nothing
    keeps_calls: bool = False


class Shard(Protocol):
    """What a part of a sharded table is made from: files, or rows of a data set."""

    @property
    def place(self) -> str:
        """Where it lies, for messages."""

    def stamp(self) -> Mapping[str, Any]:
        """Return what tells that it changed, such as size and time."""


def _get_corpus_shards(plan: Plan) -> Mapping[str, Shard]:
    """Return the shards of the corpus."""
    return plan.shards


@dataclass(frozen=True)
class Stage:
    """The declaration of a stage.

    What it is:

    - `name`: of the stage, and the last part of the name of its tables
    - `group`: the first part of the name of its table, such as "ccnet"; None for a stage of lanes, which has a table
      per lane, such as "calculator/loss_deltas"
    - `description`: what a row is, in a line
    - `columns`: the columns of the table, by name, in order
    - `key`: the columns that tell rows apart; a part with a key twice violates the check `unique_keys`
    - `checks`: promises about the rows, by name
    - `volatile`: columns that measure a run, such as seconds, and do not count in the data version
    - `in_warehouse`: how its table in the warehouse differs
    - `asset`: what its asset shows and does beside what the asset of every table does

    How its rows are made:

    - `make`: who makes the rows of a part, and in which pieces: ByShard, ByChunk, ByPart or ByParts
    - `sharded`: whether the table has a part per shard; else it has one part, WHOLE
    - `shards`: the shards by name, of a plan: those of the corpus, or others such as files of conversations
    - `shared`: whether other plans over the lake have shards of their own in the table: they stay, whatever this plan
      has
    - `pool`: what it needs alone: runs that need the same wait for each other. Each lane has a pool "tools" of its own
    - `kinds`: what Dagster shows beside the asset

    What a part depends on. It is made again when what its record says of `settings` or of the inputs is another:

    - `settings`: a function of (plan, lane) that returns what determines the rows beside other tables: settings,
      prompts, versions of code, constants of the method, SQL text. The lane is None for a stage of all lanes. The
      columns are added
    - `reads`: the names of the tables that it reads, or a function of (plan, lane) that returns them. They come before
      it in the asset graph. A bare name is a table of the same lane, "*/name" that of every lane, "group/name" itself
    - `inputs`: which versions are compared. Empty: those of all that it reads, of the same part where it is sharded. A
      tuple of names: those of these tables alone, because the others follow from them or do not change its rows. A
      function: it gets the TableOutput once per update, and returns the function that computes the inputs of a part,
      such as the size of a file
    - `inner`: stages of the same lane that are brought up to date before it, and only for it: for what the parts of a
      sharded table have to know of each other. They are no assets and not in the warehouse
    - `beside`: names of tables that are published with this one, part for part, by `make` or as `PartRows.beside`. A
      bare name is a table of the same lane. A part that one of them lacks is made again, and one that is withdrawn here
      is withdrawn there
    """

    name: str
    description: str
    columns: Mapping[str, Column]
    key: tuple[str, ...]
    settings: Callable[[Plan, Any], Mapping[str, Any]]
    make: ByShard | ByChunk | ByPart | ByParts
    reads: Callable[[Plan, Any], tuple[str, ...]] | tuple[str, ...] = ()
    inputs: "Callable[[TableOutput], InputsOf] | tuple[str, ...]" = ()
    inner: "tuple[Stage, ...]" = ()
    group: str | None = None
    sharded: bool = True
    shards: Callable[[Plan], Mapping[str, Shard]] = _get_corpus_shards
    shared: bool = False
    pool: Literal["gpu", "tools", "lake"] = "lake"
    kinds: frozenset[str] = frozenset({"python", "parquet"})
    volatile: tuple[str, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    in_warehouse: InWarehouse = InWarehouse()
    asset: StageAsset = StageAsset()

    @property
    def unit(self) -> str:
        """Return what its progress counts: "shards", "calls" or "texts"."""
        if not isinstance(self.make, ByChunk):
            return "shards"
        return "calls" if self.pool == "tools" else "texts"

    @property
    def schema(self) -> pl.Schema:
        """The Polars schema of its rows."""
        return pl.Schema({name: column.dtype for name, column in self.columns.items()})

    def shaped(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Bring rows into the form of the table: exactly its columns, in their order.

        Missing optional columns are filled with nulls. Columns that declare `sql` are computed from the others.
        """
        complete = self._with_optional_columns(frame)

        for name, column in self.columns.items():
            if column.sql is not None:
                # One after the other, since a column may be computed from an earlier computed one.
                computed = pl.sql_expr(column.sql).cast(column.dtype)
                complete = complete.with_columns(computed.alias(name))
        return complete.select(self.schema.names())

    def _with_optional_columns(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Add the optional columns that a frame lacks, filled with nulls."""
        for name, column in self.columns.items():
            if column.optional and name not in frame.columns:
                frame = frame.with_columns(pl.lit(None, column.dtype).alias(name))
        return frame


InputsOf = Callable[[str], Mapping[str, Any]]
"""Returns the inputs of the part of that name, which its record compares: name -> version; null for what is missing."""


@dataclass(frozen=True, eq=False)
class TableOutput:
    """A stage in a run: a table of the lake and an asset of the graph.

    - `stage`: what it declares
    - `plan`: the run
    - `lane_or_none`: the lane; None for a stage of all lanes
    """

    stage: Stage
    plan: Plan
    lane_or_none: Lane | None = None

    @property
    def lane(self) -> Lane:
        """The lane; only for a stage that has lanes."""
        assert self.lane_or_none is not None
        return self.lane_or_none

    @property
    def group(self) -> str:
        """The first part of the table's name: "calculator" or "ccnet"."""
        return self.stage.group or self.lane.key

    @property
    def name(self) -> str:
        """The name of the table and the asset: "calculator/loss_deltas"."""
        return self.plan.named(f"{self.group}/{self.stage.name}")

    @cached_property
    def table(self) -> Table:
        """The table of the lake, published or not."""
        return self.plan.lake.table(self.name)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Everything, except for the inputs, that determines the rows of the table. It can be compared with a record.

        Raises:
            NotPlain: A value cannot be written as JSON.
        """
        schema = {name: [str(column.dtype), column.sql] for name, column in self.stage.columns.items()}
        settings = {**self.stage.settings(self.plan, self.lane_or_none), "columns": fingerprint(schema)}

        # Through JSON, as in a record, where for example tuples become lists.
        return dict(json.loads(as_json(self.name, settings)))

    @cached_property
    def code_version(self) -> str:
        """The fingerprint of the settings, which Dagster compares."""
        return fingerprint(self.settings)

    @property
    def scored(self) -> list[Table]:
        """The lane's tables of scored calls: of single calls, and of chains where it has some."""
        return [self.lane_table(name) for name in self.lane.scored]

    def lane_table(self, name: LaneTable) -> Table:
        """Return another table of the lane: `output.lane_table("heuristic_subset")`."""
        return self.plan.lane_table(self.lane, name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """The whole names of all tables that are read."""
        reads = self.stage.reads
        names = reads(self.plan, self.lane_or_none) if callable(reads) else reads
        return self._expand_names(names)

    @property
    def parts(self) -> list[str]:
        """The names of the parts that the table should have."""
        return list(self.shards) if self.stage.sharded else [WHOLE]

    @property
    def shards(self) -> Mapping[str, Shard]:
        """The shards by name; only for a sharded stage."""
        return self.stage.shards(self.plan)

    @property
    def removed_parts(self) -> list[str]:
        """The published parts that the table should not have, sorted; none where other plans may have made them."""
        if self.stage.shared:
            return []
        return sorted(set(self.table.parts()) - set(self.parts))

    def pointers(self) -> dict[str, Pointer]:
        """Return what is published of each part of this plan. Raises DamagedPart, ReadError."""
        pointers = self.table.pointers()
        if not self.stage.shared:
            return pointers
        return {part: pointers[part] for part in self.parts if part in pointers}

    def version(self) -> str | None:
        """Return a version of the table, which changes whenever one of its parts is added, removed or changed.

        If other plans have parts in the same table, these are not looked at.

        Returns:
            None if the table has no parts, or one of them is damaged.
        """
        has_parts_of_other_plans = self.stage.shared
        if not has_parts_of_other_plans:
            return self.table.version()

        try:
            own_pointers = self.pointers()
        except DamagedPart:
            return None

        version_by_part = {part: pointer.data_version for part, pointer in own_pointers.items()}
        return fingerprint(version_by_part) if version_by_part else None

    @property
    def beside(self) -> list[Table]:
        """The tables that are published with this one, part for part."""
        return [self.plan.lake.table(name) for name in self._expand_names(self.stage.beside)]

    @property
    def inner(self) -> list["TableOutput"]:
        """The tables that are brought up to date before this one, for it alone (`Stage.inner`)."""
        return [TableOutput(stage, self.plan, self.lane_or_none) for stage in self.stage.inner]

    def inputs_of(self) -> InputsOf:
        """Return a function that tells from which versions of other tables a part would be made now.

        The function takes the name of a part: a shard, or WHOLE for a table that has a single part.

        Example:
            output.inputs_of()("en_head_0000")  # {"loss_deltas": "<version of this shard's rows>"}
        """
        inputs = self.stage.inputs
        if callable(inputs):  # the stage has a function for this
            return inputs(self)

        names = self._expand_names(inputs) or self.depends_on  # such as "calculator/loss_deltas"
        tables = {name: self.plan.lake.table(name) for name in names}

        if self.stage.sharded:
            # A part is made from the parts of the same shard in the other tables.
            tables_by_short_name = {_drop_group(name): table for name, table in tables.items()}  # "loss_deltas"
            return versions(tables_by_short_name)

        # The single part is made from all parts of the other tables.
        return partial(_read_versions_of_all_parts, tables)

    def publish(self, part: str, rows: PartRows) -> Pointer:
        """Write the rows of a part into the table, with a record of what they were made from.

        If tables are published together with this one (`Stage.beside`), their part is written first.

        Args:
            part: The name of a shard, or WHOLE.
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
        find_inputs = self.inputs_of()
        inputs = find_inputs(part)

        for name, rows_beside in rows.beside.items():
            self._publish_beside(name, part, rows_beside, inputs)

        try:
            return self._publish_rows(part, rows, inputs)
        except UnusableRows:
            without_frames = replace(rows, frames=())
            return self._publish_rows(part, without_frames, inputs)

    def _publish_rows(self, part: str, rows: PartRows, inputs: Mapping[str, Any]) -> Pointer:
        """Write the rows of a part and their record. inputs: the versions of what they were made from."""
        published = _PublishedRows(self, rows, inputs)
        return self.table.publish(part, published.frames(), published.record, self.stage.volatile)

    def _publish_beside(self, name: str, part: str, rows: pl.DataFrame, inputs: Mapping[str, Any]) -> None:
        """Publish a part of a table that is published together with this one.

        Its record contains no settings, because the settings of this table determine it.

        Args:
            name: The name of the other table, as in `Stage.beside`.
            part: The name of the part.
            rows: Its rows.
            inputs: The versions of what the rows were made from.
        """
        [whole_name] = self._expand_names([name])
        facts = {MADE_BY: name, "tool": self.lane_or_none.key if self.lane_or_none else None}
        self.plan.lake.table(whole_name).publish(part, [rows], lambda: output_record({}, inputs, **facts))

    def warehouse_table(self, sources: Sequence[str], scores: Mapping[str, str]) -> WarehouseTable:
        """Describe the table of this stage in the warehouse, the DuckDB database that shows the results of a run.

        Args:
            sources: The names of the tables in the lake that provide its rows.
            scores: For tools with another score than the paper's, the SQL of that score by the key of the lane.
        """
        stage = self.stage
        in_warehouse = stage.in_warehouse  # how it differs from the tables in the lake
        comments = _map_column_to_comment(stage)
        holds_scored_calls = "delta_is_bound" in stage.columns  # only tables with scored calls have this column

        return WarehouseTable(
            name=in_warehouse.name or stage.name,
            comment=stage.description,
            columns=comments,
            schema=stage.schema,
            sources=tuple(sources),
            select=_build_warehouse_select(in_warehouse),
            by_shard=stage.sharded and "shard" in comments,
            keeps_places=in_warehouse.keeps_places,
            scores=scores if holds_scored_calls else {},
        )

    def _expand_names(self, reads: Sequence[str]) -> tuple[str, ...]:
        """Return the whole names of tables that are named as in `Stage.reads`."""
        names: list[str] = []
        for read in reads:
            names += self._expand_name(read)
        return tuple(names)

    def _expand_name(self, read: str) -> list[str]:
        """Return the full names of the tables that a short name stands for.

        A lane is a tool with its settings. In the lane "calculator":

        - "loss_deltas" is the table of this lane: "calculator/loss_deltas"
        - "*/loss_deltas" is this table of every lane
        - "ccnet/documents" is a full name already
        """
        group, slash, name = read.rpartition("/")
        if group == "*":
            return [f"{lane.key}/{name}" for lane in self.plan.lanes]
        return [read] if slash else [f"{self.lane.key}/{read}"]


def _drop_group(name: str) -> str:
    """Return the name of a table without its group: "calculator/loss_deltas" -> "loss_deltas"."""
    return name.rpartition("/")[2]


def _map_column_to_comment(stage: Stage) -> dict[str, str]:
    """Return the description of each column that a stage's table has in the warehouse."""
    columns = {**stage.columns, **stage.in_warehouse.added}
    hidden = stage.in_warehouse.hidden
    return {name: column.description for name, column in columns.items() if name not in hidden}


def _build_warehouse_select(in_warehouse: InWarehouse) -> str:
    """Build the SQL query that makes the rows of a warehouse table from those in the lake, which are called `rows`.

    If columns are hidden, the query leaves them out and computes the added columns.
    """
    if not in_warehouse.hidden:
        return in_warehouse.select

    hidden_columns = ", ".join(in_warehouse.hidden)
    added_columns = "".join(f", {column.sql} AS {name}" for name, column in in_warehouse.added.items())
    return f"SELECT * EXCLUDE ({hidden_columns}){added_columns} FROM rows"


class _PublishedRows:
    """The rows of a part on their way into its files, and what is counted of them. It has two states.

    Until `frames` has been iterated over to its end, it counts. Then `record` may be called, once.
    """

    def __init__(self, output: TableOutput, rows: PartRows, inputs: Mapping[str, Any]) -> None:
        self._output = output
        self._rows = rows
        self._inputs = inputs
        self._key_hashes: list[pl.Series] = []  # a series per frame; 64 bits a row: those of a million take 8 MB
        self._violations = dict.fromkeys(output.stage.checks, 0)

    def frames(self) -> Iterator[pl.DataFrame]:
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
        self._key_hashes.append(frame.select(stage.key).hash_rows())
        for name, check in stage.checks.items():
            self._violations[name] += check.broken(frame, self._output)

    def record(self) -> Mapping[str, Any]:
        """Build the record of the part: from what it was made, what was rejected, and how many rows break a check.

        The counts are complete only after the last frame.
        """
        lane = self._output.lane_or_none
        facts = {
            MADE_BY: self._output.stage.name,
            "tool": lane.key if lane else None,
            RETRY: None,
            **self._rows.facts,  # may replace RETRY by a reason to make the part again
        }
        sources = output_record(self._output.settings, self._inputs, **facts)
        return {
            **sources,
            STORES: list(self._rows.stores),
            REJECTIONS: encoded(self._rows.rejected),
            VIOLATIONS: {"unique_keys": self._count_rows_with_shared_key(), **self._violations},
        }

    def _count_rows_with_shared_key(self) -> int:
        """Return how many rows have a key that another row has too."""
        if not self._key_hashes:
            return 0
        return int(pl.concat(self._key_hashes).is_duplicated().sum())


def versions(tables: Mapping[str, Table], over_all: Table | None = None) -> InputsOf:
    """Return a function that tells from which versions of other tables a shard's part would be made now.

    Args:
        tables: The other tables, by the name under which the version of the shard's rows is returned.
        over_all: One more table, which has a single part for all shards. Its record has a fingerprint for each shard,
            which is used as the version.

    Example:
        inputs_of = versions({"raw_shards": raw_shards}, over_all=removed_documents)
        inputs_of("en_head_0000")  # {"raw_shards": "<version>", "removed_documents": "<fingerprint>"}
    """
    fingerprint_by_shard = _read_fingerprints_by_shard(over_all) if over_all else {}

    def inputs_of(shard: str) -> Mapping[str, Any]:
        version_by_name = {name: table.part_version(shard) for name, table in tables.items()}
        if over_all and shard in fingerprint_by_shard:
            version_by_name[_drop_group(over_all.name)] = fingerprint_by_shard[shard]
        return version_by_name

    return inputs_of


def _read_fingerprints_by_shard(table: Table) -> Mapping[str, Any]:
    """Read the fingerprint of each shard from the record of a table that has a single part for all shards.

    The result is empty if the table has no part yet.
    """
    pointer = table.find_whole_pointer(WHOLE)
    return pointer.record[BY_SHARD] if pointer else {}


def _read_versions_of_all_parts(tables: Mapping[str, Table], part: str) -> Mapping[str, Any]:
    """Return the inputs of a table's only part: the version of every part of `tables`, by table and part."""
    return {name: _read_part_versions(table) for name, table in tables.items()}


def _read_part_versions(table: Table) -> dict[str, str | None]:
    """Return the version of each part of a table."""
    return {part: table.part_version(part) for part in table.parts()}


def encoded(rejected: Rejected) -> list[dict[str, Any]]:
    """Convert counts of rejections to the form in which a record holds them, sorted and without counts of 0.

    Example:
        encoded(Counter({("en_head_0000", "too_short"): 2}))
        # [{"shard": "en_head_0000", "reason": "too_short", "count": 2}]
    """
    rejections = []
    for (shard, reason), count in sorted(rejected.items()):
        if count:
            rejections.append({"shard": shard, "reason": reason, "count": count})
    return rejections


def count_by_reason(frame: pl.DataFrame, reason: str = "reason") -> Rejected:
    """Count the rows of a table that were rejected, by shard and reason.

    Args:
        frame: The table, with the column `shard` and a column for the reason.
        reason: The name of the column for the reason, which is null if a row was not rejected.
    """
    rejected_rows = frame.filter(pl.col(reason).is_not_null())
    counts = rejected_rows.group_by("shard", reason).len()

    rejected = Rejected()
    for shard_name, reason_of_rows, count in counts.rows():
        rejected[shard_name, reason_of_rows] = count
    return rejected


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
CALL = {
    "tool": TOOL,
    "shard": SHARD,
    "digest": DIGEST,
    "segment": SEGMENT,
    "position": Column(pl.Int32(), "i: the call stands before token x_i, counted from 0"),
    "sample": Column(pl.Int32(), "j: number of the sample at this position; from -1 down where nobody sampled it"),
}
"""What tells calls apart."""
CALL_KEY = tuple(CALL)
CHAIN = Column(
    pl.String(), "the calls of a chain with their results as JSON, this one last; null for a single call", optional=True
)
TEXT_KEY = ("shard", "digest", "segment")
"""What tells texts apart."""
SCORED = {
    **CALL,
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
        pl.Float64(), "smallest L_i of the calls before it with their results; null for a single call", optional=True
    ),
    "need": Column(
        pl.Float64(), "nats by which the calls before it made its input likelier; null for a single call", optional=True
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
        optional=True,
    ),
    "delta_is_bound": Column(
        pl.Boolean(),
        "whether delta is an upper bound, because L(c) was not computed (filtering.loss_floor)",
        "loss_call IS NULL AND loss_empty IS NOT NULL",
    ),
    "reason": Column(pl.String(), "why the call may not stay whatever its delta; null where it may"),
}
"""The columns of scored calls."""
