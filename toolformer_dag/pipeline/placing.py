"""Calls of files, rules and servers at their places among the tokens of the judge, the model that computes losses."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, RESULT, TEXT_KEY, Column, Rejected, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import scored_candidates
from toolformer_dag.pipeline.document_cuts import tokenizing
from toolformer_dag.pipeline.scored_candidates import ParsedCall
from toolformer_dag.texts import call_places
from toolformer_dag.texts.call_places import CallPlace
from toolformer_dag.texts.calls import clean_result

PLACING = 2
"""Raised when the same proposals would give other rows; no loss is computed again."""
COLUMNS = {
    **scored_candidates.STAGE.columns,
    "context": Column(pl.String(), "what the result depends on beside the input"),
    "result": RESULT,
}
"""Columns of the tables of such calls."""


class UnplacedCall(NamedTuple):
    """A call that was proposed for a text, before its token is looked for."""

    shard: str
    digest: str
    segment: int
    offset: int  # the character of the document at which the text begins
    text: str
    context: str
    source: str  # who proposed it
    char_offset: int  # the character of the document before which it stands
    input: str
    result: str | None = None  # of a call that brings its result
    p_api: float | None = None
    words: str | None = None  # what a rule saw the text say after the call


UNPLACED = pl.Schema(
    {
        "shard": pl.String(),
        "digest": pl.String(),
        "segment": pl.Int32(),
        "offset": pl.Int64(),
        "text": pl.String(),
        "context": pl.String(),
        "source": pl.String(),
        "char_offset": pl.Int64(),
        "input": pl.String(),
        "result": pl.String(),
        "p_api": pl.Float32(),
        "words": pl.String(),
    }
)
"""A frame of UnplacedCall."""


class _PlacedRow(NamedTuple):
    """A row of COLUMNS."""

    tool: str
    shard: str
    digest: str
    segment: int
    position: int
    sample: int
    source: str
    char_offset: int
    p_api: float | None
    body: str
    input: str | None
    words: str | None
    reason: str | None
    context: str
    result: str | None


class ProposedCalls(NamedTuple):
    """Calls at their places (COLUMNS), by key, and how many were rejected."""

    rows: pl.DataFrame
    rejected: Rejected


def placing(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return what the places of calls depend on, and which inputs are taken for calls: tokenizer and versions."""
    return {
        "model": tokenizing(plan),
        "placing": PLACING,
        "places": call_places.VERSION,
        "tool": lane.tool.name,
        "parsing": scored_candidates.PARSING,
    }


def unplaced(calls: Sequence[UnplacedCall]) -> pl.DataFrame:
    """Return a frame (UNPLACED) of calls."""
    return pl.DataFrame(calls, schema=UNPLACED, orient="row")


def placed_at_tokens(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> ProposedCalls:
    """Find the token before which each call stands; return those calls as rows (COLUMNS), and count the others.

    The tokens are those of the judge, the model that computes the losses. A call before a word may stand before or
    after the white space in front of it. The calls at a position are numbered (`sample`) in their order, from 0: three
    calls at the positions 4, 4, 9 of a text get the numbers 0, 1, 0.

    calls: UNPLACED, each with its text and a character of the document.

    Rejected: inside_a_token (no token begins at the character), and the reasons of `scored_candidates.parsed_call`, why
    an input makes no call of the tool.
    """
    lane = output.lane
    rows: list[_PlacedRow] = []
    rejected: Rejected = Counter()
    for calls_of_text in calls.select(UNPLACED.names()).partition_by(TEXT_KEY, maintain_order=True):
        # A function from a character of this text to the place before its token, or None.
        place_in_text = scored_candidates.places_of_judge(worker, calls_of_text["text"][0])
        for values in calls_of_text.iter_rows():
            call = UnplacedCall(*values)
            parsed = scored_candidates.parsed_call(lane, f"{lane.tool.name}({call.input})")
            place = place_in_text(call.char_offset - call.offset)
            if place is None or parsed.reason is not None:
                rejected[call.shard, parsed.reason or "inside_a_token"] += 1
            else:
                rows.append(_placed_row(lane, call, parsed, place))
    table = pl.DataFrame(rows, schema=output.stage.schema, orient="row")
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    return ProposedCalls(table.with_columns(sample=number_at_position).sort(CALL_KEY), rejected)


def _placed_row(lane: Lane, call: UnplacedCall, parsed: ParsedCall, place: CallPlace) -> _PlacedRow:
    """Return the row of a call before the token at `place`. Its `sample` is 0: the caller numbers the calls."""
    return _PlacedRow(
        tool=lane.key,
        shard=call.shard,
        digest=call.digest,
        segment=call.segment,
        position=place.position,
        sample=0,
        source=call.source,
        char_offset=call.offset + place.offset,
        p_api=call.p_api,
        body=parsed.body,
        input=parsed.input,
        words=call.words,
        reason=None,
        context=call.context,
        result=call.result and clean_result(call.result, lane.limits.max_result_characters),
    )
