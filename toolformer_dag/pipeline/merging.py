"""Insert the kept calls of all tools into the texts of a document, which is in train or held out (paper, section 2)."""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from toolformer_dag.settings.call_markers import PAPER_MARKERS, CallMarkers
from toolformer_dag.texts.calls import Call, PlacedCall, SpliceError, has_call_to_tools, remove_calls, splice
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
    """Return a hash of a document's text (8 bytes), by which C* is ordered and split.

    Hashes are spread evenly: about 5 % of the documents have one in the lowest 5 % of the range.
    """
    return blake2b(f"split 2 {text}".encode(), digest_size=8).digest()


def choose_split(text: str) -> str:
    """Return TRAIN or HELDOUT for a document, by the hash of its text. Equal documents get the same split."""
    order_number = int.from_bytes(compute_order_hash(text), "big")  # at least 0, below 2**64
    is_heldout = order_number < HELDOUT_SHARE * 2**64
    return HELDOUT if is_heldout else TRAIN


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call that passed the filter, or a chain of calls, which are made one after another at the same place.

    Attributes:
        lane_key: The key of its lane (a tool with its settings).
        char_offset: The character of the document before which it is inserted.
        delta: By how many nats it lowers the loss.
        links: The call, or the calls of the chain, each with its result.
    """

    lane_key: str
    char_offset: int
    delta: float
    links: tuple[ChainLink, ...]


@dataclass(frozen=True, slots=True)
class AugmentedText:
    """A text with the calls that were inserted into it.

    Attributes:
        segment: The text x, with its place in the document.
        text_with_calls: The text x* with calls. Without any call it is equal to x.
        calls: The inserted calls.
    """

    segment: Segment
    text_with_calls: str
    calls: tuple[KeptCall, ...]


@dataclass(frozen=True, slots=True)
class DroppedCalls:
    """How many calls could not be used, for one reason."""

    reason: str
    call_count: int


def iter_augmented_texts(
    texts: Sequence[Segment],
    kept_calls: Sequence[KeptCall],
    tool_names: Sequence[str],
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[AugmentedText | DroppedCalls]:
    """Insert the calls of a document into its texts.

    If two tools call at the same character, the call with the larger delta stays.

    Args:
        texts: What the document was cut into, in order.
        kept_calls: The kept calls of all tools.
        tool_names: The tools' names as they stand in texts.
        markers: The strings with which calls begin and end in texts.

    Yields:
        First how many calls were dropped, for each reason. Then for each text that has calls, in order: the text with
        its calls, or how many calls were dropped because they could not be inserted into it.
    """
    best_calls = _select_best_calls(kept_calls)
    calls_by_text_index = _group_calls_by_text(texts, best_calls)
    calls_in_texts = sum(len(calls_of_text) for calls_of_text in calls_by_text_index.values())

    yield from _iter_dropped_calls("not_best_at_position", len(kept_calls) - len(best_calls))
    # A call outside every text stands in white space between texts, or in a word that fits no text.
    yield from _iter_dropped_calls("outside_every_text", len(best_calls) - calls_in_texts)

    for text_index, calls_of_text in calls_by_text_index.items():
        yield _augment_text(texts[text_index], calls_of_text, tool_names, markers)


def _iter_dropped_calls(reason: str, call_count: int) -> Iterator[DroppedCalls]:
    """Yield how many calls were dropped for a reason, or nothing if there are none."""
    if call_count > 0:
        yield DroppedCalls(reason, call_count)


def iter_plain_texts(
    texts: Sequence[Segment],
    plain_text_offsets: Collection[int],
    kept_calls: Sequence[KeptCall],
    tool_names: Sequence[str],
    markers: CallMarkers = PAPER_MARKERS,
) -> Iterator[AugmentedText]:
    """Yield texts of a document that hold no call, as they are: training examples without calls.

    Args:
        texts: What the document was cut into, in order.
        plain_text_offsets: The characters of the document at which texts without a helpful call begin. These are texts
            of single tools, for which the document may have been cut in other places than for `texts`. Only texts that
            hold one of these characters, or end in the white space before one, are yielded.
        kept_calls: The kept calls of the document. Texts with one of them are left out.
        tool_names: The tools' names as they stand in texts. Texts that are written with calls to them are left out.
        markers: The strings with which calls begin and end in texts.

    Yields:
        The texts, in order, with an empty tuple of calls.
    """
    wanted_indices = _find_text_indices(texts, plain_text_offsets)
    indices_with_calls = _find_text_indices(texts, [call.char_offset for call in kept_calls])
    for index in sorted(wanted_indices - indices_with_calls):
        text = texts[index]
        if not has_call_to_tools(text.text, tool_names, markers):
            yield AugmentedText(segment=text, text_with_calls=text.text, calls=())


def _find_text_indices(texts: Sequence[Segment], char_offsets: Collection[int]) -> set[int]:
    """Return the indices of the texts that hold some characters of the document, or end in white space before one."""
    text_starts = [text.offset for text in texts]
    text_indices = {_find_text_index(text_starts, char_offset) for char_offset in char_offsets}
    return text_indices - {BEFORE_FIRST_TEXT}


def _find_text_index(text_starts: Sequence[int], char_offset: int) -> int:
    """Return the index of the last text that begins at or before a character, or BEFORE_FIRST_TEXT.

    With the starts [5, 20], it is 0 for the character 12, and -1 (BEFORE_FIRST_TEXT) for 3.
    """
    return bisect_right(text_starts, char_offset) - 1


def _select_best_calls(calls: Sequence[KeptCall]) -> list[KeptCall]:
    """Return the call with the largest delta at each character, in the order of the characters.

    Between calls with equal deltas, the lane whose key is last in the alphabet wins.
    """
    calls_from_worst_to_best = sorted(calls, key=lambda call: (call.delta, call.lane_key))

    best_call_by_offset: dict[int, KeptCall] = {}
    for call in calls_from_worst_to_best:
        best_call_by_offset[call.char_offset] = call  # replaces a worse call

    return [best_call_by_offset[char_offset] for char_offset in sorted(best_call_by_offset)]


def _group_calls_by_text(texts: Sequence[Segment], calls: Sequence[KeptCall]) -> dict[int, list[KeptCall]]:
    """Group calls by the text in which they stand. Calls outside every text are left out.

    Args:
        texts: The texts of a document, in order.
        calls: The calls, in the order of their characters.

    Returns:
        The calls by the index of their text in `texts`, in the order of the texts.
    """
    text_starts = [text.offset for text in texts]
    calls_by_text_index: dict[int, list[KeptCall]] = {}

    for call in calls:
        text_index = _find_text_index(text_starts, call.char_offset)
        if text_index == BEFORE_FIRST_TEXT:
            continue

        is_inside_text = call.char_offset < _compute_text_end(texts[text_index])
        if is_inside_text:
            calls_by_text_index.setdefault(text_index, []).append(call)

    return calls_by_text_index


def _compute_text_end(text: Segment) -> int:
    """Return the character of the document after the last one of a text."""
    return text.offset + len(text.text)


def _augment_text(
    text: Segment, kept_calls: Sequence[KeptCall], tool_names: Sequence[str], markers: CallMarkers
) -> AugmentedText | DroppedCalls:
    """Insert calls into their text.

    Returns:
        The text with and without its calls. All calls are dropped if the text already holds a call to one of the tools,
        if they cannot be inserted, or if taking them out again does not give the text.
    """
    if has_call_to_tools(text.text, tool_names, markers):
        return DroppedCalls("holds_call", len(kept_calls))

    placed_calls = _build_placed_calls(text, kept_calls)
    try:
        text_with_calls = splice(text.text, placed_calls, markers)
    except SpliceError:
        return DroppedCalls("cannot_be_spliced", len(kept_calls))

    text_without_calls = remove_calls(text_with_calls, tool_names, markers)
    if text_without_calls != text.text:
        return DroppedCalls("cannot_be_taken_out", len(kept_calls))

    return AugmentedText(text, text_with_calls, tuple(kept_calls))


def _build_placed_calls(text: Segment, kept_calls: Sequence[KeptCall]) -> list[PlacedCall]:
    """Return each call with its result, and with the character of the text before which it stands.

    In a text that begins at character 100 of its document, a call at character 112 stands before character 12. The
    calls of a chain follow each other, all before the same character.
    """
    placed_calls = []
    for kept_call in kept_calls:
        offset_in_text = kept_call.char_offset - text.offset
        for link in kept_call.links:
            call = Call(link.tool, link.input)
            placed_calls.append(PlacedCall(offset=offset_in_text, call=call, result=link.result))
    return placed_calls
