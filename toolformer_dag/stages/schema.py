"""What every stage publishes: columns, types, and a line for people about each."""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl


@dataclass(frozen=True, slots=True)
class Column:
    """A polars type and a one-line description."""

    dtype: type[pl.DataType] | pl.DataType
    description: str


TOOL = Column(pl.String, "key of the lane: calculator")
SHARD = Column(pl.String, "name of the shard file")
DIGEST = Column(pl.String, "CCNet's digest of the document")
SEGMENT = Column(pl.Int32, "number of the text within the document")
POSITION = Column(pl.Int32, "i: the call stands before token x_i, counted from 0")
SAMPLE = Column(pl.Int32, "j: number of the sample at this position")
CHAR_OFFSET = Column(pl.Int64, "character of the document at which x_i begins")
P_API = Column(pl.Float32, "p_i: probability that a call begins here")
INPUT = Column(pl.String, "input of the call, as sampled")
RESULT = Column(pl.String, "result of the call")
CALL = {"tool": TOOL, "shard": SHARD, "digest": DIGEST, "segment": SEGMENT, "position": POSITION, "sample": SAMPLE}
LOSSES = {
    "loss_empty": Column(pl.Float64, "L_i(empty), nats"),
    "loss_call": Column(pl.Float64, "L_i(e(c)): the call without its result"),
    "loss_result": Column(pl.Float64, "L_i(e(c, r)): the call with its result"),
    "loss_minus": Column(pl.Float64, "L-: the smaller of loss_empty and loss_call"),
    "loss_plus": Column(pl.Float64, "L+: loss_result"),
    "delta": Column(pl.Float64, "L- - L+: by how much the result helps"),
}

SCORED = {
    **CALL,
    "char_offset": CHAR_OFFSET,
    "input": INPUT,
    "result": RESULT,
    "p_api": P_API,
    **LOSSES,
    "reason": Column(pl.String, "why the call may not stay whatever its delta; null for most"),
}

SCHEMAS: Mapping[str, Mapping[str, Column]] = {
    "raw_shards": {
        "shard": SHARD,
        "digest": DIGEST,
        "url": Column(pl.String, "where the document was found"),
        "domain": Column(pl.String, "domain of the URL"),
        "title": Column(pl.String, "title of the page"),
        "date": Column(pl.Date, "day in the URL, if it holds one"),
        "language": Column(pl.String, "language by CCNet"),
        "text": Column(pl.String, "the document"),
    },
    "rejected_lines": {
        "shard": SHARD,
        "line": Column(pl.Int64, "line of the file, from 1; 0: the file as a whole"),
        "reason": Column(pl.String, "short name of what is wrong"),
        "detail": Column(pl.String, "what was found there"),
    },
    "heuristic_subset": {
        "tool": TOOL,
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "offset": Column(pl.Int64, "character of the document at which the text begins"),
        "text": Column(pl.String, "x: what is annotated"),
        "text_digest": Column(pl.String, "hash of the text: what was computed for it is found under this"),
        "wanted": Column(pl.String, "why the tool wants it"),
        "context": Column(pl.String, "what results depend on beside the input: the date, for the calendar"),
    },
    "scored_candidates": {
        **CALL,
        "char_offset": CHAR_OFFSET,
        "p_api": P_API,
        "body": Column(pl.String, "what was sampled between the brackets"),
        "input": INPUT,
        "reason": Column(pl.String, "why the sample was discarded; null for a call"),
    },
    "tool_results": {
        "tool": TOOL,
        "input": INPUT,
        "context": Column(pl.String, "what the result depends on beside the input"),
        "result": RESULT,
        "reason": Column(pl.String, "why there is no result; null where there is one"),
        "seconds": Column(pl.Float64, "time the tool took"),
        "cost": Column(pl.Float64, "what the backend says it cost"),
        "tool_version": Column(pl.String, "version of the tool that answered"),
    },
    "loss_deltas": SCORED,
    "swapped_results": {**SCORED, "result": Column(pl.String, "result of a call in another document")},
    "filtered_calls": {
        "tool": TOOL,
        "shard": SHARD,
        "digest": DIGEST,
        "segment": SEGMENT,
        "position": POSITION,
        "sample": SAMPLE,
        "char_offset": CHAR_OFFSET,
        "input": INPUT,
        "result": RESULT,
        "p_api": P_API,
        "loss_minus": LOSSES["loss_minus"],
        "loss_plus": LOSSES["loss_plus"],
        "delta": LOSSES["delta"],
        "tau_f": Column(pl.Float64, "the threshold that it passed"),
    },
    "augmented_corpus": {
        "digest": DIGEST,
        "segment": SEGMENT,
        "shard": SHARD,
        "offset": Column(pl.Int64, "character of the document at which the text begins"),
        "text": Column(pl.String, "x: the text without calls (the baseline's corpus C)"),
        "text_with_calls": Column(pl.String, "x*: the text with its calls (C*)"),
        "tools": Column(pl.List(pl.String), "lanes whose calls it holds"),
        "calls": Column(pl.Int32, "number of calls"),
        "split": Column(pl.String, "train or heldout"),
    },
}

CALL_KEY = tuple(CALL)
KEYS: Mapping[str, tuple[str, ...]] = {
    "raw_shards": ("shard", "digest"),
    "heuristic_subset": ("shard", "digest", "segment"),
    "scored_candidates": CALL_KEY,
    "tool_results": ("tool", "input", "context"),
    "loss_deltas": CALL_KEY,
    "swapped_results": CALL_KEY,
    "filtered_calls": ("tool", "digest", "segment", "position"),
    "augmented_corpus": ("digest", "segment"),
}
"""The columns under which a row stands once. Where lanes meet, copies of a document in several shards are one."""


def columns(stage: str) -> pl.Schema:
    """The polars schema of a stage's rows."""
    return pl.Schema({name: column.dtype for name, column in SCHEMAS[stage].items()})
