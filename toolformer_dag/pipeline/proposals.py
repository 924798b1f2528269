"""Calls that the model does not sample: those of files (another model, a log, an annotator), and those of a rule.

An inner table per kind of source finds the place of each call in the lane's texts: file_proposals over all shards,
rule_proposals shard by shard. A part of scored_candidates takes their rows. From there on they are calls like others;
`source` tells them apart.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson
import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import (
    BY_SHARD,
    CALL_KEY,
    REJECTIONS,
    RESULT,
    TEXT_KEY,
    Column,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    TableOutput,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline import raw_shards, scored_candidates
from toolformer_dag.pipeline.document_cuts import tokenizing
from toolformer_dag.settings.tool_settings import MODEL, RULE, source_name
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.tools.tool import OverBudget

FROM_FILES, FROM_RULE = "file_proposals", "rule_proposals"
PLACING = 2
"""Raised when the same proposals would give other rows; no loss is computed again."""
FIELDS = pl.Schema(
    {
        "source": pl.String(),
        "digest": pl.String(),
        "named": pl.String(),
        "at": pl.Int64(),
        "input": pl.String(),
        "result": pl.String(),
        "p_api": pl.Float32(),
    }
)
Fields = tuple[str, str | None, str | None, int, str, str | None, float | None]


def identity(lane: Lane) -> dict[str, str]:
    """Return the hash of each of the lane's files of calls, by its name. Raises UserError."""
    found = {}
    for name, path in lane.files.items():
        try:
            found[name] = file_hash(path)
        except OSError as error:
            raise _unreadable(lane, path, error) from error
    return {"files": fingerprint(found)} if found else {}


def _unreadable(lane: Lane, path: Path, error: Exception) -> UserError:
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _records(path: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file, or the values of JSON lines; None for a line that is no JSON."""
    if path.suffix == ".parquet":
        yield from pl.read_parquet(path).iter_rows(named=True)
        return
    for line in filter(None, map(bytes.strip, path.read_bytes().splitlines())):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError:
            yield None


def _fields(source: str, record: object) -> Fields | None:
    """Return what a row says of its call; None where a field is missing or of another type."""
    if not isinstance(record, dict):
        return None
    values: list[Any] = list(map(record.get, ("digest", "text", "id", "char_offset", "input", "result", "p_api")))
    digest, text, identifier, at, asked, result, p_api = values
    named = _named(text, identifier)
    typed = isinstance(digest or named, str) and type(at) is int and 0 <= at < 2**62 and isinstance(asked, str)
    if not (typed and isinstance(result, str | None) and isinstance(p_api, int | float | None)):
        return None
    return source, digest, None if digest else named, at, asked, result, p_api


def _named(text: Any, identifier: Any) -> Any:
    """The hash of a text, else the id as `documents` holds it, where numbers are text."""
    if isinstance(text, str):
        return text_digest(text)
    return str(identifier) if isinstance(identifier, int) else identifier


def _read(lane: Lane) -> list[Fields | None]:
    found: list[Fields | None] = []
    for name, path in lane.files.items():
        try:
            found += [_fields(name, record) for record in _records(path)]
        except (OSError, pl.exceptions.PolarsError) as error:
            raise _unreadable(lane, path, error) from error
    return found


def _with_documents(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Fill in the digest of calls that name their document by its text or its id: of each document that has it."""
    named = calls.filter(pl.col("named").is_not_null()).drop("digest")
    if named.is_empty():
        return calls.drop("named")
    found = [calls.clear()]
    for shard in plan.shards:
        for batch in raw_shards.documents(plan, shard):
            hashes = pl.Series(map(text_digest, batch["text"]), dtype=pl.String)
            for names in (hashes, batch["digest"], batch["url"]):  # a digest is the id, a url that of a plain record
                found.append(batch.select("digest", named=names).join(named, on="named").select(calls.columns))
    matched = pl.concat(found).unique(("number", "digest"))
    return pl.concat([calls.join(matched, on="number", how="anti"), matched]).drop("named")


def of_files(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Find the calls of the lane's files in its texts. `char_offset` of a row is the character at which x_i begins.

    A call before a word may stand before or after the white space in front of it. Rejected: bad_row (no JSON, a field
    is missing or of another type), no_such_text (no text of the lane holds the place), inside_a_token, and those of
    `parse_call`. What is of no shard counts for the first one. Memory: the files and a shard's texts.
    """
    plan, lane, first = output.plan, output.lane, min(output.plan.shards, default="")
    read = _read(lane)
    rejected: Rejected = Counter({(first, "bad_row"): read.count(None)})
    rows = pl.DataFrame([one for one in read if one], schema=FIELDS, orient="row").with_row_index("number")
    calls = _with_documents(plan, rows).with_columns(words=pl.lit(None, pl.String))
    frames = [output.stage.schema.to_frame()]
    found: set[int] = set()
    for shard in plan.shards:
        here = _in_texts(plan, lane, shard, calls)
        found.update(here["number"])
        frames.append(_at_tokens(worker, output, shard, here, rejected))
    rejected[first, "no_such_text"] += rows.height - len(found)
    table = pl.concat(frames)
    rows_of = table.partition_by("shard", as_dict=True)
    refused = {shard: list(counts) for shard, counts in groupby(sorted(rejected.items()), key=lambda one: one[0][0])}
    facts = {shard: [rows_of.get((shard,), table.clear()).rows(), refused.get(shard, [])] for shard in plan.shards}
    return PartRows([table], rejected, facts={BY_SHARD: {shard: fingerprint(fact) for shard, fact in facts.items()}})


def _in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """The calls whose place is in a text of the shard, with this text, in the order of the files."""
    texts = plan.lake.table(f"{lane.key}/heuristic_subset").read(shard)
    joined = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    inside = pl.col("at").is_between("offset", pl.col("offset") + pl.col("text").str.len_chars(), closed="left")
    return joined.filter(inside).sort("number")


def of_rule(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return what the lane's rule proposes for each text of a shard.

    Rejected: inside_a_token, those of `parse_call`, and over_budget: texts that cost the rule too much work. Raises
    ToolDown where the rule fails.
    """
    lane, rejected, calls = output.lane, Counter[tuple[str, str]](), []
    texts = output.plan.lake.table(f"{lane.key}/heuristic_subset").read(shard)
    texts = texts.select(*TEXT_KEY, "offset", "text", "context")
    for *key, offset, text, context in texts.iter_rows():
        try:
            proposed = dict.fromkeys(lane.propose(text, context))
        except OverBudget:
            rejected[shard, "over_budget"] += 1
            continue
        place = (*key, offset, text, context, RULE)
        calls += [(*place, offset + one.offset, one.input, None, None, one.words or None) for one in proposed]
    named = {**texts.schema, "source": pl.String(), "at": pl.Int64()}
    answers = {"input": pl.String(), "result": pl.String(), "p_api": pl.Float32(), "words": pl.String()}
    rows = pl.DataFrame(calls, schema={**named, **answers}, orient="row")
    return PartRows([_at_tokens(worker, output, shard, rows, rejected)], rejected)


def _at_tokens(
    worker: Worker, output: TableOutput, shard: str, calls: pl.DataFrame, rejected: Rejected
) -> pl.DataFrame:
    """The rows of calls that stand before a token and are calls of the tool."""
    lane = output.lane
    rows: list[tuple[object, ...]] = []
    for some in calls.partition_by(TEXT_KEY, maintain_order=True):
        text, offset = some["text"][0], some["offset"][0]
        places = scored_candidates.TokenPlaces(worker.encoding(), text)
        for digest, segment, context, source, place, asked, result, p_api, words in some.select(
            "digest", "segment", "context", "source", "at", "input", "result", "p_api", "words"
        ).iter_rows():
            found = places.at(place - offset)
            body, input, reason = scored_candidates.parsed_call(lane, f"{lane.tool.name}({asked})")
            if found is None or reason:
                rejected[shard, reason or "inside_a_token"] += 1
                continue
            at, position = found
            key = (lane.key, shard, digest, segment, position, 0)
            cleaned = result and clean_result(result, lane.limits.max_result_characters)
            rows.append((*key, source, offset + at, p_api, body, input, words, None, context, cleaned))
    numbered = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    table = pl.DataFrame(rows, schema=output.stage.schema, orient="row").with_columns(sample=numbered)
    return table.sort(CALL_KEY)


def given_results(output: TableOutput) -> pl.DataFrame:
    """Return (input, context, result) of calls that brought their results, of equal calls the first; none without."""
    if not output.lane.files:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.plan.lake.table(f"{output.lane.key}/{FROM_FILES}")

    def given() -> pl.DataFrame:
        known = table.scan([WHOLE]).filter(pl.col("result").str.len_chars() > 0).select("input", "context", "result")
        return known.unique(("input", "context"), keep="first", maintain_order=True).collect()

    return table.remembered("given results", given)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a lane's sources in a shard: sampled ones, those of files and of the rule.

    The `sample` of calls that were not sampled counts down from -1: so they keep it whatever m is.
    """
    lane, stage = output.lane, output.stage
    made = scored_candidates.rows(worker, output, shard) if MODEL in lane.proposals else PartRows([])
    order = {source_name(source): number for number, source in enumerate(lane.proposals)}
    own = [stage.schema.to_frame()]
    for inner in stage.inner:
        table, part = output.plan.lake.table(f"{lane.key}/{inner.name}"), shard if inner.sharded else WHOLE
        found = table.scan([part]).filter(pl.col("shard") == shard).select(stage.schema.names())
        own.append(found.collect())
        for one in table.record(part)[REJECTIONS]:
            if one["shard"] == shard:
                made.rejected[shard, one["reason"]] += one["count"]
    ordered = pl.concat(own).sort(pl.col("source").replace_strict(order, return_dtype=pl.Int32), *CALL_KEY)
    numbered = ordered.with_columns(sample=-1 - pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position"))
    return replace(made, frames=[pl.concat([*made.frames, numbered]).sort(CALL_KEY)])


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the texts; how calls are sampled only where they are."""
    sampled = scored_candidates.settings(plan, lane) if MODEL in lane.proposals else {}
    return {**_placing(plan, lane), **sampled, **identity(lane), **_rule(lane), "proposals": list(lane.proposals)}


def _placing(plan: Plan, lane: Lane) -> dict[str, Any]:
    model = {"model": tokenizing(plan), "placing": PLACING}
    return {**model, "tool": lane.tool.name, "parsing": scored_candidates.PARSING}


def _rule(lane: Lane) -> dict[str, object]:
    return {"rule": lane.rule_identity()} if RULE in lane.proposals else {}


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's texts, and of what the files have of it."""
    table, key = output.plan.lake.table, output.lane.key
    texts = "heuristic_subset"
    files = table(f"{key}/{FROM_FILES}") if output.lane.files else None
    return versions({texts: table(f"{key}/{texts}")}, files)


COLUMNS = {
    **scored_candidates.STAGE.columns,
    "context": Column(pl.String(), "what the result depends on beside the input"),
    "result": RESULT,
}
PLACED = Stage(
    name=FROM_FILES,
    description="Calls of the lane's files at their places in its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=lambda plan, lane: {
        **_placing(plan, lane),
        **identity(lane),
        "characters": lane.limits.max_result_characters,
    },
    reads=("heuristic_subset",),
    sharded=False,
    rows=of_files,
)
RULED = Stage(
    name=FROM_RULE,
    description="Calls that the lane's rule proposes for its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=lambda plan, lane: {**_placing(plan, lane), **_rule(lane)},
    reads=("heuristic_subset",),
    shard_rows=of_rule,
)


def stage(lane: Lane) -> Stage:
    """Return scored_candidates of a lane, whose calls come from its sources; discarded samples have a reason."""
    if lane.proposals == (MODEL,):
        return scored_candidates.STAGE
    return _stage(bool(lane.files), RULE in lane.proposals, MODEL in lane.proposals)


@cache
def _stage(files: bool, rule: bool, sampled: bool) -> Stage:
    inner = (*((PLACED,) if files else ()), *((RULED,) if rule else ()))
    found = replace(scored_candidates.STAGE, settings=settings, inputs=inputs, inner=inner, rows=rows)
    alone = replace(found, pool="lake", kinds=frozenset({"polars", "parquet"}), chunks=None, compute=None)
    return found if sampled else alone
