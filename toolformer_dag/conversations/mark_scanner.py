"""Find what stands between pairs of marks in a text, such as `<tool_call>` and `</tool_call>`.

Every scan goes forward with `str.find`, so that it is linear in the text whatever stands there.
"""

import json
import sys
from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

END_OF_TEXT = "<|endoftext|>"
"""A mark with which some data sets end every message."""
Span = tuple[int, int]
"""The first character of a stretch of text, and the one after its last."""
_JSON = json.JSONDecoder()


class Marks(NamedTuple):
    """The mark that opens a stretch of text, and the one that closes it."""

    opening: str
    closing: str


class Enclosed(NamedTuple):
    """A pair of marks in a text with what it encloses, by the positions of characters.

    - `start`, `end`: from the opening mark to behind the closing one
    - `body_start`, `body_end`: what stands between them
    """

    start: int
    body_start: int
    body_end: int
    end: int

    @property
    def span(self) -> Span:
        """The stretch with its marks."""
        return self.start, self.end

    def body(self, text: str) -> str:
        """Return what stands between the marks; `text` is the one that was searched."""
        return text[self.body_start : self.body_end]


def enclosed(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Yield each pair of marks in a text, in order.

    Of opening marks in a row the last one counts, since the others are only spoken of: "I write <a> before: <a>x</a>"
    encloses x. A mark that is not closed encloses the rest of the text, up to END_OF_TEXT.
    """
    opening, closing = marks
    position = 0
    while True:
        first_opening = text.find(opening, position)
        if first_opening < 0:
            return
        body_end = text.find(closing, first_opening)
        if body_end < 0:
            yield _unclosed(text, first_opening, opening)
            return
        start = text.rfind(opening, first_opening, body_end)
        position = body_end + len(closing)
        yield Enclosed(start, start + len(opening), body_end, position)


def _unclosed(text: str, start: int, opening: str) -> Enclosed:
    """Return what an opening mark at `start` encloses that is not closed: the rest of the text, up to END_OF_TEXT."""
    body_end = text.find(END_OF_TEXT, start)
    if body_end < 0:
        body_end = len(text)
    end = min(len(text), body_end + len(END_OF_TEXT))
    return Enclosed(start, start + len(opening), body_end, end)


def enclosed_bodies(text: str, marks: Marks) -> list[str]:
    """Return what stands between each pair of marks, as ["a", "b"] for `<k>a</k> <k>b</k>`."""
    return [pair.body(text) for pair in enclosed(text, marks)]


def outermost(text: str, marks: Marks) -> list[Enclosed]:
    """Return the pairs of marks that lie in no other pair: the first `<a>` and the last `</a>` of `<a>x<a>y</a></a>`.

    Where some mark has no partner, so that pairs cannot be told, it returns what `enclosed` yields.
    """
    opening, closing = marks
    pairs = list[Enclosed]()
    depth = 0
    outer_start = 0
    next_opening = text.find(opening)
    next_closing = text.find(closing)
    while next_closing >= 0 and depth >= 0:
        opens_first = 0 <= next_opening < next_closing
        if opens_first:
            if depth == 0:
                outer_start = next_opening
            depth += 1
            next_opening = text.find(opening, next_opening + len(opening))
            continue
        depth -= 1  # below 0 for a closing mark without a partner, which ends the loop
        if depth == 0:
            body_start = outer_start + len(opening)
            pairs.append(Enclosed(outer_start, body_start, next_closing, next_closing + len(closing)))
        next_closing = text.find(closing, next_closing + len(closing))
    is_balanced = depth == 0 and next_opening < 0
    return pairs if is_balanced else list(enclosed(text, marks))


def enclosed_json(text: str, marks: Marks) -> Iterator[Enclosed]:
    """Yield what `enclosed` yields, but let JSON between marks quote the marks.

    As an example, `<c>{"text": "</c>"}</c>` is one pair, closed by the last mark.
    """
    position = 0
    for pair in enclosed(text, marks):
        is_quoted = pair.start < position  # in the JSON of the pair before
        if is_quoted:
            continue
        whole_pair = _closed_behind_json(text, pair, marks.closing)
        position = whole_pair.end
        yield whole_pair


def _closed_behind_json(text: str, pair: Enclosed, closing: str) -> Enclosed:
    """Return a pair of marks, closed behind its JSON where that goes on behind the pair; else the pair as it is."""
    body = pair.body(text)
    json_start = pair.body_end - len(body.lstrip())
    if text[json_start : json_start + 1] not in ("{", "["):
        return pair
    try:
        _, json_end = _JSON.raw_decode(text, json_start)
    except (ValueError, RecursionError):  # no JSON
        return pair
    if json_end <= pair.body_end:
        return pair
    body_end = text.find(closing, json_end)
    if body_end < 0 or text[json_end:body_end].strip():
        return pair
    return pair._replace(body_end=body_end, end=body_end + len(closing))


def without_spans(text: str, spans: Sequence[Span]) -> str:
    """Return a text without some of its stretches, which may touch or overlap."""
    kept = []
    position = 0
    for start, end in sorted(spans):
        kept.append(text[position:start])
        position = max(position, end)
    kept.append(text[position:])
    return "".join(kept)


def is_within(position: int, spans: Sequence[Span]) -> bool:
    """Return whether a character lies in one of the stretches. These are sorted and do not overlap."""
    last_before = bisect(spans, (position, sys.maxsize)) - 1
    return last_before >= 0 and position < spans[last_before][1]
