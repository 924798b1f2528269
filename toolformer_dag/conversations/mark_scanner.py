"""Find the text between pairs of marks, such as `<tool_call>` and `</tool_call>`.

Scans only go forward with `str.find`, so that they are linear in the length of any text.
"""

import json
import sys
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
"""A mark at the end of every message in some data sets."""
Span = tuple[int, int]
"""A stretch of text: the offsets of its first character and of the one behind its last."""
_JSON = json.JSONDecoder()


class Marks(NamedTuple):
    """The marks before and behind a stretch of text."""

    opening: str
    closing: str


class Enclosed(NamedTuple):
    """A pair of marks in a text with the text between them, by character offsets.

    - `start`, `end`: the stretch from the opening mark to behind the closing one
    - `body_start`, `body_end`: the stretch between the marks
    """

    start: int
    body_start: int
    body_end: int
    end: int

    @property
    def span(self) -> Span:
        """The stretch with its marks."""
        return self.start, self.end

    @property
    def body_span_in_pair(self) -> Span:
        """The stretch between the marks, by offsets from the first character of the opening mark."""
        return self.body_start - self.start, self.body_end - self.start

    def whole(self, text: str) -> str:
        """Return the text with its marks. text: the text that was searched."""
        return text[self.start : self.end]

    def body(self, text: str) -> str:
        """Return the text between the marks. text: the text that was searched."""
        return text[self.body_start : self.body_end]


class MarkPositions(NamedTuple):
    """The offsets of an opening mark, and of the next closing mark behind it; None where it is not closed."""

    opening: int
    closing: int | None


def positions_of(text: str, mark: str) -> Iterator[int]:
    """Yield the offsets at which a mark stands in a text."""
    position = text.find(mark)
    while position >= 0:
        yield position
        position = text.find(mark, position + len(mark))


def iter_mark_positions(text: str, marks: Marks, start: int = 0) -> Iterator[MarkPositions]:
    """Find each opening mark with the next closing mark after it.

    The search goes on after that closing mark, so that opening marks in between are skipped.

    Args:
        text: The text.
        marks: The marks.
        start: The offset at which the search starts.

    Yields:
        The offsets of both marks. If an opening mark is never closed, it is the last one, with None for the other.
    """
    position = start
    while True:
        opening = text.find(marks.opening, position)
        if opening < 0:
            return

        closing = text.find(marks.closing, opening)
        if closing < 0:
            yield MarkPositions(opening, None)
            return

        yield MarkPositions(opening, closing)
        position = closing + len(marks.closing)


def iter_mark_pairs(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Find each pair of an opening and a closing mark in a text.

    Of several opening marks before a closing one, the last one counts, since the others are only mentioned: in
    "I write <a> before: <a>x</a>" the pair is around x. An unclosed mark is paired with the end of the text, or with
    END_OF_TEXT if that comes first.

    Yields:
        The pairs, in the order of the text.
    """
    for positions in iter_mark_positions(text, marks):
        if positions.closing is None:
            yield _build_unclosed_pair(text, positions.opening, marks.opening)
        else:
            start = text.rfind(marks.opening, positions.opening, positions.closing)
            yield _build_pair(marks, opening=start, closing=positions.closing)


def _build_pair(marks: Marks, *, opening: int, closing: int) -> Enclosed:
    """Return a pair of marks by their offsets."""
    return Enclosed(
        start=opening,
        body_start=opening + len(marks.opening),
        body_end=closing,
        end=closing + len(marks.closing),
    )


def _build_unclosed_pair(text: str, start: int, opening: str) -> Enclosed:
    """Build the pair for an opening mark that is never closed.

    Args:
        text: The text.
        start: The offset of the mark.
        opening: The mark.

    Returns:
        The mark with the text behind it, up to END_OF_TEXT or the end of the text.
    """
    body_end = text.find(END_OF_TEXT, start)
    if body_end < 0:
        body_end = len(text)
    end = min(len(text), body_end + len(END_OF_TEXT))
    return Enclosed(start, start + len(opening), body_end, end)


def list_enclosed_bodies(text: str, marks: Marks) -> list[str]:
    """Return the text between each pair of marks, as ["a", "b"] for `<k>a</k> <k>b</k>`."""
    return [pair.body(text) for pair in iter_mark_pairs(text, marks)]


def outermost(text: str, marks: Marks) -> list[Enclosed]:
    """Find the pairs of marks that do not lie in another pair.

    In `<a>x<a>y</a></a>`, the first `<a>` and the last `</a>` are such a pair. If a mark has no partner, each closing
    mark is paired with the last opening one before it, as `iter_mark_pairs` does: in `<a>x<a>y</a>`, around y.
    """
    marks_in_text = _list_marks_in_order(text, marks)
    if not _are_balanced(marks_in_text):
        return list(iter_mark_pairs(text, marks))

    pairs = list[Enclosed]()
    depth = 0  # how many marks are open
    outer_opening = 0
    for mark in marks_in_text:
        if depth == 0:
            outer_opening = mark.position

        depth += mark.depth_change  # 1 for an opening mark, -1 for a closing one
        if depth == 0:
            pairs.append(_build_pair(marks, opening=outer_opening, closing=mark.position))
    return pairs


def _are_balanced(marks: Iterable["_Mark"]) -> bool:
    """Return whether every opening mark is closed, and every closing mark has an opening one before it."""
    depth = 0
    for mark in marks:
        depth += mark.depth_change
        if depth < 0:
            return False
    return depth == 0


class _Mark(NamedTuple):
    """A mark in a text, by the offset of its first character."""

    position: int
    is_opening: bool

    @property
    def depth_change(self) -> int:
        """1 for an opening mark, -1 for a closing one."""
        return 1 if self.is_opening else -1


def _list_marks_in_order(text: str, marks: Marks) -> list[_Mark]:
    """Return the opening and closing marks of a text in the order of the text."""
    openings = [_Mark(position, is_opening=True) for position in positions_of(text, marks.opening)]
    closings = [_Mark(position, is_opening=False) for position in positions_of(text, marks.closing)]
    return sorted([*openings, *closings])


def iter_json_pairs(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Find each pair of marks in a text, skipping marks that are part of the JSON between a pair.

    For example, `<c>{"text": "</c>"}</c>` is one pair, closed by the last mark.
    """
    end_of_last = 0
    for pair in iter_mark_pairs(text, marks):
        is_inside_last_pair = pair.start < end_of_last
        if is_inside_last_pair:
            continue

        whole_pair = _close_behind_json(text, pair, marks.closing)
        end_of_last = whole_pair.end
        yield whole_pair


def _close_behind_json(text: str, pair: Enclosed, closing: str) -> Enclosed:
    """Correct the end of a pair of marks if the JSON in it contains the closing mark itself.

    Args:
        text: The text.
        pair: The pair, closed by the first closing mark.
        closing: The closing mark.

    Returns:
        The pair, closed by the first closing mark after the JSON. It is returned unchanged if its JSON does not contain
        the mark, or if no mark follows the JSON directly, with nothing but white space in between.
    """
    json_start = pair.body_end - len(pair.body(text).lstrip())
    json_end = _find_json_end(text, json_start)
    if json_end is None or json_end <= pair.body_end:
        return pair

    closing_start = text.find(closing, json_end)
    if closing_start < 0:
        return pair

    text_before_mark = text[json_end:closing_start]
    if text_before_mark.strip():
        return pair
    return pair._replace(body_end=closing_start, end=closing_start + len(closing))


def _find_json_end(text: str, start: int) -> int | None:
    """Find the end of the JSON object or list that begins at an offset.

    Returns:
        The offset behind it, or None if no object or list in valid JSON begins there.
    """
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        _, end = _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return end


def without_spans(text: str, spans: Sequence[Span]) -> str:
    """Remove some stretches from a text. They may touch or overlap."""
    pieces = []
    position = 0
    for start, end in sorted(spans):
        pieces.append(text[position:start])
        position = max(position, end)
    pieces.append(text[position:])
    return "".join(pieces)


def is_within(position: int, spans: Sequence[Span]) -> bool:
    """Return whether an offset lies in one of the stretches, which are sorted and do not overlap."""
    last_before = bisect(spans, (position, sys.maxsize)) - 1
    return last_before >= 0 and position < spans[last_before][1]
