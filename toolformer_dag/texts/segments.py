"""Cut documents into segments that fit a model's context. The paper does not describe segmenting."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

CUTTING_VERSION = 2
"""The version of the cutting: raise it when the same document would give other segments."""
TokenCounter = Callable[[Sequence[str]], Sequence[int]]
"""A function that counts the tokens of each of some texts for the model: [2, 1] for ["a b", "c"]."""

PARAGRAPH_GAP = re.compile(r"\n\s*")
"""The white space between two paragraphs."""
SENTENCE_GAP = re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|(?<=[。！？])")
"""The white space after a sentence, with a quote or bracket at its end; after 。！？, the gap may be empty."""
WORD_GAP = re.compile(r"\s+")
GAP_PATTERNS = (PARAGRAPH_GAP, SENTENCE_GAP, WORD_GAP)
"""Where a document may be cut, from coarse to fine."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a document that is annotated as a whole: a text of the method."""

    index: int  # its number in the document, from 0
    offset: int  # the character of the document at which it begins
    text: str


def compute_text_digest(text: str) -> str:
    """Compute a hash of a text, 32 hexadecimal digits, by which equal texts share their results."""
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
    token_count: int


def iter_pieces(text: str, max_tokens: int, count_tokens: TokenCounter) -> Iterator[Piece]:
    """Cut a document into pieces of 1 to `max_tokens` tokens, each with as many whole paragraphs as fit.

    - A document that fits stays whole.
    - A paragraph that is too long is cut after sentences, and a sentence that is too long between words.
    - A word that is too long becomes a piece of its own, with more tokens.

    All text between pieces is white space. `count_tokens` reads the document about twice.

    Args:
        text: The text of the document.
        max_tokens: The maximum number of tokens of a piece.
        count_tokens: Counts the tokens of texts for the model.
    """
    cutter = _Cutter(text, max_tokens, count_tokens)
    whole_text = _Span(0, len(text))
    paragraph_spans = _split_span(text, whole_text, PARAGRAPH_GAP)
    fitting_pieces = list(cutter.iter_fitting_pieces(paragraph_spans, (SENTENCE_GAP, WORD_GAP)))

    groups = cutter.group_pieces(fitting_pieces)
    return cutter.iter_joined_pieces(groups)


def build_segments(text: str, offsets_and_lengths: Iterable[tuple[int, int]]) -> list[Segment]:
    """Build the segments of a document from their offsets and lengths.

    Args:
        text: The text of the document.
        offsets_and_lengths: For each segment, its offset in the text and its length, in characters.
    """
    segments = []
    for index, (offset, length) in enumerate(offsets_and_lengths):
        segment_text = text[offset : offset + length]
        segments.append(Segment(index, offset, segment_text))
    return segments


def split_into_paragraphs(segments: Sequence[Segment]) -> list[Segment]:
    """Cut segments of one document into paragraphs, which are numbered from 0 through all segments."""
    paragraphs: list[Segment] = []
    for segment in segments:
        whole_segment = _Span(0, len(segment.text))
        for span in _split_span(segment.text, whole_segment, PARAGRAPH_GAP):
            index = len(paragraphs)
            offset = segment.offset + span.start
            paragraphs.append(Segment(index, offset, segment.text[span.start : span.end]))
    return paragraphs


def _split_span(text: str, span: _Span, gap_pattern: re.Pattern[str]) -> list[_Span]:
    """Split a part of a text at each match of a pattern.

    The parts are stripped of white space, and empty ones are left out.

    Args:
        text: The whole text.
        span: The part of it that is split.
        gap_pattern: A pattern that matches the gap between two parts.

    Returns:
        For the text "ab c", the span (0, 4) and the pattern WORD_GAP: [(0, 2), (3, 4)]
    """
    parts = []
    part_start = span.start
    for gap in gap_pattern.finditer(text, span.start, span.end):
        parts.append(_Span(part_start, gap.start()))
        part_start = gap.end()
    parts.append(_Span(part_start, span.end))

    stripped_parts = [_strip_span(text, part) for part in parts]
    return [part for part in stripped_parts if part.start < part.end]


def _strip_span(text: str, span: _Span) -> _Span:
    """Remove the white space at both ends from a span: (0, 4) becomes (1, 3) for the text " ab "."""
    without_start = text[span.start : span.end].lstrip()
    stripped = without_start.rstrip()
    start = span.end - len(without_start)
    return _Span(start, start + len(stripped))


def _split_piece(text: str, piece: Piece) -> list[Piece]:
    """Split a piece into its sentences, or into words if it is a single sentence.

    Returns:
        The parts, with 0 tokens because these are not counted yet. For a single word, the piece itself.
    """
    for gap in (SENTENCE_GAP, WORD_GAP):
        spans = _split_span(text, _Span(piece.start, piece.end), gap)
        if len(spans) > 1:
            return [Piece(span.start, span.end, token_count=0) for span in spans]
    return [piece]


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts a text into pieces of at most `max_tokens` tokens, and joins pieces as long as they fit."""

    text: str
    max_tokens: int
    count_tokens: TokenCounter

    def iter_fitting_pieces(self, spans: Sequence[_Span], gap_patterns: Sequence[re.Pattern[str]]) -> Iterator[Piece]:
        """Turn parts of the text into pieces, and cut those parts that have too many tokens.

        Example:
            With the patterns (SENTENCE_GAP, WORD_GAP), a paragraph that is too long is cut into sentences, and a
            sentence that is too long into words.

        Args:
            spans: The parts.
            gap_patterns: Patterns of places to cut at, the first for parts that are too long, and so on.

        Yields:
            The pieces. After the last pattern they are yielded even if they are too long.
        """
        token_counts = self._count_tokens_of_spans(spans)

        for span, token_count in zip(spans, token_counts, strict=True):
            if token_count <= self.max_tokens or not gap_patterns:
                yield Piece(span.start, span.end, token_count)
            else:
                parts = _split_span(self.text, span, gap_patterns[0])
                yield from self.iter_fitting_pieces(parts, gap_patterns[1:])

    def _count_tokens_of_spans(self, spans: Sequence[_Span]) -> Sequence[int]:
        """Return the number of tokens of each span, counted with the character before it."""
        # This is usually white space, which many tokenizers join to the next word.
        texts = [self.text[max(span.start - 1, 0) : span.end] for span in spans]
        return self.count_tokens(texts)

    def group_pieces(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Pack consecutive pieces into groups of at most `max_tokens` tokens, each as full as possible.

        Example:
            With 8 as the maximum, pieces of 3, 4 and 5 tokens give the groups [3, 4] and [5].
        """
        if self._can_fit_together(pieces):
            return [pieces]

        groups: list[list[Piece]] = []
        tokens_left = 0  # that the last group may still take; below 0 after a piece that is too long
        for piece in pieces:
            if piece.token_count > tokens_left:
                groups.append([])
                tokens_left = self.max_tokens
            groups[-1].append(piece)
            tokens_left -= piece.token_count
        return groups

    def _can_fit_together(self, pieces: list[Piece]) -> bool:
        """Check whether all pieces fit into `max_tokens` as one text, although the sum of their tokens is larger."""
        # Many tokenizers add a token to each text. Sums of more than twice the maximum are not looked at.
        sum_of_tokens = sum(piece.token_count for piece in pieces)
        if not self.max_tokens < sum_of_tokens <= 2 * self.max_tokens:
            return False

        [joined_piece] = self._join_groups([pieces])
        return joined_piece.token_count <= self.max_tokens

    def iter_joined_pieces(self, groups: Sequence[Sequence[Piece]]) -> Iterator[Piece]:
        """Join each group of pieces to one piece, and halve groups that turn out too long until their parts fit.

        A single piece that is too long is halved between its sentences or words.

        Yields:
            The joined pieces. A single word is yielded even if it is too long.
        """
        for group, joined_piece in zip(groups, self._join_groups(groups), strict=True):
            if joined_piece.token_count <= self.max_tokens:
                yield joined_piece
                continue

            # The parts are the pieces of the group. For a single piece, they are its sentences or words.
            parts = group if len(group) > 1 else _split_piece(self.text, group[0])
            if len(parts) == 1:  # a single word
                yield joined_piece
            else:
                first_half = parts[: len(parts) // 2]
                second_half = parts[len(parts) // 2 :]
                yield from self.iter_joined_pieces([first_half, second_half])

    def _join_groups(self, groups: Sequence[Sequence[Piece]]) -> list[Piece]:
        """Join each group of pieces to one piece, and count its tokens again."""
        spans = [_Span(group[0].start, group[-1].end) for group in groups]
        texts = [self.text[span.start : span.end] for span in spans]
        token_counts = self.count_tokens(texts)

        joined_pieces = []
        for span, token_count in zip(spans, token_counts, strict=True):
            joined_pieces.append(Piece(span.start, span.end, token_count))
        return joined_pieces
