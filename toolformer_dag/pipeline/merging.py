"""A document and the calls of all tools in it -> texts with their calls, in train or held out (paper, section 2)."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, SpliceError, holds_call, splice, take_out
from toolformer_dag.texts.chains import Link
from toolformer_dag.texts.segments import Segment

TRAIN, HELDOUT = "train", "heldout"
HELDOUT_SHARE = 0.05  # of the documents


def text_order(text: str) -> bytes:
    """Hash the text of a document: in this order C* is written and split, whatever ids the corpus has."""
    return blake2b(f"split 2 {text}".encode(), digest_size=8).digest()


def split_of(text: str) -> str:
    """Return train or heldout, by a hash of the document's text: equal documents are in the same."""
    return HELDOUT if int.from_bytes(text_order(text), "big") < HELDOUT_SHARE * 2**64 else TRAIN


MERGING = 3
"""Raised when the same calls and documents would give other texts; a golden test notices where it was not."""


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call that passed the filter, or a chain of calls; `char_offset` is a character of the document."""

    tool: str
    char_offset: int
    delta: float
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A text x, x* with `calls` in it, and the lanes they come from."""

    segment: Segment
    text_with_calls: str
    calls: tuple[KeptCall, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """Calls that could not be used, with the reason."""

    reason: str
    calls: int


def examples(
    pieces: Sequence[Segment], calls: Sequence[KeptCall], names: Sequence[str], markers: CallMarkers = PAPER_MARKERS
) -> Iterator[Example | Dropped]:
    """The texts among `pieces` that get calls, in order. `names`: the tools' names in the text.

    A call belongs to the text that holds the character before which it stands. Where two tools call at the same
    character, the larger delta stays. Reasons: not_best_at_position, outside_every_text (white space between texts, a
    word that fits no text), holds_call (the text has such a call already), and those of `splice`.
    """
    best = {call.char_offset: call for call in sorted(calls, key=lambda call: (call.delta, call.tool))}
    if len(best) < len(calls):
        yield Dropped("not_best_at_position", len(calls) - len(best))
    placed = _by_piece(pieces, [call for _, call in sorted(best.items())])
    outside = len(best) - sum(map(len, placed.values()))
    if outside:
        yield Dropped("outside_every_text", outside)
    for number, inside in sorted(placed.items()):
        yield _example(pieces[number], inside, names, markers)


def plain_examples(
    pieces: Sequence[Segment],
    offsets: Collection[int],
    calls: Sequence[KeptCall],
    names: Sequence[str],
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[Example]:
    """The texts among `pieces` that hold a character of `offsets`, no place of a call and nothing like a call."""
    starts = [piece.offset for piece in pieces]
    taken = {bisect_right(starts, call.char_offset) - 1 for call in calls}
    for number in sorted({bisect_right(starts, offset) - 1 for offset in offsets} - taken - {-1}):
        if not holds_call(pieces[number].text, names, markers):
            yield Example(pieces[number], pieces[number].text, ())


def _by_piece(pieces: Sequence[Segment], calls: Sequence[KeptCall]) -> dict[int, list[KeptCall]]:
    starts = [piece.offset for piece in pieces]
    placed: dict[int, list[KeptCall]] = {}
    for call in calls:
        number = bisect_right(starts, call.char_offset) - 1
        if number >= 0 and call.char_offset < starts[number] + len(pieces[number].text):
            placed.setdefault(number, []).append(call)
    return placed


def _example(
    piece: Segment, calls: Sequence[KeptCall], names: Sequence[str], markers: CallMarkers
) -> Example | Dropped:
    if holds_call(piece.text, names, markers):
        return Dropped("holds_call", len(calls))
    placed = [
        PlacedCall(kept.char_offset - piece.offset, Call(link.tool, link.input), link.result)
        for kept in calls
        for link in kept.links
    ]
    try:
        with_calls = splice(piece.text, placed, markers)
    except SpliceError:
        return Dropped("cannot_be_spliced", len(calls))
    if take_out(with_calls, names, markers) != piece.text:
        return Dropped("cannot_be_taken_out", len(calls))
    return Example(piece, with_calls, tuple(calls))
