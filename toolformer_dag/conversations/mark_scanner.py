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
TextSpan = tuple[int, int]
"""A span of text: the offsets of its first character and of the one behind its last."""
_JSON_DECODER = json.JSONDecoder()


class Marks(NamedTuple):
    """The marks before and behind a span of text."""

    opening: str
    closing: str


class Enclosed(NamedTuple):
    """A pair of marks in a text, by character offsets.

    Attributes:
        start: The offset of the opening mark.
        body_start: The offset behind the opening mark.
        body_end: The offset of the closing mark.
        end: The offset behind the closing mark.
    """

    start: int
    body_start: int
    body_end: int
    end: int

    @property
    def span(self) -> TextSpan:
        """The span with its marks."""
        return self.start, self.end

    @property
    def body_span_in_pair(self) -> TextSpan:
        """The span between the marks, by offsets from the first character of the opening mark."""
        return self.body_start - self.start, self.body_end - self.start

    def get_text_with_marks(self, text: str) -> str:
        """Cut the pair out of the text in which it was found, with its marks: `<k>a</k>`."""
        return text[self.start : self.end]

    def get_body(self, text: str) -> str:
        """Cut the words between the marks out of the text in which the pair was found: `a` for `<k>a</k>`."""
        return text[self.body_start : self.body_end]


class MarkPositions(NamedTuple):
    """Where an opening mark and the next closing mark behind it stand, by the offsets of their first characters.

    Attributes:
        opening_start: The offset of the opening mark.
        closing_start: The offset of the closing mark, or None if the opening mark is never closed.
    """

    opening_start: int
    closing_start: int | None


def iter_mark_offsets(text: str, mark: str) -> Iterator[int]:
    """Yield the offsets at which a mark stands in a text: 0 and 4 for "<a>" in "<a>x<a>y"."""
    position = text.find(mark)
    while position >= 0:
        yield position
        position = text.find(mark, position + len(mark))


def iter_mark_positions(text: str, marks: Marks, search_start: int = 0) -> Iterator[MarkPositions]:
    """Find each opening mark with the next closing mark after it.

    The search goes on after that closing mark, so that opening marks in between are skipped.

    Args:
        text: The text.
        marks: The marks.
        search_start: The offset at which the search starts.

    Yields:
        The offsets of both marks. If an opening mark is never closed, it is the last one, with None for the other.
    """
    while True:
        opening_start = text.find(marks.opening, search_start)
        if opening_start < 0:
            return

        closing_start = text.find(marks.closing, opening_start)
        if closing_start < 0:
            yield MarkPositions(opening_start, None)
            return

        yield MarkPositions(opening_start, closing_start)
        search_start = closing_start + len(marks.closing)


def iter_mark_pairs(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Find each pair of an opening and a closing mark in a text.

    Of several opening marks before a closing one, the last one counts, since the others are only mentioned: in
    "I write <a> before: <a>x</a>" the pair is around x. An unclosed mark is paired with the end of the text, or with
    END_OF_TEXT if that comes first.

    Yields:
        The pairs, in the order of the text.
    """
    for positions in iter_mark_positions(text, marks):
        if positions.closing_start is None:
            yield _build_unclosed_pair(text, positions.opening_start, marks.opening)
        else:
            last_opening_start = text.rfind(marks.opening, positions.opening_start, positions.closing_start)
            yield _build_pair(marks, opening_start=last_opening_start, closing_start=positions.closing_start)


def _build_pair(marks: Marks, *, opening_start: int, closing_start: int) -> Enclosed:
    """Build a pair from the offsets of the first characters of its marks."""
    return Enclosed(
        start=opening_start,
        body_start=opening_start + len(marks.opening),
        body_end=closing_start,
        end=closing_start + len(marks.closing),
    )


def _build_unclosed_pair(text: str, opening_start: int, opening_mark: str) -> Enclosed:
    """Build the pair for an opening mark that is never closed.

    Args:
        text: The text.
        opening_start: The offset of the mark.
        opening_mark: The mark.

    Returns:
        The pair. END_OF_TEXT takes the place of the closing mark: the body ends before it, the pair after it. Without
        it, both end with the text.
    """
    body_start = opening_start + len(opening_mark)
    body_end = text.find(END_OF_TEXT, opening_start)
    if body_end < 0:
        body_end = len(text)

    end = min(len(text), body_end + len(END_OF_TEXT))
    return Enclosed(start=opening_start, body_start=body_start, body_end=body_end, end=end)


def list_texts_between_marks(text: str, marks: Marks) -> list[str]:
    """List the text between each pair of marks: ["a", "b"] for `<k>a</k> <k>b</k>`."""
    return [pair.get_body(text) for pair in iter_mark_pairs(text, marks)]


def find_outermost_pairs(text: str, marks: Marks) -> list[Enclosed]:
    """Find the pairs of marks that do not lie in another pair.

    In `<a>x<a>y</a></a>`, the first `<a>` and the last `</a>` are such a pair. If a mark has no partner, each closing
    mark is paired with the last opening one before it, as `iter_mark_pairs` does: in `<a>x<a>y</a>`, around y.
    """
    marks_in_text = _list_marks_in_order(text, marks)
    if not _are_marks_balanced(marks_in_text):
        return list(iter_mark_pairs(text, marks))

    outermost_pairs = list[Enclosed]()
    depth = 0  # how many marks are open
    outer_opening_start = 0
    for mark in marks_in_text:
        if depth == 0:
            outer_opening_start = mark.position

        depth += mark.depth_change  # 1 for an opening mark, -1 for a closing one
        if depth == 0:
            pair = _build_pair(marks, opening_start=outer_opening_start, closing_start=mark.position)
            outermost_pairs.append(pair)
    return outermost_pairs


def _are_marks_balanced(marks_in_text: Iterable["_Mark"]) -> bool:
    """Return whether every opening mark is closed, and every closing mark has an opening one before it.

    Args:
        marks_in_text: The marks in the order of the text.
    """
    depth = 0  # how many marks are open
    for mark in marks_in_text:
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
    """List the opening and closing marks in a text, in the order in which they stand there."""
    openings = [_Mark(position, is_opening=True) for position in iter_mark_offsets(text, marks.opening)]
    closings = [_Mark(position, is_opening=False) for position in iter_mark_offsets(text, marks.closing)]
    return sorted([*openings, *closings])


def iter_mark_pairs_around_json(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Find each pair of marks in a text, skipping marks that are part of the JSON between a pair.

    For example, `<c>{"text": "</c>"}</c>` is one pair, closed by the last mark.
    """
    last_end = 0
    for pair in iter_mark_pairs(text, marks):
        is_inside_last_pair = pair.start < last_end
        if is_inside_last_pair:
            continue

        whole_pair = _move_end_behind_json(text, pair, marks.closing)
        last_end = whole_pair.end
        yield whole_pair


def _move_end_behind_json(text: str, pair: Enclosed, closing_mark: str) -> Enclosed:
    """Correct the end of a pair of marks if the JSON in it contains the closing mark itself.

    Example:
        In `<c>{"text": "</c>"}</c>` the pair that ends at the first `</c>` is made to end at the last one.

    Args:
        text: The text.
        pair: The pair, closed by the first closing mark.
        closing_mark: The closing mark.

    Returns:
        The pair, closed by the first closing mark after the JSON. It is returned unchanged if its JSON does not contain
        the mark, or if no mark follows the JSON directly, with nothing but white space in between.
    """
    # The JSON begins at the first character of the body that is not white space.
    json_start = pair.body_end - len(pair.get_body(text).lstrip())
    json_end = _find_json_end(text, json_start)
    if json_end is None or json_end <= pair.body_end:
        return pair

    closing_start = text.find(closing_mark, json_end)
    if closing_start < 0:
        return pair

    text_before_mark = text[json_end:closing_start]
    if text_before_mark.strip():
        return pair
    return pair._replace(body_end=closing_start, end=closing_start + len(closing_mark))


def _find_json_end(text: str, json_start: int) -> int | None:
    """Find the end of the JSON object or list that begins at an offset.

    Returns:
        The offset behind it, or None if no object or list in valid JSON begins there.
    """
    first_character = text[json_start : json_start + 1]
    if first_character not in ("{", "["):
        return None

    try:
        _, json_end = _JSON_DECODER.raw_decode(text, json_start)
    except (ValueError, RecursionError):
        return None
    return json_end


def remove_spans(text: str, spans: Sequence[TextSpan]) -> str:
    """Remove some spans (start, end) from a text, in any order. They may touch or overlap.

    Example:
        remove_spans("Hey you", [(0, 4)])  # "you"
    """
    pieces = []
    copied_end = 0  # everything before this offset is copied or removed
    for start, end in sorted(spans):
        pieces.append(text[copied_end:start])  # empty where the span overlaps the last one
        copied_end = max(copied_end, end)

    pieces.append(text[copied_end:])
    return "".join(pieces)


def is_within_spans(position: int, sorted_spans: Sequence[TextSpan]) -> bool:
    """Return whether an offset lies in one of the spans (start, end), which are sorted and do not overlap."""
    # The last span that begins at the offset or before it is the only one in which the offset may lie.
    index = bisect(sorted_spans, (position, sys.maxsize)) - 1
    if index < 0:
        return False
    _, end = sorted_spans[index]
    return position < end
