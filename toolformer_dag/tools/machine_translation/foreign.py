"""Which texts machine translation looks at (appendix A): a foreign chunk, with English before and after it.

A chunk is 10 tokens of a paragraph; here a token is a word, or one character of a script that writes no spaces. Chunks
overlap by half, so that a phrase is not lost at a boundary. One is foreign when fastText says so with a confidence
above 0.8 and it holds a letter, English when it says so with at least 0.5 and it holds a letter: of digits it says
English with 0.12. What stands before and after may be another paragraph of the same text.
"""

import re
from collections.abc import Iterable, Iterator

from toolformer_dag.tools.machine_translation.identify import Identifier
from toolformer_dag.tools.machine_translation.languages import ENGLISH_LABEL

CHUNK_TOKENS = 10
STRIDE = 5
CONFIDENCE = 0.8
ENGLISH_CONFIDENCE = 0.5

# A chunk with three of the commonest English words is not foreign, without asking fastText: twice as fast, for 1 of the
# 107 documents that the full rule finds in 20 MB of real pages. Words that are common in Portuguese, Spanish, Italian,
# French, German or Dutch as well (a, as, do, in, is, no, of, was) are left out: three of them make no English.
COMMON_ENGLISH_WORDS = 3
_COMMON = """
the and to that it you be with by at have are this not his they from she which there were one their would what if can
when my who more said your him them then its our about after any back because before being between both came could did
down each first get go good great here how into its just know like little made make many may most much must never new
now old only other out own people right same see should such take than these think those through too two under until up
upon us used using very way well went where while without work years The This It If You And She They There When At To
"""
COMMON = frozenset(_COMMON.split())

_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_HAS_UNSPACED = re.compile(f"[{_UNSPACED}]")
_BETWEEN_UNSPACED = re.compile(f"(?<=[{_UNSPACED}]) (?=[{_UNSPACED}])")
_TOKEN = re.compile(f"[{_UNSPACED}]|[^\\s{_UNSPACED}]+")


def holds_foreign_chunk(text: str, identifier: Identifier) -> bool:
    """Whether the text has a foreign chunk with English before and after it."""
    return next(foreign_chunks(text, identifier), None) is not None


def foreign_chunks(text: str, identifier: Identifier) -> Iterator[str]:
    """The foreign chunks that have English before and after them, in order."""
    chunks = [chunk for paragraph in text.splitlines() for chunk in paragraph_chunks(paragraph)]
    asked = [place for place, chunk in enumerate(chunks) if may_be_foreign(chunk)]
    answers = identifier.identify([chunk_text(chunks[place]) for place in asked])
    foreign = [
        place
        for place, found in zip(asked, answers, strict=True)
        if found.label != ENGLISH_LABEL and found.confidence > CONFIDENCE
    ]
    if foreign:
        first, last = english_borders(chunks, identifier)
        yield from (chunk_text(chunks[place]) for place in foreign if first < place < last)


def paragraph_chunks(paragraph: str) -> list[list[str]]:
    """The paragraph's tokens, ten at a time, beginning at every fifth; the last chunk may be shorter."""
    if paragraph.isascii() or not _HAS_UNSPACED.search(paragraph):
        tokens = paragraph.split()
    else:
        tokens = _TOKEN.findall(paragraph)
    starts = range(0, max(len(tokens) - STRIDE, min(len(tokens), 1)), STRIDE)
    return [tokens[at : at + CHUNK_TOKENS] for at in starts]


def chunk_text(chunk: list[str]) -> str:
    """The tokens as they read in the paragraph, white space aside."""
    return _BETWEEN_UNSPACED.sub("", " ".join(chunk))


def may_be_foreign(chunk: list[str]) -> bool:
    """A cheap look: ten tokens, not only digits or symbols, and not plainly English."""
    return (
        len(chunk) == CHUNK_TOKENS and len(COMMON.intersection(chunk)) < COMMON_ENGLISH_WORDS and _holds_letter(chunk)
    )


def _holds_letter(chunk: list[str]) -> bool:
    return any(map(str.isalpha, "".join(chunk)))


def english_borders(chunks: list[list[str]], identifier: Identifier) -> tuple[int, int]:
    """The places of the first and of the last English chunk; the end and -1 where there is none."""
    first = _first_english(enumerate(chunks), identifier)
    last = _first_english(((place, chunks[place]) for place in reversed(range(len(chunks)))), identifier)
    return len(chunks) if first is None else first, -1 if last is None else last


def _first_english(placed: Iterable[tuple[int, list[str]]], identifier: Identifier) -> int | None:
    for place, chunk in placed:
        found = identifier.identify([chunk_text(chunk)])[0]
        if found.label == ENGLISH_LABEL and found.confidence >= ENGLISH_CONFIDENCE and _holds_letter(chunk):
            return place
    return None
