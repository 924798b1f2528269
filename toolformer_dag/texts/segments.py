"""Cut documents into segments that fit a model's context. The paper does not describe segmenting."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

CUTTING = 2  # raise this when the same document would give other segments
TokenCounter = Callable[[Sequence[str]], Sequence[int]]

# Allowed cuts from coarse to fine: between paragraphs, sentences, words.
CUTS = (
    re.compile(r"\n\s*"),
    re.compile(r"(?:(?<=[.!?…])|(?<=[.!?…][\"'”’)\]]))\s+|(?<=[。！？])"),
    re.compile(r"\s+"),
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment that begins at character `offset` of the document; `index` counts from 0."""

    index: int
    offset: int
    text: str


def text_digest(text: str) -> str:
    """Hash a text to 32 hexadecimal characters: equal texts share what was computed for them."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Characters `start` to `end` of a document, and how many tokens they have."""

    start: int
    end: int
    tokens: int


def pieces(text: str, max_tokens: int, count_tokens: TokenCounter) -> Iterator[Piece]:
    """Cut a document into pieces of 1 to `max_tokens` tokens by packing its paragraphs greedily.

    - A document that fits stays whole.
    - A paragraph that does not fit is cut at sentence ends; a sentence that does not fit is cut between words.
    - A word that does not fit is a piece with more tokens. All text between pieces is white space.

    `count_tokens` counts the tokens of each text of a batch as the model does. It is applied to about twice the
    document.
    """
    spans = list(_cut(text, 0, len(text), CUTS[0]))
    fitting = list(_fitting(text, spans, CUTS[1:], max_tokens, count_tokens))
    return _settled(text, _groups(text, fitting, max_tokens, count_tokens), max_tokens, count_tokens)


def segments(text: str, places: Iterable[tuple[int, int]]) -> list[Segment]:
    """Return the segments of a document that begin at these characters and have these lengths."""
    return [Segment(index, offset, text[offset : offset + length]) for index, (offset, length) in enumerate(places)]


def paragraphs(texts: Sequence[Segment]) -> list[Segment]:
    """Cut segments of a document at the ends of their paragraphs; `index` counts anew."""
    cut = [
        (text.offset + start, text.text[start:end])
        for text in texts
        for start, end in _cut(text.text, 0, len(text.text), CUTS[0])
        if start < end
    ]
    return [Segment(index, *place) for index, place in enumerate(cut)]


def _fitting(
    text: str, spans: Sequence[tuple[int, int]], cuts: Sequence[re.Pattern[str]], max_tokens: int, count: TokenCounter
) -> Iterator[Piece]:
    """Yield the spans with their token counts, including the white space before; cut spans that do not fit."""
    spans = [(start, end) for start, end in spans if start < end]
    counts = count([text[max(start - 1, 0) : end] for start, end in spans])
    for (start, end), tokens in zip(spans, counts, strict=True):
        if tokens <= max_tokens or not cuts:
            yield Piece(start, end, tokens)
        else:
            yield from _fitting(text, list(_cut(text, start, end, cuts[0])), cuts[1:], max_tokens, count)


def _cut(text: str, start: int, end: int, cut: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    for gap in cut.finditer(text, start, end):
        yield _strip(text, start, gap.start())
        start = gap.end()
    yield _strip(text, start, end)


def _strip(text: str, start: int, end: int) -> tuple[int, int]:
    inner = text[start:end].lstrip()
    start = end - len(inner)
    return start, start + len(inner.rstrip())


def _groups(text: str, pieces: list[Piece], max_tokens: int, count: TokenCounter) -> list[list[Piece]]:
    """Pack pieces greedily; keep all in one group where they fit together although the sum of counts does not."""
    total = sum(piece.tokens for piece in pieces)  # many tokenizers add a token to each piece
    if max_tokens < total <= 2 * max_tokens and count([text[pieces[0].start : pieces[-1].end]])[0] <= max_tokens:
        return [pieces]
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        if piece.tokens > room:
            groups.append([])
            room = max_tokens
        groups[-1].append(piece)
        room -= piece.tokens
    return groups


def _settled(text: str, groups: Sequence[Sequence[Piece]], max_tokens: int, count: TokenCounter) -> Iterator[Piece]:
    """Join each group to a piece; halve groups that have too many tokens when joined."""
    counts = count([text[group[0].start : group[-1].end] for group in groups])
    for group, tokens in zip(groups, counts, strict=True):
        parts = group if tokens <= max_tokens or len(group) > 1 else _parts(text, group[0])
        if tokens > max_tokens and len(parts) > 1:
            half = len(parts) // 2
            yield from _settled(text, [parts[:half], parts[half:]], max_tokens, count)
        else:
            yield Piece(group[0].start, group[-1].end, tokens)


def _parts(text: str, piece: Piece) -> list[Piece]:
    """Return the sentences of a piece, or the words of a single sentence.

    A piece that fitted may be too long here: without the space before it, it may have a token more.
    """
    for cut in CUTS[1:]:
        spans = [(start, end) for start, end in _cut(text, piece.start, piece.end, cut) if start < end]
        if len(spans) > 1:
            return [Piece(start, end, 0) for start, end in spans]
    return [piece]
