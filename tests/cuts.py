"""Ways to count tokens, and the texts that a document is cut into by them."""

from collections.abc import Sequence

from toolformer_dag.texts.segments import Segment, TokenCounter, build_segments, iter_pieces


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def characters(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


def fitting(text: str, limit: int, count: TokenCounter) -> list[Segment]:
    """Return the texts of a document: its pieces but for words that do not fit."""
    found = [piece for piece in iter_pieces(text, limit, count) if piece.token_count <= limit]
    return build_segments(text, [(piece.start, piece.end - piece.start) for piece in found])
