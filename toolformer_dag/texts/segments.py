"""Cut documents into segments that fit a model's context. The paper does not describe segmenting."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

CUTTING = 2
"""The version of the cutting: raise it when the same document would give other segments."""
TokenCounter = Callable[[Sequence[str]], Sequence[int]]
"""Returns how many tokens each of some texts has for the model: [2, 1] for ["a b", "c"]."""

PARAGRAPHS = re.compile(r"\n\s*")
"""The white space between two paragraphs."""
SENTENCES = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|(?<=[。！？])")
"""The white space after a sentence, with a quote or bracket at its end; after 。！？, the gap may be empty."""
WORDS = re.compile(r"\s+")
CUTS = (PARAGRAPHS, SENTENCES, WORDS)
"""Where a document may be cut, from coarse to fine."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a document that is annotated as a whole: a text of the method."""

    index: int  # its number in the document, from 0
    offset: int  # the character of the document at which it begins
    text: str


def text_digest(text: str) -> str:
    """Return a hash of a text, 32 hexadecimal digits, by which equal texts share their results."""
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
    - A paragraph that is too long is cut after sentences; a sentence that is too long is cut between words.
    - A word that is too long becomes a piece with more tokens. All text between pieces is white space.

    `count_tokens` reads the document about twice.
    """
    paragraph_spans = _cut(text, _Span(0, len(text)), PARAGRAPHS)
    fitting = list(_fitting(text, paragraph_spans, (SENTENCES, WORDS), max_tokens, count_tokens))
    groups = _groups(text, fitting, max_tokens, count_tokens)
    return _joined(text, groups, max_tokens, count_tokens)


def segments(text: str, places: Iterable[tuple[int, int]]) -> list[Segment]:
    """Return the segments of a document at `places`, pairs of an offset and a length in characters.

    Segments with the texts "ab" and "d" for the document "ab d" and the places (0, 2), (3, 1).
    """
    result = []
    for index, (offset, length) in enumerate(places):
        result.append(Segment(index, offset, text[offset : offset + length]))
    return result


def paragraphs(texts: Sequence[Segment]) -> list[Segment]:
    """Return the paragraphs of segments of one document, as segments that are numbered from 0."""
    result: list[Segment] = []
    for segment in texts:
        for span in _cut(segment.text, _Span(0, len(segment.text)), PARAGRAPHS):
            text = segment.text[span.start : span.end]
            result.append(Segment(len(result), segment.offset + span.start, text))
    return result


def _fitting(
    text: str, spans: Sequence[_Span], cuts: Sequence[re.Pattern[str]], max_tokens: int, count: TokenCounter
) -> Iterator[Piece]:
    """Yield spans of a text as pieces with their token counts; a span that is too long is cut into several pieces.

    It is cut by the first of `cuts`, parts that are still too long by the next, and so on. Parts that no pattern of
    `cuts` is left for are yielded with too many tokens.
    """
    # The character before a span is counted with it: white space, which many tokenizers join to the next word.
    counts = count([text[max(span.start - 1, 0) : span.end] for span in spans])
    for span, tokens in zip(spans, counts, strict=True):
        if tokens <= max_tokens or not cuts:
            yield Piece(span.start, span.end, tokens)
        else:
            parts = _cut(text, span, cuts[0])
            yield from _fitting(text, parts, cuts[1:], max_tokens, count)


def _cut(text: str, span: _Span, gap: re.Pattern[str]) -> list[_Span]:
    """Cut a span of a text at the matches of `gap`; return the parts, stripped of white space, without empty ones.

    [(0, 2), (3, 4)] for the text "ab c", the span (0, 4) and the gap WORDS.
    """
    parts = []
    start = span.start
    for match in gap.finditer(text, span.start, span.end):
        parts.append(_stripped(text, _Span(start, match.start())))
        start = match.end()
    parts.append(_stripped(text, _Span(start, span.end)))
    return [part for part in parts if part.start < part.end]


def _stripped(text: str, span: _Span) -> _Span:
    """Return a span of a text without the white space at its ends: (1, 3) for the text " ab " and the span (0, 4)."""
    without_start = text[span.start : span.end].lstrip()
    start = span.end - len(without_start)
    return _Span(start, start + len(without_start.rstrip()))


def _groups(text: str, pieces: list[Piece], max_tokens: int, count: TokenCounter) -> list[list[Piece]]:
    """Pack consecutive pieces of a text into groups of at most `max_tokens` tokens, each as full as it can be.

    Pieces of 3, 4 and 5 tokens give the groups [3, 4] and [5] with 8 as the maximum. A piece of more than `max_tokens`
    is a group alone. All pieces are one group where they fit as one text, although their sum is larger.
    """
    if _fit_together(text, pieces, max_tokens, count):
        return [pieces]
    groups: list[list[Piece]] = []
    tokens_left = 0  # that the last group may still take; below 0 after a piece that is too long
    for piece in pieces:
        if piece.tokens > tokens_left:
            groups.append([])
            tokens_left = max_tokens
        groups[-1].append(piece)
        tokens_left -= piece.tokens
    return groups


def _fit_together(text: str, pieces: list[Piece], max_tokens: int, count: TokenCounter) -> bool:
    """Return whether all pieces have at most `max_tokens` tokens as one text, although the sum of theirs is above it.

    Many tokenizers add a token to each text. Sums of more than twice `max_tokens` are not looked at.
    """
    tokens_of_all = sum(piece.tokens for piece in pieces)
    if not max_tokens < tokens_of_all <= 2 * max_tokens:
        return False
    [tokens_joined] = count([text[pieces[0].start : pieces[-1].end]])
    return tokens_joined <= max_tokens


def _joined(text: str, groups: Sequence[Sequence[Piece]], max_tokens: int, count: TokenCounter) -> Iterator[Piece]:
    """Yield each group of pieces joined to one piece; a group that is too long then is halved until its parts fit.

    A group of a single piece is halved between its sentences or words. A single word is yielded although it is too
    long.
    """
    counts = count([text[group[0].start : group[-1].end] for group in groups])
    for group, tokens in zip(groups, counts, strict=True):
        joined = Piece(group[0].start, group[-1].end, tokens)
        if tokens <= max_tokens:
            yield joined
            continue
        parts = group if len(group) > 1 else _parts(text, group[0])
        if len(parts) == 1:  # a single word
            yield joined
            continue
        half = len(parts) // 2
        yield from _joined(text, [parts[:half], parts[half:]], max_tokens, count)


def _parts(text: str, piece: Piece) -> list[Piece]:
    """Return the sentences of a piece, or the words of a piece of one sentence, or the piece itself if it is a word.

    The caller counts the tokens of the parts; here they are 0.
    """
    for gap in (SENTENCES, WORDS):
        spans = _cut(text, _Span(piece.start, piece.end), gap)
        if len(spans) > 1:
            return [Piece(span.start, span.end, tokens=0) for span in spans]
    return [piece]
