"""Place the calls of files, rules and servers before tokens of the judge, the model that computes losses."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, RESULT, TEXT_KEY, Column, Rejected, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import scored_candidates
from toolformer_dag.pipeline.document_cuts import tokenizer_identity
from toolformer_dag.pipeline.scored_candidates import ParsedCall
from toolformer_dag.texts import call_places
from toolformer_dag.texts.call_places import CallPlace
from toolformer_dag.texts.calls import clean_result

PLACING = 2
"""Raised when the same proposals would give other rows; no loss is computed again."""
PROPOSAL_COLUMNS = {
    **scored_candidates.STAGE.columns,
    "context": Column(pl.String(), "what the result depends on beside the input"),
    "result": RESULT,
}
"""Columns of the tables with the calls of files, rules and servers."""


class UnplacedCall(NamedTuple):
    """A call that was proposed for a text, before its token was found."""

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


UNPLACED_CALLS = pl.Schema(
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
    """A row of PROPOSAL_COLUMNS."""

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
    """Calls at their places (PROPOSAL_COLUMNS), by key, and how many were rejected."""

    rows: pl.DataFrame
    rejected: Rejected


def placing_settings(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return the versions and the tokenizer that determine where calls are placed and which inputs are valid."""
    return {
        "model": tokenizer_identity(plan),
        "placing": PLACING,  # versions of the code
        "places": call_places.VERSION,
        "tool": lane.tool.name,
        "parsing": scored_candidates.PARSING,
    }


def build_unplaced_frame(calls: Sequence[UnplacedCall]) -> pl.DataFrame:
    """Return calls as a frame (UNPLACED_CALLS)."""
    return pl.DataFrame(calls, schema=UNPLACED_CALLS, orient="row")


def place_at_tokens(worker: Worker, output: TableOutput, calls: pl.DataFrame) -> ProposedCalls:
    """Find the token before which each call stands; return calls that have one as rows, and count the others.

    The tokens are those of the judge, the model that computes the losses. A call that is written inside a token, or is
    no valid call of the tool, is rejected.

    calls: UNPLACED_CALLS. A call before a word may stand before or after the white space in front of it.
    """
    rows: list[_PlacedRow] = []
    rejected: Rejected = Counter()
    for row_or_refusal in _place_calls(worker, output.lane, calls):  # one of the two for each call
        if isinstance(row_or_refusal, _Refused):
            rejected[row_or_refusal.shard, row_or_refusal.reason] += 1
        else:
            rows.append(row_or_refusal)
    table = _number_calls(pl.DataFrame(rows, schema=output.stage.schema, orient="row"))
    return ProposedCalls(table.sort(CALL_KEY), rejected)


def _place_calls(worker: Worker, lane: Lane, calls: pl.DataFrame) -> "Iterator[_PlacedRow | _Refused]":
    """Yield the row of each call (UNPLACED_CALLS), or why it has none, text by text."""
    for calls_of_text in calls.select(UNPLACED_CALLS.names()).partition_by(TEXT_KEY, maintain_order=True):
        yield from _place_calls_of_text(worker, lane, calls_of_text)


def _place_calls_of_text(worker: Worker, lane: Lane, calls: pl.DataFrame) -> "Iterator[_PlacedRow | _Refused]":
    """Yield the row of each call of one text (UNPLACED_CALLS), or why it has none."""
    place_in_text = scored_candidates.build_judge_place_finder(worker, calls["text"][0])
    for values in calls.iter_rows():
        yield _place_call(lane, UnplacedCall(*values), place_in_text)


def _number_calls(table: pl.DataFrame) -> pl.DataFrame:
    """Number the calls at each position of a text (`sample`): at the positions 4, 4, 9 they get 0, 1, 0."""
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    return table.with_columns(sample=number_at_position)


class _Refused(NamedTuple):
    """A call that cannot be placed."""

    shard: str
    reason: str


def _place_call(
    lane: Lane, call: UnplacedCall, place_in_text: Callable[[int], CallPlace | None]
) -> _PlacedRow | _Refused:
    """Return the row of a call, or why it is no call of the tool or has no place.

    place_in_text: a function from a character of the call's text to the place before its token, or None.
    """
    parsed = scored_candidates.parsed_call(lane, f"{lane.tool.name}({call.input})")
    if parsed.reason is not None:
        return _Refused(call.shard, parsed.reason)
    call_place = place_in_text(call.char_offset - call.offset)
    if call_place is None:
        return _Refused(call.shard, "inside_a_token")
    return _build_placed_row(lane, call, parsed, call_place)


def _build_placed_row(lane: Lane, call: UnplacedCall, parsed: ParsedCall, call_place: CallPlace) -> _PlacedRow:
    """Return the row of a call before the token at `call_place`. Its `sample` is 0 until calls are numbered."""
    return _PlacedRow(
        tool=lane.key,
        shard=call.shard,
        digest=call.digest,
        segment=call.segment,
        position=call_place.position,
        sample=0,
        source=call.source,
        char_offset=call.offset + call_place.offset,
        p_api=call.p_api,
        body=parsed.body,
        input=parsed.input,
        words=call.words,
        reason=None,
        context=call.context,
        result=_clean_call_result(lane, call),
    )


def _clean_call_result(lane: Lane, call: UnplacedCall) -> str | None:
    """Return the result that a call brings, shortened and cleaned as the tool's own results are; None without one."""
    return call.result and clean_result(call.result, lane.limits.max_result_characters)
