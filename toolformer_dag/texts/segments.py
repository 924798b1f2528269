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
CUT_PATTERNS = (PARAGRAPHS, SENTENCES, WORDS)
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
    """Cut a document into pieces of 1 to `max_tokens` tokens, each with as many whole paragraphs as fit.

    - A document that fits stays whole.
    - A paragraph that is too long is cut after sentences, and a sentence that is too long between words.
    - A word that is too long becomes a piece of its own, with more tokens.

    All text between pieces is white space. `count_tokens` reads the document about twice.
    """
    cutter = _Cutter(text, max_tokens, count_tokens)
    whole_text = _Span(0, len(text))
    paragraph_spans = _split_span(text, whole_text, PARAGRAPHS)
    fitting_pieces = list(cutter.fitting(paragraph_spans, (SENTENCES, WORDS)))

    groups = cutter.groups(fitting_pieces)
    return cutter.joined(groups)


def segments(text: str, places: Iterable[tuple[int, int]]) -> list[Segment]:
    """Return the segments of a document at `places`, pairs of an offset and a length in characters."""
    result = []
    for index, (offset, length) in enumerate(places):
        result.append(Segment(index, offset, text[offset : offset + length]))
    return result


def paragraphs(texts: Sequence[Segment]) -> list[Segment]:
    """Cut segments of one document into paragraphs, which are numbered from 0 through all segments."""
    result: list[Segment] = []
    for segment in texts:
        whole_segment = _Span(0, len(segment.text))
        for span in _split_span(segment.text, whole_segment, PARAGRAPHS):
            text = segment.text[span.start : span.end]
            result.append(Segment(len(result), segment.offset + span.start, text))
    return result


def _split_span(text: str, span: _Span, gap: re.Pattern[str]) -> list[_Span]:
    """Split a part of a text at each match of a pattern.

    The parts are stripped of white space, and empty ones are left out.

    Args:
        span: The part of it that is split.
        gap: The pattern of what is between two parts.

    Returns:
        For the text "ab c", the span (0, 4) and the gap WORDS: [(0, 2), (3, 4)]
    """
    parts = []
    start = span.start
    for match in gap.finditer(text, span.start, span.end):
        parts.append(_Span(start, match.start()))
        start = match.end()
    parts.append(_Span(start, span.end))

    stripped = [_strip_span(text, part) for part in parts]
    return [part for part in stripped if part.start < part.end]


def _strip_span(text: str, span: _Span) -> _Span:
    """Return a span of a text without the white space at its ends: (1, 3) for the text " ab " and the span (0, 4)."""
    without_start = text[span.start : span.end].lstrip()
    stripped = without_start.rstrip()
    start = span.end - len(without_start)
    return _Span(start, start + len(stripped))


def _split_piece(text: str, piece: Piece) -> list[Piece]:
    """Split a piece into its sentences, or into words if it is a single sentence.

    Returns:
        The parts, with 0 tokens because these are not counted yet. For a single word, the piece itself.
    """
    for gap in (SENTENCES, WORDS):
        spans = _split_span(text, _Span(piece.start, piece.end), gap)
        if len(spans) > 1:
            return [Piece(span.start, span.end, tokens=0) for span in spans]
    return [piece]


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts a text into pieces of at most `max_tokens` tokens, and joins pieces as long as they fit."""

    text: str
    max_tokens: int
    count_tokens: TokenCounter

    def fitting(self, spans: Sequence[_Span], cuts: Sequence[re.Pattern[str]]) -> Iterator[Piece]:
        """Turn parts of the text into pieces, and cut those parts that have too many tokens.

        Args:
            spans: The parts.
            cuts: Patterns of places to cut at. The first is used for parts that are too long, and the next for
                what is still too long after that.

        Yields:
            The pieces. After the last pattern they are yielded even if they are too long.
        """
        counts = self._count_tokens_of_spans(spans)

        for span, tokens in zip(spans, counts, strict=True):
            if tokens <= self.max_tokens or not cuts:
                yield Piece(span.start, span.end, tokens)
            else:
                parts = _split_span(self.text, span, cuts[0])
                yield from self.fitting(parts, cuts[1:])

    def _count_tokens_of_spans(self, spans: Sequence[_Span]) -> Sequence[int]:
        """Return the number of tokens of each span, counted with the white space before it."""
        # Many tokenizers join white space to the next word.
        texts = [self.text[max(span.start - 1, 0) : span.end] for span in spans]
        return self.count_tokens(texts)

    def groups(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Pack consecutive pieces into groups of at most `max_tokens` tokens, each as full as possible.

        Example:
            With 8 as the maximum, pieces of 3, 4 and 5 tokens give the groups [3, 4] and [5].
        """
        if self._fit_together(pieces):
            return [pieces]

        groups: list[list[Piece]] = []
        tokens_left = 0  # that the last group may still take; below 0 after a piece that is too long
        for piece in pieces:
            if piece.tokens > tokens_left:
                groups.append([])
                tokens_left = self.max_tokens
            groups[-1].append(piece)
            tokens_left -= piece.tokens
        return groups

    def _fit_together(self, pieces: list[Piece]) -> bool:
        """Check whether all pieces fit into `max_tokens` as one text, although the sum of their tokens is larger."""
        # Many tokenizers add a token to each text. Sums of more than twice the maximum are not looked at.
        sum_of_tokens = sum(piece.tokens for piece in pieces)
        if not self.max_tokens < sum_of_tokens <= 2 * self.max_tokens:
            return False

        [joined] = self._unite_groups([pieces])
        return joined.tokens <= self.max_tokens

    def joined(self, groups: Sequence[Sequence[Piece]]) -> Iterator[Piece]:
        """Join each group of pieces to one piece, and halve groups that turn out too long until their parts fit.

        A single piece that is too long is halved between its sentences or words.

        Yields:
            The joined pieces. A single word is yielded even if it is too long.
        """
        for group, united in zip(groups, self._unite_groups(groups), strict=True):
            if united.tokens <= self.max_tokens:
                yield united
                continue

            parts = group if len(group) > 1 else _split_piece(self.text, group[0])  # pieces, else sentences, else words
            if len(parts) == 1:  # a single word
                yield united
            else:
                first_half = parts[: len(parts) // 2]
                second_half = parts[len(parts) // 2 :]
                yield from self.joined([first_half, second_half])

    def _unite_groups(self, groups: Sequence[Sequence[Piece]]) -> list[Piece]:
        """Join each group of pieces to one piece, and count its tokens again."""
        spans = [_Span(group[0].start, group[-1].end) for group in groups]
        texts = [self.text[span.start : span.end] for span in spans]
        counts = self.count_tokens(texts)

        united = []
        for span, tokens in zip(spans, counts, strict=True):
            united.append(Piece(span.start, span.end, tokens))
        return united
