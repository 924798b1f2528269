"""Insert the kept calls of all tools into the texts of a document, which is in train or held out (paper, section 2)."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, SpliceError, holds_call, splice, take_out
from toolformer_dag.texts.chains import ChainLink
from toolformer_dag.texts.segments import Segment

TRAIN = "train"
"""The split that is trained on."""
HELDOUT = "heldout"
"""The split that chooses the checkpoint and measures perplexity."""
HELDOUT_SHARE = 0.05
"""The share of the documents that are held out."""
MERGING = 3
"""Raised when the same calls and documents would give other texts; a golden test notices where it was not."""


BEFORE_FIRST_TEXT = -1
"""The index of a text, for a character of the document before its first text."""


def compute_order_hash(text: str) -> bytes:
    """Return a hash of a document's text, 8 bytes, by which C* is ordered and split.

    Hashes are spread evenly: those in the lowest 5 % of their range are 5 % of the documents.
    """
    return blake2b(f"split 2 {text}".encode(), digest_size=8).digest()


def choose_split(text: str) -> str:
    """Return TRAIN or HELDOUT for a document, by the hash of its text; equal documents get the same split."""
    is_heldout = int.from_bytes(compute_order_hash(text), "big") < HELDOUT_SHARE * 2**64
    return HELDOUT if is_heldout else TRAIN


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call that passed the filter, or a chain of calls; it is inserted before a character of the document."""

    tool: str  # the key of its lane
    char_offset: int  # the character of the document
    delta: float
    links: tuple[ChainLink, ...]  # the call, or the calls of the chain


@dataclass(frozen=True, slots=True)
class AugmentedText:
    """A text x (`segment`), the same with calls, x* (`text_with_calls`), and the calls; without any both are equal."""

    segment: Segment
    text_with_calls: str
    calls: tuple[KeptCall, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """How many calls could not be used for one reason."""

    reason: str
    calls: int


def examples(
    texts: Sequence[Segment], calls: Sequence[KeptCall], names: Sequence[str], markers: CallMarkers = PAPER_MARKERS
) -> Iterator[AugmentedText | Dropped]:
    """Insert the calls of a document into its texts; yield each text that gets calls, and what was dropped.

    Where two tools call at the same character, the call with the larger delta stays.

    texts: what the document was cut into, in order.
    calls: the kept calls of all tools.
    names: the tools' names as they stand in texts.
    """
    best_calls = _select_best_calls(calls)
    calls_of_texts = _group_calls_by_text(texts, best_calls)
    inside_count = sum(len(calls_of_text) for calls_of_text in calls_of_texts.values())
    yield from _iter_dropped("not_best_at_position", len(calls) - len(best_calls))
    # Such a call stands in white space between texts, or in a word that fits no text.
    yield from _iter_dropped("outside_every_text", len(best_calls) - inside_count)
    for index, calls_of_text in calls_of_texts.items():
        yield _augment_text(texts[index], calls_of_text, names, markers)


def _iter_dropped(reason: str, count: int) -> Iterator[Dropped]:
    """Yield what was dropped for a reason, if anything was."""
    if count > 0:
        yield Dropped(reason, count)


def select_plain_examples(
    texts: Sequence[Segment],
    offsets: Collection[int],
    calls: Sequence[KeptCall],
    names: Sequence[str],
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[AugmentedText]:
    """Yield texts of a document that hold no call, as they are: training examples without calls.

    texts: what the document was cut into, in order.
    offsets: characters of the document at which texts without a helpful call begin, as tools cut it; only texts that
        hold one of them, or end in the white space before one, are yielded.
    calls: the kept calls of the document.
    names, markers: how calls are written.
    """
    wanted_indices = _find_text_indices(texts, offsets)
    indices_with_calls = _find_text_indices(texts, [call.char_offset for call in calls])
    for index in sorted(wanted_indices - indices_with_calls):
        text = texts[index]
        if not holds_call(text.text, names, markers):
            yield AugmentedText(segment=text, text_with_calls=text.text, calls=())


def _find_text_indices(texts: Sequence[Segment], char_offsets: Collection[int]) -> set[int]:
    """Return the indices of the texts that hold some characters of the document, or end in white space before one."""
    starts = [text.offset for text in texts]
    indices = {_find_text_index(starts, char_offset) for char_offset in char_offsets}
    return indices - {BEFORE_FIRST_TEXT}


def _find_text_index(starts: Sequence[int], char_offset: int) -> int:
    """Return the index of the last text that begins at or before a character, or BEFORE_FIRST_TEXT.

    With the starts [5, 20] it is 0 for the character 12, and -1 for 3.
    """
    return bisect_right(starts, char_offset) - 1


def _select_best_calls(calls: Sequence[KeptCall]) -> list[KeptCall]:
    """Return the call with the largest delta at each character, in the order of the characters."""
    best: dict[int, KeptCall] = {}
    for call in sorted(calls, key=lambda call: (call.delta, call.tool)):
        best[call.char_offset] = call  # a later one is better; of equal deltas the order of the lanes' keys decides
    return [best[char_offset] for char_offset in sorted(best)]


def _group_calls_by_text(texts: Sequence[Segment], calls: Sequence[KeptCall]) -> dict[int, list[KeptCall]]:
    """Group calls by text: index of the text in `texts` -> its calls. Calls outside every text are left out.

    calls: in the order of their characters.
    """
    starts = [text.offset for text in texts]
    calls_of_texts: dict[int, list[KeptCall]] = {}
    for call in calls:
        index = _find_text_index(starts, call.char_offset)
        if index != BEFORE_FIRST_TEXT and call.char_offset < _compute_text_end(texts[index]):
            calls_of_texts.setdefault(index, []).append(call)
    return calls_of_texts


def _compute_text_end(text: Segment) -> int:
    """Return the character of the document at which a text ends."""
    return text.offset + len(text.text)


def _augment_text(
    text: Segment, calls: Sequence[KeptCall], names: Sequence[str], markers: CallMarkers
) -> AugmentedText | Dropped:
    """Insert calls into their text x; return x and x*, the text with calls, or drop all of them with a reason."""
    if holds_call(text.text, names, markers):  # x has such a call already
        return Dropped("holds_call", len(calls))
    placed_calls = _place_calls(text, calls)
    try:
        text_with_calls = splice(text.text, placed_calls, markers)
    except SpliceError:
        return Dropped("cannot_be_spliced", len(calls))
    if take_out(text_with_calls, names, markers) != text.text:
        return Dropped("cannot_be_taken_out", len(calls))
    return AugmentedText(text, text_with_calls, tuple(calls))


def _place_calls(text: Segment, calls: Sequence[KeptCall]) -> list[PlacedCall]:
    """Return each call with its character in the text; the calls of a chain all stand before the same one."""
    placed = []
    for call in calls:
        offset = call.char_offset - text.offset
        for link in call.links:
            placed.append(PlacedCall(offset=offset, call=Call(link.tool, link.input), result=link.result))
    return placed
