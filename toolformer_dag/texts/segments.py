"""Cut documents into segments that fit a model's context. The paper does not describe segmenting."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

CUTTING = 2
"""The version of the cutting: raise it when the same document would give other segments."""
TokenCounter = Callable[[Sequence[str]], Sequence[int]]
"""Returns the tokens of each of some texts, as the model counts them."""

PARAGRAPHS = re.compile(r"\n\s*")
"""The white space between two paragraphs."""
SENTENCES = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|(?<=[。！？])")
"""The white space after the end of a sentence and a quote or bracket; signs of Chinese and Japanese need none."""
WORDS = re.compile(r"\s+")
CUTS = (PARAGRAPHS, SENTENCES, WORDS)
"""Where a document may be cut, from coarse to fine."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A text: a part of a document that is annotated as a whole."""

    index: int  # its number in the document, from 0
    offset: int  # the character of the document at which it begins
    text: str


def text_digest(text: str) -> str:
    """Return a hash of a text, 32 hexadecimal characters: equal texts share what was computed for them."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


class _Span(NamedTuple):
    """Characters `start` to `end` of a text."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters `start` to `end` of a document, and how many tokens they have."""

    start: int
    end: int
    tokens: int


def pieces(text: str, max_tokens: int, count_tokens: TokenCounter) -> Iterator[Piece]:
    """Cut a document into pieces of 1 to `max_tokens` tokens, each of as many whole paragraphs as fit.

    - A document that fits stays whole.
    - A paragraph that does not fit is cut after sentences; a sentence that does not fit is cut between words.
    - A word that does not fit is a piece with more tokens. All text between pieces is white space.

    `count_tokens` is applied to about twice the document.
    """
    paragraph_spans = _cut(text, _Span(0, len(text)), PARAGRAPHS)
    fitting = list(_fitting(text, paragraph_spans, (SENTENCES, WORDS), max_tokens, count_tokens))
    groups = _groups(text, fitting, max_tokens, count_tokens)
    return _joined(text, groups, max_tokens, count_tokens)


def segments(text: str, places: Iterable[tuple[int, int]]) -> list[Segment]:
    """Return the segments of a document at these places, each an offset and a length in characters."""
    result = []
    for index, (offset, length) in enumerate(places):
        result.append(Segment(index, offset, text[offset : offset + length]))
    return result


def paragraphs(texts: Sequence[Segment]) -> list[Segment]:
    """Cut segments of a document at the ends of their paragraphs; the results are numbered anew, from 0."""
    result: list[Segment] = []
    for segment in texts:
        for span in _cut(segment.text, _Span(0, len(segment.text)), PARAGRAPHS):
            text = segment.text[span.start : span.end]
            result.append(Segment(len(result), segment.offset + span.start, text))
    return result


def _fitting(
    text: str, spans: Sequence[_Span], cuts: Sequence[re.Pattern[str]], max_tokens: int, count: TokenCounter
) -> Iterator[Piece]:
    """Yield spans of a text as pieces with their token counts; cut those that do not fit by the first of `cuts`.

    Their parts are cut by the next of `cuts`, and so on; where none is left, a piece may have too many tokens. The
    character before a span is counted with it: it is white space, which many tokenizers join to the next word.
    """
    counts = count([text[max(span.start - 1, 0) : span.end] for span in spans])
    for span, tokens in zip(spans, counts, strict=True):
        if tokens <= max_tokens or not cuts:
            yield Piece(span.start, span.end, tokens)
        else:
            parts = _cut(text, span, cuts[0])
            yield from _fitting(text, parts, cuts[1:], max_tokens, count)


def _cut(text: str, span: _Span, gap: re.Pattern[str]) -> list[_Span]:
    """Return what stands between the matches of `gap` in a span of a text, without white space around it.

    Parts of nothing but white space are left out.
    """
    parts = []
    start = span.start
    for match in gap.finditer(text, span.start, span.end):
        parts.append(_stripped(text, _Span(start, match.start())))
        start = match.end()
    parts.append(_stripped(text, _Span(start, span.end)))
    return [part for part in parts if part.start < part.end]


def _stripped(text: str, span: _Span) -> _Span:
    """Return a span of a text without the white space at its ends."""
    without_start = text[span.start : span.end].lstrip()
    start = span.end - len(without_start)
    return _Span(start, start + len(without_start.rstrip()))


def _groups(text: str, pieces: list[Piece], max_tokens: int, count: TokenCounter) -> list[list[Piece]]:
    """Pack consecutive pieces of a text into groups of at most `max_tokens` tokens, each as full as it can be.

    The tokens of a group are the sum of its pieces' counts. A piece that has more than `max_tokens` has its own group.

    Many tokenizers add a token to each text that they count, so a sum may be too large. Where the sum of all pieces is
    above `max_tokens`, but at most twice that, they are counted joined as well, and all are one group if they fit.
    """
    tokens_of_all = sum(piece.tokens for piece in pieces)
    if max_tokens < tokens_of_all <= 2 * max_tokens:
        joined = text[pieces[0].start : pieces[-1].end]
        tokens_joined = count([joined])[0]
        if tokens_joined <= max_tokens:
            return [pieces]

    groups: list[list[Piece]] = []
    room = 0  # tokens that the last group may still take; below 0 after a piece that is too long
    for piece in pieces:
        if piece.tokens > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(piece)
        room -= piece.tokens
    return groups


def _joined(text: str, groups: Sequence[Sequence[Piece]], max_tokens: int, count: TokenCounter) -> Iterator[Piece]:
    """Join the pieces of each group to one; halve groups that have too many tokens when they are joined.

    A group of a single piece is halved by its sentences or words; a single word stays too long.
    """
    counts = count([text[group[0].start : group[-1].end] for group in groups])
    for group, tokens in zip(groups, counts, strict=True):
        fits = tokens <= max_tokens
        parts = _parts(text, group[0]) if not fits and len(group) == 1 else group
        if fits or len(parts) == 1:
            yield Piece(group[0].start, group[-1].end, tokens)
        else:
            half = len(parts) // 2
            yield from _joined(text, [parts[:half], parts[half:]], max_tokens, count)


def _parts(text: str, piece: Piece) -> list[Piece]:
    """Return the sentences of a piece, or the words of a single sentence; their tokens are not counted (0).

    A piece that fitted with the character before it may be too long without: some tokenizers need a token more then.
    """
    for gap in (SENTENCES, WORDS):
        spans = _cut(text, _Span(piece.start, piece.end), gap)
        if len(spans) > 1:
            return [Piece(span.start, span.end, tokens=0) for span in spans]
    return [piece]
