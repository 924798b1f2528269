"""Calls that a file brings, from another model, a log or an annotator, in place of sampled ones or beside them.

An inner table of all shards finds the place of each call in the lane's texts; a part of scored_candidates takes its
rows. From there on they are calls like others.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import polars as pl

from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.pipeline import raw_shards, scored_candidates
from toolformer_dag.pipeline.document_cuts import tokenizing
from toolformer_dag.pipeline.plan import Lane, Plan
from toolformer_dag.pipeline.stage import (
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
from toolformer_dag.pipeline.worker import Worker
from toolformer_dag.texts.calls import clean_result
from toolformer_dag.texts.segments import text_digest

if TYPE_CHECKING:
    from toolformer_dag.model.encoding import Encoding

NAME = "own_candidates"
PLACING = 1
"""Raised when the same file would give other rows; no loss is computed again."""
FIRST_SAMPLE = 1_000_000
"""Number of the first call of a file at a position; sampled calls have smaller ones. views.sql knows it too."""
FIELDS = pl.Schema(
    {
        "digest": pl.String(),
        "text_hash": pl.String(),
        "at": pl.Int64(),
        "input": pl.String(),
        "result": pl.String(),
        "p_api": pl.Float32(),
    }
)
Fields = tuple[str | None, str | None, int, str, str | None, float | None]


def identity(lane: Lane) -> dict[str, str]:
    """Return the hash of the lane's file of calls; nothing where it has none. Raises UserError."""
    if lane.candidates is None:
        return {}
    try:
        return {"candidates": file_hash(lane.candidates)}
    except OSError as error:
        raise _unreadable(lane, error) from error


def _unreadable(lane: Lane, error: Exception) -> UserError:
    return UserError(
        f"[tools.{lane.tool.key}] candidates: {lane.candidates} cannot be read ({error}); name a Parquet file or JSON "
        "lines with digest or text, char_offset and input"
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


def _fields(record: object) -> Fields | None:
    """Return what a row says of its call; None where a field is missing or of another type."""
    if not isinstance(record, dict):
        return None
    values: list[Any] = list(map(record.get, ("digest", "text", "char_offset", "input", "result", "p_api")))
    digest, text, at, asked, result, p_api = values
    typed = isinstance(digest or text, str) and type(at) is int and 0 <= at < 2**62 and isinstance(asked, str)
    if not (typed and isinstance(result, str | None) and isinstance(p_api, int | float | None)):
        return None
    return digest, None if digest else text_digest(text), at, asked, result, p_api


def _with_documents(plan: Plan, calls: pl.DataFrame) -> pl.DataFrame:
    """Fill in the digest of calls that bring the text of their document: of each document with this text."""
    by_text = calls.filter(pl.col("text_hash").is_not_null()).drop("digest")
    if by_text.is_empty():
        return calls.drop("text_hash")
    found = [calls.clear()]
    for shard in plan.shards:
        for batch in raw_shards.documents(plan, shard):
            hashed = batch.select("digest", text_hash=pl.Series(map(text_digest, batch["text"]), dtype=pl.String))
            found.append(hashed.join(by_text, on="text_hash").select(calls.columns))
    matched = pl.concat(found).unique(("number", "digest"))
    return pl.concat([calls.join(matched, on="number", how="anti"), matched]).drop("text_hash")


def placed(worker: Worker, output: TableOutput, part: str) -> PartRows:
    """Find the calls of the lane's file in its texts. `char_offset` of a row is the character at which x_i begins.

    A call before a word may stand before or behind the white space in front of it. Rejected: bad_row (no JSON, a field
    is missing or of another type), no_such_text (no text of the lane holds the place), inside_a_token, and those of
    `parse_call`. What is of no shard counts for the first one. Memory: the file and a shard's texts.
    """
    plan, lane, first = output.plan, output.lane, min(output.plan.shards, default="")
    assert lane.candidates is not None
    try:
        read = list(map(_fields, _records(lane.candidates)))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise _unreadable(lane, error) from error
    rejected: Rejected = Counter({(first, "bad_row"): read.count(None)})
    rows = pl.DataFrame([one for one in read if one], schema=FIELDS, orient="row").with_row_index("number")
    calls = _with_documents(plan, rows)
    frames = [output.stage.schema.to_frame()]
    found: set[int] = set()
    for shard in plan.shards:
        here = _in_texts(plan, lane, shard, calls)
        found.update(here["number"])
        frames.append(_at_tokens(worker, output, shard, here, rejected))
    rejected[first, "no_such_text"] += rows.height - len(found)
    table = pl.concat(frames).sort(CALL_KEY)
    rows_of = table.partition_by("shard", as_dict=True)
    refused = {shard: list(counts) for shard, counts in groupby(sorted(rejected.items()), key=lambda one: one[0][0])}
    facts = {shard: [rows_of.get((shard,), table.clear()).rows(), refused.get(shard, [])] for shard in plan.shards}
    return PartRows([table], rejected, facts={BY_SHARD: {shard: fingerprint(fact) for shard, fact in facts.items()}})


def _in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """The calls whose place is in a text of the shard, with this text, in the order of the file."""
    texts = plan.lake.table(f"{lane.key}/heuristic_subset").read(shard)
    joined = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    inside = pl.col("at").is_between("offset", pl.col("offset") + pl.col("text").str.len_chars(), closed="left")
    return joined.filter(inside).sort("number")


def _at_tokens(
    worker: Worker, output: TableOutput, shard: str, calls: pl.DataFrame, rejected: Rejected
) -> pl.DataFrame:
    """The rows of calls that stand before a token and are calls of the tool."""
    lane = output.lane
    rows: list[tuple[object, ...]] = []
    for some in calls.partition_by(TEXT_KEY, maintain_order=True):
        text, offset = some["text"][0], some["offset"][0]
        begins = _token_begins(worker.encoding(), text)
        for digest, segment, context, place, asked, result, p_api in some.select(
            "digest", "segment", "context", "at", "input", "result", "p_api"
        ).iter_rows():
            at = place - offset
            if at not in begins and text[at - 1 : at].isspace():
                at -= 1
            body, input, reason = scored_candidates.parsed_call(lane, f"{lane.tool.name}({asked})")
            if at not in begins or reason:
                rejected[shard, reason or "inside_a_token"] += 1
                continue
            key = (lane.key, shard, digest, segment, begins[at], 0)
            cleaned = result and clean_result(result, lane.limits.max_result_characters)
            rows.append((*key, offset + at, p_api, body, input, None, context, cleaned))
    numbered = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position") + FIRST_SAMPLE
    return pl.DataFrame(rows, schema=output.stage.schema, orient="row").with_columns(sample=numbered)


def _token_begins(encoding: "Encoding", text: str) -> dict[int, int]:
    """Return the position of each token by the character at which it begins; of several there the first."""
    [tokens] = encoding.texts([text])
    return {int(at): i for i, at in reversed(list(enumerate(tokens.offsets))) if not tokens.inside[i]}


def given_results(output: TableOutput) -> pl.DataFrame:
    """Return (input, context, result) of calls that brought their results, of equal calls the first; none without."""
    if output.lane.candidates is None:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.plan.lake.table(f"{output.lane.key}/{NAME}")

    def given() -> pl.DataFrame:
        known = table.scan([WHOLE]).filter(pl.col("result").str.len_chars() > 0).select("input", "context", "result")
        return known.unique(("input", "context"), keep="first", maintain_order=True).collect()

    return table.remembered("given results", given)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of the file in a shard, beside the sampled ones where calls are sampled too."""
    sampled = scored_candidates.rows(worker, output, shard) if output.lane.sampling else PartRows([])
    placing = output.plan.lake.table(f"{output.lane.key}/{NAME}")
    own = placing.scan([WHOLE]).filter(pl.col("shard") == shard).select(output.stage.schema.names()).collect()
    for one in placing.record(WHOLE)[REJECTIONS]:
        if one["shard"] == shard:
            sampled.rejected[shard, one["reason"]] += one["count"]
    return replace(sampled, frames=[pl.concat([*sampled.frames, own]).sort(CALL_KEY)])


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the texts; how calls are sampled only where they are."""
    sampled = scored_candidates.settings(plan, lane) if lane.sampling else {}
    placing = {"model": tokenizing(plan), "tool": lane.tool.name, "parsing": scored_candidates.PARSING}
    return {**placing, **sampled, **identity(lane), "placing": PLACING}


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's texts, and of what the file has of it."""
    table = output.plan.lake.table
    texts = "heuristic_subset"
    return versions({texts: table(f"{output.lane.key}/{texts}")}, table(f"{output.lane.key}/{NAME}"))


PLACED = Stage(
    name=NAME,
    description="Calls of the lane's file at their places in its texts.",
    columns={
        **scored_candidates.STAGE.columns,
        "context": Column(pl.String(), "what the result depends on beside the input"),
        "result": RESULT,
    },
    key=CALL_KEY,
    settings=lambda plan, lane: {
        **settings(plan, replace(lane, sampling=False)),
        "characters": lane.limits.max_result_characters,
    },
    reads=("heuristic_subset",),
    sharded=False,
    rows=placed,
)
STAGE = replace(
    scored_candidates.STAGE,
    description="Calls of the lane's file, and where calls are sampled too these; discarded ones have a reason.",
    settings=settings,
    inputs=inputs,
    inner=(PLACED,),
    rows=rows,
)
"""scored_candidates of a lane that has a file of calls and samples others beside them."""
FILE_ALONE = replace(STAGE, pool="lake", kinds=frozenset({"polars", "parquet"}), chunks=None, compute=None)
"""scored_candidates of a lane whose calls are those of a file."""
