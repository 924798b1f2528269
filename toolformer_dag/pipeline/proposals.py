"""Calls that the model does not sample: those of files (another model, a log, an annotator), and those of a rule.

An inner table per kind of source finds the place of each call in the lane's texts: file_proposals over all shards,
rule_proposals and served_proposals shard by shard. A part of scored_candidates takes their rows. From there on they are
calls like others; `source` tells them apart.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    TEXT_KEY,
    ByChunk,
    ByPart,
    ByShard,
    InputsOf,
    PartRows,
    Rejected,
    Stage,
    StageAsset,
    TableOutput,
    versions,
)
from toolformer_dag.computing.worker import Worker
from toolformer_dag.files import UserError
from toolformer_dag.identity import file_hash, fingerprint
from toolformer_dag.lake.table import WHOLE
from toolformer_dag.model.weights import is_packaged
from toolformer_dag.pipeline import raw_shards, scored_candidates, served_proposals
from toolformer_dag.pipeline.placing import COLUMNS, UNPLACED, at_tokens, placing
from toolformer_dag.settings.tool_settings import MODEL, RULE, source_name
from toolformer_dag.synthetic import WRITTEN
from toolformer_dag.texts.compression import HEAD_BYTES, kind_in_words
from toolformer_dag.texts.readers.json_lines import other_shape
from toolformer_dag.texts.segments import text_digest
from toolformer_dag.tools.tool import OverBudget

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
    for name, path in lane.sources.files.items():
        try:
            found[name] = file_hash(path)
        except OSError as error:
            raise _unreadable(lane, path, error) from error
    return {"files": fingerprint(found)} if found else {}


def rarely_written(plan: Plan, lanes: Sequence[Lane]) -> list[str]:
    """Say of each lane that a model of the package samples for, and hardly writes calls of, what would propose some."""
    if not is_packaged(plan.identity_of("proposer")):
        return []
    return [
        f"{lane.key}: the embedded model writes calls of {', '.join(WRITTEN)}, and hardly any of {lane.tool.name}, so "
        f'that most samples are lost. Set proposals = ["rule"] under [tools.{lane.tool.key}], with a pattern under '
        f"[tools.{lane.tool.key}.rule] or `propose` in the tool's class, or name a file of calls there, or another "
        "model.name"
        for lane in lanes
        if MODEL in lane.sources.names and lane.tool.name not in WRITTEN
    ]


def _unreadable(lane: Lane, path: Path, error: object) -> UserError:
    return UserError(
        f"[tools.{lane.tool.key}] proposals: {path} cannot be read ({error}); name a Parquet file or JSON lines with "
        "digest, text or id, char_offset and input"
    )


def _records(path: Path) -> Iterator[object]:
    """Yield the rows of a Parquet file, or the objects of JSON lines; None for a line that holds none.

    Raises ValueError where no line holds one and the first tells what the file is in the place of JSON lines.
    """
    if path.suffix == ".parquet":
        yield from pl.read_parquet(path).iter_rows(named=True)
        return
    lines = list(filter(None, map(bytes.strip, path.read_bytes().splitlines())))
    records = list(map(_parsed, lines))
    if records.count(None) == len(records) and (shape := other_shape(lines[0] if lines else b"")):
        raise ValueError(shape)
    yield from records


def _parsed(line: bytes) -> object:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


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
    for name, path in lane.sources.files.items():
        try:
            found += [_fields(name, record) for record in _records(path)]
        except pl.exceptions.PolarsError as error:
            raise _unreadable(lane, path, kind_in_words(path.read_bytes()[:HEAD_BYTES]) or error) from error
        except (OSError, ValueError) as error:
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
    """Find the calls of the lane's files in its texts. `char_offset` of a row is the character before which it stands.

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
        frames.append(at_tokens(worker, output, shard, here, rejected))
    rejected[first, "no_such_text"] += rows.height - len(found)
    table = pl.concat(frames)
    rows_of = table.partition_by("shard", as_dict=True)
    refused = {shard: list(counts) for shard, counts in groupby(sorted(rejected.items()), key=lambda one: one[0][0])}
    facts = {shard: [rows_of.get((shard,), table.clear()).rows(), refused.get(shard, [])] for shard in plan.shards}
    return PartRows([table], rejected, facts={BY_SHARD: {shard: fingerprint(fact) for shard, fact in facts.items()}})


def _in_texts(plan: Plan, lane: Lane, shard: str, calls: pl.DataFrame) -> pl.DataFrame:
    """The calls whose place is in a text of the shard, with this text, in the order of the files."""
    texts = plan.lane_table(lane, "heuristic_subset").read(shard)
    joined = texts.select(*TEXT_KEY, "offset", "text", "context").join(calls, on="digest")
    inside = pl.col("at").is_between("offset", pl.col("offset") + pl.col("text").str.len_chars(), closed="left")
    return joined.filter(inside).sort("number")


def of_rule(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return what the lane's rule proposes for each text of a shard.

    Rejected: inside_a_token, those of `parse_call`, and over_budget: texts that cost the rule too much work. Raises
    ToolDown where the rule fails.
    """
    lane, rejected, calls = output.lane, Counter[tuple[str, str]](), []
    texts = output.lane_table("heuristic_subset").read(shard)
    texts = texts.select(*TEXT_KEY, "offset", "text", "context")
    for *key, offset, text, context in texts.iter_rows():
        try:
            proposed = dict.fromkeys(lane.sources.propose(lane.tool, text, context))
        except OverBudget:
            rejected[shard, "over_budget"] += 1
            continue
        place = (*key, offset, text, context, RULE)
        calls += [(*place, offset + one.offset, one.input, None, None, one.words or None) for one in proposed]
    rows = pl.DataFrame(calls, UNPLACED, orient="row")
    return PartRows([at_tokens(worker, output, shard, rows, rejected)], rejected)


def given_results(output: TableOutput) -> pl.DataFrame:
    """Return (input, context, result) of calls that brought their results, of equal calls the first; none without."""
    if not output.lane.sources.files:
        return pl.DataFrame(schema={"input": pl.String(), "context": pl.String(), "result": pl.String()})
    table = output.lane_table("file_proposals")

    def given() -> pl.DataFrame:
        known = table.scan([WHOLE]).filter(pl.col("result").str.len_chars() > 0).select("input", "context", "result")
        return known.unique(("input", "context"), keep="first", maintain_order=True).collect()

    return table.remembered("given results", given)


def rows(worker: Worker, output: TableOutput, shard: str) -> PartRows:
    """Return the calls of a lane's sources in a shard: sampled ones, those of files and of the rule.

    The `sample` of calls that were not sampled counts down from -1: so they keep it whatever m is.
    """
    lane, stage = output.lane, output.stage
    made = scored_candidates.rows(worker, output, shard) if lane.sources.sampled else PartRows([])
    order = {source_name(source): number for number, source in enumerate(lane.sources.names)}
    own = [stage.schema.to_frame()]
    for inner in output.inner:
        part = shard if inner.stage.sharded else WHOLE
        calls = inner.table.scan([part]).filter(pl.col("shard") == shard).select(stage.schema.names())
        own.append(calls.collect())
        for rejection in inner.table.record(part)[REJECTIONS]:
            if rejection["shard"] == shard:
                made.rejected[shard, rejection["reason"]] += rejection["count"]
    ordered = pl.concat(own).sort(pl.col("source").replace_strict(order, return_dtype=pl.Int32), *CALL_KEY)
    numbered = ordered.with_columns(sample=-1 - pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position"))
    return replace(made, frames=[pl.concat([*made.frames, numbered]).sort(CALL_KEY)])


def settings(plan: Plan, lane: Lane) -> Mapping[str, Any]:
    """Return what determines the rows beside the texts; how calls are sampled only where they are."""
    sampled = scored_candidates.settings(plan, lane) if lane.sources.sampled else {}
    served = served_proposals.STAGE.settings(plan, lane) if lane.sources.served else {}
    return {
        **placing(plan, lane),
        **sampled,
        **served,
        **identity(lane),
        **_rule(lane),
        "proposals": list(lane.sources.names),
    }


def _rule(lane: Lane) -> dict[str, object]:
    return {"rule": lane.sources.rule_identity(lane.tool)} if RULE in lane.sources.names else {}


def inputs(output: TableOutput) -> InputsOf:
    """Return what tells the versions of a shard's texts, and of what the files have of it."""
    texts = output.lane_table("heuristic_subset")
    from_files = output.lane_table("file_proposals") if output.lane.sources.files else None
    return versions({"heuristic_subset": texts}, from_files)


PLACED = Stage(
    name="file_proposals",
    description="Calls of the lane's files at their places in its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=lambda plan, lane: {
        **placing(plan, lane),
        **identity(lane),
        "characters": lane.limits.max_result_characters,
    },
    reads=("heuristic_subset",),
    sharded=False,
    make=ByPart(of_files),
)
RULED = Stage(
    name="rule_proposals",
    description="Calls that the lane's rule proposes for its texts.",
    columns=COLUMNS,
    key=CALL_KEY,
    settings=lambda plan, lane: {**placing(plan, lane), **_rule(lane)},
    reads=("heuristic_subset",),
    make=ByShard(of_rule),
)


def _warnings(output: TableOutput) -> list[str]:
    """Warn before a token is spent where the model hardly writes calls of the lane's tool."""
    return rarely_written(output.plan, [output.lane])


SAMPLED = replace(scored_candidates.STAGE, asset=StageAsset(warns=_warnings))
"""scored_candidates of a lane whose calls are all sampled."""


def stage(lane: Lane) -> Stage:
    """Return scored_candidates of a lane, whose calls come from its sources; discarded samples have a reason."""
    if lane.sources.names == (MODEL,) and lane.sources.sampled:
        return SAMPLED
    return _stage(bool(lane.sources.files), RULE in lane.sources.names, lane.sources.served, lane.sources.sampled)


@cache
def _stage(files: bool, rule: bool, served: bool, sampled: bool) -> Stage:
    there = ((PLACED, files), (RULED, rule), (served_proposals.STAGE, served))
    inner = tuple(one for one, used in there if used)
    found = replace(SAMPLED, settings=settings, inputs=inputs, inner=inner)
    if sampled:
        return replace(found, make=ByChunk(scored_candidates.chunks, scored_candidates.compute, rows))
    return replace(found, pool="lake", kinds=frozenset({"polars", "parquet"}), make=ByPart(rows))
