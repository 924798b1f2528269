"""Segments: they fit, they cover the document, and no word is cut."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.cuts import characters, fitting, words
from toolformer_dag.texts.segments import Piece, Segment, TokenCounter, iter_pieces


def quarrelsome(texts: Sequence[str]) -> list[int]:
    """Texts have more tokens together than apart, and another number without the space before them."""
    return [len(text) + text.count(" ") ** 2 + (not text[:1].isspace()) for text in texts]


COUNTERS = st.sampled_from([words, characters, quarrelsome])
TEXTS = st.text() | st.lists(
    st.sampled_from(["a", "bcd", " ", ". ", "\n", "\n\n", "。", ' "Go!" ', "\t", "x" * 9])
).map("".join)


@given(TEXTS, st.integers(1, 30), COUNTERS)
@example("one two\nthree", 2, words)
def test_segments_fit_and_cover_the_document_without_cutting_a_word(text: str, limit: int, count: TokenCounter) -> None:
    at = 0
    for piece in iter_pieces(text, limit, count):
        start = at
        at = piece.end
        assert text[start : piece.start].strip() == ""
        assert piece.start == 0 or text[piece.start - 1].isspace() or text[piece.start - 1] in "。！？"
        assert at == len(text) or text[at].isspace() or text[at - 1] in "。！？"
        whole = text[piece.start : at]
        assert whole == whole.strip() != ""
        assert count([whole])[0] <= limit if piece.token_count <= limit else not re.search(r"\s", whole)
    assert text[at:].strip() == ""
    found = fitting(text, limit, count)
    assert [segment.index for segment in found] == list(range(len(found)))
    assert [segment.offset for segment in found] == [
        piece.start for piece in iter_pieces(text, limit, count) if piece.token_count <= limit
    ]
    for segment in found:
        assert text[segment.offset :].startswith(segment.text)
        assert segment.text == segment.text.strip() != "" and count([segment.text])[0] <= limit


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("", 5, []),
        (" \n ", 5, []),
        ("one two\n\nthree", 5, [(0, "one two\n\nthree")]),
        ("one two\n\nthree\nfour", 3, [(0, "one two\n\nthree"), (15, "four")]),
        ("one two\nthree four\n", 3, [(0, "one two"), (8, "three four")]),
        ("One two. Three four. Five", 4, [(0, "One two. Three four."), (21, "Five")]),
        ('"One two." Three four', 2, [(0, '"One two."'), (11, "Three four")]),
        ("one two three four five", 2, [(0, "one two"), (8, "three four"), (19, "five")]),
        ("  one", 1, [(2, "one")]),
    ],
)
def test_cut_at_paragraphs_then_sentences_then_words(text: str, limit: int, expected: list[tuple[int, str]]) -> None:
    assert fitting(text, limit, words) == [Segment(index, *each) for index, each in enumerate(expected)]


def spaced(texts: Sequence[str]) -> list[int]:
    """Each word is a token, and the first two without a space before it, as with byte-pair encoding."""
    return [len(text.split()) + (not text[:1].isspace()) for text in texts]


@given(TEXTS, st.integers(1, 30), COUNTERS | st.just(spaced))
@example("x y. a b c.", 3, spaced)
@example("x y\na b. c d e", 4, spaced)
def test_only_single_words_are_unfit(text: str, limit: int, count: TokenCounter) -> None:
    alone = re.split(r"\s+|(?<=[。！？])", text)
    assume(all(tokens <= limit for tokens in count(list(filter(None, alone)))))
    assert all(piece.token_count <= limit for piece in iter_pieces(text, limit, count))


def test_a_word_that_does_not_fit_is_a_named_range_and_the_rest_stays() -> None:
    text = "ab " + "c" * 50 + " de"
    assert list(iter_pieces(text, 10, characters)) == [Piece(0, 2, 2), Piece(3, 53, 50), Piece(54, 56, 2)]
    assert fitting(text, 10, characters) == [Segment(0, 0, "ab"), Segment(1, 54, "de")]


def test_much_white_space_does_not_make_a_paragraph_too_long() -> None:
    assert fitting("ab" + "\n" * 10_000 + "cd" + " " * 10_000, 10, characters) == [
        Segment(0, 0, "ab"),
        Segment(1, 10_002, "cd"),
    ]


def test_a_document_that_fits_stays_whole_though_each_piece_apart_has_a_token_more() -> None:
    def marked(texts: Sequence[str]) -> list[int]:
        return [1 + len(text.split()) for text in texts]

    assert fitting("one two\nthree\nfour", 5, marked) == [Segment(0, 0, "one two\nthree\nfour")]
    assert len(fitting("one two\nthree\nfour", 4, marked)) == 2
