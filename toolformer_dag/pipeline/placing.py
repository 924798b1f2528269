"""Place the calls of files, rules and servers before tokens of the judge, the model that computes losses."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl

from toolformer_dag.computing.plan import Lane, Plan
from toolformer_dag.computing.stage import CALL_KEY, RESULT, TEXT_KEY, Column, RejectionCounts, TableOutput
from toolformer_dag.computing.worker import Worker
from toolformer_dag.pipeline import scored_candidates
from toolformer_dag.pipeline.document_cuts import collect_tokenizer_identity
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


UNPLACED_CALL_SCHEMA = pl.Schema(
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
    """Proposed calls, each at its place in a text.

    Attributes:
        rows: The calls, in the columns PROPOSAL_COLUMNS.
        rejected: How many calls were rejected, by (shard, reason).
    """

    rows: pl.DataFrame
    rejected: RejectionCounts


def collect_placing_settings(plan: Plan, lane: Lane) -> dict[str, Any]:
    """Return the versions and the tokenizer that determine where calls are placed and which inputs are valid."""
    return {
        "model": collect_tokenizer_identity(plan),
        "placing": PLACING,
        "places": call_places.CALL_PLACES_VERSION,
        "tool": lane.tool.name,
        "parsing": scored_candidates.PARSING,
    }


def build_unplaced_frame(calls: Sequence[UnplacedCall]) -> pl.DataFrame:
    """Return calls as a frame with a row per call (UNPLACED_CALL_SCHEMA)."""
    return pl.DataFrame(calls, schema=UNPLACED_CALL_SCHEMA, orient="row")


def place_calls_at_tokens(worker: Worker, output: TableOutput, unplaced_calls: pl.DataFrame) -> ProposedCalls:
    """Find the token before which each call stands.

    The tokens are those of the judge, the model that computes the losses. A call that is written inside a token, or is
    no valid call of the tool, is rejected.

    Args:
        output: The table to build. Its lane names the tool.
        unplaced_calls: The calls, in the columns UNPLACED_CALL_SCHEMA. A call before a word may stand before or after
            the white space in front of it.

    Returns:
        The calls that have a token, sorted by CALL_KEY, and how many others there are for each reason.
    """
    placed_rows: list[_PlacedRow] = []
    rejection_counts: RejectionCounts = Counter()

    for row_or_refusal in _iter_placed_calls(worker, output.lane, unplaced_calls):
        if isinstance(row_or_refusal, _RefusedCall):
            rejection_counts[row_or_refusal.shard, row_or_refusal.reason] += 1
        else:
            placed_rows.append(row_or_refusal)

    placed_calls = pl.DataFrame(placed_rows, schema=output.stage.schema, orient="row")
    numbered_calls = _number_calls(placed_calls)
    return ProposedCalls(numbered_calls.sort(CALL_KEY), rejection_counts)


def _iter_placed_calls(
    worker: Worker, lane: Lane, unplaced_calls: pl.DataFrame
) -> "Iterator[_PlacedRow | _RefusedCall]":
    """Yield the row of each call (UNPLACED_CALL_SCHEMA), or why it has none, text by text."""
    calls = unplaced_calls.select(UNPLACED_CALL_SCHEMA.names())
    for calls_of_text in calls.partition_by(TEXT_KEY, maintain_order=True):
        yield from _iter_placed_calls_of_text(worker, lane, calls_of_text)


def _iter_placed_calls_of_text(
    worker: Worker, lane: Lane, unplaced_calls: pl.DataFrame
) -> "Iterator[_PlacedRow | _RefusedCall]":
    """Yield the row of each call of one text (UNPLACED_CALL_SCHEMA), or why it has none."""
    text = unplaced_calls["text"][0]
    find_place = scored_candidates.build_judge_place_finder(worker, text)
    for values in unplaced_calls.iter_rows():
        yield _place_call(lane, UnplacedCall(*values), find_place)


def _number_calls(placed_calls: pl.DataFrame) -> pl.DataFrame:
    """Number the calls at each position of a text (`sample`): at the positions 4, 4, 9 they get 0, 1, 0."""
    number_at_position = pl.int_range(pl.len(), dtype=pl.Int32).over(*TEXT_KEY, "position")
    return placed_calls.with_columns(sample=number_at_position)


class _RefusedCall(NamedTuple):
    """A call that cannot be placed, with the reason why."""

    shard: str
    reason: str


def _place_call(
    lane: Lane, unplaced_call: UnplacedCall, find_place: Callable[[int], CallPlace | None]
) -> _PlacedRow | _RefusedCall:
    """Return the table row of a call, or the reason why it is no call of the tool or stands inside a token.

    Args:
        lane: The tool with its settings.
        unplaced_call: The call, which is known by the character of the document before which it stands.
        find_place: Returns the place before the token that begins at a character of the call's text. None if the
            character is inside a token.
    """
    parsed_call = scored_candidates.parse_call_body(lane, f"{lane.tool.name}({unplaced_call.input})")
    if parsed_call.reason is not None:
        return _RefusedCall(unplaced_call.shard, parsed_call.reason)

    # Both are offsets in the document: where the call stands, and where its text begins.
    offset_in_text = unplaced_call.char_offset - unplaced_call.offset
    call_place = find_place(offset_in_text)
    if call_place is None:
        return _RefusedCall(unplaced_call.shard, "inside_a_token")

    return _build_placed_row(lane, unplaced_call, parsed_call, call_place)


def _build_placed_row(
    lane: Lane, unplaced_call: UnplacedCall, parsed_call: ParsedCall, call_place: CallPlace
) -> _PlacedRow:
    """Return the table row of a call for which the token behind it has been found.

    Args:
        lane: The tool with its settings.
        unplaced_call: The call as it was proposed, known by its characters.
        parsed_call: The call, parsed.
        call_place: The place before the token: its position in tokens, and the character where the call is inserted,
            both counted from the beginning of the text.

    Returns:
        The row, with characters counted from the beginning of the document. Its `sample` is 0 until calls are numbered.
    """
    return _PlacedRow(
        tool=lane.key,
        shard=unplaced_call.shard,
        digest=unplaced_call.digest,
        segment=unplaced_call.segment,
        position=call_place.position,
        sample=0,
        source=unplaced_call.source,
        char_offset=unplaced_call.offset + call_place.char_offset,
        p_api=unplaced_call.p_api,
        body=parsed_call.body,
        input=parsed_call.input,
        words=unplaced_call.words,
        reason=None,
        context=unplaced_call.context,
        result=_clean_call_result(lane, unplaced_call),
    )


def _clean_call_result(lane: Lane, unplaced_call: UnplacedCall) -> str | None:
    """Return the result that a call brings, shortened and cleaned as the tool's own results are.

    A call without a result keeps None, an empty result stays empty.
    """
    if not unplaced_call.result:
        return unplaced_call.result
    return clean_result(unplaced_call.result, lane.limits.max_result_characters)
