"""What a stage declares, once: columns, key, inputs, the settings that determine it, its functions.

The asset, `stale --why`, the warehouse's tables and comments, the data dictionary and the checks follow from it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import polars as pl

from toolformer_dag.computing.lane_tables import LaneTable
from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError, as_json
from toolformer_dag.identity import fingerprint
from toolformer_dag.lake.manifest import Pointer
from toolformer_dag.lake.record import STORES, record
from toolformer_dag.lake.session import News
from toolformer_dag.lake.table import WHOLE, Table, behind
from toolformer_dag.lake.warehouse_filling import ROWS, WarehouseTable

Rejected = Counter[tuple[str, str]]
"""(shard, reason) -> how many."""
REJECTIONS = "rejections"
"""The field of a part's record that holds what was left out."""
VIOLATIONS = "violations"
"""Rows that fail a check, by check."""
MADE_BY = "stage"
"""The field of a part's record that says which stage left out what REJECTIONS counts."""
RETRY = "retry"
"""Why the next run computes the part again although nothing changed; null for most."""
BY_SHARD = "by_shard"
"""The field of the record of a table over all shards that holds a fingerprint of what concerns each."""
BACKENDS = "backends"
"""The backends that computed the rows that the run did not reuse."""


@dataclass(frozen=True, slots=True)
class Column:
    """A polars type and a one-line description. `sql`: how the column follows from the columns before it.

    `optional`: it is null in rows that were made without it.
    """

    dtype: pl.DataType
    description: str
    sql: str | None = None
    optional: bool = False


Check = Callable[[pl.DataFrame, "TableOutput"], int]
"""Counts the rows of a frame that break a promise."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a run cost: `tokens` through the model; rows that were `computed` and `reused`, such as samples; by kind.

    `damaged`: files that were set aside, with reasons; `backends`: `Backend.identity` of those that computed; `news`:
    parts made by a worker process; dropped by `+`.
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
    """An input was published anew after another one had been made from it."""

    def __init__(self, table: str, part: str, what: str, asset: str) -> None:
        where = behind(", shard", part)
        super().__init__(f"{table}{where}: {what}; materialize {asset} first, or all with `toolformer-dag stale --run`")


class UnusableRows(Exception):
    """Raised after the last frame when the whole part must be discarded."""


@dataclass(frozen=True, slots=True)
class PartRows:
    """The rows of a part and what belongs into its record. `rejected` and `facts` are read after the last frame.

    There may be no frame. Frames may end with UnusableRows: the part is then published without rows.

    `stores`: names of the row stores they come from; `facts`: what else is worth keeping, RETRY among it.
    """

    frames: Iterable[pl.DataFrame]
    rejected: Rejected = field(default_factory=Counter)
    stores: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


class Chunk(NamedTuple):
    """What is computed and committed together: `units` (texts, calls), and some `tokens` that the model will run."""

    units: int
    payload: Any
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The missing rows of a part. `work`: rows that are computed and reused."""

    chunks: Sequence[Chunk]
    work: Work


Claimed = dict[str, list[pl.DataFrame]]
"""Keys that are being computed for shards of this run that are not published yet, in their order, by row store."""
Rows = Callable[[Worker, "TableOutput", str], PartRows]
"""Makes or reads the rows of a part."""


@dataclass(frozen=True, slots=True)
class ByShard:
    """A shard is a chunk: a worker makes its rows and publishes them."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class ByChunk:
    """Workers compute the chunks of a part and store their rows; the part is read from these."""

    chunks: "Callable[[Worker, TableOutput, str, Claimed], Planned]"
    compute: "Callable[[Worker, TableOutput, Any], Work]"
    rows: Rows


@dataclass(frozen=True, slots=True)
class ByPart:
    """The process of the run makes one part after the other."""

    rows: Rows


@dataclass(frozen=True, slots=True)
class ByParts:
    """The process of the run makes small parts together, since one by one they cost more than their rows."""

    rows: "Callable[[Worker, TableOutput, Sequence[str]], Mapping[str, PartRows]]"


@dataclass(frozen=True, slots=True)
class InWarehouse:
    """A stage's table in the warehouse, where it differs from the lake's.

    `name`: empty for the stage's; `hidden`, `added`: columns that it lacks, and that it has beside them; `select`: its
    rows where they are others.
    """

    name: str = ""
    hidden: tuple[str, ...] = ()
    added: Mapping[str, Column] = field(default_factory=dict)
    select: str = ROWS


@dataclass(frozen=True)
class Stage:
    """A declaration. `group`: first part of the table's name, None for a lane's own.

    settings: what determines the rows beside the inputs, of (plan, lane); constants of the method and SQL text too.
    make: who makes a part, and how.
    reads: the tables that are read; a bare name is of the same lane, "*/name" of every lane.
    inputs: those of them whose versions count, all where nothing is said; or what tells the inputs in the record of a
    part, asked once for all parts of a table.
    inner: stages of the same lane whose tables are brought up to date with this one's, before it: for what the parts of
    a sharded table have to know of each other. They are no assets, and are not in the warehouse.
    sharded: a part per shard, else one part. pool: what serialises its runs; each lane has its own of tools.
    volatile: columns whose values are not part of the table's version.
    beside: tables that are published with it, part for part.
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
    pool: Literal["gpu", "tools", "lake"] = "lake"
    kinds: frozenset[str] = frozenset({"python", "parquet"})
    volatile: tuple[str, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    in_warehouse: InWarehouse = InWarehouse()

    @property
    def unit(self) -> str:
        """Name what its progress counts."""
        if not isinstance(self.make, ByChunk):
            return "shards"
        return "calls" if self.pool == "tools" else "texts"

    @property
    def schema(self) -> pl.Schema:
        """Return the Polars schema of its rows."""
        return pl.Schema({name: column.dtype for name, column in self.columns.items()})

    def shaped(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Compute the columns that follow from others, and put all columns in the declared order."""
        lacking = {name: column.dtype for name, column in self.columns.items() if column.optional}
        frame = frame.with_columns(
            pl.lit(None, dtype).alias(name) for name, dtype in lacking.items() if name not in frame.columns
        )
        for name, column in self.columns.items():
            if column.sql is not None:
                frame = frame.with_columns(pl.sql_expr(column.sql).cast(column.dtype).alias(name))
        return frame.select(self.schema.names())


InputsOf = Callable[[str], Mapping[str, Any]]
"""Returns the inputs in the record of a part."""


@dataclass(frozen=True, eq=False)
class TableOutput:
    """A stage of a plan, for a lane where it has lanes: a table of the lake and an asset of the graph."""

    stage: Stage
    plan: Plan
    lane_or_none: Lane | None = None

    @property
    def lane(self) -> Lane:
        """The lane, which a stage of all lanes does not have."""
        assert self.lane_or_none is not None
        return self.lane_or_none

    @property
    def group(self) -> str:
        return self.stage.group or self.lane.key

    @property
    def name(self) -> str:
        """Name of the table and the asset: "calculator/loss_deltas"."""
        return self.plan.named(f"{self.group}/{self.stage.name}")

    @cached_property
    def table(self) -> Table:
        return self.plan.lake.table(self.name)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The settings that determine the rows beside the inputs, in the form that JSON gives back."""
        schema = {name: [str(column.dtype), column.sql] for name, column in self.stage.columns.items()}
        made = {**self.stage.settings(self.plan, self.lane_or_none), "columns": fingerprint(schema)}
        return dict(json.loads(as_json(self.name, made)))

    @cached_property
    def code_version(self) -> str:
        """The fingerprint of the settings, which Dagster compares."""
        return fingerprint(self.settings)

    @property
    def scored(self) -> list[Table]:
        """The lane's tables of scored calls."""
        return [self.lane_table(name) for name in self.lane.scored]

    def lane_table(self, name: LaneTable) -> Table:
        """Return another table of the lane: `output.lane_table("heuristic_subset")`."""
        return self.plan.lane_table(self.lane, name)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Names of all tables that are read."""
        reads = self.stage.reads
        return self._named(reads(self.plan, self.lane_or_none) if callable(reads) else reads)

    @property
    def parts(self) -> list[str]:
        """The parts that the table should have."""
        return list(self.plan.shards) if self.stage.sharded else [WHOLE]

    @property
    def inner(self) -> list["TableOutput"]:
        """The tables that are brought up to date before this one, for it alone."""
        return [TableOutput(stage, self.plan, self.lane_or_none) for stage in self.stage.inner]

    def inputs_of(self) -> InputsOf:
        """Return what tells the versions of what a part is made from; null for what was not made yet."""
        inputs = self.stage.inputs
        if callable(inputs):
            return inputs(self)
        names, table = self._named(inputs) or self.depends_on, self.plan.lake.table
        if self.stage.sharded:
            return versions({name.rpartition("/")[2]: table(name) for name in names})
        whole = {name: table(name) for name in names}
        return lambda _: {name: {part: one.part_version(part) for part in one.parts()} for name, one in whole.items()}

    def publish(self, part: str, made: PartRows) -> Pointer:
        """Publish the rows of a part with their record. Raises WriteError."""
        inputs = self.inputs_of()(part)  # before the first row: what changes meanwhile is read again
        try:
            return self._publish(part, made.frames, made, inputs)
        except UnusableRows:
            return self._publish(part, (), made, inputs)

    def _publish(self, part: str, frames: Iterable[pl.DataFrame], made: PartRows, inputs: Mapping[str, Any]) -> Pointer:
        keys = [pl.Series(dtype=pl.UInt64)]  # 64 bits each: those of a million rows take 8 MB
        violations: Counter[str] = Counter()

        def seen() -> Iterator[pl.DataFrame]:
            for frame in frames:
                keys.append(frame.select(self.stage.key).hash_rows())
                violations.update({name: check(frame, self) for name, check in self.stage.checks.items()})
                yield frame
            if len(keys) == 1:
                yield self.stage.schema.to_frame()

        def made_from() -> Mapping[str, Any]:
            twice = pl.concat(keys).is_duplicated().sum() if len(keys) > 1 else 0
            facts = {MADE_BY: self.stage.name, "tool": self.lane_or_none.key if self.lane_or_none else None}
            return record(self.settings, inputs, **{**facts, RETRY: None, **made.facts}) | {
                STORES: list(made.stores),
                REJECTIONS: encoded(made.rejected),
                VIOLATIONS: {"unique_keys": twice, **violations},
            }

        return self.table.publish(part, seen(), made_from, self.stage.volatile)

    def warehouse_table(self, sources: Sequence[str], scores: Mapping[str, str]) -> WarehouseTable:
        """Return the stage's table in the warehouse, over the lake tables `sources`; `scores`: those of its lanes."""
        stage, there = self.stage, self.stage.in_warehouse
        shown = {name: column for name, column in {**stage.columns, **there.added}.items() if name not in there.hidden}
        added = "".join(f", {column.sql} AS {name}" for name, column in there.added.items())
        return WarehouseTable(
            there.name or stage.name,
            stage.description,
            {name: column.description for name, column in shown.items()},
            stage.schema,
            tuple(sources),
            f"SELECT * EXCLUDE ({', '.join(there.hidden)}){added} FROM rows" if there.hidden else there.select,
            by_shard=stage.sharded and "shard" in shown,
            scores=scores if "delta_is_bound" in stage.columns else {},
        )

    def _named(self, reads: Sequence[str]) -> tuple[str, ...]:
        """Tables by their whole names."""
        named: list[str] = []
        for read in reads:
            group, slash, name = read.rpartition("/")
            of_lanes = [f"{lane.key}/{name}" for lane in self.plan.lanes]
            named += of_lanes if group == "*" else [read if slash else f"{self.lane.key}/{read}"]
        return tuple(named)


def versions(tables: Mapping[str, Table], over_all: Table | None = None) -> InputsOf:
    """Return what tells the versions of a shard in `tables`, and what a table over all shards says of it (BY_SHARD)."""
    pointer = over_all.whole_pointer(WHOLE) if over_all else None
    concerning = {over_all.name.rpartition("/")[2]: pointer.record[BY_SHARD]} if over_all and pointer else {}

    def of(shard: str) -> Mapping[str, Any]:
        part_versions = {name: table.part_version(shard) for name, table in tables.items()}
        return part_versions | {name: by_shard[shard] for name, by_shard in concerning.items() if shard in by_shard}

    return of


def encoded(rejected: Rejected) -> list[dict[str, Any]]:
    """Return rejections as a record holds them, in a fixed order."""
    return [{"shard": shard, "reason": reason, "count": n} for (shard, reason), n in sorted(rejected.items()) if n]


def counted(frame: pl.DataFrame, reason: str = "reason") -> Rejected:
    """Count the rows of `frame` (shard, reason) whose reason is not null."""
    rows = frame.filter(pl.col(reason).is_not_null()).group_by("shard", reason).len().rows()
    return Counter({(shard, why): count for shard, why, count in rows})


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
CALL_KEY = tuple(CALL)
CHAIN = Column(
    pl.String(), "the calls of a chain with their results as JSON, this one last; null for a single call", optional=True
)
TEXT_KEY = ("shard", "digest", "segment")
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
    "reason": Column(pl.String(), "why the call may not stay whatever its delta; null for most"),
}
